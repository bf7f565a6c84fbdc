"""Measure how loose the bound on rounding is with ``privacy.engine=ghost``, ``ghost_tf32`` and ``ghost_bf16``.

    python benchmarks/low_precision.py [--quick] [--threads 2]

`benchmarks/README.md` says how it measures.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from clipping import QUICK, Row, build_losses, build_model
from common import machine, options, say, write

SHAPES = [
    Row("t5-small", 4, 384, 128), Row("t5-small", 8, 64, 16), Row("minilm", 8, 128, 0), Row("smollm2", 2, 384, 32),
]  # fmt: skip
TRAINED = ("minilm, trained", "public_t5, trained")
NAMES = ("ghost", "ghost_tf32", "ghost_bf16")


def trained(label: str) -> tuple[Any, Callable[[], Any], int]:
    """Return a trained model, its loss on InsuranceQA, and the number of rows."""
    import torch
    import torch.nn.functional as F

    from lit_dpret.datamodules import InsuranceQADataModule

    found = InsuranceQADataModule().read_collection()
    pairs = [
        (found.queries[q], found.passages[next(iter(found.positives("train", q)))]) for q in list(found.queries)[:8]
    ]
    if label.startswith("minilm"):
        from lit_dpret.encoders import TextEncoder

        encoder = TextEncoder.from_pretrained("minilm")
        questions, answers = (encoder.tokenize([pair[i] for pair in pairs], "passage") for i in (0, 1))
        with torch.no_grad():
            pool = encoder(answers)
        truth = torch.arange(len(pairs))
        return encoder, lambda: F.cross_entropy(encoder(questions) @ pool.T / 0.05, truth, reduction="none"), len(pairs)
    from lit_dpret.modules.language_models import PUBLIC_T5, load_language_model, load_tokenizer

    model, tokenizer = load_language_model(PUBLIC_T5), load_tokenizer(PUBLIC_T5)
    given = tokenizer(
        [answer for _, answer in pairs], return_tensors="pt", padding=True, truncation=True, max_length=384
    )
    labels = tokenizer([query for query, _ in pairs], return_tensors="pt", padding=True).input_ids
    labels = labels.masked_fill(labels == tokenizer.pad_token_id, -100)

    def losses() -> Any:
        logits = model(**given, labels=labels, use_cache=False).logits
        return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1) / (labels != -100).sum(1)

    return model, losses, len(pairs)


def untrained(row: Row) -> tuple[Any, Callable[[], Any], int]:
    """Return the same for a model with random weights."""
    model = build_model(row.model, "cpu").eval()
    return model, build_losses(model, row, "cpu"), row.batch


def measured(model: Any, losses: Callable[[], Any], rows: int) -> dict[str, Any]:
    """Return the norms divided by exact norms, for each engine."""
    import torch

    from lit_dpret.matmul_precision import whole_products
    from lit_dpret.privacy.clipping import make_engine
    from lit_dpret.privacy.clipping.contributions import unit_gradients
    from lit_dpret.privacy.clipping.units import UnitRows

    units, real = torch.arange(rows), torch.ones(rows, dtype=torch.bool)
    batch = UnitRows.build(units, real)
    expected: dict[str, Any] = {}
    whole = 0.0
    found: dict[str, Any] = {}
    for name in NAMES:
        engine: Any = make_engine(name, model, max_grad_norm=1e-3)
        with torch.enable_grad():
            seen, contributions = engine._recorded(losses, batch)
        with torch.no_grad(), whole_products():
            exact = torch.zeros(rows, dtype=torch.float64)
            for parameter, uses in contributions.items():
                for one in (one for group in batch.groups for one in group.split(1)):
                    gradient = unit_gradients(uses, engine.parameters[parameter].shape, one, torch.float64)
                    one.add_to(exact, gradient.square().sum()[None])
            written = engine._write_out(contributions, batch)
            _, vague, _ = engine._norms(contributions, written, seen, batch)
            shares = (engine._certified(contributions, written, batch).norms() / exact.sqrt()).tolist()
        engine.add(losses, units, real)
        sums = engine.take()
        if name == "ghost":
            expected, whole = sums, sum(float(total.double().square().sum()) for total in sums.values()) ** 0.5
        gap = sum(float((total - expected[each]).double().square().sum()) for each, total in sums.items())
        found[name] = {
            "norm_over_exact": {"median": statistics.median(shares), "least": min(shares), "most": max(shares)},
            "computed_in_float64": int(vague.sum()),
            "sum_from_ghost": gap**0.5 / whole,
        }
    return found


def main() -> None:
    parser = options(__doc__ or "", "low_precision_cpu.json", threads=2)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    import torch

    torch.set_num_threads(asked.threads)
    rows: dict[str, Any] = {}
    cases: list[tuple[str, Callable[[], tuple[Any, Callable[[], Any], int]]]] = []
    for row in QUICK[:3] if asked.quick else SHAPES:
        cases.append((row.label, partial(untrained, row)))
    cases += [] if asked.quick else [(label, partial(trained, label)) for label in TRAINED]
    for label, build in cases:
        model, losses, count = build()
        for passes in ("float32", "bfloat16 autocast") if label in TRAINED else ("float32",):

            def in_precision(losses: Any = losses, half: bool = passes != "float32") -> Any:
                with torch.autocast("cpu", torch.bfloat16, enabled=half):
                    return losses().float()

            rows[f"{label}, {passes}"] = found = measured(model.eval(), in_precision, count)
            for name in NAMES:
                one = found[name]
                say(
                    f"{label:<24} {passes:<18} {name:<10}  norm {one['norm_over_exact']['median']:.5f} (most "
                    f"{one['norm_over_exact']['most']:.5f}), {one['computed_in_float64']} of {count} in float64, sum "
                    f"{one['sum_from_ghost']:.2e} from ghost's"
                )
        del model, losses
    write({"machine": machine("torch", "transformers"), "rows": rows}, asked.out)


if __name__ == "__main__":
    main()
