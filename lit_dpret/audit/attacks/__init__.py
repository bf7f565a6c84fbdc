"""Attacks on trained models: membership of a query in the training data, and inversion of embeddings.

Each attack is a function from models and texts to scores; `lit_dpret.audit.statistics` decides what the scores prove.
Scores of private queries are private. No module, callback or accountant imports this package.
"""
