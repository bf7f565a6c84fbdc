"""The silo's side: translate messages into calls of `SiloClient` and results into messages, without training itself.

A deployed node handles every message in a new process. Its lasting data are in the silo's state folder, and the length
and hash of each ledger in Flower's ``Context.state``. Error texts stay here, since they may name files, ids and numbers
of the silo: the server learns only the kind of an error.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from traceback import format_exception
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save
from torch import Tensor

from lit_dpret.errors import DataError, LedgerError, LitDpretError
from lit_dpret.federated.aggregation import Weights, fingerprint
from lit_dpret.federated.flower import payloads
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
from lit_dpret.federated.keys import SIGNATURE_BYTES
from lit_dpret.federated.negatives import Block, FedPool, merged_pool
from lit_dpret.federated.sealing import Kind, Refresh, Sealer
from lit_dpret.federated.settings import PHASES, PddAs2
from lit_dpret.federated.silo import SiloClient
from lit_dpret.federated.silo_sum import SiloSum, SumPlan
from lit_dpret.federated.storage import Served, save_tensors
from lit_dpret.progress import tell_here
from lit_dpret.settings import is_whole

# Builds the silo of a node from the settings that its operator gave the node (``context.node_config``).
MakeClient = Callable[[Context], SiloClient]

T = TypeVar("T")
Head = Mapping[str, Any]
Handler = Callable[[SiloClient, RecordDict, Head], RecordDict]

SPLITS = ("train", "dev", "test")
_SERVER = "the server"


def build_client_app(make_client: MakeClient) -> ClientApp:
    """Build the app of every silo; ``make_client`` is called once per process and node.

    Guarantees:
        - A message changes and releases only what a method of `SiloClient` does, budget included.
        - A message is refused if server and silo have different settings, or if a ledger that this node knows is gone
          or no longer begins as it did.
        - Only rounds, refreshes and epochs that the silo's own settings plan are served, however often a server asks,
          and each once, from one set of weights. The silo repeats its answer to the same question.
        - Only the kind of an error leaves the silo. If single queries are protected (`PddAs2.hides`), no error depends
          on one of them, whatever finite weights and pools are sent: refusals depend on the message, the collection
          and the silo's files before any query is read, a query that fails is ignored, and work that sends no result
          fails silently (`unheard`). Under masks all silos of a sum report the same single fact: that too few have an
          update. Other silos learn which have none.
        - With ``secure_sum`` updates leave the silo only under masks and in sums of enough of them. The next message of
          another kind deletes the secrets of a round.
        - With ``seal`` request rows and answers leave the silo only in letters to other silos.
        - Measures stay in the silo's state folder unless its owner shares them (``share_measures``). Under a budget
          they always stay, since no ledger counts them.
    """
    app = ClientApp()
    silos: dict[int, SiloClient] = {}

    def register(category: str, action: str, handler: Handler) -> None:
        def handle(message: Message, context: Context) -> Message:
            try:
                if context.node_id not in silos:
                    silos[context.node_id] = make_client(context)
                client = silos[context.node_id]
                client.hides_failures = client.settings.hides
                head = payloads.head_of(message.content, _SERVER)
                if head.get("settings") != payloads.digest_of(client.settings):
                    raise DataError("The server's settings differ from this silo's document.", kind="other settings")
                check_planned(client.settings, head)
                check_ledgers(client, context)
                if action in SUM_ACTS and not client.settings.secure_sum:
                    raise DataError("The server begins a secure sum, under secure_sum=false.", kind="other settings")
                # A server that moves on to something else has abandoned its sum or refresh: delete those keys.
                if client.settings.secure_sum and action not in SUM_ACTS:
                    _sum(client).forget()
                if client.settings.seal and action not in REFRESH:
                    _sealer(client).forget()
                try:
                    reply = handler(client, message.content, head)
                finally:  # a handler that fails may have spent budget first
                    remember_ledgers(client, context)
            except Exception as error:  # the round continues without this silo
                _note(message.metadata.message_type, error)
                reason = type(error).__name__ + (f" ({error.kind})" if isinstance(error, DataError) else "")
                return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason), reply_to=message)
            return Message(reply, reply_to=message)

        getattr(app, category)(action)(handle)

    register("query", "describe", describe)
    register("train", "stage1", train_stage1)
    for act, handler in SUM_ACTS.items():
        register("train", act, handler)
    for query in (seal_key, fedneg_request, fedneg_serve):
        register("query", query.__name__, query)
    register("train", "personalise", personalise)
    register("evaluate", "retrieval", evaluate)
    return app


def _note(what: str, error: Exception) -> None:
    """Report a failure, which may show queries, on the silo's terminal, with a traceback unless it is a refusal."""
    trace = "" if isinstance(error, LitDpretError) else "".join(format_exception(error))
    tell_here(f"Kept on this machine: {what}: {type(error).__name__}: {error}\n{trace}".rstrip("\n"))


