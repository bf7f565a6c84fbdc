"""What a run says at its end: one `Table`, one `Page`, and figures with one look.

The package is long because the pages of the federated studies stand here as well, until those studies
move to `reproduction`.
"""
