"""What a run let out, written down before it lets it out: the chained file, the gate, and the ledger of a data set."""
