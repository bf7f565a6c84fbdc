"""Which source of negatives goes with which privacy mode."""

from __future__ import annotations

import re
from typing import Any

import pytest
from negative_cases import NOISE

from lit_dpret.errors import ConfigurationError
from lit_dpret.negatives import SOURCES, NegativeSource, check_sources
from lit_dpret.privacy.modes import (
    DPSGD,
    BatchClip,
    LogitDP,
    NoPrivacy,
    PerExampleDuplicated,
    PrivacyMode,
    PublicPassages,
    SyntheticData,
)

MODES: dict[str, PrivacyMode] = {
    mode.name: mode
    for mode in (
        NoPrivacy(),
        SyntheticData(),
        BatchClip(max_grad_norm=1.0, **NOISE),
        PublicPassages(max_grad_norm=1.0, **NOISE),
        DPSGD(max_grad_norm=1.0, **NOISE),
        LogitDP(max_logit_grad_norm=1.0, **NOISE),
        PerExampleDuplicated(max_grad_norm=1.0, **NOISE),
    )
}
ROWS_ALONE = {"random", "gold", "bm25", "static", "dynamic", "labelled"}
#: Written out again here, by what each mode proves.
ALLOWED = {
    "none": set(SOURCES),
    "synthetic": set(SOURCES),
    "batch_clip": ROWS_ALONE | {"in_batch"},
    "public_passages": ROWS_ALONE,
    "dp_sgd": ROWS_ALONE,
    "logit_dp": {"in_batch"},
    "per_example_duplicated": {"in_batch"},
}


def made(name: str, **settings: Any) -> NegativeSource:
    needed = {"labelled": {"file": "labels.tsv", "lines_are_independent": True}}
    return SOURCES[name](**needed.get(name, {}), **settings)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SOURCES)
def test_a_mode_takes_what_its_proof_covers_and_refuses_the_rest(name: str, mode: str) -> None:
    source = made(name)
    if name in ALLOWED[mode]:
        check_sources([source], MODES[mode])
        return
    with pytest.raises(ConfigurationError, match=rf"model\.negatives={name} cannot go with privacy={mode}: ") as told:
        check_sources([source], MODES[mode])
    assert "\n" not in str(told.value) and ("Choose among" in str(told.value) or "Set model" in str(told.value))
    for other in re.findall(r" or (?:choose )?privacy=(\w+)", str(told.value)):
        check_sources([source], MODES[other])


@pytest.mark.parametrize("mode", ["public_passages", "dp_sgd"])
@pytest.mark.parametrize("name", ["random", "gold", "bm25", "static"])
def test_a_source_that_is_shared_in_the_batch_couples_rows(name: str, mode: str) -> None:
    source = made(name, shared_in_batch=True)
    assert source.couples_rows and not made(name).couples_rows
    with pytest.raises(ConfigurationError, match=rf"Set model\.negatives\.{name}\.shared_in_batch=false"):
        check_sources([source], MODES[mode])
    check_sources([source], MODES["batch_clip"])


def test_judged_negatives_belong_to_a_query_and_to_no_pair() -> None:
    by_pair = PublicPassages(max_grad_norm=1.0, unit="pair", **NOISE)
    with pytest.raises(ConfigurationError, match=r"part of no pair.*Set privacy\.unit=query"):
        check_sources([made("gold")], by_pair)
    check_sources([made("bm25")], by_pair)


def test_a_file_of_hard_negatives_must_be_declared_to_be_made_row_by_row() -> None:
    for name in ("public_passages", "dp_sgd", "batch_clip"):
        with pytest.raises(ConfigurationError, match=r"set model\.negatives\.gold\.lines_are_independent=true"):
            check_sources([made("gold", file="hard.jsonl")], MODES[name])
        check_sources([made("gold", file="hard.jsonl", lines_are_independent=True)], MODES[name])
    check_sources([made("gold", file="hard.jsonl")], MODES["none"])
