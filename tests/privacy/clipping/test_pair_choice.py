"""How norms=auto chooses, and what its choice may depend on."""

from __future__ import annotations

from typing import Any

import pytest
from pair_models import DIM, assert_equal, build, reference

from lit_dpret.privacy.clipping.pairs import choose_norms, costs, make_pair_norms


def test_auto_takes_the_closed_form_for_a_linear_head_whatever_its_size() -> None:
    for n in (2, 5000):
        assert choose_norms(n_max=n, dim=4, positions=1, width=9, linear_head=True) == "linear_head"


@pytest.mark.parametrize("dim", [8, 64, 384])
@pytest.mark.parametrize("shared", [True, False])
def test_auto_switches_where_the_costs_cross(dim: int, shared: bool) -> None:
    public: dict[str, Any] = dict(dim=dim, positions=32, width=384, shared=shared)
    other = "jacobian" if shared else "k_blocks"
    chosen = [choose_norms(n_max=n, **public) for n in range(1, 3 * dim + 100)]
    cost = [costs(n_max=n, **public) for n in range(1, 3 * dim + 100)]
    assert chosen[0] == "pair_ghost"
    for name, found in zip(chosen, cost, strict=True):
        if name == "pair_ghost":
            assert found["pair_ghost"] <= found[other]
        elif name == other and shared:
            assert found["jacobian"] < found["pair_ghost"]
    if not shared:
        switch = chosen.index("k_blocks")
        assert set(chosen[switch:]) == {"k_blocks"}
        assert cost[switch]["k_blocks"] < cost[switch]["pair_ghost"]
        assert cost[switch - 1]["pair_ghost"] <= cost[switch - 1]["k_blocks"]


def test_auto_takes_a_bound_only_where_exact_norms_cost_ten_times_as_much() -> None:
    public: dict[str, Any] = dict(dim=64, positions=256, width=384)
    for n in range(1, 20_000, 97):
        found = costs(n_max=n, shared=True, **public)
        best = min(found["pair_ghost"], found["jacobian"])
        assert (choose_norms(n_max=n, **public) == "k_blocks") == (best > 10 * found["k_blocks"])
    assert choose_norms(n_max=20_000, **public) == "k_blocks"
    assert choose_norms(n_max=128, **public) != "k_blocks"


def test_auto_builds_what_it_chose() -> None:
    pairs = build("mlp")
    strategy = make_pair_norms("auto", pairs.module, n_max=5, dim=DIM, positions=1)
    assert strategy.exact
    assert_equal(strategy.table(pairs.batch), reference(pairs))
    head = build("linear_head")
    strategy = make_pair_norms("auto", head.module, n_max=5, dim=DIM, linear_head=True)
    assert_equal(strategy.table(head.batch), reference(head))


def test_auto_prefers_exact_norms_for_the_embedding_net_of_the_paper() -> None:
    assert choose_norms(n_max=400, dim=8, positions=64, width=50) == "jacobian"
