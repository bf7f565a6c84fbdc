"""Text encoders: weights, tokenizer and contract, loaded from any folder, for embeddings.

Model folders have the sentence-transformers layout and are read and written here. That library is not a dependency: it
takes 3.7 s of processor time to import, and its batches and padding depend on other texts, which private texts do not
allow. Tests check that our embeddings are bit-equal to its own.
"""

from lit_dpret.encoders.bulk import Progress
from lit_dpret.encoders.contract import Contract, Side
from lit_dpret.encoders.st_folder import Towers, cut, load_towers
from lit_dpret.encoders.text_encoder import TextEncoder

__all__ = ["Contract", "Progress", "Side", "TextEncoder", "Towers", "cut", "load_towers"]
