"""Facts of a card besides its claim: software, hardware, randomness, start of training, registered protocols.

A model that saw a query before private training can reveal it whatever the noise was. A card therefore names the
weights that training started from, and how much of public text was in their pre-training corpus. An audit protocol
is registered by its hash before the first release: an attack chosen after its results are known proves nothing.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lit_dpret
from lit_dpret.errors import ConfigurationError, DataError, ResumeError
from lit_dpret.files import file_sha256
from lit_dpret.privacy.accounting import composition as accounting
from lit_dpret.privacy.accounting.releases import release_from_dict
from lit_dpret.privacy.budget import show_delta, show_epsilon
from lit_dpret.privacy.ledger.assumptions import RANDOM_WEIGHTS, Assumption, Consequence
from lit_dpret.privacy.ledger.judgement import Judged, plan_of
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger, noise_keys, plans_of, recorded_start
from lit_dpret.privacy.plan import EVOLUTION, HISTOGRAM, PrivacyPlan
from lit_dpret.texts import normalise

if TYPE_CHECKING:
    import torch

CHANGED = "+changes"
"""Suffix of the code commit when files of the checkout differ from it."""

_PACKAGES = ("torch", "lightning", "transformers", "dp-accounting", "opacus", "numpy")


def version_of(package: str) -> str:
    """Return the installed version of a package, or ``unknown``."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def package_versions() -> dict[str, str]:
    """Return the versions of the software that a claim depends on."""
    versions = {name: version_of(name) for name in _PACKAGES}
    return {"python": platform.python_version(), "lit-dpret": lit_dpret.__version__, **versions}


def environment_facts(*, device: torch.device | str | None = None, precision: str | None = None) -> dict[str, Any]:
    """Return the card's facts about the machine, without names of hosts or users; None if unknown."""
    return {"code_commit": code_commit(), "hardware": None if device is None else _hardware(str(device)),
            "precision": precision}  # fmt: skip


@cache
def code_commit() -> str | None:
    """Return the commit of this package's checkout, with ``+changes`` if files differ; None if it is installed."""
    package = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "--no-optional-locks", "-C", str(package), *arguments],
                capture_output=True,
                text=True,
                timeout=10,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if not git("ls-files", "--error-unmatch", "__init__.py"):
        return None
    commit = git("rev-parse", "HEAD")
    return f"{commit}{CHANGED}" if commit and git("status", "--porcelain", "--untracked-files=no") else commit


def _hardware(device: str) -> str:
    kind = device.partition(":")[0]
    if kind == "cuda":
        import torch  # imported late: reading a card of another machine does not need it

        return torch.cuda.get_device_name(device) if torch.cuda.is_available() else kind
    return f"{kind} ({platform.machine()})" if kind == "cpu" else kind


KNOB = "callbacks.card.pretraining_overlap"


def text_hashes(texts: Iterable[str]) -> list[str]:
    """Return a short hash of each normalised text, by which a later run can recognise it."""
    plain = (normalise(text).encode("utf-8", "surrogatepass") for text in texts)
    return sorted({hashlib.sha256(each).hexdigest()[:16] for each in plain})


def overlap_facts(file: str | Path) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the block ``pretraining.overlap_check`` from the task's ``pretraining_overlap.json``, and text hashes.

    The share for private queries is itself a number computed from them, so a card accepts only shares for public or
    synthetic texts. The hashes are those of the texts that were checked.
    """
    path = Path(file).expanduser()
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        found = {name: facts[name] for name in ("corpus", "sampled", "split", "whose", "found")}
        hashes = frozenset(map(str, facts["queries_sha256"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{KNOB}={file} cannot be read: name the pretraining_overlap.json of a run of task=pretraining_overlap."
        ) from error
    if found["whose"] not in ("public", "synthetic") or facts.get("not_covered"):
        raise ConfigurationError(
            f"{KNOB}={file} holds shares of private queries, which no noise covers, and the card is released. Run "
            "task=pretraining_overlap with task.queries=public, or set this to null."
        )
    return found, hashes


PROTOCOL_EVENT = "audit_protocols"
"""The event that registers protocols; it counts only before the first announced step."""

_KNOB = "callbacks.card.audit_protocols"


def protocol_facts(files: Iterable[str | Path], *, knob: str = _KNOB) -> list[dict[str, str]]:
    """Return name and SHA-256 of each protocol; ``knob`` is the setting that error messages name."""
    facts = []
    for file in map(Path, files):
        try:
            if not file.expanduser().stat().st_size:
                raise ConfigurationError(f"{knob}: {file} is empty, so it registers nothing.")
            facts.append({"name": file.name, "sha256": file_sha256(file.expanduser())})
        except (OSError, DataError) as error:
            raise ConfigurationError(f"{knob}: {file} cannot be read. Name the file of a protocol.") from error
    return facts


def note_protocols(ledger: PrivacyLedger, files: Sequence[str | Path]) -> None:
    """Write the hashes of protocols into a ledger, before the record of its first announced step."""
    if new := new_protocols(ledger.records, files):
        ledger.append("event", name=PROTOCOL_EVENT, protocols=new)


def new_protocols(records: Sequence[Mapping[str, Any]], files: Sequence[str | Path]) -> list[dict[str, str]]:
    """Return the facts of the protocols that are not yet in a ledger; refuse new ones after its first step."""
    known = {one["sha256"] for one in registered(records)}
    new = [one for one in protocol_facts(files) if one["sha256"] not in known]
    if new and noise_keys(records):
        names = ", ".join(one["name"] for one in new)
        raise ResumeError(
            f"{_KNOB}: {names} was not registered when this run began, or was changed since. A protocol that comes "
            "after the first release is not pre-registered: restore the file, leave it out, or start a new run."
        )
    return new


def registered(records: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return ``name``, ``sha256`` and ``registered`` (the day) of the protocols before the first announced step."""
    found: list[dict[str, str]] = []
    for record in records:
        if record["kind"] == "intent":
            break
        if record["kind"] == "event" and record.get("name") == PROTOCOL_EVENT:
            found += [{**one, "registered": str(record["day"])} for one in record["protocols"]]
    return found


