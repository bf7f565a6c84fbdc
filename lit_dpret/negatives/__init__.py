"""Sources of negatives, which can be combined; each declares whether it couples rows."""

from lit_dpret.negatives.base import InBatchNegatives, NegativeSource, PassageSource, PreBatchNegatives, TrainTexts
from lit_dpret.negatives.drawn import GoldNegatives, LabelledNegatives, RandomNegatives
from lit_dpret.negatives.mined import BM25Negatives, DynamicNegatives, MarginFilter, MinedSource, StaticNegatives
from lit_dpret.negatives.row_negatives import RowNegatives, check_sources, refusal

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
