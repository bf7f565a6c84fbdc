"""Measure the cost of clipping: a step with this package's engine and with opacus over a step without privacy.

    python benchmarks/clipping.py [--rounds 7] [--threads 2] [--device cpu|cuda] [--quick] [--low-precision]

`benchmarks/README.md` says how it measures.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from json import dumps
from typing import Any

from common import CASES, GIVEN_BACK, RESULTS, apart, in_turns, machine, median_ratio, options, say, timed, write

VARIANTS = ("plain", "ghost", "opacus", "opacus ghost")
LOW_PRECISION = ("ghost_tf32", "ghost_bf16")
LABELS = {
    "plain": "no privacy", "ghost": "lit-dpret ghost (all trained)", "ghost_tf32": "lit-dpret ghost_tf32",
    "ghost_bf16": "lit-dpret ghost_bf16", "opacus": "opacus hooks (positions frozen)",
    "opacus ghost": "opacus ghost (positions frozen)",
}  # fmt: skip
#: Parameters that opacus cannot handle and its variants freeze: their gradient has no batch axis there.
FROZEN_FOR_OPACUS = ("relative_attention_bias", "position_embeddings")


@dataclass(frozen=True)
class Row:
    """A model name, the rows of the batch, and the tokens of source and target (0: an encoder)."""

    model: str
    batch: int
    source: int
    target: int

    @property
    def label(self) -> str:
        return f"{self.model} {self.batch} x {self.source}" + (f"/{self.target}" if self.target else "")

    @property
    def tokens(self) -> int:
        return self.batch * (self.source + self.target)


T5_SHAPES, BERT_SHAPES, LLAMA_SHAPES = (CASES[family] for family in ("t5", "bert", "llama"))
LORA = "+lora"  # suffix of a model's name
ROWS = {device: [Row(*row) for row in rows] for device, rows in CASES["rows"].items()}
QUICK = ROWS["quick"]


def build_model(name: str, device: str) -> Any:
    """Return a model of that shape with random weights, in train mode (dropout 0.1; none in a decoder-only model)."""
    import torch
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    shape = name.removesuffix(LORA)
    if shape in T5_SHAPES:
        model: Any = T5ForConditionalGeneration(T5Config(**T5_SHAPES[shape], decoder_start_token_id=0))
    elif shape in LLAMA_SHAPES:
        model = LlamaForCausalLM(LlamaConfig(**LLAMA_SHAPES[shape], tie_word_embeddings=True))
        if name.endswith(LORA):
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=8))
    else:
        model = BertModel(BertConfig(**BERT_SHAPES[name]), add_pooling_layer=False)
    return model.train().to(device)


def build_losses(model: Any, row: Row, device: str) -> Callable[[], Any]:
    """Return a function that computes one loss per row; bf16 autocast on a GPU."""
    import torch
    import torch.nn.functional as F

    from lit_dpret.modules.families import DecoderOnly

    ids = torch.randint(1, model.config.vocab_size, (row.batch, row.source), device=device)
    labels = torch.randint(1, model.config.vocab_size, (row.batch, max(1, row.target)), device=device)
    mask, types = torch.ones_like(ids), torch.zeros_like(ids)
    family = DecoderOnly()
    whole = {name: each.to(device) for name, each in family.collate(ids.tolist(), labels.tolist(), 0).items()}

    def losses() -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device != "cpu"):
            if row.model.removesuffix(LORA) in LLAMA_SHAPES:
                logits = family.logits(model, whole)
                return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1)
            if row.target:
                logits = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).logits
                return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1)
            pooled = model(ids, attention_mask=mask, token_type_ids=types).last_hidden_state.mean(1)
            return pooled.float().sin().sum(1)

    return losses


def build_step(variant: str, model: Any, row: Row, device: str) -> Callable[[], None]:
    """Return one step of a variant; its result (gradients or their sums) is freed by the next step.

    Raises:
        NotImplementedError: opacus refuses the model, here or in the first step.
    """
    import torch

    losses = build_losses(model, row, device)
    if variant == "plain":

        def plain() -> None:
            model.zero_grad(set_to_none=True)
            torch.autograd.backward(losses().sum())

        return plain
    if variant.startswith("ghost"):
        from lit_dpret.privacy.clipping import make_engine

        engine = make_engine(variant, model, max_grad_norm=1.0)
        units, real = torch.arange(row.batch, device=device), torch.ones(row.batch, dtype=torch.bool, device=device)

        def ghost() -> None:
            engine.forget()
            engine.add(losses, units, real)

        return ghost
    warnings.filterwarnings("ignore", message="Full backward hook")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(frozen in name for frozen in FROZEN_FOR_OPACUS))
    if variant == "opacus ghost":
        from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleModuleFastGradientClipping

        wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum", max_grad_norm=1.0)

        def opacus_ghost() -> None:
            model.zero_grad(set_to_none=True)
            found = losses()
            torch.autograd.backward(found.sum(), retain_graph=True)
            factors = wrapped.get_clipping_coef()
            model.zero_grad(set_to_none=True)
            wrapped.disable_hooks()
            torch.autograd.backward((factors * found).sum())
            wrapped.enable_hooks()

        return opacus_ghost
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    trained = [p for p in model.parameters() if p.requires_grad]
    GradSampleModule(model, loss_reduction="sum")
    optimizer = DPOptimizer(
        torch.optim.SGD(trained, lr=0.0), noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=row.batch
    )

    def opacus() -> None:
        optimizer.zero_grad(set_to_none=True)
        for p in trained:
            p.summed_grad = None
        torch.autograd.backward(losses().sum())
        optimizer.clip_and_accumulate()

    return opacus


def upper_bound(values: list[float], confidence: float = 0.95) -> float | None:
    """Return the smallest value that is above the median with this confidence; None if there are too few values.

    The k-th smallest of n is above the median unless k or more of n fair coins show heads.
    """
    n = len(values)
    below = 0.0
    for k in range(1, n + 1):
        below += math.comb(n, k - 1) / 2**n
        if below >= confidence:
            return sorted(values)[k - 1]
    return None


def wait(device: str) -> None:
    if device != "cpu":
        import torch

        torch.cuda.synchronize()


def matmul_rate(device: str) -> float:
    """Return the floating-point operations per second of a large product in the precision of the passes."""
    import torch

    size, dtype = (2048, torch.float32) if device == "cpu" else (8192, torch.bfloat16)
    a = torch.randn(size, size, device=device, dtype=dtype)
    spent = []
    for _ in range(6):
        wait(device)
        begun = time.perf_counter()
        a @ a
        wait(device)
        spent.append(time.perf_counter() - begun)
    return 2 * size**3 / min(spent)


def count_flops(step: Callable[[], None]) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def measure_time(row: Row, rounds: int, device: str, ours: tuple[str, ...] = ("ghost",)) -> dict[str, Any]:
    """Return the seconds of every variant and their ratios to the plain step, measured in turns."""
    import torch

    model = build_model(row.model, device)
    steps: dict[str, Callable[[], None]] = {v: build_step(v, model, row, device) for v in ("plain", *ours)}
    refused: dict[str, str] = {}
    too_large: dict[str, str] = {}

    def step(variant: str) -> None:
        steps[variant]()
        wait(device)

    def run(variant: str) -> float:
        wait(device)
        return timed(lambda: step(variant))[1]["seconds"]

    run("plain")
    first = {variant: run(variant) for variant in ("plain", *ours)}
    model.zero_grad(set_to_none=True)
    for variant in ("opacus", "opacus ghost"):
        try:
            steps[variant] = build_step(variant, build_model(row.model, device), row, device)
            first[variant] = run(variant)
        except NotImplementedError as error:
            steps.pop(variant, None)
            refused[variant] = str(error)
        except torch.OutOfMemoryError:
            steps.pop(variant, None)
            too_large[variant] = f"{row.label} does not fit in memory next to the models of the other variants"
            torch.cuda.empty_cache()
    names = [v for v in LABELS if v in steps]
    wait(device)
    done = in_turns({variant: partial(step, variant) for variant in names}, rounds)
    flops = count_flops(steps["plain"])
    rate = matmul_rate(device)
    result: dict[str, Any] = {
        "refused": refused, "too_large": too_large, "matmul_flops": rate, "variants": {}, "ghost_over": {},
    }  # fmt: skip
    for variant in names:
        wall = statistics.median(r[variant]["seconds"] for r in done)
        result["variants"][variant] = {
            "wall_seconds": wall,
            "cpu_seconds": statistics.median(r[variant]["processor_seconds"] for r in done),
            "wall_ratio": median_ratio(done, variant, "plain", "seconds"),
            "cpu_ratio": median_ratio(done, variant, "plain", "processor_seconds"),
            "first_step_wall_seconds": first[variant],
            "tokens_per_second": row.tokens / wall,
            "share_of_matmul_rate": flops / wall / rate,
        }
        if variant.startswith("opacus"):
            ratios = [r["ghost"]["seconds"] / r[variant]["seconds"] for r in done]
            result["ghost_over"][variant] = {"median": statistics.median(ratios), "upper_95": upper_bound(ratios)}
    return result


def measure_memory_here(variant: str, row: Row, device: str) -> dict[str, int]:
    """Measure, in a fresh process, bytes above the built model, in the first step and in later ones."""
    import torch

    from lit_dpret.costs.measure import peak, reset_peak, resident

    model, here = build_model(row.model, device), torch.device(device)
    step = build_step(variant, model, row, device)
    peaks, base = [], resident(here)
    for _ in range(3):
        reset_peak(here)
        step()
        peaks.append(peak(here) - base)
    return {"first_step_bytes": peaks[0], "later_step_bytes": max(peaks[1:])}


def measure_memory(variant: str, row: Row, device: str, threads: int) -> dict[str, Any] | None:
    """Measure in a separate process; return None if the variant is refused or does not fit."""
    words = ["--device", device, "--threads", threads, "--memory-of", variant]
    try:
        found: dict[str, Any] = apart(__file__, *words, row.model, row.batch, row.source, row.target, **GIVEN_BACK)
    except RuntimeError as error:
        if "NotImplementedError" in str(error) or "OutOfMemoryError" in str(error):
            return None
        raise
    return found


def largest_batch(variant: str, row: Row, limit: int, device: str, threads: int) -> int | None:
    """Return the most rows within the limit: extrapolated from two sizes, then measured around that guess."""

    def peak(batch: int) -> float:
        found = measure_memory(variant, Row(row.model, batch, row.source, row.target), device, threads)
        return math.inf if found is None else max(found.values())

    few, more = peak(2), peak(4)
    if few > limit:
        return None
    each = max(1.0, (more - few) / 2)
    batch = max(2, int(2 + (limit - few) / each)) if math.isfinite(each) else 2
    if peak(batch) <= limit:
        while peak(batch + 1) <= limit:
            batch += 1
        return batch
    while batch > 2 and peak(batch - 1) > limit:
        batch -= 1
    return batch - 1


def report_row(row: Row, arguments: argparse.Namespace) -> dict[str, Any]:
    more = LOW_PRECISION if arguments.low_precision else ()
    memory = {v: measure_memory(v, row, arguments.device, arguments.threads) for v in (*VARIANTS, *more)}
    spent = measure_time(row, arguments.rounds, arguments.device, ("ghost", *more))
    plain = memory["plain"]
    print(f"\n{row.label}")
    print(f"{'':32}{'wall':>8}{'cpu':>8}{'memory':>8}{'first step':>12}   seconds, tokens/s, share of matmul rate, MB")
    for variant, measured in spent["variants"].items():
        held = memory[variant]
        if plain is None or held is None:
            continue
        for key in ("first_step", "later_step"):
            held[f"{key}_ratio"] = held[f"{key}_bytes"] / plain[f"{key}_bytes"]
        print(
            f"{LABELS[variant]:32}{measured['wall_ratio']:7.2f}x{measured['cpu_ratio']:7.2f}x"
            f"{held['later_step_ratio']:7.2f}x{held['first_step_ratio']:11.2f}x"
            f"   {measured['wall_seconds']:.3f} s, {measured['tokens_per_second']:.0f}, "
            f"{measured['share_of_matmul_rate']:.0%}, {held['later_step_bytes'] / 1e6:.0f}"
        )
    for variant, ratio in spent["ghost_over"].items():
        bound = "too few rounds" if ratio["upper_95"] is None else f"{ratio['upper_95']:.2f}"
        print(f"ghost over {LABELS[variant]}: {ratio['median']:.2f} (upper 95 percent bound: {bound})")
    for word in ("refused", "too_large"):
        for variant, reason in spent[word].items():
            print(f"{LABELS[variant]}: {word.replace('_', ' ')}: {reason}")
    say("")
    return {"memory": memory, "time": spent}


def main() -> None:
    parser = options(__doc__, None, threads=2)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of all variants; at least 7 for a report")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--limit-gb", type=float, default=3.0, help="memory limit for the largest batch; 0 skips that part"
    )
    parser.add_argument("--only", default="", help="only rows whose label contains this")
    parser.add_argument("--quick", action="store_true", help="toy models: shows that the script runs")
    parser.add_argument("--low-precision", action="store_true", help="also ghost_tf32 and ghost_bf16")
    parser.add_argument("--memory-of", nargs=5, metavar="X", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(arguments.threads)
    if arguments.memory_of:
        variant, model, *shape = arguments.memory_of
        say(dumps(measure_memory_here(variant, Row(model, *map(int, shape)), arguments.device)))
        return
    rows = [r for r in (QUICK if arguments.quick else ROWS[arguments.device]) if arguments.only in r.label]
    report: dict[str, Any] = {
        "method": __doc__,
        "rounds": arguments.rounds,
        "threads": arguments.threads,
        "device": arguments.device if arguments.device == "cpu" else torch.cuda.get_device_name(),
        "before": machine("torch", "opacus", "transformers"),
        "rows": {},
    }
    out = arguments.out or RESULTS / f"clipping_{arguments.device}.json"  # written after every row
    for row in rows:
        report["rows"][row.label] = report_row(row, arguments)
        write(report, out)
    if arguments.limit_gb:
        row = next((row for row in rows if row.source == 384), rows[0])
        print(
            f"\nLargest batch of {row.model} {row.source}/{row.target} within {arguments.limit_gb:g} GB above the model"
        )
        report["largest_batch"] = {"row": row.label, "limit_gb": arguments.limit_gb}
        for variant in VARIANTS[:3]:
            limit = int(arguments.limit_gb * 1e9)
            found = largest_batch(variant, row, limit, arguments.device, arguments.threads)
            report["largest_batch"][variant] = found
            say(f"{LABELS[variant]:32}{found if found is not None else 'not even 2'}")
        write(report | {"after": machine()}, out)


if __name__ == "__main__":
    main()
