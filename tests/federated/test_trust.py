"""What the trust table says that others see of a silo; its counts are compared with every message that leaves it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from tiny_silos import PRIVATE, SMALL, declare_public

pytest.importorskip("flwr", reason="needs the extra federated (flwr)")

from messages import Run, WritesDown

from lit_dpret.federated.flower.library import RecordDict
from lit_dpret.federated.settings import PddAs2, Stage1
from lit_dpret.federated.silo import SiloClient
from lit_dpret.federated.trust import Sight, sights, trust_table


class Learns(SiloClient):
    """A silo whose training takes no time."""

    def train_shared(self, weights: Any, number: int) -> Any:
        return dict(weights)

    def personalise(self, weights: Any, pool: Any, number: int) -> None:
        """Learns nothing."""

    def evaluate(self, *_: Any, **__: Any) -> Any:
        return {"sentence/mrr@10": np.ones(3)}


class Fewer(Learns):
    """The same, and the first silo has one train query less."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if self.name == "client0":
            self.queries.popitem()


class Overheard(Run):
    grid_of = WritesDown


def sizes(content: RecordDict) -> list[Any]:
    """The numbers in clear and the sizes of everything in a message, by name."""
    found: list[Any] = []
    for name, record in sorted(content.array_records.items()):
        found += [(name, key, tuple(array.shape)) for key, array in record.items()]
    for name, facts in sorted(content.config_records.items()):
        found += [(name, key, len(one) if isinstance(one, bytes) else one) for key, one in sorted(facts.items())
                  if name != "keys"]  # fmt: skip
    return found


def seen(root: Path, settings: PddAs2, silo: type[SiloClient]) -> tuple[list[Any], list[Any]]:
    """What the server gets of the first silo, and what the others get of it, as sizes and numbers in clear."""
    run = Overheard(root, settings, silo=silo, timeout=60.0)
    declare_public(root)
    assert not run.launch().faults
    sent = [(kind, sizes(content)) for kind, node, way, content in run.grid.seen if (node, way) == (10, "up")
            and kind in ("query.describe", "train.stage1", "train.secagg_masked", "query.fedneg_request")]  # fmt: skip
    asked = [sizes(content) for kind, node, way, content in run.grid.seen
             if (kind, node, way) == ("query.fedneg_serve", 11, "down")]  # fmt: skip
    return sent, asked


def row_of(settings: PddAs2) -> Sight | None:
    return next((one for one in sights(settings) if one.what == "how many train queries a silo has"), None)


def with_(settings: PddAs2, weighting: Any, request: Any, **more: Any) -> PddAs2:
    stage1 = replace(settings.stage1, weighting=weighting, n_hat=20 if weighting == "capped" else None)
    return replace(settings, stage1=stage1, stage2=replace(settings.stage2, request=request), **more)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("weighting", "secure_sum", "request_", "seal"),
    [("uniform", False, "none", False), ("examples", False, "none", False), ("capped", True, "exact", False),
     *(pytest.param(*case, marks=pytest.mark.slow) for case in
       [("uniform", False, "exact", False), ("uniform", True, "exact", True), ("capped", False, "exact", True),
        ("capped", True, "none", False)])],
)  # fmt: skip
def test_the_number_of_train_queries_is_told_where_one_query_less_changes_what_others_get(
    weighting: str, secure_sum: bool, request_: str, seal: bool, tmp_path: Path
) -> None:
    settings = with_(SMALL, weighting, request_, secure_sum=secure_sum, seal=seal).check()
    (server, silos), (server_less, silos_less) = (
        seen(tmp_path / kind.__name__, settings, kind) for kind in (Learns, Fewer)
    )
    row, never = row_of(settings), sights(settings)[-1].what
    told = server != server_less  # a sum of weights is told as well, and no single message shows it
    summed = weighting == "capped" and secure_sum
    assert (row is not None) == (told or summed) == ("how many train queries" not in never)
    if row is not None:
        assert ("none: in clear" in row.protection) == told and ("masks" in row.protection) == (not told)
        assert ("the sum of the weights" in row.server) == summed
        assert ("of a request" in row.server) == (request_ == "exact")
        assert (row.silos != "nothing") == (request_ == "exact")
    if not seal:  # what a letter holds is what the message would
        assert (silos != silos_less) == (row is not None and row.silos != "nothing")


