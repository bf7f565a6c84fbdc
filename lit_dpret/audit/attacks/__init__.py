"""Attacks on trained models: membership of a query in the training data, and inversion of embeddings.

Each attack is a function from models and texts to scores; what the scores prove is `lit_dpret.audit.statistics`'s to
say. Scores of private queries are private. No module, callback or accountant imports this package.
"""
