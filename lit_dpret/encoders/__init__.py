"""Text encoders: weights, tokenizer and contract in one, from any folder to embeddings."""

from lit_dpret.encoders.text_encoder import Contract, Progress, Side, TextEncoder, Towers, load_towers

__all__ = ["Contract", "Progress", "Side", "TextEncoder", "Towers", "load_towers"]