@pytest.mark.costly
@pytest.mark.parametrize(("weighting", "secure_sum"), [("uniform", False), ("capped", True)])
def test_under_a_budget_nothing_is_counted_by_a_message_and_epsilon_tells_the_number(
    weighting: str, secure_sum: bool, tmp_path: Path
) -> None:
    settings = with_(PRIVATE, weighting, "dp_centroid", secure_sum=secure_sum).check()
    views = [seen(tmp_path / kind.__name__, settings, kind) for kind in (Learns, Fewer)]
    assert views[0] == views[1]
    row, rest = row_of(settings), [one.what for one in sights(settings)]
    assert (row is None) == (weighting == "uniform") and (row is None or "in clear" not in row.protection)
    assert any("spent" in one and "the number of its train queries" in one for one in rest)
    assert "train queries" not in rest[-1]


def test_queries_that_a_generator_wrote_are_counted_and_not_called_train_queries() -> None:
    written = replace(SMALL, train_on="synthetic").check()
    of_own, table = row_of(written), sights(written)
    row = next(one for one in table if one.what == "how many queries its DP generator wrote")
    assert of_own is None and "in clear" not in row.protection and "number" in row.server
    assert "how many train queries a silo has" in table[-1].what  # not told: what is sent is made of the written ones


def test_no_request_is_told_of_where_no_system_makes_one() -> None:
    settings = with_(SMALL, "uniform", "exact")
    assert any("request" in one.what for one in sights(settings))
    assert not any("request" in one.what for one in sights(settings, ["stage1", "customised"]))


def test_the_trust_table_says_in_clear_wherever_nothing_protects_and_nowhere_under_budget_and_masks() -> None:
    assert trust_table(PddAs2()).count("none: in clear") == 4  # update, number of queries, request, answer
    masked = with_(PRIVATE, "capped", "dp_centroid", secure_sum=True).check()
    table, signed = trust_table(masked), trust_table(replace(masked, roster=True).check())
    assert "in clear" not in table and "eps=20" in table and "t=2n/3 + 1" in table
    assert "taken on trust" in table and "taken on trust" not in signed and "c < 2 t - n" in signed
    centroids = replace(PRIVATE.stage2, response="dp_centroid", request="none")
    assert "eps=2 " in trust_table(
        replace(PRIVATE, stage2=centroids, privacy=replace(PRIVATE.privacy, collection_eps=2.0)).check()
    )
    sealed = trust_table(PddAs2(seal=True).check())
    assert sealed.count("| who asks whom, and sizes |") == sealed.count("against the silos: none: in clear") == 2
    private = trust_table(replace(PRIVATE, seal=True, roster=True).check())
    assert "sealed from the server" in private and "in clear" not in private and "taken on trust" not in private


def test_the_trust_table_tells_by_which_rule_the_next_model_is_made() -> None:
    rules = get_args(get_type_hints(Stage1)["aggregation"])
    told = {rule: sights(replace(SMALL, stage1=replace(SMALL.stage1, aggregation=rule)))[0].silos for rule in rules}
    assert len(set(told.values())) == len(rules)
    assert [rule for rule, text in told.items() if text.startswith("the mean,")] == ["mean"]


@pytest.mark.parametrize(("run", "knob"), [(SMALL, "share_measures"), (PRIVATE, "share_epsilon")])
def test_what_a_silo_may_choose_to_tell_is_no_row_of_never(run: PddAs2, knob: str) -> None:
    lines = trust_table(run).splitlines()
    never = next(line for line in lines if "never" in line)
    assert any(f"unless the silo sets {knob}" in line for line in lines)
    assert ("train queries" in never) == (run.privacy.eps is None and run.stage1.weighting == "uniform")
