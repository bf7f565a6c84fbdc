"""Measure in under 40 minutes the GPU claims that were not yet measured on one, and write one report.

    python benchmarks/gpu_day.py --out gpu_day                      on a machine with one GPU
    python benchmarks/gpu_day.py --out gpu_day --device cpu --tiny  a rehearsal on toy models

`benchmarks/README.md` says how it measures.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import machine, options, say, write

HERE = Path(__file__).resolve().parent
Rows = dict[str, dict[str, Any]]
TRAINERS = {
    "run one": ("trainer=gpu",),
    "run ddp": ("trainer=ddp", "trainer.precision=bf16-mixed"),
    "run fsdp": ("trainer=fsdp",),
    "run zero2": ("trainer=deepspeed", "privacy=dp_sgd"),
    "run zero3": ("trainer=deepspeed", "trainer.strategy.stage=3", "privacy=dp_sgd"),
}


@dataclass(frozen=True)
class Day:
    """The settings of a day: where the parts run and where they write."""

    out: Path  # folder of the report; each part has a file or a folder in it
    device: str  # ``cuda`` or ``cpu``
    tiny: bool  # toy sizes: shows that every part runs, but not how fast

    def train(self, trainer: tuple[str, ...], folder: Path, steps: int, *more: str) -> list[str]:
        model = ("model.pretrained=null", "model.config={model_type: t5, d_model: 768, d_kv: 64, d_ff: 3072, "
                 "num_layers: 12, num_heads: 12, vocab_size: 2048}")  # fmt: skip
        if self.tiny:
            model = ("model.max_passage_length=16", "model.max_query_length=8")
        sizes = (16, 8) if self.tiny else (128, 32)
        settings = [
            "model=generator", *model, "privacy.eps=3", "callbacks=with_throughput", "callbacks.throughput.every=1",
            *trainer, "trainer.devices=1", f"trainer.max_steps={steps}", f"hydra.run.dir={folder}",
            f"datamodule.expected_batch_size={sizes[0]}", f"datamodule.physical_batch_size={sizes[1]}", *more,
        ]  # fmt: skip
        if self.device == "cpu":
            settings += ["trainer.accelerator=cpu", "trainer.precision=32-true"]
        if "privacy=dp_sgd" in settings:  # a config group must come before its keys
            settings.sort(key=lambda each: each != "privacy=dp_sgd")
        return [sys.executable, str(HERE.parent / "train.py"), *settings]


def run(command: list[str], log: Path, limit: float | None = None) -> str:
    """Run a command with its output in a file and return the output; raise with its last lines if it fails."""
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False, timeout=limit)
    written = log.read_text(encoding="utf-8", errors="replace")
    if done.returncode:
        raise RuntimeError(f"status {done.returncode}: " + " / ".join(written.strip().splitlines()[-3:]))
    return written


def epsilon_of(folder: Path) -> float:
    card: dict[str, Any] = json.loads((folder / "privacy_card.json").read_text(encoding="utf-8"))
    return float(card["claim"]["epsilon"])


def of_clipping(found: Any) -> Rows:
    """Return the ratios of each model's private step to the plain one, in time and in memory."""
    rows: Rows = {}
    for label, row in found["rows"].items():
        for variant, spent in row["time"]["variants"].items():
            held = row["memory"].get(variant) or {}
            rows[f"{label}, {variant}"] = {
                "time over plain": spent["wall_ratio"],
                "memory over plain": held.get("later_step_ratio"),
                "peak GB": None if not held else held["later_step_bytes"] / 1e9,
                "seconds": spent["wall_seconds"],
                "of the product rate": spent["share_of_matmul_rate"],
            }
        for variant, reason in (row["time"]["refused"] | row["time"].get("too_large", {})).items():
            rows[f"{label}, {variant}"] = {"not run": reason.splitlines()[0][:120]}
    return rows


def of_noise(found: Any) -> Rows:
    keys = ("normals_per_second", "processor_seconds_for_t5_xl")
    return {name: {key.replace("_", " "): row[key] for key in keys} for name, row in found["rows"].items()}


def of_synthesize(found: Any) -> Rows:
    return {
        name: {
            "queries a second": row["queries"] / min(each["lit-dpret"]["seconds"] for each in row["rounds"]),
            "throughput over model.generate": row["throughput_over_plain"]["median"],
        }
        for name, row in found["rows"].items()
    }


