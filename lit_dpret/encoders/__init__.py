"""Text encoders: weights, tokenizer and contract, loaded from any folder, for embeddings.

Folders are those of sentence-transformers, read and written here: the library is not a dependency, costs 3.7 s of
processor time to import, and batches and pads in its own way, where private texts need batches that follow from no
other text. Tests hold our embeddings against it bit by bit.
"""

from lit_dpret.encoders.bulk import Progress
from lit_dpret.encoders.contract import Contract, Side
from lit_dpret.encoders.st_folder import Towers, cut, load_towers
from lit_dpret.encoders.text_encoder import TextEncoder

__all__ = ["Contract", "Progress", "Side", "TextEncoder", "Towers", "cut", "load_towers"]
