"""A letter opens for whom it was sealed, in the refresh for which it was, and shows all others its size.

By messages, sealed silos train with the same negatives as in clear, whatever the server that carries them does.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="needs the extra federated (flwr)")

from messages import DIM, MASKED, Drifts, Masked, credentials

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.federated.flower.library import Message, RecordDict
from lit_dpret.federated.flower.payloads import tensors_record
from lit_dpret.federated.keys import Credentials, load_credentials, make_identity, new_identity, write_roster
from lit_dpret.federated.negatives import Block, FedPool, respond, respond_uniformly
from lit_dpret.federated.sealing import Letter, Refresh, Sealer
from lit_dpret.federated.settings import PddAs2
from lit_dpret.federated.storage import save_tensors

NOW = Refresh(run="r", number=3, weights="w")
TEXT = b"rows of private queries" * 50


def three(root: Path, refresh: Refresh = NOW) -> tuple[dict[int, Sealer], dict[int, bytes]]:
    sealers = {number: Sealer(root / str(number)) for number in (1, 2, 3)}
    return sealers, {number: one.begin(refresh, number) for number, one in sealers.items()}


def test_a_letter_opens_for_each_that_it_was_sealed_for_and_its_body_is_there_once(tmp_path: Path) -> None:
    sealers, keys = three(tmp_path)
    letter = sealers[1].seal(NOW, "request", TEXT, {2: keys[2], 3: keys[3]})
    for number in (2, 3):
        assert sealers[number].open(NOW, "request", letter.body, letter.boxes[number], sender=1, public=keys[1]) == TEXT
    assert len(letter.body) == len(TEXT) + 28 and all(len(box) == 73 for box in letter.boxes.values())


def refusal(opener: Sealer, letter: Letter, box: bytes, public: bytes, *, sender: int = 1, kind: str = "request",
            refresh: Refresh = NOW) -> str:  # fmt: skip
    with pytest.raises(DataError) as caught:
        opener.open(refresh, kind, letter.body, box, sender=sender, public=public)  # type: ignore[arg-type]
    assert f"The letter of client {sender} " in str(caught.value) and "rows" not in str(caught.value)
    return caught.value.kind


def test_a_letter_that_was_changed_replayed_or_misrouted_is_refused_with_its_reason(tmp_path: Path) -> None:
    sealers, keys = three(tmp_path)
    letter = sealers[1].seal(NOW, "request", TEXT, {2: keys[2], 3: keys[3]})
    changed_body = bytearray(letter.body)
    changed_body[40] ^= 1
    box = letter.boxes[2]
    for place in range(0, len(box), 5):  # every part of the box: its header, nonce, key and tag
        broken = bytearray(box)
        broken[place] ^= 1
        assert refusal(sealers[2], letter, bytes(broken), keys[1])
    assert refusal(sealers[2], replace(letter, body=bytes(changed_body)), box, keys[1]) == "was changed on the way"
    assert refusal(sealers[2], letter, letter.boxes[3], keys[1]) == "was meant for another silo"
    assert refusal(sealers[2], letter, box, keys[3], sender=3) == "is another silo's"
    assert refusal(sealers[2], letter, box, keys[1], kind="answer") == "is no answer"
    assert refusal(sealers[2], letter, b"short", keys[1]) == "was cut"
    # A letter of an earlier refresh, with its header and with one that lies.
    later = replace(NOW, number=4)
    new = {number: one.begin(later, number) for number, one in sealers.items()}
    assert refusal(sealers[2], letter, box, new[1], refresh=later) == "is of refresh 3 and not of 4"
    lying = box[:1] + (4).to_bytes(4, "big") + box[5:]
    assert refusal(sealers[2], letter, lying, new[1], refresh=later) == "was changed on the way"
    assert refusal(sealers[2], letter, lying, keys[1], refresh=later) == "was changed on the way"
    other = sealers[1].seal(later, "request", TEXT + b"!", {2: new[2]})  # another letter's body with this one's box
    assert refusal(sealers[2], replace(letter, body=other.body), box, keys[1], refresh=later)


def test_another_run_or_other_weights_open_nothing_and_neither_does_a_key_that_was_deleted(tmp_path: Path) -> None:
    sealers, keys = three(tmp_path)
    letter = sealers[1].seal(NOW, "answer", TEXT, {2: keys[2]})
    for other in (replace(NOW, run="s"), replace(NOW, weights="v")):
        with pytest.raises(DataError, match="refresh 3"):
            sealers[2].open(other, "answer", letter.body, letter.boxes[2], sender=1, public=keys[1])
    path = tmp_path / "2" / "sealing" / "key.json"
    assert path.stat().st_mode & 0o077 == 0 and path.parent.stat().st_mode & 0o077 == 0
    sealers[2].forget()
    assert not path.exists()
    with pytest.raises(DataError, match="refresh 3"):
        sealers[2].open(NOW, "answer", letter.body, letter.boxes[2], sender=1, public=keys[1])


def test_a_key_in_the_middle_reads_everything_without_a_roster_and_nothing_with_one(tmp_path: Path) -> None:
    pairs = {name: new_identity() for name in ("a", "b", "c")}
    roster = {name: public for name, (_, public) in pairs.items()}
    signed = {
        number: Sealer(tmp_path / name, Credentials(name=name, identity=pairs[name][0], roster=roster))
        for number, name in enumerate(roster, start=1)
    }
    keys = {number: one.begin(NOW, number) for number, one in signed.items()}
    letter = signed[1].seal(NOW, "request", TEXT, {2: keys[2]})
    assert signed[2].open(NOW, "request", letter.body, letter.boxes[2], sender=1, public=keys[1]) == TEXT
    middle = Sealer(tmp_path / "middle")
    forged = middle.begin(NOW, 2)
    good, bad = signed[1].usable(NOW, {2: forged, 3: keys[3]})
    assert set(good) == {3} and bad == {2: "has a key that is not signed by the roster's"}
    for public in (forged, forged + keys[2][32:], keys[3]):  # no signature, another key's, another silo's
        with pytest.raises(DataError, match="client 2"):
            signed[1].seal(NOW, "request", TEXT, {2: public})
    with pytest.raises(DataError, match="roster"):
        signed[1].begin(NOW, 2)
    trusting, keys = three(tmp_path / "trusting")  # what the sentence "taken on trust" means
    letter = trusting[1].seal(NOW, "request", TEXT, {2: forged})
    assert middle.open(NOW, "request", letter.body, letter.boxes[2], sender=1, public=keys[1]) == TEXT


def test_a_key_that_is_none_is_left_out(tmp_path: Path) -> None:
    sealers, keys = three(tmp_path)
    good, bad = sealers[1].usable(NOW, {2: keys[2], 3: bytes(32), 4: b"short"})
    assert set(good) == {2} and set(bad) == {3, 4}


# -- signing keys and rosters


def files(root: Path, *names: str) -> Path:
    write_roster(root / "roster.json", {name: make_identity(root / name / "identity.key") for name in names})
    return root / "roster.json"


def test_what_was_written_is_read_and_numbers_follow_the_names(tmp_path: Path) -> None:
    roster = files(tmp_path, "b", "a", "c")
    found = {name: load_credentials(name, tmp_path / name / "identity.key", roster) for name in "abc"}
    assert [found[name].number for name in "abc"] == [1, 2, 3]
    assert found["a"].by_number == found["b"].by_number == found["c"].by_number
    assert (tmp_path / "a" / "identity.key").stat().st_mode & 0o077 == 0
    signature = found["b"].sign(b"text")
    assert found["a"].signed_by(2, signature, b"text")
    for number, text in ((1, b"text"), (2, b"texts"), (9, b"text")):
        assert not found["a"].signed_by(number, signature, text)


def test_a_key_is_in_no_repr_and_is_not_written_over(tmp_path: Path) -> None:
    one = load_credentials("a", tmp_path / "a" / "identity.key", files(tmp_path, "a", "b", "c"))
    assert one.identity.hex() not in repr(one) and str(one.identity) not in repr(one)
    with pytest.raises(ConfigurationError, match=r"identity\.key"):
        make_identity(tmp_path / "a" / "identity.key")


def test_files_that_do_not_go_together_are_refused_by_name_and_show_no_key(tmp_path: Path) -> None:
    roster, key = files(tmp_path, "a", "b"), tmp_path / "a" / "identity.key"
    facts = json.loads(roster.read_text())
    (tmp_path / "newer.json").write_text(json.dumps({**facts, "schema": "lit-dpret/federated-roster/2"}))
    write_roster(tmp_path / "twice.json", dict.fromkeys("ab", facts["silos"]["a"]))  # either could sign for both
    for name, key_file, roster_file, named in (
        ("b", key, roster, "'b'"),
        ("a", key, tmp_path / "nowhere", "nowhere"),
        ("a", roster, roster, "signing key"),
        ("a", key, tmp_path / "newer.json", r"newer\.json .*federated-roster/2"),
        ("a", key, tmp_path / "twice.json", "one key for two silos"),
    ):
        with pytest.raises(ConfigurationError, match=named) as caught:
            load_credentials(name, key_file, roster_file)
        assert key.read_text().strip() not in str(caught.value)
    key.chmod(0o644)
    with pytest.raises(ConfigurationError, match="0644"):
        load_credentials("a", key, roster)


# -- by messages --------------------------------------------------------------------------------

STAGE2 = replace(MASKED.stage2, epochs=1, top_k=6, n=4, request="exact")
CLEAR = replace(MASKED, secure_sum=False, sum_threshold=None, stage2=STAGE2)
SEALED = replace(CLEAR, seal=True)
NAMES = ("client0", "client1", "client2")


def coins(name: str, what: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, DIM, generator=torch.Generator().manual_seed(10 * int(name[-1]) + what))


class Asks(Drifts):
    """Asks and answers with coins, and keeps the pool that it was given."""

    queries = range(5)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.examples = 5

    def request(self, weights: Any, refresh: int) -> torch.Tensor:
        return torch.empty(0, DIM) if self.settings.stage2.request == "none" else coins(self.name, 0, 5)

    def serve(self, weights: Any, rows: torch.Tensor, *, refresh: int) -> Block:
        stage, candidates = self.settings.stage2, coins(self.name, 1, 30)
        if len(rows):
            return respond(self.name, rows, candidates, stage.top_k, send_as=stage.send_as)
        return respond_uniformly(self.name, candidates, stage.n, seed=refresh, send_as=stage.send_as)

    def personalise(self, weights: Any, pool: FedPool, number: int) -> None:
        lists = {} if pool.lists is None else {"lists": pool.lists}
        save_tensors({"embeddings": pool.embeddings, **lists}, self.state / "pool.safetensors")


def silos(root: Path, settings: PddAs2 = SEALED, *, silo: Any = Asks, **more: Any) -> Masked:
    return Masked(root, settings, silo=silo, names=NAMES, **more)


def pools(root: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The pool of each silo that was given one."""
    return {path.parent.name: load_file(path) for path in root.glob("*/pool.safetensors")}


