"""`task=doctor`: check whether a run would keep its guarantee, trap by trap, without training."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import ClassVar

import lightning as L

from lit_dpret.callbacks.doctor import examine
from lit_dpret.callbacks.planning import refuse_unread_rows
from lit_dpret.datamodules.identity import data_facts
from lit_dpret.errors import ConfigurationError
from lit_dpret.federated.trust import trust_table
from lit_dpret.tasks.parts import Parts, check_run_dir, say
from lit_dpret.tasks.rulers import cut_texts, rulers_of

REPORT = "doctor.json"


class Doctor:
    """Examine Trainer, DataModule, model and plan; write ``doctor.json`` and print the findings.

    It examines one fit. For a federation it checks the settings, prints who sees what, and then refuses.
    """

    takes_federation: ClassVar[bool] = True
    takes_start: ClassVar[bool] = True

    def run(self, parts: Parts) -> dict[str, float]:
        """Return the number of findings by status."""
        federation = parts.make_federation()
        if federation is not None:
            say(trust_table(federation.settings(parts.seed)))
            raise ConfigurationError(
                f"task=doctor examines one fit, but federated.transport={federation.transport} is a federation. Its "
                "settings are valid, and the table states what each party sees. Other violations of its guarantee are "
                "checked by task=federated before any training, by lit-dpret silo --check next to a silo's data, and "
                "in each fit of a silo."
            )
        check_run_dir(parts.run_dir, min_free_mb=1)
        L.seed_everything(parts.seed, verbose=False)
        data = parts.make_datamodule()
        module = parts.make_module(privacy=parts.make_privacy())
        trainer = parts.make_trainer(
            default_root_dir=str(parts.run_dir), callbacks=parts.make_callbacks(), logger=False
        )
        data.prepare_data()
        data.setup("fit")
        refuse_unread_rows(module, data)
        if hasattr(module, "prepare"):
            module.prepare(data)
        found = examine(trainer, module, data)
        report = parts.run_dir / REPORT
        report.write_text(json.dumps(data_facts(data) | found.to_dict(), indent=2) + "\n", encoding="utf-8")
        say(found.format())
        with suppress(AttributeError):  # a module or a datamodule without texts
            say(*(f"note: {line}" for line in cut_texts(data, rulers_of(module))))
        if found.refused:
            names = ", ".join(finding.trap for finding in found.refused)
            raise ConfigurationError(f"A fit with these settings would be refused ({names}). See {report}.")
        statuses = [finding.status for finding in found.findings]
        return {status: float(statuses.count(status)) for status in set(statuses)}
