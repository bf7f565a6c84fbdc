"""Reports of a run: one `Table`, one `Page`, and figures in one style.

It is above its budget of 1,100 lines because it contains the report of every task in addition to these three.
"""
