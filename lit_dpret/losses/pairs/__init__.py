"""Losses on the matrix of all similarities in a batch, and their sensitivity to one record."""