def with_stage2(settings: PddAs2, **changes: Any) -> PddAs2:
    return replace(settings, stage2=replace(settings.stage2, **changes))


def of(name: str, pool: dict[str, torch.Tensor]) -> bool:
    """Whether a pool has an embedding of a silo."""
    theirs = coins(name, 1, 30).half().float()
    return bool((pool["embeddings"][:, None] == theirs).all(-1).any())


def numbers(made: Masked) -> bytes:
    """All bytes that the server sees in the tensors, keys and boxes of stage 2."""
    found = bytearray()
    for kind, _, _, content in made.grid.seen:
        if "fedneg" in kind or kind in ("query.seal_key", "train.personalise"):
            found += b"".join(array.data for record in content.array_records.values() for array in record.values())
            records = content.config_records.values()
            found += b"".join(value for record in records for value in record.values() if isinstance(value, bytes))
    return bytes(found)


@pytest.mark.parametrize(
    ("request_", "select"), [("exact", "all"), ("dp_centroid", "all"), ("none", "all"), ("exact", "random")]
)
def test_sealed_every_silo_gets_the_pool_that_it_gets_in_clear_and_the_server_sees_sizes(
    request_: Any, select: Any, tmp_path: Path
) -> None:
    parts = {"select": select, "select_count": 1 if select == "random" else None, "request": request_}
    clear = silos(tmp_path / "clear", with_stage2(CLEAR, **parts))
    sealed = silos(tmp_path / "sealed", with_stage2(SEALED, **parts)).forget_between_messages()
    assert not clear.launch().faults and not sealed.launch().faults
    found, expected = pools(tmp_path / "sealed"), pools(tmp_path / "clear")
    assert set(expected) == set(found) == set(NAMES)
    for name in NAMES:
        assert set(found[name]) == set(expected[name])
        for part, value in expected[name].items():
            assert len(value) and torch.equal(found[name][part], value), part
    assert not [path for name in NAMES for path in (tmp_path / "sealed" / name / "sealing").iterdir()]  # no key is left
    rows = [row.numpy().tobytes() for name in NAMES for row in coins(name, 0, 5)]
    embeddings = [row.half().numpy().tobytes() for name in NAMES for row in coins(name, 1, 30)]
    seen = {made: numbers(made) for made in (clear, sealed)}
    assert not any(row in seen[sealed] for row in rows) and not any(row[:8] in seen[sealed] for row in embeddings)
    assert any(row in seen[clear] for row in embeddings) and (rows[0] in seen[clear]) == (request_ != "none")
    if request_ == "none":  # one body for all
        assert set(sealed.grid.of("query.fedneg_serve")[10]) == {"head", "answer.0", "boxes"}
    if (request_, select) == ("exact", "all"):  # what the server cannot merge goes down once for each answer
        assert sealed.grid.down["train.personalise"] > 1.05 * clear.grid.down["train.personalise"]


