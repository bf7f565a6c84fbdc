"""What ``federated=`` says: where the silos are, how they talk, and everything about a run that is public."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from lit_dpret.datamodules import InsuranceQADataModule
from lit_dpret.datamodules.silo_folder import Silo, read_silo, silo_folders, write_silos
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.federated.data import planted_silos, silos_by_domain
from lit_dpret.federated.data.planted import Planted
from lit_dpret.federated.model import AS2Maker
from lit_dpret.federated.settings import FederatedPrivacy, PddAs2, Stage1, Stage2
from lit_dpret.federated.synthetic import PUBLIC
from lit_dpret.federated.transport import ELSEWHERE, check_transport

T = TypeVar("T")
_HOW = ("secret_file", "more")  # a run is carried, and noise is keyed, by these; no result depends on them
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
        secure_sum: See `PddAs2`.
        update_limit: See `PddAs2`.
        sum_threshold: See `PddAs2`.
        seal: See `PddAs2`.
        roster: See `PddAs2`; for silos on machines of their own alone.
        secret_file: Keys the noise; null for the user's state folder.
        superlink: For ``transport=flower``, where a run is handed to: ``HOST:PORT``, or the name of a connection in
            the user's own Flower configuration.
        root_certificates: For the same; of who signed the SuperLink's certificate.
        insecure: For the same; no TLS.
        run_name: For the same; the server keeps the run under it.
        min_clients: For the same; fewer updates than these end the run.
        timeout: For the same; seconds to wait for the answers of a round.
        wait: For the same; seconds to wait at the start until so many silos are there.

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
        secure_sum: bool = False,
        update_limit: float = 1.0,
        sum_threshold: int | None = None,
        seal: bool = False,
        roster: bool = False,
        secret_file: str | None = None,
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
        self.sample, self.declare_public = dict(sample or {}), declare_public
        self.planted = _made("federated.planted", Planted, planted)
        self.secret_file = secret_file
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
        self.privacy = _made("federated.privacy", FederatedPrivacy, privacy)
        private = self.privacy.eps is not None
        given = {"planted": self.planted} if self.silos == PLANTED else {}
        self.model = _made("federated.model", AS2Maker, {**(model or {}), **given})
        weighting = "capped" if secure_sum and (stage1 or {}).get("n_hat") else "uniform"
        first = {
            "in_batch": not private,
            "other_positives": 0 if private else 1,
            "weighting": weighting if private or secure_sum else "examples",
        }
        second = {
            "in_batch": not private,
            "request": "dp_centroid" if private else "exact",
            "response": ("public" if declare_public else "dp_centroid") if private else "raw",
        }
        self._settings = PddAs2(
            stage1=_made("federated.stage1", Stage1, _filled(stage1, first)),
            stage2=_made("federated.stage2", Stage2, _filled(stage2, second)),
            privacy=self.privacy,
            secure_sum=secure_sum,
            update_limit=update_limit,
            sum_threshold=sum_threshold,
            seal=seal,
            roster=roster,
        ).check()

    def settings(self, seed: int) -> PddAs2:
        """The settings of one seed."""
        return replace(self._settings, seed=seed)

    def describe(self) -> dict[str, Any]:
        """Everything that results depend on."""
        return {name: repr(value) for name, value in sorted(vars(self).items()) if name not in _HOW}

    def folders(self, built: Path) -> dict[str, Path]:
        """The data folder of each client; silos that have to be built are written to ``built``, once.

        Where the silos are other people's, none is known here.

        Raises:
            ConfigurationError: There are fewer than two clients, or a number is out of range.
            DataError: There are no silos in the folder, or a client has no queries of a split.
        """
        if self.transport in ELSEWHERE:
            return {}
        if self.silos not in (INSURANCEQA, PLANTED):
            found = silo_folders(self.silos, knob="federated.silos")
        else:
            if not built.exists():
                write_silos(built, self._build(), facts={"source": self.silos}, knob="hydra.run.dir")
            found = silo_folders(built, knob="hydra.run.dir")
            if self.declare_public:
                for folder in found.values():
                    _declare(folder)
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

    def _build(self) -> Sequence[Silo]:
        if self.silos == PLANTED:
            return planted_silos(self.planted)
        try:
            data = InsuranceQADataModule(folder=_insuranceqa())
            return silos_by_domain(data.collection, clients=self.clients, **self.sample)
        except TypeError as error:
            raise ConfigurationError(f"federated.sample: {error}.") from error


def _filled(given: Mapping[str, Any] | None, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The given values, with the defaults for those that are null or missing."""
    found = dict(given or {})
    return {**found, **{name: value for name, value in defaults.items() if found.get(name) is None}}


def _made(where: str, kind: type[T], given: Mapping[str, Any] | None) -> T:
    known = sorted(kind.__dataclass_fields__)  # type: ignore[attr-defined]
    if unknown := sorted(set(given or {}) - set(known)):
        raise ConfigurationError(f"{where}.{unknown[0]} is not a setting. There are: {', '.join(known)}.")
    try:
        return kind(**dict(given or {}))
    except TypeError as error:
        raise ConfigurationError(f"{where}: {error}.") from error


def _insuranceqa() -> Path | None:
    """Null for the package; where that is missing, the copy in ``$LIT_DPRET_DATA``."""
    copy = Path(os.environ.get("LIT_DPRET_DATA", "")) / "insuranceqa"
    missing = importlib.util.find_spec("insuranceqa_data") is None
    return copy if missing and copy.is_dir() else None


def _declare(folder: Path) -> None:
    path = folder / PUBLIC
    if not path.exists():
        path.write_text("\n".join(read_silo(folder, verify=False).sentences) + "\n", encoding="utf-8")
