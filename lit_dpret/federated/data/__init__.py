"""Silos from data that exist: a split of each collection into clients, sentence by sentence."""

from lit_dpret.federated.data.central import merged_silo
from lit_dpret.federated.data.collections import silos_by_domain
from lit_dpret.federated.data.newsqa import read_newsqa, section_of
from lit_dpret.federated.data.planted import planted_silos, planted_words
from lit_dpret.federated.data.pseudo import pseudo_silo
from lit_dpret.federated.data.sentences import sentence_spans, sentences_of
from lit_dpret.federated.data.squad import silos_by_article
from lit_dpret.federated.data.statistics import statistics_table

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
    "statistics_table",
]
