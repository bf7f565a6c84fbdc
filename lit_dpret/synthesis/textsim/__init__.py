"""How near synthetic text is to the text it stands for: overlap, BLEU, MAUVE, diversity, and what a model had seen.

Everything here is a function of lists of texts (or of their features) and knows nothing of privacy. Whoever
hands it private texts gets numbers that no guarantee covers; ``task=similarity`` asks for that in so many words.
"""
