"""Text encoders: weights, tokenizer and contract in one, from any folder to embeddings."""

from lit_dpret.encoders.bulk import Progress
from lit_dpret.encoders.contract import Contract, Side
from lit_dpret.encoders.st_folder import Towers, cut, load_towers
from lit_dpret.encoders.text_encoder import TextEncoder

__all__ = ["Contract", "Progress", "Side", "TextEncoder", "Towers", "cut", "load_towers"]
