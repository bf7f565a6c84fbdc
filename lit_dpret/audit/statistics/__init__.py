"""Statistics of attacks: lower bounds on epsilon from scores, or from ranks of planted secrets.

An accountant bounds leakage from above and an audit from below. Everything here is a function of numbers
(scores, ranks, counts) and returns `Evidence`: a lower bound with its confidence, and what it takes for
granted. No bound is a grade. A high one contradicts a claim; a low one says that this attack, with so many
canaries, saw no more. ``docs/audit.md`` tells which to choose.
"""
