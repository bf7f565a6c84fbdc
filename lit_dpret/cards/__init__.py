"""Privacy cards: what a ledger proves, said in words, checked again, signed and traced to the cards behind it."""
