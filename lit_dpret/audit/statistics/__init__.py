"""Statistics of attacks: lower bounds on epsilon from scores, or from ranks of planted secrets.

Everything here is a function of numbers and returns `Evidence`: a lower bound with its confidence, and what it takes
for granted. No bound is a grade: a low one says that this attack saw no more. ``docs/audit.md`` tells which to choose.
"""
