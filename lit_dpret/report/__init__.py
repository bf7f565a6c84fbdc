"""Reports of a run: one `Table`, one `Page`, and figures in one style.

It is above its budget of 1,100 lines because the report of every task stands here, beside the three of its name.
"""