def unheard(work: Callable[[], T]) -> T | None:
    """Run work that depends on private queries and sends no result; on failure return None, shown on the terminal only.

    Make all refusals before calling it.
    """
    try:
        return work()
    except Exception as error:
        _note("not reported to the server", error)
        return None


def check_planned(run: PddAs2, head: Head) -> None:
    """Refuse a turn that the settings do not plan: it would reveal more about the queries, or cost budget."""
    turns = {
        "round": range(run.stage1.warmup_rounds + run.stage1.rounds),
        "refresh": [epoch for epoch in range(run.stage2.epochs) if run.stage2.asks(epoch)],
        "epoch": range(run.stage2.epochs),
    }
    for name, planned in turns.items():
        if name in head and payloads.whole(head, name) not in planned:
            raise DataError(
                f"The server asks for {name} {head[name]}, which the settings do not plan.", kind="not planned"
            )


def remember_ledgers(client: SiloClient, context: Context) -> None:
    """Store the length and hash of each of the silo's ledgers in the node's own state."""
    found = {path.name: path.read_bytes() for path in client.ledgers.glob("silo_ledger.*.jsonl")}
    facts = {name: f"{len(text)}:{hashlib.sha256(text).hexdigest()}" for name, text in sorted(found.items())}
    context.state["ledgers"] = ConfigRecord({"schema": payloads.SCHEMA, **facts})


def check_ledgers(client: SiloClient, context: Context) -> None:
    """Refuse to continue with a lost or shortened ledger, whose spending still counts."""
    for name, fact in context.state.config_records.get("ledgers", {}).items():
        if name == "schema":
            continue
        size, _, digest = str(fact).partition(":")
        path = client.ledgers / name
        known = path.read_bytes()[: int(size)] if path.is_file() else b""
        if hashlib.sha256(known).hexdigest() != digest:
            raise LedgerError(
                f"{path} is not this node's ledger of an earlier round, or has lost entries. Restore the newest copy."
            )


# -- stage 1 -----------------------------------------------------------------------------------


def describe(client: SiloClient, content: RecordDict, head: Head) -> RecordDict:
    """Return the silo's name, its number on its roster of keys and the roster's length."""
    run = client.settings
    # Under a budget `PddAs2.check` has refused all settings that would report how many queries a silo has.
    counted = run.reports_examples
    one = client.credentials
    number, listed = (0, 0) if one is None else (one.number, len(one.roster))
    return payloads.envelope(name=client.name, number=number, listed=listed, examples=client.examples if counted else 1)


def train_stage1(client: SiloClient, content: RecordDict, head: Head) -> RecordDict:
    """Train one local epoch from the global weights and answer in clear; refused under ``secure_sum``."""
    if client.settings.secure_sum:
        raise DataError("The server asks for an update in clear, under secure_sum=true.", kind="other settings")
    weights = payloads.weights_of(content, _SERVER, like=client.model[0])
    return payloads.answer(weights=payloads.tensors_record(client.train_shared(weights, payloads.whole(head, "round"))))


# -- stage 1 by a secure sum -------------------------------------------------------------------


def secagg_setup(client: SiloClient, content: RecordDict, head: Head) -> RecordDict:
    """Train one local epoch and advertise keys, even if training fails (`SiloSum.begin`)."""
    weights = payloads.weights_of(content, _SERVER, like=client.model[0])
    plan = SumPlan(
        run=payloads.digest_of(client.settings), round=payloads.whole(head, "round"), attempt=_attempt(head),
        weights=fingerprint(weights), clients=_numbers(head, "clients"),
    )  # fmt: skip
    number = payloads.whole(head, "number")
    plan.session(client.settings.sum_threshold)  # refuses before the server learns anything
    client.accept_round(weights, plan.round)
    update = unheard(lambda: client.train_shared(weights, plan.round))
    keys = _sum(client).begin(plan, number, weights, update, examples=client.examples)
    return payloads.answer(keys=payloads.keys_record([keys]))


