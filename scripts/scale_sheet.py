"""Write docs/scale.md: the cost of large runs, computed from published shapes and from rates measured here.

    python scripts/scale_sheet.py

Operations and bytes are counted from the models' shapes. Encoding and search use the rates in benchmarks/results. GPU
times use the vendor's numbers and one assumption, which the page states. The text of the page is in scale.md next to
this file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import StrictUndefined, Template

from lit_dpret.costs.estimate import duration, size
from lit_dpret.costs.memory import estimated_bytes
from lit_dpret.costs.prediction import ASSUMED, predict
from lit_dpret.costs.work import ACCELERATORS, work_of
from lit_dpret.modules import OptimizerSpec
from lit_dpret.modules.outline import GeneratorOutline

ROOT = Path(__file__).resolve().parent.parent
BATCH, EPOCHS = 1024, 30
QUERIES = {"500k": 500_000, "10M": 10_000_000, "1B": 1_000_000_000}
PASSAGES = {"8.8M": 8_800_000, "100M": 100_000_000, "1B": 1_000_000_000}
LORA = {"r": 16, "lora_alpha": 32, "target_modules": ["q", "v"]}
DEVICES = ("a100-40gb", "h100-80gb")
DIM = 768


@dataclass(frozen=True)
class Case:
    """One way to train T5-XL on ``world`` GPUs."""

    label: str
    lora: bool
    strategy: str
    world: int


CASES = (
    Case("all weights, one GPU", False, "ddp", 1), Case("LoRA, one GPU", True, "ddp", 1),
    Case("all weights, ZeRO-1", False, "zero1", 8), Case("all weights, ZeRO-2", False, "zero2", 8),
    Case("all weights, ZeRO-3", False, "zero3", 8), Case("all weights, FSDP2", False, "fsdp", 8),
    Case("LoRA, DDP", True, "ddp", 8), Case("all weights, ZeRO-2", False, "zero2", 64),
    Case("all weights, FSDP2", False, "fsdp", 64), Case("LoRA, DDP", True, "ddp", 64),
)  # fmt: skip


def outline(name: str, *, lora: bool = False) -> GeneratorOutline:
    return GeneratorOutline.of_settings(
        optimizer=OptimizerSpec(), pretrained=name, gradient_checkpointing=True, lora=LORA if lora else None
    )


def predicted(
    model: GeneratorOutline, device: str, world: int, strategy: str, engine: str = "ghost", *, secure_rng: bool = False
) -> dict[str, Any]:
    """Return the prediction with noise at the rate of benchmarks/results, so that the page is the same anywhere."""
    path = ROOT / "benchmarks" / "results" / "noise_cpu.json"
    rate = json.loads(path.read_text(encoding="utf-8"))["rows"]["blocks, 1 thread"]["normals_per_processor_second"]
    return predict(
        model, batch=BATCH, device=device, world=world, strategy=strategy, engine=engine, secure_rng=secure_rng,
        seconds_of_a_normal=1 / rate,
    )  # fmt: skip


def training_rows(device_name: str) -> list[list[str]]:
    found = []
    for case in CASES:
        model = outline("google-t5/t5-3b", lora=case.lora)
        told = predicted(model, device_name, case.world, case.strategy)
        while_clipping = told["bytes_lasting"] + told["bytes_gathered"] + told["bytes_of_sum"]
        cells = [f"{case.world} x {device_name}", case.label, size(while_clipping), size(told["bytes_while_updating"])]
        cells += [str(told["rows_that_fit"]), range_of(told)] if told["rows_that_fit"] else ["does not fit", "-"]
        found.append(cells)
    return found


def range_of(told: dict[str, Any], steps: int = 1) -> str:
    return " to ".join(duration(steps * seconds) for seconds in told["seconds_per_step"])


def parts_rows(device_name: str) -> list[list[str]]:
    model = outline("google-t5/t5-3b")
    parts = dict(predicted(model, device_name, 8, "fsdp")["seconds"])
    parts["noise, secure_rng"] = predicted(model, device_name, 8, "fsdp", secure_rng=True)["seconds"]["noise"]
    return [[name, duration(each["at_peak"]), duration(each["assumed"])] for name, each in parts.items()]


def engines_rows(device_name: str) -> list[list[str]]:
    """Return the products at their peak and assumed rates, and the whole step, for each engine of norms and sums."""
    model, found = outline("google-t5/t5-3b"), []
    for engine in ("ghost", "ghost_tf32", "ghost_bf16"):
        told = predicted(model, device_name, 8, "fsdp", engine)
        products = [each for name, each in told["seconds"].items() if name.endswith("products")]
        sums = [sum(each[how] for each in products) for how in ("at_peak", "assumed")]
        found.append([f"`{engine}`", " to ".join(map(duration, sums)), range_of(told)])
    return found


def epochs_rows(device_name: str) -> list[list[str]]:
    model, found = outline("google-t5/t5-3b"), []
    for label, count in QUERIES.items():
        steps = round(count / BATCH) * EPOCHS
        told = [predicted(model, device_name, world, "fsdp" if world > 1 else "ddp") for world in (1, 8, 64)]
        found.append([label, f"{steps:,}", *(range_of(one, steps) for one in told)])
    return found


def encoding_rates() -> dict[str, float]:
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


def index_rows() -> list[list[str]]:
    """Return recall, time of one processor, and bytes of each kind of index in benchmarks/index_kinds.py."""
    path = ROOT / "benchmarks" / "results" / "index_kinds_cpu.json"
    rows = []
    for collection in json.loads(path.read_text(encoding="utf-8"))["sizes"]:
        for found in collection["rows"]:
            built = duration(found["build_processor_seconds"]) if "build_processor_seconds" in found else "-"
            rows.append([
                f"{collection['passages']:,}", f"`{found['kind']};{found['parameters']}`".replace(";`", "`"),
                f"{found['recall@10']:.3f}", f"{found['recall@100']:.3f}",
                f"{1000 * found['one_question_processor_seconds']:.3g} ms", built,
                size(2**20 * found.get("index_mib", 0)) if "index_mib" in found else "-",
                size(2**20 * found["risen_mib"]),
            ])  # fmt: skip
    return rows


_SIZES = {"small": "T5-small", "base": "T5-base"}
_LABELS = {
    "full": "all weights", "checkpointing": "all weights, activations again", "lora": "LoRA",
    "bf16": "bfloat16 with float32 copies",
}  # fmt: skip


def validation_rows() -> list[list[str]]:
    """Return predicted over measured values for each case of benchmarks/plan_cost.py that was run."""
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


def by_block_facts() -> dict[str, str]:
    """Return what benchmarks/fsdp_memory.py counted on ranks of a scaled-down T5-XL, and its law for the real one."""
    path = ROOT / "benchmarks" / "results" / "fsdp_scaling_cpu.json"
    found = json.loads(path.read_text(encoding="utf-8"))["rows"]
    rows, beyond = [], "counted_{}_beyond_share_in_blocks".format
    own = [row for row in found if row["way"] == "fsdp, by block"]
    for row in own:
        told = f"{row[beyond('clipping')]:.2f} ({row[beyond('checking')]:.2f})"
        rows.append([
            str(row["layers"]), f"{row['parameters'] / 1e6:.1f}M", str(row["ranks"]), size(row["state_share"]),
            size(row["counted_clipping"]), told,
        ])  # fmt: skip
    one, other = ((row["layers"], row[beyond("clipping")]) for row in (own[0], own[-1]))
    slope = (other[1] - one[1]) / (other[0] - one[0])
    at_once = [row for row in found if row["way"] == "fsdp, at once"]
    least, most = (how(row[beyond("clipping")] for row in at_once) for how in (min, max))
    layers = at_once[0]["layers"]
    span = f"{least:.0f}" if round(least) == round(most) else f"{least:.0f} to {most:.0f}"
    xl = outline("google-t5/t5-3b")
    return {
        "by_block": table(["layers, each side", "weights", "ranks", "share", "held", "beyond it, in blocks"], rows),
        "constant": f"{one[1] - slope * one[0]:.2f}",
        "slope": f"{slope:.3f}",
        "block_size": size(4 * found[0]["largest_block"]),
        "at_once_sentence": f"Gathered at once, {layers} layers take {span} blocks beyond the share.",
        "xl_share": size(16 * xl.parameters / 8),
        "xl_block": size(4 * xl.blocks[0]),
    }


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
    model = outline("google-t5/t5-3b")
    return estimated_bytes(model, work_of(model)).updating / model.parameters


def page() -> str:
    """Return the whole of docs/scale.md."""
    rates = encoding_rates()
    gpus = ["GPUs", "how", "while clipping, each, without rows", "peak of an update, each", "rows at once", "a step"]
    passages = ["passages", "encode, 1 core", "encode, 64 cores", "float32", "float16", "64-byte codes"]
    facts = {
        "shares": ", ".join(f"{share:g} for {name}" for name, share in ASSUMED.items()),
        "parts": table(["part", "at its peak", "assumed"], parts_rows("h100-80gb")),
        "engines": table(["`privacy.engine`", "all products", "a step"], engines_rows("h100-80gb")),
        "batch": BATCH,
        "epochs": EPOCHS,
        "dim": DIM,
        "device": ACCELERATORS["h100-80gb"].name,
        "update_bytes": f"{update_bytes():.0f}",
        "texts_per_second": f"{rates['texts_per_second']:.3g}",
        "products_per_second": f"{rates['products_per_second']:.3g}",
        "counted": table(
            ["model", "weights", "TFLOP a row", "lasting", "sum", "peak of an update", "a row"], counted_rows()
        ),
        "training": table(gpus, [row for name in DEVICES for row in training_rows(name)]),
        "validation": table(
            ["model", "trained", "rows", "memory", "memory, predicted / real", "time, predicted / real"],
            validation_rows(),
        ),
        "of_epochs": table(["queries", "steps", "1 GPU", "8 GPUs", "64 GPUs"], epochs_rows("h100-80gb")),
        **by_block_facts(),
        "indices": table(
            ["passages", "index", "recall@10", "recall@100", "one question", "build", "on disk", "memory"], index_rows()
        ),
        "encoding": table([*passages, "exact search, 1000 queries"], encoding_rows()),
    }
    text = Path(__file__).with_name("scale.md").read_text(encoding="utf-8")
    return Template(text, undefined=StrictUndefined, keep_trailing_newline=True).render(facts)


def main() -> None:
    (ROOT / "docs" / "scale.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
