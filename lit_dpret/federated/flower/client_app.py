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
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save
from torch import Tensor

from lit_dpret.errors import DataError, LedgerError, LitDpretError
from lit_dpret.federated.aggregation import Weights, fingerprint
from lit_dpret.federated.fed_negatives import Block, FedPool, merge_lists, pool_of
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
    SIGNATURE,
    block_of_parts,
    block_record,
    body_of,
    body_record,
    bytes_of,
    bytes_record,
    checked_rows,
    digest_of,
    envelope,
    head_of,
    keys_of,
    keys_record,
    pool_of_record,
    rows_of,
    rows_record,
    weights_of,
    weights_record,
    words_record,
)
from lit_dpret.federated.sealing import Kind, Refresh, Sealer
from lit_dpret.federated.settings import PddAs2
from lit_dpret.federated.silo import SiloClient
from lit_dpret.federated.silo_sum import SiloSum, SumPlan
from lit_dpret.federated.storage import Served, save_tensors

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


ACTS = ("secagg_setup", "secagg_share", "secagg_masked", "secagg_sign", "secagg_unmask")


Answer = Callable[[SiloClient, RecordDict, Mapping[str, Any], SiloSum], RecordDict]


def secagg_setup(client: SiloClient, content: RecordDict, head: Mapping[str, Any], sum_: SiloSum) -> RecordDict:
    """Act 1: one local epoch from the global weights, which stays here; keys."""
    weights = weights_of(content, _SERVER, like=client.model[0])
    plan = SumPlan(
        run=digest_of(client.settings), round=whole(head, "round"), attempt=_attempt(head),
        weights=fingerprint(weights), clients=_numbers(head, "clients"),
    )  # fmt: skip
    number = whole(head, "number")
    plan.session(client.settings.sum_threshold)  # refused before anything is learned
    update = client.train_shared(weights, plan.round)
    reply = envelope()
    reply["keys"] = keys_record([sum_.begin(plan, number, weights, update, examples=client.examples)])
    return reply


def secagg_share(client: SiloClient, content: RecordDict, head: Mapping[str, Any], sum_: SiloSum) -> RecordDict:
    """Act 2: everybody's keys in, sealed shares out."""
    reply = envelope()
    reply["shares"] = bytes_record(sum_.share(_attempt(head), keys_of(content, _SERVER)))
    return reply


def secagg_masked(client: SiloClient, content: RecordDict, head: Mapping[str, Any], sum_: SiloSum) -> RecordDict:
    """Act 3: sealed shares in, the vector under its masks out."""
    reply = envelope()
    reply["masked"] = words_record(sum_.mask(_attempt(head), bytes_of(content, "shares", _SERVER)))
    return reply


def secagg_sign(client: SiloClient, content: RecordDict, head: Mapping[str, Any], sum_: SiloSum) -> RecordDict:
    """Act 4: who is left and who was lost in, a signature over it out."""
    if client.credentials is None:
        raise DataError("The server asks for a signature, and the settings have no roster.", kind="other settings")
    reply = envelope()
    signature = sum_.sign(_attempt(head), _numbers(head, "active"), _numbers(head, "dead"))
    reply["signatures"] = bytes_record({client.credentials.number: signature})
    return reply


def secagg_unmask(client: SiloClient, content: RecordDict, head: Mapping[str, Any], sum_: SiloSum) -> RecordDict:
    """Act 5: who is left, who was lost and who has signed that in, a share of one secret of each out."""
    signatures = bytes_of(content, "signatures", _SERVER, size=SIGNATURE)
    found = sum_.unmask(_attempt(head), _numbers(head, "active"), _numbers(head, "dead"), signatures)
    reply = envelope()
    reply["seeds"], reply["lost"] = bytes_record(found.seeds), bytes_record(found.keys)
    return reply


ANSWERS: dict[str, Answer] = dict(
    zip(ACTS, (secagg_setup, secagg_share, secagg_masked, secagg_sign, secagg_unmask), strict=True)
)


def answered(act: str, client: SiloClient, content: RecordDict, head: Mapping[str, Any]) -> RecordDict:
    """One act of a silo, where its settings have a secure sum.

    Raises:
        DataError: They have none, or the message is not as it must be.
    """
    if not client.settings.secure_sum:
        raise DataError("The server begins a secure sum, and the settings have none.", kind="other settings")
    return ANSWERS[act](client, content, head, _sum_of(client))


def end_sum(client: SiloClient) -> None:
    """Delete what a silo keeps of a sum, where the server has gone on to something else."""
    if client.settings.secure_sum:
        _sum_of(client).forget()


def _sum_of(client: SiloClient) -> SiloSum:
    return SiloSum(client.state, client.settings, client.credentials)


def _attempt(head: Mapping[str, Any]) -> str:
    value = head.get("attempt")
    if not isinstance(value, str) or not value:
        raise DataError("The server names no attempt of the sum.", kind="bad message")
    return value


def whole(head: Mapping[str, Any], name: str) -> int:
    """A number of a message's head.

    Raises:
        DataError: It is none.
    """
    value = head.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise DataError(f"The server's {name} is {value!r} and no number.", kind="bad message")
    return value


