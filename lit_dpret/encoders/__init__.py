"""Text encoders: weights, tokenizer and contract in one, from any folder to embeddings."""

from lit_dpret.encoders.bulk import Progress
from lit_dpret.encoders.contract import Contract, Side
from lit_dpret.encoders.text_encoder import TextEncoder
from lit_dpret.encoders.towers import Towers, cut, load_towers

__all__ = ["Contract", "Progress", "Side", "TextEncoder", "Towers", "cut", "load_towers"]