def of_encode(found: Any) -> Rows:
    seconds = min(each["lit-dpret"]["seconds"] for each in found["rounds"])
    over = found["median_throughput_over_theirs"]
    return {found["model"]: {"texts a second": found["texts"] / seconds, "throughput over theirs": over}}


def of_search(found: Any) -> Rows:
    return {
        name: {"seconds": min(each["seconds"] for each in facts), "shared with ours": facts[0]["shared_with_ours"]}
        for name, facts in found["speed"]["runs"].items()
    }


# Benchmarks of this folder: the function that selects the rows to show, and the settings for toy models and in full.
BENCHMARKS: dict[str, tuple[Callable[[Any], Rows], str, str]] = {
    "clipping": (
        of_clipping, "--limit-gb 0 --low-precision --quick --rounds 2", "--limit-gb 0 --low-precision --rounds 7",
    ),
    "noise": (of_noise, "--count 200000 --rounds 2", f"--threads {os.cpu_count()}"),
    "synthesize": (
        of_synthesize, "--models public_t5 --passages 24 --batch-size 8 --rounds 2 --max-new-tokens 6",
        "--passages 2048 1024 --batch-size 256",
    ),
    "encode": (of_encode, "--texts 64 --rounds 2", "--texts 16384 --batch-size 256"),
    "search": (of_search, "--queries 50 --passages 9000 --k 20 --dim 16", "--passages 1000000 --rounds 2"),
}  # fmt: skip


def benchmark(name: str) -> Callable[[Day], Rows]:
    def part(day: Day) -> Rows:
        shown, tiny, full = BENCHMARKS[name]
        out, words = day.out / f"{name}.json", [*(tiny if day.tiny else full).split(), "--device", day.device]
        run([sys.executable, str(HERE / f"{name}.py"), *words, "--out", str(out)], day.out / f"{name}.log")
        return shown(json.loads(out.read_text(encoding="utf-8")))

    return part


def trained(name: str) -> Callable[[Day], Rows]:
    """Return the part that trains under one of `TRAINERS`."""

    def part(day: Day) -> Rows:
        log = day.out / f"{name.replace(' ', '_')}.log"
        folder = day.out / "runs" / f"{name.replace(' ', '_')}_{time.time_ns()}"
        written = run(day.train(TRAINERS[name], folder, 3 if day.tiny else 12), log)
        seconds = [float(each) for each in re.findall(r"speed: ([0-9.e+-]+) s a step", written)]
        # The line has the mean since the start; the time of the later steps alone leaves out the warm-up.
        later = (seconds[-1] * len(seconds) - seconds[0]) / (len(seconds) - 1)
        return {name: {"seconds of a step": later, "first step": seconds[0], "epsilon": epsilon_of(folder)}}

    return part


def resume(day: Day) -> Rows:
    """Kill a run in the middle, resume it, and compare its weights with those of an uninterrupted run."""
    from safetensors.torch import load_file

    steps, log = (6 if day.tiny else 20), day.out / "resume.log"
    root = day.out / "runs" / f"resume_{time.time_ns()}"
    killed, whole = root / "killed", root / "whole"
    checkpoints = "callbacks.checkpoint.every_n_train_steps=2"

    def command(folder: Path) -> list[str]:
        return day.train(TRAINERS["run one"], folder, steps, checkpoints)

    ledger = killed / "privacy_ledger.jsonl"
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command(killed), stdout=file, stderr=subprocess.STDOUT)
        while process.poll() is None:
            if ledger.exists() and ledger.read_text(encoding="utf-8").count('"intent"') > steps // 2:
                process.send_signal(signal.SIGKILL)
            time.sleep(0.02)
    if process.returncode != -signal.SIGKILL:
        raise RuntimeError(f"the run ended with status {process.returncode} before it was killed: {log}")
    run([*command(killed), "resume=true"], log)
    # The first record names the noise streams; the uninterrupted run starts with it, and with no step.
    whole.mkdir(parents=True)
    first = ledger.read_text(encoding="utf-8").splitlines()[0]
    (whole / "privacy_ledger.jsonl").write_text(first + "\n", encoding="utf-8")
    run([*command(whole), "resume=true"], log)
    one, other = (load_file(folder / "model" / "model.safetensors") for folder in (whole, killed))
    apart = max(float((one[name].float() - other[name].float()).abs().max()) for name in one)
    facts = {"largest difference of a weight": apart, "epsilon": epsilon_of(whole)}
    facts["epsilon of the killed run"] = epsilon_of(killed)
    return {"killed and resumed": facts}


