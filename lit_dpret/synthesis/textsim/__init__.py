"""Similarity of synthetic to original text: overlap, BLEU, MAUVE, diversity, and overlap with pre-training data.

Everything here is a function of lists of texts (or of their features), without any notion of privacy. For private texts
it gives numbers that no guarantee covers; ``task=similarity`` asks for that explicitly.
"""
