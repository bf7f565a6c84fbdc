"""Build silos from existing data: assign each collection to clients and split it into sentences."""

from lit_dpret.federated.data.collections import merged_silo, pseudo_silo, silos_by_domain
from lit_dpret.federated.data.planted import planted_silos, planted_words
from lit_dpret.federated.data.questions import read_newsqa, section_of, silos_by_article
from lit_dpret.federated.data.sentences import sentence_spans, sentences_of

__all__ = [
    "merged_silo",
    "planted_silos",
    "planted_words",
    "pseudo_silo",
    "read_newsqa",
    "section_of",
    "sentence_spans",
    "sentences_of",
    "silos_by_article",
    "silos_by_domain",
]