def _numbers(head: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = head.get(name, [])  # Flower cannot count the bytes of an empty list, so none is sent
    if not isinstance(value, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in value):
        raise DataError(f"The server's {name} are no list of numbers.", kind="bad message")
    return tuple(value)


REFRESH = ("seal_key", "fedneg_request", "fedneg_serve", "personalise")


_SERVER = "the server"


def seal_key(client: SiloClient, content: RecordDict, head: Mapping[str, Any]) -> RecordDict:
    """A key for a new refresh, which ends the one before it."""
    if not client.settings.seal:
        raise DataError("The server begins to seal, and the settings do not.", kind="other settings")
    refresh = Refresh(run=digest_of(client.settings), number=whole(head, "refresh"), weights=str(head.get("weights")))
    reply = envelope()
    number = whole(head, "number")
    reply["keys"] = bytes_record({number: _sealer(client).begin(refresh, number)})
    return reply


def sealed_request(client: SiloClient, content: RecordDict, head: Mapping[str, Any], rows: Tensor) -> RecordDict:
    """Request rows, for the silos whose keys the server relays."""
    refresh = _refresh(client, head, whole(head, "refresh"))
    sealer = _sealer(client)
    keys, refused = sealer.usable(refresh, bytes_of(content, "keys", _SERVER))
    letter = sealer.seal(refresh, "request", save({"rows": rows.float().contiguous()}), keys)
    reply = envelope()
    reply["request"], reply["boxes"] = body_record(letter.body), bytes_record(letter.boxes)
    return refusals(reply, refused)


def sealed_answers(client: SiloClient, content: RecordDict, head: Mapping[str, Any], weights: Weights) -> RecordDict:
    """An answer for each request that opens; one for all of them where requests say nothing."""
    number, sealer, keys = whole(head, "refresh"), _sealer(client), bytes_of(content, "keys", _SERVER)
    refresh, says_nothing = _refresh(client, head, number), client.settings.stage2.request == "none"
    asked: dict[int, Tensor] = {}
    refused: dict[int, str] = {}
    for asker, opened in _opened(client, content, refresh, "request", keys, refused).items():
        try:
            rows = _tensors(opened, f"client {asker}").get("rows")
            asked[asker] = checked_rows(rows, f"client {asker}", dim=client.model[1])
            if says_nothing and len(asked[asker]):
                raise DataError(
                    f"Client {asker} asks with rows, under request=none.", kind="has rows, under request=none"
                )
        except DataError as error:
            asked.pop(asker, None)
            refused[asker] = error.kind
    askers = sorted(asked)
    for asker, known in zip(askers, Served(client.state).known(number, [asked[one] for one in askers]), strict=True):
        if not known:
            asked.pop(asker)
            refused[asker] = "came later than the others of this refresh"
    reply = envelope()
    boxes: dict[int, bytes] = {}
    alike = {0: sorted(asked)} if says_nothing and asked else {asker: [asker] for asker in sorted(asked)}
    for place, askers in alike.items():
        block = client.serve(weights, asked[askers[0]], refresh=number)
        parts = {"embeddings": block.embeddings, "starts": block.starts, "entries": block.entries}
        packed = save({name: value.contiguous() for name, value in parts.items()})
        letter = sealer.seal(refresh, "answer", packed, {asker: keys[asker] for asker in askers})
        reply[f"answer.{place}"] = body_record(letter.body)
        boxes.update(letter.boxes)
    reply["boxes"] = bytes_record(boxes)
    return refusals(reply, refused)


def sealed_pool(
    client: SiloClient, content: RecordDict, head: Mapping[str, Any], weights: Weights
) -> tuple[FedPool, dict[int, str]]:
    """The pool that this silo merges of all answers to it; and whose were refused, and why."""
    stage, number = client.settings.stage2, whole(head, "epoch")
    refresh, keys = _refresh(client, head, number), bytes_of(content, "keys", _SERVER)
    rows = client.request(weights, number)
    count, limit = (len(rows), stage.top_k) if len(rows) else (1, stage.n)
    refused: dict[int, str] = {}
    blocks: list[Block] = []
    for sender, opened in _opened(client, content, refresh, "answer", keys, refused).items():
        whose = f"{sender:06}"  # blocks are merged in the order of names
        try:
            parts = _tensors(opened, whose)
            blocks.append(block_of_parts(parts, whose, rows=count, dim=client.model[1], limit=limit))
        except DataError as error:
            refused[sender] = error.kind
    _sealer(client).forget()
    merged = merge_lists(blocks, rows, stage.top_k) if stage.request == "exact" else pool_of(blocks, client.model[1])
    return merged, refused


def end_refresh(client: SiloClient) -> None:
    """Delete the key of a refresh, where the server has gone on to something else."""
    if client.settings.seal:
        _sealer(client).forget()


def refusals(reply: RecordDict, refused: Mapping[int, str]) -> RecordDict:
    """The reply, with whose letters were left out and why."""
    if refused:
        reply["refused"] = ConfigRecord({str(number): why for number, why in refused.items()})
    return reply


def _opened(
    client: SiloClient, content: RecordDict, refresh: Refresh, kind: Kind, keys: Mapping[int, bytes],
    refused: dict[int, str],
) -> dict[int, bytes]:  # fmt: skip
    """What is in the letters of a message, by sender; those that do not open are refused, each by name."""
    sealer, found = _sealer(client), {}
    for sender, box in sorted(bytes_of(content, "boxes", _SERVER).items()):
        try:
            if sender not in keys:
                raise DataError(f"The server relays a letter of client {sender} and no key.", kind="has no key")
            body = body_of(content, f"{kind}.{sender}", _SERVER)
            found[sender] = sealer.open(refresh, kind, body, box, sender=sender, public=keys[sender])
        except DataError as error:
            if error.kind == "no such key":
                raise
            refused[sender] = error.kind
    return found


def _tensors(content: bytes, whose: str) -> dict[str, Tensor]:
    try:
        found: dict[str, Tensor] = load(content)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"The letter of {whose} holds no tensors.", kind="bad answer") from error
    return found


def _refresh(client: SiloClient, head: Mapping[str, Any], number: int) -> Refresh:
    return Refresh(run=digest_of(client.settings), number=number, weights=str(head.get("weights")))


def _sealer(client: SiloClient) -> Sealer:
    return Sealer(client.state, client.credentials)
