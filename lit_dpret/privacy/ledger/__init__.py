"""Record every release before it is made: chained files, the gate, and the ledger of a data set."""
