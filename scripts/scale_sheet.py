"""Write docs/scale.md: what the large runs would take, by arithmetic on published shapes and on rates measured here.

    python scripts/scale_sheet.py

Operations and bytes are counted from the models' shapes, encoding and search go by
the rates in benchmarks/results, and what a GPU would do rests on its maker's numbers and one assumption, which the page
names. A test makes the page again and compares.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lit_dpret.costs.memory import estimated_bytes
from lit_dpret.costs.slices import predict
from lit_dpret.costs.work import ACCELERATORS, UTILISATION, accelerator, work_of
from lit_dpret.modules import OptimizerSpec
from lit_dpret.modules.outline import GeneratorOutline
from lit_dpret.tasks.plan import duration, size

ROOT = Path(__file__).resolve().parent.parent
BATCH, EPOCHS = 1024, 30
QUERIES = {"500k": 500_000, "10M": 10_000_000, "1B": 1_000_000_000}
PASSAGES = {"8.8M": 8_800_000, "100M": 100_000_000, "1B": 1_000_000_000}
LORA = {"r": 16, "lora_alpha": 32, "target_modules": ["q", "v"]}
DEVICES = ("a100-40gb", "h100-80gb")
DIM = 768


@dataclass(frozen=True)
class Case:
    """One way to train T5-XL on so many GPUs."""

    label: str
    lora: bool
    strategy: str
    world: int


CASES = (
    Case("all weights, one GPU", False, "ddp", 1),
    Case("LoRA, one GPU", True, "ddp", 1),
    Case("all weights, ZeRO-1", False, "zero1", 8),
    Case("all weights, ZeRO-2", False, "zero2", 8),
    Case("all weights, ZeRO-3", False, "zero3", 8),
    Case("all weights, FSDP2", False, "fsdp", 8),
    Case("LoRA, DDP", True, "ddp", 8),
    Case("all weights, ZeRO-2", False, "zero2", 64),
    Case("all weights, FSDP2", False, "fsdp", 64),
    Case("LoRA, DDP", True, "ddp", 64),
)


def outline(name: str, *, lora: bool = False) -> GeneratorOutline:
    return GeneratorOutline.of_settings(
        optimizer=OptimizerSpec(), pretrained=name, gradient_checkpointing=True, lora=LORA if lora else None
    )


def training_rows(device_name: str) -> list[list[str]]:
    found = []
    for case in CASES:
        model = outline("google-t5/t5-3b", lora=case.lora)
        told = predict(model, batch=BATCH, device=device_name, world=case.world, strategy=case.strategy)
        while_clipping = told["bytes_lasting"] + told["bytes_gathered"] + told["bytes_of_sum"]
        cells = [f"{case.world} x {device_name}", case.label, size(while_clipping), size(told["bytes_while_updating"])]
        rows, seconds = told["rows_that_fit"], told["seconds_per_step"]
        cells += [str(rows), duration(seconds)] if rows else ["does not fit", "-"]
        found.append(cells)
    return found


def epochs_rows(device_name: str) -> list[list[str]]:
    device = accelerator(device_name)
    work = work_of(outline("google-t5/t5-3b"))
    found = []
    for label, count in QUERIES.items():
        cells = [label, f"{round(count / BATCH) * EPOCHS:,}"]
        for world in (1, 8, 64):
            seconds = work.model_flops * count * EPOCHS / (UTILISATION * device.bf16_flops * world)
            cells.append(duration(seconds))
        found.append(cells)
    return found


def encoding_rates() -> dict[str, float]:
    """Passages per processor second, and products per second of the search, from benchmarks/results."""
    encode = json.loads((ROOT / "benchmarks" / "results" / "encode_cpu.json").read_text(encoding="utf-8"))
    search = json.loads((ROOT / "benchmarks" / "results" / "search_cpu.json").read_text(encoding="utf-8"))["speed"]
    own: list[Any] = [each["lit-dpret"]["processor_seconds"] for each in encode["rounds"]]
    products = search["queries"] * search["passages"] * search["dim"]
    return {
        "texts_per_second": encode["texts"] / median(own),
        "products_per_second": products / median(run["processor_seconds"] for run in search["runs"]["lit-dpret"]),
    }


def encoding_rows() -> list[list[str]]:
    rates = encoding_rates()
    found = []
    for label, count in PASSAGES.items():
        encode = count / rates["texts_per_second"]
        thousand = 1000 * count * DIM / rates["products_per_second"]
        found.append([
            label, duration(encode), duration(encode / 64), size(4 * DIM * count), size(2 * DIM * count),
            size(64 * count), duration(thousand),
        ])  # fmt: skip
    return found


_SIZES = {"small": "T5-small", "base": "T5-base"}
_LABELS = {
    "full": "all weights", "checkpointing": "all weights, activations again", "lora": "LoRA",
    "bf16": "bfloat16 with float32 copies",
}  # fmt: skip


def validation_rows() -> list[list[str]]:
    """What slices told over what was measured, for each case of benchmarks/plan_cost.py that was run."""
    path = ROOT / "benchmarks" / "results" / "plan_cost_cpu.json"
    rows = []
    for case, found in json.loads(path.read_text(encoding="utf-8"))["cases"].items():
        model, at_once, label = case.split(":")
        told = found["predicted_over_measured"]
        names = ("bytes", "step")
        ratios = [f"{told[name]:.2f}" if name in told else "not measured" for name in names]
        measured = size(found["measurement"]["bytes"]) if "measurement" in found else "not measured"
        rows.append([_SIZES[model], _LABELS[label], at_once, measured, *ratios])
    known = {row[0] for row in rows}
    rows += [[model, "any", "any", *["not measured"] * 3] for model in _SIZES.values() if model not in known]
    return rows


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def counted_rows() -> list[list[str]]:
    found = []
    for name in ("google-t5/t5-small", "google-t5/t5-base", "google-t5/t5-large", "google-t5/t5-3b"):
        model = outline(name)
        work = work_of(model)
        whole = estimated_bytes(model, work)
        found.append([
            name, f"{model.parameters / 1e6:,.0f}M", f"{work.model_flops / 1e12:.3g}", size(whole.lasting),
            size(whole.sums), size(whole.updating), size(whole.row),
        ])  # fmt: skip
    return found


def update_bytes() -> float:
    """Bytes of an update for each weight of T5-XL, all of them trained."""
    model = outline("google-t5/t5-3b")
    return estimated_bytes(model, work_of(model)).updating / model.parameters


def page() -> str:
    """The whole of docs/scale.md."""
    rates = encoding_rates()
    device = ACCELERATORS["h100-80gb"]
    return f"""# The scale sheet: what the large runs take, and where each resource runs out

