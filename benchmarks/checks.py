"""Measure the cost of the checks of a private fit relative to its steps.

    python benchmarks/checks.py [--steps 60] [--out results/checks_cpu.json]

`benchmarks/README.md` says how it measures.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common import CASES, options, say, write

CHILD = """
import gc, json, sys, time
from lit_dpret import cli
from lit_dpret.callbacks import PrivacyAccountant
from lit_dpret.callbacks.own_code import UnchangedUnits
from lit_dpret.callbacks.origins import OwnWeights
from lit_dpret.modules.coupling_check import CouplingCheck
from lit_dpret.modules.hook_watch import HookWatch
from lit_dpret.modules.private_module import PrivateModule
from lit_dpret.privacy.clipping.ghost import GhostClipping
from lit_dpret.privacy.clipping.recording_check import RecordingCheck
from lit_dpret.privacy.state_watch import StateWatch
from lit_dpret.privacy.ledger.noise_check import NoiseCheck

spent, collected = {}, [0.0]

def collects(phase, _):
    # A collection of garbage falls by chance on a check or a step: its time is counted for neither.
    collected[0] += time.process_time() if phase == "stop" else -time.process_time()

gc.callbacks.append(collects)

def clock():
    return time.process_time() - collected[0]

def timed(owner, name, label, sign=1):
    made = getattr(owner, name)
    def wrapper(*args, **kwargs):
        begun = clock()
        try:
            return made(*args, **kwargs)
        finally:
            if sign > 0 or kwargs.get("audited"):  # a part of `_audited` that every other batch has as well
                spent[label] = spent.get(label, 0.0) + sign * (clock() - begun)
    setattr(owner, name, wrapper)

for name in ("prepare", "look", "compare_collations"):
    timed(CouplingCheck, name, "rows that depend on each other")
timed(RecordingCheck, "may_be_due", "gradients that are charged to other units")
timed(GhostClipping, "_audited", "gradients that are charged to other units")
timed(GhostClipping, "_by_parameter", "gradients that are charged to other units", -1)
for name in ("note", "compare", "compare_last"):
    timed(HookWatch, name, "writes of hooks")
for name in ("before", "after"):
    timed(StateWatch, name, "writes of the forward pass")
timed(NoiseCheck, "verdict", "noise that is missing")
timed(OwnWeights, "note_step", "values that others could copy")
timed(UnchangedUnits, "compare", "units that the data set changed")
timed(PrivacyAccountant, "_require_drawn", "units that were not drawn")
timed(PrivateModule, "training_step", "all steps")
out, sys.argv[1:] = sys.argv[1], sys.argv[2:]
try:
    cli.main()
finally:
    spent["the whole run"] = time.process_time()
    spent["collections of garbage"] = collected[0]
    json.dump(spent, open(out, "w"))
"""


def main() -> None:
    parser = options(__doc__, "checks_cpu.json", steps=60)
    parser.add_argument("--only", type=int, help="number of the run, from 0")
    chosen = parser.parse_args()
    report = {}
    for number, (name, settings) in enumerate(CASES["checks"].items()):
        if chosen.only not in (None, number):
            continue
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable, "-c", CHILD, f"{folder}/spent.json", *settings.split(), "privacy.eps=3", "trainer=cpu",
                f"trainer.max_steps={chosen.steps}", f"hydra.run.dir={folder}/run",
                f"privacy.secret_file={folder}/secret",
            ]  # fmt: skip
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            spent = json.loads(Path(folder, "spent.json").read_text())
        steps, run, garbage = (spent.pop(name) for name in ("all steps", "the whole run", "collections of garbage"))
        checks = sum(spent.values())
        report[name] = {
            "steps": chosen.steps,
            "processor_seconds_of_all_steps": round(steps, 2),
            "processor_seconds_of_the_run": round(run, 2),
            "processor_seconds_of_collections_of_garbage": round(garbage, 2),
            "share_of_the_steps": {check: round(seconds / steps, 4) for check, seconds in spent.items()},
            "all_checks_share_of_the_steps": round(checks / steps, 4),
            "all_checks_share_of_the_run": round(checks / run, 4),
        }
        say(f"{name}: {steps:.1f} s; " + ", ".join(f"{c} {s / steps:.2%}" for c, s in spent.items()))
        say(f"all checks: {checks / steps:.2%} of the steps, {checks / run:.2%} of the run of {run:.1f} s")
    write(report, chosen.out)


if __name__ == "__main__":
    main()
