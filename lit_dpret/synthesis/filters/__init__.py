"""Operations on released queries without privacy cost: filtering and labelling."""

from lit_dpret.synthesis.dataset_folder import ReleasedQuery
from lit_dpret.synthesis.filters.bins import Bins, LabelBins, LengthBins, TopicBins
from lit_dpret.synthesis.filters.by_score import BestOf, CrossEncoderScore, LanguageModelScore, QueryFilter, RoundTrip
from lit_dpret.synthesis.filters.histogram_match import HistogramMatch
from lit_dpret.synthesis.filters.released import ReleasedQueries, load_released
from lit_dpret.synthesis.filters.selection import apply_filters, write_selection

__all__ = [
    "BestOf",
    "Bins",
    "CrossEncoderScore",
    "HistogramMatch",
    "LabelBins",
    "LanguageModelScore",
    "LengthBins",
    "QueryFilter",
    "ReleasedQueries",
    "ReleasedQuery",
    "RoundTrip",
    "TopicBins",
    "apply_filters",
    "load_released",
    "write_selection",
]