PARTS: dict[str, Callable[[Day], Rows]] = {
    "clipping": benchmark("clipping"),
    **{name: trained(name) for name in TRAINERS},
    "resume": resume,
    **{name: benchmark(name) for name in BENCHMARKS},
}


def page(report: dict[str, Any]) -> str:
    """Return the report as Markdown: a table for each part, or the reason why it failed."""
    lines = ["# What was measured on " + report["device"], ""]
    if report["tiny"]:
        lines += ["A rehearsal with toy models: it shows that every part runs, and says nothing about speed.", ""]
    minutes = sum(part["seconds"] for part in report["parts"].values()) / 60
    lines += [f"{len(report['parts'])} of {len(PARTS)} parts, {minutes:.1f} minutes in all.", ""]
    for name, part in report["parts"].items():
        lines += [f"## {name}", "", f"{part['seconds']:.0f} seconds.", ""]
        if "failed" in part:
            lines += [f"Failed: {part['failed']}", ""]
            continue
        columns = list(dict.fromkeys(column for row in part["rows"].values() for column in row))
        lines += ["| | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)]
        for label, row in part["rows"].items():
            cells = [row.get(column) for column in columns]
            lines.append(f"| {label} | " + " | ".join(_cell(each) for each in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return "" if value is None else str(value)


def main() -> None:
    parser = options(__doc__, None)
    parser.set_defaults(out=Path("gpu_day"))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy models: shows that the script runs")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="run only these parts, again")
    parser.add_argument("--limit-minutes", type=float, default=12, help="time limit of one part")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    day = Day(arguments.out.resolve(), arguments.device, arguments.tiny)
    day.out.mkdir(parents=True, exist_ok=True)
    if arguments.part:
        say(json.dumps(PARTS[arguments.part](day)))
        return
    out = day.out / "gpu_day.json"
    report = begun(out, day)
    for name in arguments.only or PARTS:
        if not arguments.only and "rows" in report["parts"].get(name, {}):
            continue
        say(f"{name} ...")
        report["parts"][name] = _measured(name, day, arguments.limit_minutes * 60)
        (day.out / "gpu_day.md").write_text(page(report), encoding="utf-8")
        write(report, out)
    failed = [name for name, part in report["parts"].items() if "failed" in part]
    say(f"written: {day.out / 'gpu_day.md'}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    sys.exit(1 if failed else 0)


def begun(out: Path, day: Day) -> dict[str, Any]:
    """Return the earlier report of the same device and sizes, or a new one."""
    import torch

    if day.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: torch sees no GPU here; --device cpu --tiny rehearses the day.")
    name = "a CPU" if day.device == "cpu" else torch.cuda.get_device_name()
    facts = {"device": name, "tiny": day.tiny}
    if out.exists():
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        if all(found[key] == value for key, value in facts.items()):
            return found
        sys.exit(f"--out {day.out} holds the report of {found['device']} (tiny: {found['tiny']}); choose another.")
    return {**facts, **machine("torch", "transformers", "opacus", "deepspeed", "faiss-gpu"), "parts": {}}


def _measured(name: str, day: Day, limit: float) -> dict[str, Any]:
    """Run a part in a separate process group, so that a time limit ends everything that it started."""
    words = ["--part", name, "--out", str(day.out), "--device", day.device, *(["--tiny"] if day.tiny else [])]
    begun = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, __file__, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        told, error = process.communicate(timeout=limit)
        rows = {"rows": json.loads(told.splitlines()[-1])} if process.returncode == 0 else {}
        failed = (error.strip().splitlines() or ["no message"])[-1]
    except subprocess.TimeoutExpired:
        rows, failed = {}, f"not finished after {limit / 60:g} minutes"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return {"seconds": time.monotonic() - begun, **(rows or {"failed": failed})}


if __name__ == "__main__":
    main()