#: What models of these names were pre-trained on, where that is known.
_READ = {
    "smollm2": " The model had read text from the web, code and textbooks; public collections of questions, such as "
    "InsuranceQA, may be among them, and the claim does not cover what it knew before."
}

_RANDOM_START = f"Training on the private data started from {RANDOM_WEIGHTS}, as declared."


def start_parents(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the names and SHA-256 of the cards of the models that this run started from, nearest first."""
    start = recorded_start(records)
    return [] if start is None else list(start["parents"])


def declared_start(model: str | None, what: str = "training on the private data") -> Assumption:
    """State the declaration, taken on trust, about weights of unknown origin that ``what`` started from."""
    if model == RANDOM_WEIGHTS:
        text = (
            f"{what[0].upper()}{what[1:]} started from {RANDOM_WEIGHTS}, as declared. No private data went into them, "
            "nor into the vocabulary, which is handed on with the model."
        )
        return Assumption(text, "unverified")
    how = "as is assumed" if model in (None, "unstated") else "as declared"
    return Assumption(
        f"No private data went into {_named(model)}, from which {what} started, {how}: weights do not "
        "show what they were trained on.",
        "unverified",
    )


def _named(model: str | None) -> str:
    return "the weights that the module was built with" if model in (None, "unstated") else f"{model}, a public model"


def start_assumptions(records: Sequence[Mapping[str, Any]], model: str | None = None) -> list[Assumption]:
    """List the assumptions about the start that are taken on trust; ``model`` names weights without a card."""
    start = recorded_start(records)
    if start is None:
        if _is_of(records, EVOLUTION):
            text = f"No private data went into {_named(model)}, which wrote the candidates, as declared."
            return [Assumption(text, "unverified")]
        return [] if _is_of(records, HISTOGRAM) else [declared_start(model)]
    what = "that this histogram is charged with" if _is_of(records, HISTOGRAM) else "that training started from"
    if start["public"]:
        text = f"The model {what} ({start['name']}) was made from public data alone, as declared."
        return [Assumption(text, "unverified")]
    if start["guarantee"] == "not_proved":
        return [Assumption(f"For the model {what} ({start['name']}) a guarantee is proved.", "refuted")]
    unit = start.get("unit", "unit")
    made = f"Only public data and what a private run had released went into {start['name']}."
    return [
        Assumption(f"The ledger of the model {what} ({start['name']}) is complete.", "unverified"),
        *([Assumption(made, "unverified")] if start.get("derived") else []),
        *([] if _is_of(records, HISTOGRAM) else [Assumption(
            f"Private data went into the weights that the module was built with only through {start['name']}.",
            "unverified",
        )]),
        Assumption(f"What one {unit} of these data holds is in at most one {unit} of the data of {start['name']}.",
                   "unverified"),
        *(assumption_of(start["name"], one) for one in start.get("assumptions", ())),
    ]  # fmt: skip


_OF = re.compile(r"Of [^:]+: ")


def plain_assumption(text: str) -> str:
    """Return the text of an assumption without the artefact name that `assumption_of` put before it."""
    return _OF.sub("", text, count=1) if _OF.match(text) else text


def assumption_of(name: str, stated: Mapping[str, Any]) -> Assumption:
    """Return an assumption from another card, called ``name``, for a claim that is composed with that card's.

    If the assumption does not hold, the releases of that card already account for it.
    """
    text = stated["text"] if _OF.match(stated["text"]) else f"Of {name}: {stated['text']}"
    consequence: Consequence = "weights_alone" if stated["consequence"] == "weights_alone" else "charged"
    return Assumption(text, "refuted" if stated["holds"] is False else "unverified", consequence)


def gaps_of_start(records: Sequence[Mapping[str, Any]], own: Collection[str]) -> list[str]:
    """Return the gaps of the start's card that a composed card does not already state (``own``)."""
    start = recorded_start(records) or {}
    left_out = [text for text in start.get("not_covered", ()) if text not in own]
    return [text if text.startswith("Of ") else f"Of {start['name']}, alone: {text}" for text in left_out]


def randomness_facts(judged: Judged) -> dict[str, Any]:
    """Read from the ledger how noise was generated: generator, published seed, floating point."""
    plan, last = judged.plan, plan_of(judged.records)[1]
    secure, start = bool(last.get("secure_rng", False)), recorded_start(judged.records)
    own = "ChaCha20" if secure else "Philox (NumPy), keyed; not cryptographic"
    # The claim also covers the noise of the start.
    before = {} if start is None or start["public"] else start.get("randomness", {"rng": "unstated", "secure": False})
    rounded = bool(before) and bool(before.get("floating_point", True))
    return {
        "rng": own if before.get("rng", own) == own else f"{own}; before it: {before['rng']}",
        "secure": secure and bool(before.get("secure", True)),
        "secret": "never stored with the run",
        "seeded": last.get("noise_seed") is not None,
        "floating_point": plan is None or plan.noise != "discrete" or rounded,
    }


def start_accounting(judged: Judged, plan: PrivacyPlan) -> dict[str, Any]:
    """Return both parts of the claim at one delta: the cost of this run alone, and of the start alone."""
    start = recorded_start(judged.records)
    if start is None or start["public"]:
        return {}
    parts = {"epsilon_of_this_run": judged.own, "epsilon_of_start": [release_from_dict(r) for r in start["releases"]]}
    facts: dict[str, Any] = {"name": start["name"], "card_sha256": start["card_sha256"], **dict.fromkeys(parts)}
    facts |= {name: start[name] for name in ("delta", "n_public") if name in start}
    if judged.verdict.basis == "as_charged":
        for name, releases in parts.items():
            facts[name] = accounting.epsilon(
                releases, delta=plan.budget.delta, neighbours=plan.budget.neighbours, accountant=plan.accountant
            )
    return {"init_from": facts}


def start_text(judged: Judged, accounted: Mapping[str, Any], model: str | None = None) -> dict[str, str]:
    """State where training started, and the parts of the claim; ``accounted`` contains `start_accounting`."""
    records = judged.records
    start = recorded_start(records)
    if start is None:
        if _is_of(records, HISTOGRAM):
            return {}
        if _is_of(records, EVOLUTION):
            text = f"The candidates were written by {_named(model)}, which is assumed to contain no private data."
            return {"start": text + _READ.get(str(model), "")}
        if model == RANDOM_WEIGHTS:
            return {"start": _RANDOM_START}
        text = (
            f"Training on the private data started from {_named(model)}. It is assumed that no private data went into "
            "that start."
        )
        return {"start": text + _READ.get(str(model), "")}
    if start["public"]:
        return {"start": f"Training on the private data started from {start['name']}, which was declared to be public."}
    counted = _is_of(records, HISTOGRAM)
    text = "This histogram is charged together with" if counted else "Training on the private data started from"
    votes = start.get("mode") == EVOLUTION
    did = "released votes of private data" if votes else "was trained on private data"
    did = "was made from what a private run released" if start.get("derived") else did
    text += f" {start['name']}, which {did} (card sha256 {start['card_sha256']})."
    if (planted := start.get("planted")) is not None:
        text += f" {planted['canaries']} canaries were planted in the data behind it (sha256 {planted['sha256']})."
    if (plan := judged.claimed_plan) is None:
        return {"start": text}
    parts = accounted["init_from"]
    both = f"{'votes' if votes else 'training'} and histogram" if counted else "both trainings"
    text += f" The claim is about {both} together, whether or not they used the same data"
    if parts["epsilon_of_this_run"] is not None:
        text += (
            f": this run alone cost epsilon = {show_epsilon(parts['epsilon_of_this_run'])} of its own budget of "
            f"{plan.budget.eps:g}, the one before it {show_epsilon(parts['epsilon_of_start'])}, each at delta = "
            f"{show_delta(plan.budget.delta)}"
        )
    return {"start": f"{text}."}


def _is_of(records: Sequence[Mapping[str, Any]], mode: str) -> bool:
    return any(plan["mode"] == mode for plan in plans_of(records))
