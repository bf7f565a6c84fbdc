"""What a run says at its end: one `Table`, one `Page`, and figures with one look.

It is above its budget of 1,100 lines because the report of every task stands here, beside the three of its name.
"""
