"""Privacy cards: statements that a ledger proves, their verification, signatures, and links to parent cards.

The package is long because `verify` recomputes or compares every entry of a card, and each sentence on
the page has the condition under which it is true.
"""
