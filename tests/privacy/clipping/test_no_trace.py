"""``add`` leaves the module, its gradients and the random state as they were, also when it fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_dpret.privacy.clipping import make_engine


def fingerprint(module: torch.nn.Module) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, layer in module.named_modules():
        hooks = {k: len(v) for k, v in vars(layer).items() if k.endswith("_hooks") and hasattr(v, "__len__")}
        state[name] = sorted(vars(layer)), hooks, [id(p) for p in layer._parameters.values()]
    for name, p in module.named_parameters():
        state[name] = id(p), p.grad, p.requires_grad, p._version, sorted(vars(p)), p.detach().clone()
    return state


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, (dict, tuple, list)):
        pairs = zip(one.items(), other.items(), strict=True) if isinstance(one, dict) else zip(one, other, strict=True)
        return type(one) is type(other) and all(same(a, b) for a, b in pairs)
    return bool(one == other)


@pytest.mark.parametrize("engine", ["ghost", "vmap", "loop", "opacus"])
def test_a_batch_leaves_no_trace_nor_does_one_whose_forward_pass_fails(engine: str, lib: SimpleNamespace) -> None:
    case = lib.t5()
    case.module.train()
    for name, p in case.module.named_parameters():
        p.requires_grad_("relative_attention_bias" not in name)
    before = fingerprint(case.module)
    clipping = make_engine(engine, case.module, max_grad_norm=1.0)
    random = torch.get_rng_state()
    case.run(clipping)
    assert torch.equal(random, torch.get_rng_state())
    assert same(before, fingerprint(case.module))
    assert not any(total.requires_grad for total in clipping.take().values())

    def fail(*_: object) -> None:
        raise RuntimeError("in the middle")

    handle = case.module.decoder.block[1].layer[1].EncDecAttention.k.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        case.run(clipping)
    handle.remove()
    assert same(before, fingerprint(case.module))


def test_gradients_that_were_there_stay(lib: SimpleNamespace) -> None:
    case = lib.head()
    case.module.weight.grad = torch.full_like(case.module.weight, 3.0)
    case.run(make_engine("ghost", case.module, max_grad_norm=1.0))
    assert (case.module.weight.grad == 3.0).all() and case.module.bias.grad is None


def test_the_forward_pass_is_the_models_own(lib: SimpleNamespace) -> None:
    """The losses under the engine are those without it, bit for bit, so training sees the same model."""
    for name in ("t5_untied_gated", "bert", "embedding_tied_to_linear"):
        case = lib.case(name)
        case.module.float()
        case.rows = {n: v.float() if v.is_floating_point() else v for n, v in case.rows.items()}
        expected = case.losses(case.rows)
        seen = []

        def losses(rows: Any, case: Any = case, seen: Any = seen, plain: Any = case.losses) -> torch.Tensor:
            seen.append(plain(rows))
            return seen[0]

        case.losses = losses
        case.run(make_engine("ghost", case.module, max_grad_norm=1.0))
        assert torch.equal(expected, seen[0])


def test_a_compiled_module_is_clipped_exactly_and_stays_compiled(lib: SimpleNamespace) -> None:
    case = lib.head()
    compiled = torch.compile(case.module, backend="eager")
    case.module, case.losses = (
        compiled,
        lambda b: torch.nn.functional.cross_entropy(compiled(b["x"]), b["y"], reduction="none"),
    )
    lib.check_exact(case)
    ran = []
    torch._dynamo.reset()
    again = torch.compile(compiled._orig_mod, backend=lambda graph, _: ran.append(1) or graph.forward)
    again(case.rows["x"])
    assert ran