def test_a_body_for_all_is_sent_up_once_however_many_are_asked(tmp_path: Path) -> None:
    made = silos(tmp_path)
    made.server.measure = lambda *_, **__: None  # type: ignore[method-assign]  # the keys come with the first weights
    assert not made.launch().faults
    content = made.grid.of("query.fedneg_request")[10]
    assert set(content) == {"head", "request", "boxes"} and set(content["boxes"]) == {"2", "3"}


def answer_changed(kind: str, node: int, content: RecordDict) -> None:
    if kind == "train.personalise" and node == 10:
        array = content["answer.2"]["body"]
        array.data = array.data[:-1] + bytes([array.data[-1] ^ 1])


def answers_swapped(kind: str, node: int, content: RecordDict) -> None:
    """Two answers to one silo, each under the other's name."""
    if kind == "train.personalise" and node == 10:
        for part in (content, content["boxes"]):
            one, two = ("answer.2", "answer.3") if part is content else ("2", "3")
            part[one], part[two] = part[two], part[one]


def request_changed(kind: str, node: int, content: RecordDict) -> None:
    if kind == "query.fedneg_serve" and node == 11:
        box = bytearray(content["boxes"]["1"])
        box[-1] ^= 1
        content["boxes"]["1"] = bytes(box)


@pytest.mark.parametrize(("meddle", "reporter", "left_out", "why"), [
    (answer_changed, "client0", ["client1"], "was changed on the way"),
    (answers_swapped, "client0", ["client1", "client2"], "is another silo's"),
    (request_changed, "client1", ["client0"], "was changed on the way"),
])  # fmt: skip
def test_what_a_relay_meddled_with_is_left_out_by_name_and_the_others_are_used(
    meddle: Any, reporter: str, left_out: list[str], why: str, tmp_path: Path
) -> None:
    made = silos(tmp_path)
    handled = made.grid._handled

    def meddled(message: Message, node: int) -> Message:
        meddle(message.metadata.message_type, node, message.content)
        return handled(message, node)

    made.grid._handled = meddled
    faults = made.launch().faults
    assert len(faults) == len(left_out)
    for name, fault in zip(left_out, faults, strict=True):
        assert f"client {reporter!r}" in fault and f"client {name!r}" in fault and why in fault
    missing = set(left_out) if meddle is not request_changed else {"client1"}
    assert {name for name in NAMES[1:] if not of(name, pools(tmp_path)["client0"])} == missing
    assert set(pools(tmp_path)) == set(NAMES)  # everybody trained


