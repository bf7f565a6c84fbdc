"""A letter opens for whom it was sealed, in the refresh for which it was, and shows all others its size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="needs the extra federated (cryptography)")

import json

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.federated.keys import (
    Credentials,
    identity_of,
    load_credentials,
    make_identity,
    new_identity,
    write_roster,
)
from lit_dpret.federated.sealing import Letter, Refresh, Sealer

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


def test_what_the_relay_sees_looks_uniform_and_two_letters_of_one_text_share_nothing(tmp_path: Path) -> None:
    sealers, keys = three(tmp_path)
    one, two = (sealers[1].seal(NOW, "request", bytes(40_000), {2: keys[2]}).body for _ in range(2))
    counts = np.bincount(np.frombuffer(one, dtype=np.uint8), minlength=256)
    assert ((counts - len(one) / 256) ** 2 / (len(one) / 256)).sum() < 360  # chi-square, 255 degrees: 99.999 %
    assert np.mean(np.frombuffer(one, np.uint8) == np.frombuffer(two, np.uint8)) < 0.01


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
        with pytest.raises(DataError, match="no key of refresh 3"):
            sealers[2].open(other, "answer", letter.body, letter.boxes[2], sender=1, public=keys[1])
    path = tmp_path / "2" / "sealing" / "key.json"
    assert path.stat().st_mode & 0o077 == 0 and path.parent.stat().st_mode & 0o077 == 0
    sealers[2].forget()
    assert not path.exists()
    with pytest.raises(DataError, match="no key of refresh 3"):
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
        with pytest.raises(DataError, match="not signed by the key of the roster"):
            signed[1].seal(NOW, "request", TEXT, {2: public})
    with pytest.raises(DataError, match="not that of the roster"):
        signed[1].begin(NOW, 2)
    trusting, keys = three(tmp_path / "trusting")  # what the sentence "taken on trust" means
    letter = trusting[1].seal(NOW, "request", TEXT, {2: forged})
    assert middle.open(NOW, "request", letter.body, letter.boxes[2], sender=1, public=keys[1]) == TEXT
    assert identity_of(pairs["a"][0]) == roster["a"]


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
    with pytest.raises(ConfigurationError, match=r"cannot be written to .*exists"):
        make_identity(tmp_path / "a" / "identity.key")


def test_files_that_do_not_go_together_are_refused_by_name(tmp_path: Path) -> None:
    roster, key = files(tmp_path, "a", "b"), tmp_path / "a" / "identity.key"
    with pytest.raises(ConfigurationError, match="holds no silo 'b' with the public half of this signing key"):
        load_credentials("b", key, roster)
    with pytest.raises(ConfigurationError, match=r"nowhere cannot be read"):
        load_credentials("a", key, tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match=r"is not a signing key, or .* is not a roster") as caught:
        load_credentials("a", roster, roster)
    assert key.read_text().strip() not in str(caught.value)
    facts = json.loads(roster.read_text())
    (tmp_path / "newer.json").write_text(json.dumps({**facts, "schema": "lit-dpret/federated-roster/2"}))
    with pytest.raises(ConfigurationError, match=r"newer\.json cannot be read: .*federated-roster/2"):
        load_credentials("a", key, tmp_path / "newer.json")
    key.chmod(0o644)
    with pytest.raises(ConfigurationError, match="mode 0644 and can be read by others"):
        load_credentials("a", key, roster)


def test_one_key_for_two_silos_is_refused(tmp_path: Path) -> None:
    one = load_credentials("a", tmp_path / "a" / "identity.key", files(tmp_path, "a", "b"))
    with pytest.raises(ConfigurationError, match="one key to two silos"):
        Credentials(name="a", identity=one.identity, roster={"a": one.roster["a"], "b": one.roster["a"]})
