"""What can be done with released queries at no cost in privacy: choose among them, and label them."""

from lit_dpret.postprocessing.filters import (
    BestOf,
    CrossEncoderScore,
    LanguageModelScore,
    QueryFilter,
    RoundTrip,
)
from lit_dpret.postprocessing.released import ReleasedQueries, ReleasedQuery, load_released
from lit_dpret.postprocessing.selection import apply_filters, write_selection

__all__ = [
    "BestOf",
    "CrossEncoderScore",
    "LanguageModelScore",
    "QueryFilter",
    "ReleasedQueries",
    "ReleasedQuery",
    "RoundTrip",
    "apply_filters",
    "load_released",
    "write_selection",
]
