"""Indexes in folders: embed a corpus, keep it with everything that decides a search, ask it."""

from lit_dpret.indexing.build import encode_folder, index_folder
from lit_dpret.indexing.folder import IndexFolder

__all__ = ["IndexFolder", "encode_folder", "index_folder"]
