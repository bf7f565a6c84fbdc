"""Privacy cards: what a ledger proves, said in words, checked again, signed and traced to the cards behind it.

The package is long because `verify` recomputes or compares every entry of a card, and each sentence on
the page has the condition under which it is true.
"""
