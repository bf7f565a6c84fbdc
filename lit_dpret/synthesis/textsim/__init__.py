"""Similarity of synthetic to original text: overlap, BLEU, MAUVE, diversity, and overlap with pre-training data.

Everything here is a function of lists of texts (or of their features) and knows nothing of privacy. Whoever
hands it private texts gets numbers that no guarantee covers; ``task=similarity`` asks for that in so many words.
"""
