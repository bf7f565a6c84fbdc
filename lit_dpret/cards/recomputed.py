"""Card entries that are recomputed from the ledger: what ran, its cost, and the end of the chain.

Making a card and checking one use these same functions, which read no configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any

from lit_dpret.cards.claim import group_facts
from lit_dpret.cards.provenance import randomness_facts, registered, start_accounting, start_text
from lit_dpret.errors import UnsupportedAccountingError
from lit_dpret.privacy import clip_fraction
from lit_dpret.privacy.accounting import comparisons
from lit_dpret.privacy.accounting import composition as accounting
from lit_dpret.privacy.accounting.ceilings import attack_ceilings
from lit_dpret.privacy.accounting.composition import FINE
from lit_dpret.privacy.accounting.releases import GaussianRelease, NonPrivateRelease, Release
from lit_dpret.privacy.budget import AccountantName
from lit_dpret.privacy.ledger.chain import GENESIS
from lit_dpret.privacy.ledger.dataset_file import noted_total
from lit_dpret.privacy.ledger.judgement import Judged, epsilon_by, plan_of
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME, charged_releases, noise_keys, plans_of
from lit_dpret.privacy.plan import PrivacyPlan

Record = Mapping[str, Any]

# If there are more distinct releases than this, they are composed but not priced one by one.
PRICED_ALONE = 6


def registered_facts(records: Sequence[Record]) -> dict[str, Any]:
    """Return what was registered before the first step: audit protocols and planted canaries."""
    planted = next((plan.get("planted") for plan in reversed(plans_of(records))), None)
    return {"pre_registered": registered(records), **({"planted": dict(planted)} if planted else {})}


def decided_blocks(judged: Judged, model: str | None, accounted: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the blocks of a card besides its claim, without entries that a ledger does not contain.

    ``model`` names the weights that training started from, if they have no card. ``accounted`` is the accounting block
    whose numbers the sentences quote, by default the one returned.
    """
    accounting: dict[str, Any] | None = None
    if judged.plan is not None:
        accounting = accounting_facts(judged, judged.plan)
        accounting |= {"groups": group_facts(judged, judged.plan)}
        accounting |= start_accounting(judged, judged.plan)
    accounted = (accounting or {}) if accounted is None else accounted
    return {
        "mechanism": mechanism_facts(judged),
        "accounting": accounting,
        "pretraining": start_text(judged, accounted, model),
        "randomness": randomness_facts(judged),
        "empirical": {"ceilings": ceilings_of(judged)},
        "ledger": {  # the end of the chain when the card was made, which ``verify_card`` compares
            "name": LEDGER_NAME,
            "head": str(judged.records[-1]["hash"]) if judged.records else GENESIS,
            "records": len(judged.records),
            "releases": [release.to_dict() for release in judged.releases],
        },
    }


def mechanism_facts(judged: Judged) -> dict[str, Any]:
    """Return the mechanism of the steps, from their records; values that differ become a range."""
    records, plan = judged.records, judged.plan
    stated = [record for record in records if record["kind"] == "release"]
    last = plan_of(records)[1]
    keys = noise_keys(records)
    gaussian = [release for release in judged.own if isinstance(release, GaussianRelease)]
    not_made = _count(judged.own) - _count(charged_releases(records))
    laws = list(dict.fromkeys(release.law for release in gaussian))
    facts: dict[str, Any] = {
        "kind": "gaussian_sum" if plan is not None else "no_noise",
        "mode": last["mode"],
        "law": [law.to_dict() for law in laws],
        "law_text": "; ".join(law.describe() for law in laws) or None,
        "sample_rate": span(getattr(law, "sample_rate", None) for law in laws),
        "expected_batch_size": span(law.expected_batch_size for law in laws),
        "noise_multiplier": span(release.noise_multiplier for release in gaussian),
        "noise_std": span(record.get("noise_std") for record in stated) if plan is not None else None,
        "sensitivity": span(record.get("sensitivity") for record in stated),
        "denominator": span(record.get("denominator") for record in stated),
        "steps_planned": last["planned_steps"],
        "steps_done": len(keys),
        **({"steps_counted": _count(judged.own)} if not_made else {}),
        "steps_unconfirmed": len(set(keys) - {(record["attempt"], record["step"]) for record in stated}),
        "steps_replayed": sum(record["kind"] == "replay" for record in records),
        "attempts": len({attempt for attempt, _ in keys}),
        "rows_per_unit": last.get("rows_per_unit"),
        **({"mode_facts": dict(last["mode_facts"])} if last.get("mode_facts") else {}),
    }
    if plan is not None:
        facts |= {
            "max_grad_norm": plan.max_grad_norm,
            "clip": plan.clip,
            "clip_groups": plan.clip_groups,
            "engine": plan.engine,
            "physical_batch_size": plan.physical_batch_size,
            "empty_batches": "add noise, take their step and are counted",
            "n_public": plan.n_public,
            "noise": plan.noise,
        }
        if plan.clip_fraction_budget:
            facts["clip_fraction"] = {
                "budget": plan.clip_fraction_budget,
                "standard_deviation": span(
                    clip_fraction.deviation(
                        release.noise_multiplier, share=plan.clip_fraction_budget, denominator=plan.denominator
                    )
                    for release in gaussian
                ),
            }
        if plan.coupling is not None:
            facts["coupling"] = asdict(plan.coupling) | {
                "text": plan.coupling.describe(plan.max_grad_norm),
                "sensitivity_per_bound": plan.sensitivity / plan.max_grad_norm,
            }
    return facts


