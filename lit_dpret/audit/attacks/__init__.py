"""Attacks on what was trained: was this query in the training data, and what does an embedding tell of its text?

Each attack is a function from models and texts to scores; what the scores prove is `lit_dpret.audit.statistics`'s to
say. Scores of private queries are private. No module, callback or accountant imports this package.
"""