This page is made by `python scripts/scale_sheet.py`; a test makes it again and compares. **Nothing on it was measured
on a GPU.** Each table says what it is: *counted* from the shapes of the models, *measured* on two CPU cores, or
*predicted*. A prediction of time on a GPU is operations over the maker's peak times {UTILISATION:g}, an **assumed**
utilisation; a real one may well differ by a factor of two either way. Ask for your own machine:

    python train.py experiment=generator_t5_xl task=plan task.units=500000 task.measure=slices

runs slices of one and three layers of the real width there, and adds their times and bytes up. For GPUs that are not
at hand, the function that makes the second table below is asked by

    python train.py experiment=generator_t5_xl task=plan task.units=500000 task.device=h100-80gb task.world_size=8

Three settings belong to large runs. `datamodule.physical_batch_size=auto` finds how many units fit before the first
release, on random rows of full length, under `trainer=fsdp` in shards; no claim depends on the answer. A step that runs
out of memory all the same begins again in smaller batches: its draw is keyed by the step, its sum is forgotten before
any noise, and it is charged once. `trainer.precision=bf16-true` keeps bfloat16 weights and float32 copies, which take
the noised gradient in float32 and are what is written, on one GPU or under `trainer=ddp`; FSDP2 and DeepSpeed keep such
copies by themselves (`bf16-mixed`). `callbacks=with_throughput` tells speed on the terminal and in no file, because
times depend on private texts.

## One private step (counted)