def secagg_share(client: SiloClient, content: RecordDict, head: Head) -> RecordDict:
    """Receive all keys; return sealed shares."""
    shares = _sum(client).share(_attempt(head), payloads.keys_of(content, _SERVER))
    return payloads.answer(shares=payloads.bytes_record(shares))


def secagg_masked(client: SiloClient, content: RecordDict, head: Head) -> RecordDict:
    """Receive sealed shares; return the masked vector."""
    words = _sum(client).mask(_attempt(head), payloads.bytes_of(content, "shares", _SERVER))
    return payloads.answer(masked=payloads.tensors_record({"words": torch.from_numpy(words)}))


def secagg_sign(client: SiloClient, content: RecordDict, head: Head) -> RecordDict:
    """Sign the lists of remaining and lost silos."""
    if client.credentials is None:
        raise DataError("The server asks for a signature, under roster=false.", kind="other settings")
    signature = _sum(client).sign(_attempt(head), _numbers(head, "active"), _numbers(head, "dead"))
    return payloads.answer(signatures=payloads.bytes_record({client.credentials.number: signature}))


def secagg_unmask(client: SiloClient, content: RecordDict, head: Head) -> RecordDict:
    """Receive the lists and their signatures; return a share of one secret of every silo."""
    signatures = payloads.bytes_of(content, "signatures", _SERVER, size=SIGNATURE_BYTES)
    found = _sum(client).unmask(_attempt(head), _numbers(head, "active"), _numbers(head, "dead"), signatures)
    return payloads.answer(seeds=payloads.bytes_record(found.seeds), lost=payloads.bytes_record(found.keys))


SUM_ACTS: dict[str, Handler] = {
    act.__name__: act for act in (secagg_setup, secagg_share, secagg_masked, secagg_sign, secagg_unmask)
}


def _sum(client: SiloClient) -> SiloSum:
    return SiloSum(client.state, client.settings, client.credentials)


def _attempt(head: Head) -> str:
    value = head.get("attempt")
    if not isinstance(value, str) or not value:
        raise DataError("The server names no attempt of the sum.", kind="bad message")
    return value


def _numbers(head: Head, name: str) -> tuple[int, ...]:
    value = head.get(name, [])  # Flower cannot count the bytes of an empty list, so the server sends none
    if not isinstance(value, list) or not all(map(is_whole, value)):
        raise DataError(f"The server's {name} are not a list of integers.", kind="bad message")
    return tuple(value)


# -- stage 2 -----------------------------------------------------------------------------------


def global_weights(client: SiloClient, content: RecordDict, head: Head) -> Weights:
    """Return the weights at the end of stage 1, by hash: from this message, or stored from an earlier one."""
    wanted = str(head.get("weights"))
    if not re.fullmatch(r"[0-9a-f]{64}", wanted):
        raise DataError("The server names no weights.", kind="bad message")
    Served(client.state).stage2(wanted)
    kept = client.state / f"received-{wanted[:16]}.safetensors"
    if "weights" in content.array_records:
        weights = payloads.weights_of(content, _SERVER, like=client.model[0])
        if fingerprint(weights) != wanted:
            raise DataError("The weights are not those that the server names.", kind="bad message")
        for old in client.state.glob("received-*.safetensors"):
            old.unlink()
        save_tensors(weights, kept)
        return weights
    if not kept.is_file():
        raise DataError("The weights that the server names are not stored here.", kind="weights missing")
    return load_file(kept)


def fedneg_request(client: SiloClient, content: RecordDict, head: Head) -> RecordDict:
    """Return the request rows for other silos; under ``seal`` encrypted for them."""
    rows = client.request(global_weights(client, content, head), payloads.whole(head, "refresh"))
    if not client.settings.seal:
        return payloads.answer(rows=payloads.tensors_record({"rows": rows.float()}))
    refresh, sealer = _refresh(client, head), _sealer(client)
    keys, refused = sealer.usable(refresh, payloads.bytes_of(content, "keys", _SERVER))
    letter = sealer.seal(refresh, "request", save({"rows": rows.float().contiguous()}), keys)
    reply = payloads.answer(request=payloads.body_record(letter.body), boxes=payloads.bytes_record(letter.boxes))
    return _refusals(reply, refused)


