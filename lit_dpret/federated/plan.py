"""The federation that ``federated=`` describes: where the silos are, how they talk, and all public facts of a run."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_dpret.datamodules import InsuranceQADataModule
from lit_dpret.datamodules.silo_folder import Silo, read_silo, silo_folders, write_silos
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.federated.aggregation import check_silos
from lit_dpret.federated.data import planted_silos, silos_by_domain
from lit_dpret.federated.data.planted import Planted
from lit_dpret.federated.model import AS2Maker
from lit_dpret.federated.settings import FederatedPrivacy, PddAs2, Stage1, Stage2, TrainOn, built, require_whole
from lit_dpret.federated.synthetic import PUBLIC, check_generated
from lit_dpret.federated.transport import ELSEWHERE, check_transport, silo_state

_HOW = ("secret_file", "more", "note")  # no result depends on these
INSURANCEQA, PLANTED = "insuranceqa", "planted"


class FederationPlan:
    """A federation as the command line describes it.

    Where a setting is null its value follows from whether there is a budget: without ``privacy.eps`` it is the
    paper's, with it what the budget allows. A value that is given and that a budget refuses is refused by name.

    Args:
        transport: What carries the messages; see `lit_dpret.federated.transport`.
        silos: ``insuranceqa``, its domains as clients; ``planted``, invented words; or a folder of silos, as
            task=build_silos writes it.
        clients: How many of the largest clients, by train queries; null for all of a folder.
        sample: ``max_train_queries``, ``max_test_queries`` (of each other split) and ``max_passages`` of a client, and
            the public ``seed`` of the draw, for ``insuranceqa``.
        planted: Sizes of the planted silos (`lit_dpret.federated.data.planted.Planted`).
        declare_public: Declare every sentence public, for silos that are built here: what ``response=public`` rests on.
        model: Arguments of `AS2Maker`.
        stage1: Arguments of `Stage1`; null ``in_batch``, ``other_positives`` and ``weighting`` follow from the budget.
        stage2: Arguments of `Stage2`; the same for ``in_batch``, ``request`` and ``response``.
        privacy: Arguments of `FederatedPrivacy`.
        train_on: This, and those of the same names below, are described at `PddAs2`.
        state: The state folder that each silo begins with, ``DIR/NAME``: what task=federated_generators left in
            ``RUN/private``. Every seed begins with a copy, so that its ledgers go on from what the generators cost.
        secure_sum: See `PddAs2`.
        update_limit: See `PddAs2`.
        update_norm: See `PddAs2`.
        sum_threshold: See `PddAs2`.
        seal: See `PddAs2`.
        roster: See `PddAs2`; only for silos on machines of their own.
        secret_file: Keys the noise; null for the user's state folder.
        note: Printed in the report, such as what these settings were chosen on.
        superlink: This and all below are for ``transport=flower``; see `lit_dpret.federated.flower.submit`.
        root_certificates: See ``superlink``.
        insecure: See ``superlink``.
        run_name: See ``superlink``.
        min_clients: See ``superlink``.
        timeout: See ``superlink``.
        wait: See ``superlink``.

    Raises:
        ConfigurationError: A setting is unknown or refused.
    """

    def __init__(
        self,
        *,
        transport: str = "inprocess",
        silos: str = INSURANCEQA,
        clients: int | None = 10,
        sample: Mapping[str, Any] | None = None,
        planted: Mapping[str, Any] | None = None,
        declare_public: bool = False,
        model: Mapping[str, Any] | None = None,
        stage1: Mapping[str, Any] | None = None,
        stage2: Mapping[str, Any] | None = None,
        privacy: Mapping[str, Any] | None = None,
        train_on: TrainOn = "queries",
        state: str | Path | None = None,
        secure_sum: bool = False,
        update_limit: float = 1.0,
        update_norm: float | None = 1.0,
        sum_threshold: int | None = None,
        seal: bool = False,
        roster: bool = False,
        secret_file: str | None = None,
        note: str = "",
        superlink: str | None = None,
        root_certificates: str | None = None,
        insecure: bool = False,
        run_name: str = "pdd_as2",
        min_clients: int = 2,
        timeout: float | None = None,
        wait: float = 600.0,
    ) -> None:
        check_transport(transport)
        self.transport, self.silos, self.clients = transport, str(silos), clients
        require_whole("federated", self, 1, "clients", null=True)
        self.sample, self.declare_public = dict(sample or {}), declare_public
        self.planted = built(Planted, planted, "federated.planted")
        self.secret_file, self.note = secret_file, note
        link = {"superlink": superlink, "root_certificates": root_certificates, "insecure": insecure,
                "run_name": run_name, "min_clients": min_clients, "timeout": timeout, "wait": wait}  # fmt: skip
        self.more: dict[str, Any] = {"link": link} if transport in ELSEWHERE else {}
        if superlink is not None and not self.more:
            raise ConfigurationError(
                f"federated.superlink={superlink} is for federated=flower, and federated.transport is {transport}."
            )
        if roster and not self.more:
            raise ConfigurationError(
                f"federated.roster=true says whose keys a server passes on, and under federated.transport={transport} "
                "no silo has a signing key of its own. Set it with federated=flower, or leave it false."
            )
        self.privacy = built(FederatedPrivacy, privacy, "federated.privacy")
        self.state = None if state is None else Path(state)
        if self.state is not None and self.more:
            raise ConfigurationError(
                f"federated.state={state}: with federated=flower each silo has its state beside its data (lit-dpret "
                "silo --state). Leave it out here."
            )
        private = self.privacy.eps is not None and train_on == "queries"
        self.model = built(AS2Maker, model, "federated.model")
        if self.silos == PLANTED:
            self.model = replace(self.model, planted=self.planted)
        robust = (stage1 or {}).get("aggregation", "mean") != "mean"
        weighting = "capped" if secure_sum and (stage1 or {}).get("n_hat") else "uniform"
        first = {
            "in_batch": not private,
            "other_positives": 0 if private else 1,
            "weighting": weighting if private or secure_sum or robust else "examples",
        }
        second = {
            "in_batch": not private,
            "request": "dp_centroid" if private else "exact",
            "response": _response(self.privacy.eps, train_on, declare_public=declare_public),
        }
        self._settings = PddAs2(
            stage1=built(Stage1, _filled(stage1, first), "federated.stage1"),
            stage2=built(Stage2, _filled(stage2, second), "federated.stage2"),
            privacy=self.privacy,
            train_on=train_on,
            secure_sum=secure_sum,
            update_limit=update_limit,
            update_norm=update_norm,
            sum_threshold=sum_threshold,
            seal=seal,
            roster=roster,
        ).check()

    def settings(self, seed: int) -> PddAs2:
        """The settings of one seed."""
        return replace(self._settings, seed=seed)

    def describe(self) -> dict[str, Any]:
        """Return everything that results depend on."""
        return {name: repr(value) for name, value in sorted(vars(self).items()) if name not in _HOW}

    def folders(self, folder: Path) -> dict[str, Path]:
        """Return the data folder of each client; silos that are built here are written to ``folder``, once.

        The folders of other people's silos are not known here, so there are none.

        Raises:
            ConfigurationError: There are fewer than two clients, or a number is out of range.
            DataError: There are no silos in the folder, or a client has no queries of a split.
        """
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
                    _declare(data)
        if min(len(found), self.clients or 2) < 2:
            raise ConfigurationError(
                f"federated.silos={self.silos} has {len(found)} client with federated.clients={self.clients}, and a "
                "federation needs at least two. Build more (task=build_silos), or raise federated.clients."
            )
        sizes = {name: read_silo(folder).counts() for name, folder in found.items()}
        largest = sorted(sizes, key=lambda name: (-sizes[name]["train"], name))[: self.clients]
        for name in largest:
            counts = sizes[name]
            if empty := next((split for split in ("train", "dev", "test") if not counts[split]), None):
                raise DataError(
                    f"Client {name!r} of federated.silos={self.silos} has no {empty} query, and every split is needed. "
                    "Leave it out, or build the silos again (task=build_silos)."
                )
        return {name: found[name] for name in largest}

    def check_state(self, silos: Mapping[str, Path]) -> None:
        """Refuse a run with too few silos, or whose silos lack synthetic queries that their ledgers have counted.

        Args:
            silos: The data folder of each client; none where they are elsewhere, each of which checks its own.

        Raises:
            ConfigurationError: There are too few of them for the settings; or the state folder is not named, was begun
                by other rounds, or lacks a silo.
            DataError: A silo has no synthetic queries.
            PrivateDataError: They are not what their card says, or not charged to the ledger of the silo's state.
        """
        settings = self.settings(0)
        if silos:
            check_silos(settings, len(silos))
        if not silos or (self.state is None and not settings.generated):
            return
        if self.state is None:
            raise ConfigurationError(
                f"federated.train_on={settings.train_on} with federated.stage2.response={settings.stage2.response} "
                "needs each silo's generator, and this run's ledgers begin empty: they would not count what it cost. "
                "Name the folder of the silos' states: federated.state=RUN/private, RUN of task=federated_generators."
            )
        for name, data in silos.items():
            own = self.state / name
            if not own.is_dir():
                raise ConfigurationError(
                    f"federated.state={self.state} has no state of client {name!r}. Run task=federated_generators for "
                    "it, and name that run's folder 'private'."
                )
            if (own / "run.json").exists():
                raise ConfigurationError(
                    f"federated.state={self.state}: the state of client {name!r} was begun by rounds of another run. "
                    "Name one that holds a generator alone."
                )
            if settings.generated:
                check_generated(data, own, settings)

    def begin_states(self, silos: Mapping[str, Path], folder: Path) -> None:
        """Copy the state that each silo begins with to ``folder``, unless it has one there."""
        for name in silos if self.state is not None else ():
            state = silo_state(folder, name)
            if not state.exists():
                draft = state.with_name(f".{name}.draft")
                shutil.rmtree(draft, ignore_errors=True)
                shutil.copytree(Path(str(self.state)) / name, draft)
                draft.rename(state)

    def _build(self) -> Sequence[Silo]:
        if self.silos == PLANTED:
            return planted_silos(self.planted)
        try:
            data = InsuranceQADataModule(folder=_insuranceqa())
            return silos_by_domain(data.collection, clients=self.clients, **self.sample)
        except TypeError as error:
            raise ConfigurationError(f"federated.sample: {error}.") from error


def _response(eps: float | None, train_on: TrainOn, *, declare_public: bool) -> str:
    """Return what a null response stands for: the paper's without a budget, with one what costs least."""
    if eps is None:
        return "raw"
    if declare_public:
        return "public"
    return "synthetic" if train_on == "synthetic" else "dp_centroid"


def _filled(given: Mapping[str, Any] | None, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given values, with the defaults for those that are null or missing."""
    found = dict(given or {})
    return {**found, **{name: value for name, value in defaults.items() if found.get(name) is None}}


def _insuranceqa() -> Path | None:
    """Return null for the package; where that is missing, the copy in ``$LIT_DPRET_DATA``."""
    copy = Path(os.environ.get("LIT_DPRET_DATA", "")) / "insuranceqa"
    missing = importlib.util.find_spec("insuranceqa_data") is None
    return copy if missing and copy.is_dir() else None


def _declare(folder: Path) -> None:
    path = folder / PUBLIC
    if not path.exists():
        path.write_text("\n".join(read_silo(folder, verify=False).sentences) + "\n", encoding="utf-8")
