"""Statistics of attacks: lower bounds on epsilon from scores, or from ranks of planted secrets.

Everything here is a function of numbers and returns `Evidence`: a lower bound with its confidence and its assumptions.
No bound is a grade: a low one means that this attack saw no more. ``docs/audit.md`` explains which to choose.
"""
