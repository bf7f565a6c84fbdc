"""A silo's side: messages in, the methods of `SiloClient` called, messages out. Nothing is learned here.

A deployed node runs every message in a new process, so what has to last is in the silo's state folder (its personal
query encoder, the global weights of stage 2, its ledgers) and a little of it in Flower's ``Context.state``: how long
each ledger was and what it hashed to. A ledger that is gone or was shortened is noticed before anything more is spent.

What goes wrong stays here too. The server is told the kind of an error and not its sentence, which may name files,
ids and numbers of the silo's own.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from lit_dpret.errors import DataError, LedgerError, LitDpretError
from lit_dpret.federated.aggregation import Weights, fingerprint
from lit_dpret.federated.fed_negatives import FedPool
from lit_dpret.federated.flower.library import (
    ClientApp,
    ConfigRecord,
    Context,
    Error,
    ErrorCode,
    Message,
    MetricRecord,
    RecordDict,
)
from lit_dpret.federated.flower.payloads import (
    SCHEMA,
    block_record,
    digest_of,
    envelope,
    head_of,
    pool_of_record,
    rows_of,
    rows_record,
    weights_of,
    weights_record,
)
from lit_dpret.federated.flower.sealed_messages import (
    REFRESH,
    end_refresh,
    refusals,
    seal_key,
    sealed_answers,
    sealed_pool,
    sealed_request,
)
from lit_dpret.federated.flower.sum_messages import ACTS, answered, end_sum
from lit_dpret.federated.served import Served
from lit_dpret.federated.settings import PddAs2
from lit_dpret.federated.silo import SiloClient
from lit_dpret.federated.storage import save_tensors

MakeClient = Callable[[Context], SiloClient]
"""Builds the silo of a node, from what its operator told the node (``context.node_config``)."""

Choice = bool | Callable[[SiloClient], bool]
"""A silo's own choice: for all of an app's silos, or asked of each."""

Handler = Callable[[SiloClient, RecordDict, Mapping[str, Any]], RecordDict]

log = logging.getLogger("lit_dpret.federated")
SYSTEMS = ("bm25", "stage1", "stage2")
SPLITS = ("train", "dev", "test")
_SERVER = "the server"


def build_client_app(
    make_client: MakeClient, *, share_measures: Choice = False, share_epsilon: Choice = False
) -> ClientApp:
    """The app of every silo.

    Guarantees:
        - What a message changes or releases is what a method of `SiloClient` does, budget included.
        - A message is refused where server and silo have different settings, and where a ledger that this node
          knows is gone, or does not begin as it did.
        - No round, refresh or epoch is made that the silo's own settings do not plan, however often a server asks; and
          each once, from one set of weights: asked the same again it gives the same answer, and else it refuses.
        - Of an error no word but its kind leaves the silo.
        - With ``secure_sum`` no update leaves the silo but under masks, and the secrets of a round are deleted by
          whatever message comes after it.
        - With ``seal`` no request row and no answer leaves the silo but in a letter to another one.
        - Measures are kept in the silo's state folder, and leave it under ``share_measures`` alone; under a budget
          never, since no ledger counts them.

    Args:
        make_client: Called once in a process and node.
        share_measures: Tell the server the mean measures and the number of test queries: the silo's own choice, for
            all of them or asked of each.
        share_epsilon: Tell the server, with every measure, what the silo has spent of its budget: its own choice.
            It follows from the settings and from how many units the silo has, and not from what these are.
    """
    app = ClientApp()
    silos: dict[int, SiloClient] = {}

    def register(category: str, action: str, handler: Handler) -> None:
        def handle(message: Message, context: Context) -> Message:
            try:
                if context.node_id not in silos:
                    silos[context.node_id] = make_client(context)
                client = silos[context.node_id]
                head = head_of(message.content, _SERVER)
                if head.get("settings") != digest_of(client.settings):
                    raise DataError("The server's settings are not this silo's.", kind="other settings")
                check_planned(client.settings, head)
                check_ledgers(client, context)
                if action not in ACTS:
                    end_sum(client)
                if action not in REFRESH:
                    end_refresh(client)
                try:
                    reply = handler(client, message.content, head)
                finally:
                    remember_ledgers(client, context)
            except Exception as error:  # whatever it is, the round goes on without this silo
                log.error("%s: %s: %s", message.metadata.message_type, type(error).__name__, error,
                          exc_info=None if isinstance(error, LitDpretError) else error)  # fmt: skip
                return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=_kind(error)), reply_to=message)
            return Message(reply, reply_to=message)

        getattr(app, category)(action)(handle)

    register("query", "describe", describe)
    register("train", "stage1", train_stage1)
    for act in ACTS:
        register("train", act, partial(answered, act))
    register("query", "seal_key", fedneg_key)
    register("query", "fedneg_request", fedneg_request)
    register("query", "fedneg_serve", fedneg_serve)
    register("train", "personalise", personalise)
    register("evaluate", "retrieval", partial(evaluate, share=share_measures, spent=share_epsilon))
    return app


# -- what a silo does ---------------------------------------------------------------------------


def describe(client: SiloClient, content: RecordDict, head: Mapping[str, Any]) -> RecordDict:
    """Its name, its number, how many are on its roster; and how many train queries it has, where nothing is promised
    and the aggregation needs it.
    """
    run = client.settings
    counted = run.privacy.eps is None and run.stage1.weighting != "uniform" and not run.secure_sum
    one = client.credentials
    number, listed = (0, 0) if one is None else (one.number, len(one.roster))
    return envelope(name=client.name, number=number, listed=listed, examples=client.examples if counted else 1)


def train_stage1(client: SiloClient, content: RecordDict, head: Mapping[str, Any]) -> RecordDict:
    """One local epoch from the global weights, in clear: refused where the settings say that it goes under masks."""
    if client.settings.secure_sum:
        raise DataError("The server asks for an update in clear, under secure_sum=true.", kind="other settings")
    weights = weights_of(content, _SERVER, like=client.model[0])
    reply = envelope()
    reply["weights"] = weights_record(client.train_shared(weights, _number(head, "round")))
    return reply


def fedneg_key(client: SiloClient, content: RecordDict, head: Mapping[str, Any]) -> RecordDict:
    """A key for what is sealed in a refresh; it may be the first message with the global weights."""
    global_weights(client, content, head)
    return seal_key(client, content, head)


def fedneg_request(client: SiloClient, content: RecordDict, head: Mapping[str, Any]) -> RecordDict:
    """The rows that others are asked with; under ``seal`` for their eyes alone."""
    rows = client.request(global_weights(client, content, head), _number(head, "refresh"))
    if client.settings.seal:
        return sealed_request(client, content, head, rows)
    reply = envelope()
    reply["rows"] = rows_record(rows)
    return reply


def fedneg_serve(client: SiloClient, content: RecordDict, head: Mapping[str, Any]) -> RecordDict:
    """Answers to requests of others, who are numbers here and have no names."""
    weights, refresh = global_weights(client, content, head), _number(head, "refresh")
    if client.settings.seal:
        return sealed_answers(client, content, head, weights)
    reply = envelope()
    asked = [
        rows_of(content, f"asker {asker}", name=f"rows.{asker}", dim=client.model[1])
        for asker in range(_number(head, "askers"))
    ]
    for asker, known in enumerate(Served(client.state).known(refresh, asked)):
        if known:  # a request that comes later in this refresh is one more than was planned
            reply[f"block.{asker}"] = block_record(client.serve(weights, asked[asker], refresh=refresh))
    return reply


def personalise(client: SiloClient, content: RecordDict, head: Mapping[str, Any]) -> RecordDict:
    """One local epoch of its own query encoder, which stays here."""
    weights = global_weights(client, content, head)
    pool: FedPool | None = None
    refused: dict[int, str] = {}
    epoch = _number(head, "epoch")
    if client.settings.stage2.asks(epoch) and client.settings.seal:
        pool, refused = sealed_pool(client, content, head, weights)
    elif client.settings.stage2.asks(epoch):
        lists = client.examples if client.settings.stage2.request == "exact" else None
        pool = pool_of_record(content, _SERVER, dim=client.model[1], rows=lists)
    client.personalise(weights, pool, epoch)
    return refusals(envelope(), refused)


def evaluate(
    client: SiloClient, content: RecordDict, head: Mapping[str, Any], *, share: Choice, spent: Choice
) -> RecordDict:
    """Measures on its own collection, of every query for the silo itself; their means for the server, where agreed."""
    system, split = head.get("system"), head.get("split")
    if system not in SYSTEMS or split not in SPLITS:
        raise DataError(f"The server asks for measures of {system!r} on {split!r}.", kind="bad message")
    weights = None if system == "bm25" else global_weights(client, content, head)
    kept = measures_file(client.state, system, split)
    if not kept.is_file():
        measured = client.evaluate(weights, personal=system == "stage2", split=split)
        save_tensors({name.replace("/", "."): torch.from_numpy(one.copy()) for name, one in measured.items()}, kept)
    found = {name.replace(".", "/", 1): value.numpy() for name, value in load_file(kept).items()}
    epsilon = client.epsilon() if _chosen(spent, client) else None
    told = {} if epsilon is None else {"epsilon": epsilon}
    if not _chosen(share, client) or client.settings.privacy.eps is not None:
        return envelope(withheld=True, **told)
    reply = envelope(withheld=False, queries=max(len(value) for value in found.values()), **told)
    reply["measures"] = MetricRecord({name: float(value.mean()) for name, value in found.items()})
    return reply


def measures_file(state: Path, system: str, split: str) -> Path:
    """Where a silo keeps its measures of every query, which it tells the same whenever it is asked."""
    return state / f"measures-{system}-{split}.safetensors"


def check_planned(run: PddAs2, head: Mapping[str, Any]) -> None:
    """Refuse a turn that the settings do not have: each shows more of the queries, or costs budget that others need.

    Raises:
        DataError: Naming the turn.
    """
    turns = {
        "round": range(run.stage1.warmup_rounds + run.stage1.rounds),
        "refresh": [epoch for epoch in range(run.stage2.epochs) if run.stage2.asks(epoch)],
        "epoch": range(run.stage2.epochs),
    }
    for name, planned in turns.items():
        if name in head and _number(head, name) not in planned:
            raise DataError(f"The server asks for {name} {head[name]}, which is not planned.", kind="not planned")


# -- what lasts --------------------------------------------------------------------------------


def global_weights(client: SiloClient, content: RecordDict, head: Mapping[str, Any]) -> Weights:
    """The weights at the end of stage 1: from the message, or kept from one before, by their hash.

    Raises:
        DataError: They are neither here nor there, are not what their hash says, or not those of an earlier message.
    """
    wanted = str(head.get("weights"))
    if not re.fullmatch(r"[0-9a-f]{64}", wanted):
        raise DataError("The server names no weights.", kind="bad message")
    Served(client.state).stage2(wanted)
    kept = client.state / f"received-{wanted[:16]}.safetensors"
    if "weights" in content.array_records:
        weights = weights_of(content, _SERVER, like=client.model[0])
        if fingerprint(weights) != wanted:
            raise DataError("The weights are not those that the server names.", kind="bad message")
        for old in client.state.glob("received-*.safetensors"):
            old.unlink()
        save_tensors(weights, kept)
        return weights
    if not kept.is_file():
        raise DataError("The weights that the server names are not here.", kind="weights missing")
    return load_file(kept)


def remember_ledgers(client: SiloClient, context: Context) -> None:
    """Keep the length and the hash of each of the silo's ledgers in the node's own state."""
    found = {path.name: path.read_bytes() for path in client.ledgers.glob("silo_ledger.*.jsonl")}
    facts = {name: f"{len(text)}:{hashlib.sha256(text).hexdigest()}" for name, text in sorted(found.items())}
    context.state["ledgers"] = ConfigRecord({"schema": SCHEMA, **facts})


def check_ledgers(client: SiloClient, context: Context) -> None:
    """Refuse to go on with a ledger that was lost or shortened: what it held is spent all the same.

    Raises:
        LedgerError: Naming the file.
    """
    for name, fact in context.state.config_records.get("ledgers", {}).items():
        if name == "schema":
            continue
        size, _, digest = str(fact).partition(":")
        path = client.ledgers / name
        known = path.read_bytes()[: int(size)] if path.is_file() else b""
        if hashlib.sha256(known).hexdigest() != digest:
            raise LedgerError(
                f"{path} is not the ledger that this node wrote in an earlier round, or has lost entries. Bring it "
                "back from a copy: without it nobody knows what is spent."
            )


def _number(head: Mapping[str, Any], name: str) -> int:
    value = head.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise DataError(f"The server's {name} is {value!r} and no number.", kind="bad message")
    return value


def _kind(error: Exception) -> str:
    return f"{type(error).__name__} ({error.kind})" if isinstance(error, DataError) else type(error).__name__


def _chosen(choice: Choice, client: SiloClient) -> bool:
    return choice(client) if callable(choice) else choice
