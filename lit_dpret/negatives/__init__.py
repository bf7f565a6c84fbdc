"""Where the negatives of a query come from: small sources that compose, each saying what it couples."""

from lit_dpret.negatives.base import NegativeSource, PassageSource
from lit_dpret.negatives.drawn import GoldNegatives, RandomNegatives
from lit_dpret.negatives.filters import MarginFilter
from lit_dpret.negatives.labelled import LabelledNegatives
from lit_dpret.negatives.mined import BM25Negatives, DynamicNegatives, MinedSource, StaticNegatives
from lit_dpret.negatives.of_batch import InBatchNegatives, PreBatchNegatives
from lit_dpret.negatives.row_negatives import RowNegatives
from lit_dpret.negatives.rules import check_sources, refusal
from lit_dpret.negatives.texts import TrainTexts

SOURCES: dict[str, type[NegativeSource]] = {
    source.name: source
    for source in (
        InBatchNegatives,
        RandomNegatives,
        PreBatchNegatives,
        GoldNegatives,
        BM25Negatives,
        StaticNegatives,
        DynamicNegatives,
        LabelledNegatives,
    )
}

__all__ = [
    "SOURCES",
    "BM25Negatives",
    "DynamicNegatives",
    "GoldNegatives",
    "InBatchNegatives",
    "LabelledNegatives",
    "MarginFilter",
    "MinedSource",
    "NegativeSource",
    "PassageSource",
    "PreBatchNegatives",
    "RandomNegatives",
    "RowNegatives",
    "StaticNegatives",
    "TrainTexts",
    "check_sources",
    "refusal",
]