The paper's setting: 384 + 128 tokens, batch {BATCH}, Adam, bfloat16 weights with float32 copies, activations computed
again. *Lasting* is weights, copies and Adam's moments; beside them lie the sum of clipped gradients, and in an update
the noised gradients. Bytes of a row are an estimate that was held against T5-small alone (`COPIES` in
`lit_dpret/costs/memory.py`); slices tell them more exactly.

{table(["model", "weights", "TFLOP a row", "lasting", "sum", "peak of an update", "a row"], counted_rows())}

## T5-XL on 1, 8 and 64 GPUs (bytes counted, time predicted)

*Rows* is the largest power of two that fits into nine tenths of the memory beside everything else. Which bytes a
strategy divides stands in `lit_dpret.costs.memory`. What a strategy has been shown to do is told in
`docs/several_processes.md`; a row here claims nothing about it.

{
        table(
            ["GPUs", "how", "while clipping, each, without rows", "peak of an update, each", "rows at once", "a step"],
            [row for name in DEVICES for row in training_rows(name)],
        )
    }

Memory runs out first: with all weights trained, an update takes {
        update_bytes():.0f} bytes for each weight on a GPU that
holds everything. Where that does not fit, adapters (`model.lora`) or a strategy that shards take over. The clipped
sum, and all weights while batches are clipped, stay whole on each GPU under every strategy here: from some 8 GPUs on
they are most of what is left, and more GPUs do not make them smaller.

**Left out of these times**: messages between GPUs, and drawing the noise. Noise is drawn on the CPU (NumPy's Philox or
SHAKE-256), one normal for each trained weight and step; for all weights of T5-XL that can take longer than everything
else in the step. `task.measure=slices` measures it with the rest; it is one more reason for adapters.

## How far predictions from slices are off (measured)

Told by `task.measure=slices` over what a real step took, T5s of 384 + 128 tokens, one CPU thread of a busy machine
(`benchmarks/plan_cost.py`, whose results also tell the load, and which times were taken in turn and which one after the
other).

{
        table(
            ["model", "trained", "rows", "memory", "memory, told / real", "time, told / real"],
            validation_rows(),
        )
    }

*Memory* is what the kernel says of the process beyond what it held before, freed blocks handed back at once. Some 35 MB
of it are libraries, which no prediction counts. glibc left alone keeps holes between small blocks: with LoRA another
tenth of the whole, where only blocks of 1 MiB and more were handed back. On a CPU leave that much room. A GPU's
allocator has holes of its own, which were not measured, nor was any model larger than those of the table. Dual encoders
are not predicted.

## 500k, 10M and 1B queries, {EPOCHS} epochs of all weights on {device.name} (predicted)

{table(["queries", "steps", "1 GPU", "8 GPUs", "64 GPUs"], epochs_rows("h100-80gb"))}

Privacy does not ask for {EPOCHS} epochs: with more queries the same number of *steps* has a smaller sampling rate and
needs less noise. What runs out at a billion is time; there a fixed number of steps is planned (`trainer.max_steps`),
and `task=plan` says what that costs. The ledger grows by two lines a step, whatever the number
of queries.

## Encoding and search of 8.8M, 100M and 1B passages (from rates measured on a CPU)

Encoding goes by {rates["texts_per_second"]:.3g} passages a processor second (all-MiniLM-L6-v2, 112 tokens on average;
`benchmarks/results/encode_cpu.json`); T5-base or a GPU has other rates, and they are not measured here. Exact search
goes by {rates["products_per_second"]:.3g} products a processor second (`benchmarks/results/search_cpu.json`), scaled to
{DIM} dimensions. Times are processor time of one core, but where 64 are named.

{
        table(
            [
                "passages",
                "encode, 1 core",
                "encode, 64 cores",
                "float32",
                "float16",
                "64-byte codes",
                "exact search, 1000 queries",
            ],
            encoding_rows(),
        )
    }

Up to some ten million passages `task=search` ranks exactly, out of memory-mapped shards. Beyond that memory runs out
before time does, and an existing engine takes over: FAISS with inverted lists and product quantisation
(trained on public passages), one shard of some hundred million passages a machine, or a service that shards by itself
(Vespa, Milvus, Elasticsearch). An index of public passages costs no privacy; queries
that are sent to a service of others are out of the claim.
"""


def main() -> None:
    (ROOT / "docs" / "scale.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
