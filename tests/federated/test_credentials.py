"""A silo's key is its owner's alone, and is the one that the roster has for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="needs the extra federated (cryptography)")

from lit_dpret.errors import ConfigurationError
from lit_dpret.federated.keys import Credentials, load_credentials, make_identity, write_roster


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