def fedneg_serve(client: SiloClient, content: RecordDict, head: Head) -> RecordDict:
    """Answer requests of other silos, which are known only by number."""
    weights, refresh = global_weights(client, content, head), payloads.whole(head, "refresh")
    if client.settings.seal:
        return _sealed_answers(client, content, head, weights)
    reply = payloads.envelope()
    asked = [
        payloads.rows_of(content, f"asker {asker}", name=f"rows.{asker}", dim=client.model[1])
        for asker in range(payloads.whole(head, "askers"))
    ]
    for asker, known in enumerate(Served(client.state).known(refresh, asked)):
        if known:  # a request that comes later in this refresh exceeds the plan
            block = client.serve(weights, asked[asker], refresh=refresh)
            reply[f"block.{asker}"] = payloads.tensors_record(block.parts)
    return reply


def personalise(client: SiloClient, content: RecordDict, head: Head) -> RecordDict:
    """Train one local epoch of the silo's own query encoder, which stays here."""
    weights = global_weights(client, content, head)
    epoch = payloads.whole(head, "epoch")
    pool: FedPool | None = None
    refused: dict[int, str] = {}
    if client.settings.stage2.asks(epoch) and client.settings.seal:
        pool, refused = _sealed_pool(client, content, head, weights)
    elif client.settings.stage2.asks(epoch):
        lists = client.examples if client.settings.stage2.request == "exact" else None
        pool = payloads.pool_of_record(content, _SERVER, dim=client.model[1], rows=lists)
    if client.settings.hides:
        unheard(lambda: client.personalise(weights, pool, epoch))
    else:
        client.personalise(weights, pool, epoch)
    return _refusals(payloads.envelope(), refused)


# -- sealed negatives --------------------------------------------------------------------------

REFRESH = ("seal_key", "fedneg_request", "fedneg_serve", "personalise")


def seal_key(client: SiloClient, content: RecordDict, head: Head) -> RecordDict:
    """Return a key for a new refresh, ending the previous one; may be the first message with the global weights."""
    global_weights(client, content, head)
    if not client.settings.seal:
        raise DataError("The server begins to seal, under seal=false.", kind="other settings")
    number = payloads.whole(head, "number")
    return payloads.answer(keys=payloads.bytes_record({number: _sealer(client).begin(_refresh(client, head), number)}))


def _sealed_answers(client: SiloClient, content: RecordDict, head: Head, weights: Weights) -> RecordDict:
    """Answer each request that opens, or all of them with one answer if requests are empty."""
    refresh, sealer, keys = _refresh(client, head), _sealer(client), payloads.bytes_of(content, "keys", _SERVER)
    says_nothing = client.settings.stage2.request == "none"
    asked: dict[int, Tensor] = {}
    refused: dict[int, str] = {}
    for asker, opened in _opened(client, content, refresh, "request", keys, refused).items():
        try:
            rows = payloads.checked_rows(_unpacked(opened, asker).get("rows"), f"client {asker}", dim=client.model[1])
            if says_nothing and len(rows):
                raise DataError(f"Client {asker} sent rows.", kind="has rows, under request=none")
            asked[asker] = rows
        except DataError as error:
            refused[asker] = error.kind
    askers = sorted(asked)
    known = Served(client.state).known(refresh.number, [asked[one] for one in askers])
    for asker in [asker for asker, one in zip(askers, known, strict=True) if not one]:
        asked.pop(asker)
        refused[asker] = "came later than the others of this refresh"
    reply = payloads.envelope()
    boxes: dict[int, bytes] = {}
    alike = {0: sorted(asked)} if says_nothing and asked else {asker: [asker] for asker in sorted(asked)}
    for place, askers in alike.items():
        block = client.serve(weights, asked[askers[0]], refresh=refresh.number)
        packed = save({name: value.contiguous() for name, value in block.parts.items()})
        letter = sealer.seal(refresh, "answer", packed, {asker: keys[asker] for asker in askers})
        reply[f"answer.{place}"] = payloads.body_record(letter.body)
        boxes.update(letter.boxes)
    reply["boxes"] = payloads.bytes_record(boxes)
    return _refusals(reply, refused)