def test_a_request_with_rows_where_none_are_agreed_on_is_answered_nothing(tmp_path: Path) -> None:
    class Curious(Asks):
        def request(self, weights: Any, refresh: int) -> torch.Tensor:
            return coins(self.name, 0, 5) if self.name == "client0" else super().request(weights, refresh)

    result = silos(tmp_path, with_stage2(SEALED, request="none"), silo=Curious).launch()
    told = [fault for fault in result.faults if "request=none" in fault and "client 'client0'" in fault]
    assert len(told) == 2
    assert set(pools(tmp_path)) == set(NAMES) and len(pools(tmp_path)["client0"]["embeddings"]) == 0


@pytest.mark.parametrize("settings", [CLEAR, SEALED], ids=["clear", "sealed"])
def test_a_silo_that_is_gone_in_a_refresh_is_left_out_and_comes_back(settings: PddAs2, tmp_path: Path) -> None:
    first = "query.seal_key" if settings.seal else "query.fedneg_request"

    def fate(message: Message) -> Any:
        kind, node = message.metadata.message_type, message.metadata.dst_node_id
        early = message.content.config_records.get("head", {}).get("refresh") == 0
        return "unavailable" if early and (kind, node) in ((first, 10), ("query.fedneg_serve", 12)) else None

    made = silos(tmp_path, with_stage2(settings, epochs=2), fate=fate)
    made.server.measure = lambda *_, **__: None  # type: ignore[method-assign]  # so that the first weights are lost too
    result = made.launch()
    assert len(result.faults) == 2 and set(pools(tmp_path)) == set(NAMES)
    for name, fault in zip(("client0", "client2"), result.faults, strict=True):
        assert f"refresh 0: client {name!r} failed" in fault


