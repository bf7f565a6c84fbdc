"""The federation configured by ``federated=``: the silos, the transport, and all public facts of a run."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lit_dpret.datamodules import InsuranceQADataModule
from lit_dpret.datamodules.silo_folder import Silo, read_silo, silo_folders, write_silos
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.federated.aggregation import check_silos
from lit_dpret.federated.data import planted_silos, silos_by_domain
from lit_dpret.federated.data.planted import Planted
from lit_dpret.federated.documents import SuperLinkTarget
from lit_dpret.federated.model import AS2Maker
from lit_dpret.federated.settings import FederatedPrivacy, PddAs2, Safeguards, Stage1, Stage2
from lit_dpret.federated.storage import copy_once
from lit_dpret.federated.synthetic import PUBLIC, check_generated
from lit_dpret.federated.transport import ELSEWHERE, FederationRun, check_transport, silo_state
from lit_dpret.settings import built, require_whole

_HOW = ("secret_file", "note", "stage1", "stage2")  # no result depends on these, except through `FederationPlan.run`
INSURANCEQA, PLANTED = "insuranceqa", "planted"


@dataclass(frozen=True, kw_only=True)
class FederationPlan(Safeguards, SuperLinkTarget):
    """A federation as configured on the command line.

    A null setting gets the paper's value without ``privacy.eps``, and what the budget allows with it. A given value
    that the budget does not allow is refused by name. `SuperLinkTarget` is for ``transport=flower``.
    """

    transport: str = "inprocess"
    silos: str = INSURANCEQA
    clients: int | None = 10
    sample: Mapping[str, Any] = field(default_factory=dict)
    planted: Planted = field(default_factory=Planted)
    declare_public: bool = False
    model: AS2Maker = field(default_factory=AS2Maker)
    stage1: Mapping[str, Any] = field(default_factory=dict)
    stage2: Mapping[str, Any] = field(default_factory=dict)
    privacy: FederatedPrivacy = field(default_factory=FederatedPrivacy)
    state: Path | None = None
    secret_file: str | None = None
    note: str = ""
    run: PddAs2 = field(init=False, repr=False)
    link: SuperLinkTarget = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_transport(self.transport)
        require_whole("federated", self, 1, "clients", null=True)
        self._refuse_elsewhere()
        # The command line gives mappings.
        self._set("sample", dict(self.sample or {}))
        for name, kind in (("planted", Planted), ("privacy", FederatedPrivacy), ("model", AS2Maker)):
            given = getattr(self, name)
            self._set(name, given if isinstance(given, kind) else built(kind, given, f"federated.{name}"))
        self._set("state", None if self.state is None else Path(self.state))
        self.planted.check("federated.planted")
        if self.silos == PLANTED:
            self._set("model", replace(self.model, planted=self.planted))
        self._refuse_sample()
        safeguards = {one.name: getattr(self, one.name) for one in fields(Safeguards)}
        stages: dict[str, Any] = {}
        first, second = self._defaults()
        for name, stage, defaults in (("stage1", Stage1, first), ("stage2", Stage2, second)):
            chosen = dict(getattr(self, name) or {})
            chosen |= {key: value for key, value in defaults.items() if chosen.get(key) is None}
            stages[name] = built(stage, chosen, f"federated.{name}")
        self._set("run", PddAs2(**stages, privacy=self.privacy, **safeguards).check())
        link = {one.name: getattr(self, one.name) for one in fields(SuperLinkTarget)}
        self._set("link", built(SuperLinkTarget, link, "federated"))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _refuse_elsewhere(self) -> None:
        """Refuse settings for silos on other machines if the silos are local, and the reverse."""
        elsewhere = self.transport in ELSEWHERE
        if self.superlink is not None and not elsewhere:
            raise ConfigurationError(f"federated.superlink={self.superlink} needs federated=flower.")
        if self.roster and not elsewhere:
            raise ConfigurationError(
                f"federated.roster=true needs silos with signing keys, and federated.transport={self.transport} has "
                "none. Set federated=flower, or roster=false."
            )
        if self.state is not None and elsewhere:
            raise ConfigurationError(
                f"federated.state={self.state} with federated=flower: each silo names its own state folder (lit-dpret "
                "silo --state). Leave it null."
            )

    def _refuse_sample(self) -> None:
        """Refuse a sample of queries in which one unit decides which other units are included."""
        kept, private = self.sample.get("max_train_queries"), self.privacy
        if self.silos != INSURANCEQA or kept is None or private.eps is None:
            return
        if (private.unit, private.neighbours) == ("pair", "replace_one"):
            raise ConfigurationError(
                f"federated.sample.max_train_queries={kept} with federated.privacy.unit=pair and "
                "neighbours=replace_one: one pair may bring a query into the sample, which moves all pairs of another "
                "query out. Set it to null, or set neighbours=zero_out or unit=query."
            )

    def _defaults(self) -> tuple[dict[str, Any], dict[str, Any]]:
        private = self.privacy.eps is not None and self.train_on == "queries"
        given = self.stage1 or {}
        weighting = "examples"
        if private or self.secure_sum or given.get("aggregation", "mean") != "mean":
            weighting = "capped" if self.secure_sum and given.get("n_hat") else "uniform"
        first = {"in_batch": not private, "other_positives": 0 if private else 1, "weighting": weighting}
        response = "raw"
        if self.privacy.eps is not None:  # the response that costs least
            response = "synthetic" if self.train_on == "synthetic" else "dp_centroid"
            response = "public" if self.declare_public else response
        return first, {
            "in_batch": not private,
            "request": "dp_centroid" if private else "exact",
            "response": response,
        }

    def settings(self, seed: int) -> PddAs2:
        return replace(self.run, seed=seed)

    def federation(self, settings: PddAs2, silos: Mapping[str, Path], folder: Path) -> FederationRun:
        """Return one run of this federation with these settings and silos, and its state in ``folder``."""
        return FederationRun(
            settings=settings, silos=silos, make_module=self.model, folder=folder, transport=self.transport,
            secret_file=self.secret_file, link=self.link,
        )  # fmt: skip

    def describe(self) -> dict[str, Any]:
        """Return everything that determines the results; the address of the SuperLink does not."""
        names = {one.name for one in fields(self)} - {one.name for one in fields(SuperLinkTarget)} - set(_HOW)
        found = {name: repr(getattr(self, name)) for name in sorted(names)}
        del found["link"]
        if self.transport in ELSEWHERE:
            found["link"] = repr(replace(self.link, superlink=None, root_certificates=None, insecure=False))
        return found

    def folders(self, folder: Path) -> dict[str, Path]:
        """Return the data folder of each client; silos built here are written to ``folder`` once."""
        # Silos on other machines have no folder here.
        if self.transport in ELSEWHERE:
            return {}
        if self.silos not in (INSURANCEQA, PLANTED):
            found = silo_folders(self.silos, knob="federated.silos")
        else:
            if not folder.exists():
                write_silos(folder, self._build(), facts={"source": self.silos}, knob="hydra.run.dir")
            found = silo_folders(folder, knob="hydra.run.dir")
            if self.declare_public:
                for data in found.values():
                    if not (data / PUBLIC).exists():
                        every = "".join(f"{sid}\n" for sid in read_silo(data, verify=False).sentences)
                        (data / PUBLIC).write_text(every, encoding="utf-8")
        if min(len(found), self.clients or 2) < 2:
            raise ConfigurationError(
                f"federated.silos={self.silos} has {len(found)} clients and federated.clients={self.clients}: at least "
                "two are needed. Build more (task=build_silos, or federated.planted.clients), or raise "
                "federated.clients."
            )
        sizes = {name: read_silo(folder).counts() for name, folder in found.items()}
        largest = sorted(sizes, key=lambda name: (-sizes[name]["train"], name))[: self.clients]
        for name in largest:
            counts = sizes[name]
            if empty := next((split for split in ("train", "dev", "test") if not counts[split]), None):
                raise DataError(
                    f"Client {name!r} of federated.silos={self.silos} has no {empty} query. Build the silos again "
                    "(task=build_silos), or lower federated.clients if it is one of the smallest."
                )
        return {name: found[name] for name in largest}

    def check_state(self, silos: Mapping[str, Path]) -> None:
        """Refuse a run with too few silos, or with silos that lack charged synthetic queries."""
        settings = self.settings(0)
        if silos:
            check_silos(settings, len(silos))
        if not silos or (self.state is None and not settings.generated):
            return
        if self.state is None:
            raise ConfigurationError(
                f"federated.train_on={settings.train_on} with federated.stage2.response={settings.stage2.response} "
                "needs each silo's generator, and this run's ledgers begin empty. Set federated.state=RUN/private, "
                "where RUN is the folder of a task=federated_generators run."
            )
        for name, data in silos.items():
            own = self.state / name
            if not own.is_dir():
                raise ConfigurationError(
                    f"federated.state={self.state} has no state of client {name!r}. Name the folder 'private' of a "
                    "task=federated_generators run over these silos."
                )
            if (own / "run.json").exists():
                raise ConfigurationError(
                    f"federated.state={self.state}: the state of client {name!r} already holds rounds of another run. "
                    "Name a folder whose states hold only generators."
                )
            if settings.generated:
                check_generated(data, own, settings)

    def begin_states(self, silos: Mapping[str, Path], folder: Path) -> None:
        """Copy the initial state of each silo to ``folder``, unless the silo already has a state there."""
        for name in silos if self.state is not None else ():
            copy_once(Path(str(self.state)) / name, silo_state(folder, name))

    def _build(self) -> Sequence[Silo]:
        if self.silos == PLANTED:
            return planted_silos(self.planted)
        try:
            # Use the copy in ``$LIT_DPRET_DATA`` if the package is missing.
            copy = Path(os.environ.get("LIT_DPRET_DATA", "")) / "insuranceqa"
            missing = importlib.util.find_spec("insuranceqa_data") is None
            data = InsuranceQADataModule(folder=copy if missing and copy.is_dir() else None)
            return silos_by_domain(data.collection, clients=self.clients, where="federated.sample", **self.sample)
        except TypeError as error:
            raise ConfigurationError(f"federated.sample: {error}.") from error