def _sealed_pool(
    client: SiloClient, content: RecordDict, head: Head, weights: Weights
) -> tuple[FedPool, dict[int, str]]:
    """Merge the pool of all answers to this silo; return it, and the reason for each refused sender."""
    stage, dim, refresh = client.settings.stage2, client.model[1], _refresh(client, head, "epoch")
    keys = payloads.bytes_of(content, "keys", _SERVER)
    rows, refused = client.request(weights, refresh.number), dict[int, str]()

    def read(sender: int, opened: bytes, **size: int) -> Block:
        # Blocks are merged in the order of these names.
        return payloads.block_of_parts(_unpacked(opened, sender), f"{sender:06}", dim=dim, **size)

    def refuse(sender: int, error: DataError) -> None:
        refused[sender] = error.kind

    letters = _opened(client, content, refresh, "answer", keys, refused)
    answers = [(sender, partial(read, sender, opened)) for sender, opened in letters.items()]
    pool = merged_pool(answers, rows, stage, refuse)
    _sealer(client).forget()
    return pool, refused


def _opened(
    client: SiloClient, content: RecordDict, refresh: Refresh, kind: Kind, keys: Mapping[int, bytes],
    refused: dict[int, str],
) -> dict[int, bytes]:  # fmt: skip
    """Open the letters of a message, by sender; record those that do not open in ``refused``."""
    sealer, found = _sealer(client), {}
    for sender, box in sorted(payloads.bytes_of(content, "boxes", _SERVER).items()):
        try:
            if sender not in keys:
                raise DataError(f"The server relays a letter of client {sender} without its key.", kind="has no key")
            body = payloads.body_of(content, f"{kind}.{sender}", _SERVER)
            found[sender] = sealer.open(refresh, kind, body, box, sender=sender, public=keys[sender])
        except DataError as error:
            if error.kind == "no such key":
                raise
            refused[sender] = error.kind
    return found


def _unpacked(content: bytes, sender: int) -> dict[str, Tensor]:
    try:
        found: dict[str, Tensor] = load(content)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"The letter of client {sender} holds no tensors.", kind="bad answer") from error
    return found


def _refusals(reply: RecordDict, refused: Mapping[int, str]) -> RecordDict:
    if refused:
        reply["refused"] = ConfigRecord({str(number): why for number, why in refused.items()})
    return reply


def _refresh(client: SiloClient, head: Head, name: str = "refresh") -> Refresh:
    return Refresh(
        run=payloads.digest_of(client.settings), number=payloads.whole(head, name), weights=str(head.get("weights"))
    )


def _sealer(client: SiloClient) -> Sealer:
    return Sealer(client.state, client.credentials)


# -- measures ----------------------------------------------------------------------------------


def evaluate(client: SiloClient, content: RecordDict, head: Head) -> RecordDict:
    """Evaluate on the silo's own collection; store every query's values, and report means if the owner agreed."""
    system, split = head.get("system"), head.get("split")
    if system not in PHASES or split not in SPLITS:
        raise DataError(f"The server asks for measures of {system!r} on {split!r}.", kind="bad message")
    weights = None if system == "bm25" else global_weights(client, content, head)
    kept = measures_file(client.state, system, split)

    def measure() -> None:
        if not kept.is_file():
            measured = client.evaluate(weights, personal=system == "stage2", split=split)
            save_tensors({name.replace("/", "."): torch.from_numpy(one.copy()) for name, one in measured.items()}, kept)

    epsilon = client.epsilon() if client.told.epsilon else None
    spending = {} if epsilon is None else {"epsilon": epsilon}
    if not client.told.measures or client.settings.privacy.eps is not None:
        unheard(measure)
        return payloads.envelope(withheld=True, **spending)
    measure()
    found = {name.replace(".", "/", 1): value.numpy() for name, value in load_file(kept).items()}
    reply = payloads.envelope(withheld=False, queries=max(len(value) for value in found.values()), **spending)
    reply["measures"] = MetricRecord({name: float(value.mean()) for name, value in found.items()})
    return reply


def measures_file(state: Path, system: str, split: str) -> Path:
    """Return the path where a silo's per-query measures are stored, so that every report is the same."""
    return state / f"measures-{system}-{split}.safetensors"