def test_with_a_roster_a_silo_with_another_key_is_asked_nothing_and_told_nothing(tmp_path: Path) -> None:
    signed = replace(SEALED, roster=True)
    assert not silos(tmp_path / "good", signed, keys=credentials()).launch().faults
    made = silos(tmp_path / "bad", signed, keys=credentials(client2=new_identity()[0]))
    faults = made.launch().faults
    assert [one for one in faults if "client 'client0'" in one and "client 'client2'" in one and "not signed" in one]
    assert all("3" not in made.grid.of("query.fedneg_request")[node]["boxes"] for node in (10, 11))
    used = pools(tmp_path / "bad")["client0"]
    assert len(used["embeddings"]) and not of("client2", used)


def test_a_silo_that_seals_answers_no_request_in_clear(tmp_path: Path) -> None:
    made = silos(tmp_path)
    made.launch()
    weights = made.grid.of("query.fedneg_request", "down")[10]["head"]["weights"]
    asked = made.ask(10, "query.fedneg_request", weights=weights, refresh=0)
    assert asked.error.reason == "DataError (no such key)"
    rows = {"rows.0": tensors_record({"rows": torch.randn(3, DIM)})}
    served = made.ask(10, "query.fedneg_serve", rows, weights=weights, refresh=0, askers=1)
    assert not served.content.array_records
    clear = silos(tmp_path / "clear", CLEAR)
    clear.launch()
    begun = clear.ask(10, "query.seal_key", weights=weights, refresh=0, number=1)
    assert begun.error.reason == "DataError (other settings)"