def _count(releases: Sequence[Release]) -> int:
    return sum(release.count for release in releases)


def accounting_facts(judged: Judged, plan: PrivacyPlan) -> dict[str, Any]:
    """Return the accountant, other accountants' results, the cost of each part, and of all runs together."""
    releases, verdict = judged.releases, judged.verdict
    delta, neighbours = plan.budget.delta, plan.budget.neighbours
    skipped: dict[str, str] = {}

    def answer(name: str, compute: Callable[[], float]) -> float | None:
        if verdict.guarantee != "dp":
            skipped[name] = "not computed: no guarantee"
            return None
        try:
            value = compute()
        except UnsupportedAccountingError:
            skipped[name] = "not proved: no accountant supports this"
            return None
        if math.isfinite(value):
            return value
        skipped[name] = "infinite"
        return None

    def alone(release: Release) -> float | None:
        if len(releases) == 1 and verdict.basis == "as_charged":
            return verdict.epsilon
        if len(releases) > PRICED_ALONE or isinstance(release, NonPrivateRelease):
            return None
        return answer("epsilon_alone", lambda: epsilon_by(plan.accountant, [release], plan))

    facts: dict[str, Any] = {
        "accountant": plan.accountant,
        "library": "opacus" if plan.accountant == "prv" else "dp-accounting",
        "version": metadata.version("opacus" if plan.accountant == "prv" else "dp-accounting"),
        "basis": verdict.basis,
        **_rounding("pld" if verdict.basis == "no_amplification" else plan.accountant),
        "composition": [
            {"release": r.to_dict(), "text": describe_release(r), "count": r.count, "epsilon_alone": alone(r)}
            for r in releases
        ],
        "epsilon_if_shuffled": answer(
            "epsilon_if_shuffled", lambda: comparisons.epsilon_if_shuffled(releases, delta=delta, neighbours=neighbours)
        ),
        "epsilon_rdp": answer("epsilon_rdp", lambda: epsilon_by("rdp", releases, plan)),
        "epsilon_replace_one": answer("epsilon_replace_one", lambda: _replace_one_epsilon(releases, plan)),
        "epsilon_underreported_by_gdp": answer(
            "epsilon_underreported_by_gdp",
            lambda: comparisons.underreported_epsilon(releases, delta=delta, neighbours=neighbours),
        ),
    }
    return {**facts, "dataset_total": noted_total(judged.records), "not_computed": skipped}


def _replace_one_epsilon(releases: Sequence[Release], plan: PrivacyPlan) -> float:
    laws = {release.law for release in releases if isinstance(release, GaussianRelease)}
    if not all(plan.holds_under(law, "replace_one") for law in laws):
        raise UnsupportedAccountingError(
            "The loss couples units, and a replacement moves the sum further than planned."
        )
    delta, accountant = plan.budget.delta, plan.accountant
    return accounting.epsilon(releases, delta=delta, neighbours="replace_one", accountant=accountant)


def _rounding(accountant: AccountantName) -> dict[str, Any]:
    """Return how exact epsilon is: an upper bound in each case."""
    errors = {
        "pld": f"privacy losses are rounded up to multiples of {FINE:g}: never below the exact value",
        "rdp": "the least bound over the orders of Renyi divergence: never below the exact value",
        "prv": "the upper end of Opacus' interval; its rounding errors were measured, not bounded",
    }
    return {"discretisation": FINE if accountant == "pld" else None, "error_bound": errors[accountant]}


def ceilings_of(judged: Judged, **settings: Any) -> dict[str, Any] | None:
    """Return the ceilings of attacks on one unit, from the accountant's curve; None without a guarantee.

    ``settings`` are passed to `attack_ceilings`.
    """
    if (plan := judged.claimed_plan) is None:
        return None
    rdp = judged.verdict.basis == "as_charged" and plan.accountant == "rdp"
    accountant: AccountantName = "rdp" if rdp else "pld"
    delta, neighbours = plan.budget.delta, plan.budget.neighbours
    try:
        return attack_ceilings(judged.charged, delta=delta, neighbours=neighbours, accountant=accountant, **settings)
    except UnsupportedAccountingError:
        return None


def describe_release(release: Release) -> str:
    """Describe one release in a phrase."""
    if isinstance(release, NonPrivateRelease):
        return f"{release.label}: without protection"
    return f"{release.label}: Gaussian noise of multiplier {release.noise_multiplier:.6g}, {release.law.describe()}"


def span(values: Iterable[float | None]) -> float | dict[str, float] | None:
    """Return the value if all are equal, otherwise the minimum and maximum; None without values."""
    known = sorted({value for value in values if value is not None})
    if not known:
        return None
    return known[0] if len(known) == 1 else {"min": known[0], "max": known[-1]}
