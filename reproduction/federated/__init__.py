"""The analyses of paper 004: variants of one federation, run and compared."""
