"""A chain that was rewritten whole agrees with itself; only a signature tells it from the one that was signed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from cards import Run, make_plan
from tiny_tasks import no_parts

from lit_dpret.cards.amendments import note_not_covered
from lit_dpret.cards.card import inherit_card, read_card, subject_of, write_card
from lit_dpret.cards.file import checksum
from lit_dpret.cards.signature import check_signature, public_key_fingerprint, sign_card
from lit_dpret.cards.verification import verify_chain
from lit_dpret.errors import ConfigurationError, DataError, VerificationError
from lit_dpret.tasks import Verify

pytest.importorskip("cryptography", reason="signatures are the extra lit-dpret[sign]")


def keys(folder: Path, name: str = "key") -> tuple[Path, Path]:
    """A private and a public key, as openssl writes them."""
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption()))
    private.chmod(0o600)
    public.write_bytes(key.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo))
    return private, public


def write_chain(root: Path, *, noise: float = 4.0, queries: str = "what is a claim") -> Path:
    """A private run and the data set made from it, whole and consistent; returns the folder of the latter."""
    run = Run(root / "generator", make_plan(noise=noise)).train()
    run.write_card()
    made = root / "synthetic"
    made.mkdir()
    (made / "queries.jsonl").write_text(queries, encoding="utf-8")
    subject = subject_of("dataset", "synthetic", [made / "queries.jsonl"], root=made)
    write_card(inherit_card(run.folder, subject, description="drawing"), made)
    return made


def rewritten(root: Path) -> Path:
    """The whole chain made anew, with another ledger and other queries; the signatures are left where they were."""
    kept = {path.relative_to(root): path.read_bytes() for path in root.rglob("*.sig")}
    shutil.rmtree(root)
    made = write_chain(root, noise=8.0, queries="what the forger likes")
    for path, content in kept.items():
        (root / path).write_bytes(content)
    return made


def test_a_chain_that_was_rewritten_whole_passes_unsigned_which_is_said_and_does_not_fit_its_signature(
    tmp_path: Path,
) -> None:
    private, public = keys(tmp_path)
    made = rewritten(write_chain(tmp_path / "runs").parent)
    result = verify_chain(made)
    assert not result.failed
    said = [finding.text for finding in result.not_checked if finding.check == "signature"]
    assert len(said) == 1 and "a chain that was completely rewritten (ledger, files and cards) would pass" in said[0]
    card = read_card(tmp_path / "runs" / "generator")
    assert "a chain was completely rewritten" in card["signoff"]["text"]
    assert "a chain was completely rewritten" in (tmp_path / "runs" / "generator" / "privacy_card.html").read_text()
    made = write_chain(tmp_path / "signed")
    sign_card(made, private)
    assert not verify_chain(made, public_key=public).failed
    rewritten(made.parent)
    for key in (public, None):
        (finding,) = verify_chain(made, public_key=key).failed
        assert finding.check == "signature" and "the card was changed after it was signed" in finding.text
    (made / "privacy_card.sig").unlink()
    (finding,) = verify_chain(made, public_key=public).failed
    assert finding.check == "signature"


def test_a_signature_by_another_key_is_not_that_of_the_curator(tmp_path: Path) -> None:
    _, public = keys(tmp_path)
    other, other_public = keys(tmp_path, "other")
    made = write_chain(tmp_path / "runs")
    sign_card(made, other)
    (finding,) = verify_chain(made, public_key=public).failed
    assert "which is not that of task.public_key" in finding.text
    unnamed = verify_chain(made)
    assert not unnamed.failed and public_key_fingerprint(other_public)[:16] in unnamed.not_checked[-1].text


def test_the_signature_of_a_parent_covers_the_parent_and_not_what_was_derived_from_it(tmp_path: Path) -> None:
    private, public = keys(tmp_path)
    made = write_chain(tmp_path / "runs")
    sign_card(made.parent / "generator", private)
    result = verify_chain(made, public_key=public)
    assert not result.failed
    assert ("generator", "signature", "ok") in [(f.artefact, f.check, f.outcome) for f in result.findings]
    assert "it is not signed itself; generator is" in result.not_checked[-1].text


def test_a_note_that_was_added_after_signing_leaves_the_signature_and_is_named(tmp_path: Path) -> None:
    private, public = keys(tmp_path)
    made = write_chain(tmp_path / "runs")
    sign_card(made, private)
    note_not_covered(made, "BLEU of synthetic", computed="the private queries")
    result = verify_chain(made, public_key=public)
    assert not result.failed
    assert result.not_checked[-1].text == "1 notes were added to the card after it was signed."
    card = read_card(made)
    card["cautions"].clear()
    card["checksum"] = checksum(card)
    with pytest.raises(DataError, match="changed after it was signed"):
        check_signature(card, made / "privacy_card.sig")


def test_the_task_signs_what_was_confirmed_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    private, public = keys(tmp_path)
    made = write_chain(tmp_path / "runs")
    (made / "model").mkdir()
    shutil.copy2(made / "privacy_card.json", made / "model")
    Verify(card=made, sign_with=private).run(no_parts(tmp_path / "out"))
    assert "signed: " in capsys.readouterr().out and (made / "model" / "privacy_card.sig").is_file()
    assert Verify(card=made, public_key=public).run(no_parts(tmp_path / "out"))["failed"] == 0
    (made / "privacy_card.sig").unlink()
    (made / "queries.jsonl").write_bytes(b"other")
    with pytest.raises(VerificationError):
        Verify(card=made, sign_with=private).run(no_parts(tmp_path / "out"))
    assert not (made / "privacy_card.sig").exists()


def test_a_signature_file_that_is_none_or_of_another_version_is_rejected(tmp_path: Path) -> None:
    private, _ = keys(tmp_path)
    made = write_chain(tmp_path / "runs")
    (path,) = sign_card(made, private)
    good = json.loads(path.read_text(encoding="utf-8"))
    for change, complaint in (
        ({"schema": "lit-dpret/privacy-card-signature/2"}, "privacy-card-signature/2"),
        ({"public_key": "00"}, "holds no Ed25519 public key"),
        ({"signature": "xx"}, "is not a signature of a card"),
        ({"signature": good["signature"][::-1]}, "changed after it was signed"),
    ):
        path.write_text(json.dumps(good | change), encoding="utf-8")
        (finding,) = verify_chain(made).failed
        assert complaint in finding.text
    path.write_text("[]", encoding="utf-8")
    assert "is not a signature" in verify_chain(made).failed[0].text


def test_keys_that_must_not_be_used_are_refused(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private, _ = keys(tmp_path)
    made = write_chain(tmp_path / "runs")

    def refuses(path: Path, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            sign_card(made, path)

    refuses(tmp_path / "none", "cannot be read")
    private.chmod(0o644)
    refuses(private, "others can read it")
    private.chmod(0o600)
    refuses(Path(shutil.copy2(private, made / "key.pem")), "is in the folder of the card")
    pem, pkcs8 = s.Encoding.PEM, s.PrivateFormat.PKCS8
    locked, curve, text = tmp_path / "locked", tmp_path / "curve", tmp_path / "text"
    locked.write_bytes(Ed25519PrivateKey.generate().private_bytes(pem, pkcs8, s.BestAvailableEncryption(b"x")))
    curve.write_bytes(ec.generate_private_key(ec.SECP256R1()).private_bytes(pem, pkcs8, s.NoEncryption()))
    text.write_text("no key", encoding="utf-8")
    for path in (locked, curve, text):
        os.chmod(path, 0o600)
    refuses(locked, "is encrypted")
    refuses(curve, "is not an Ed25519 key")
    refuses(text, "openssl genpkey -algorithm ed25519")
    for path, message in ((private, "is not a public key"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(ConfigurationError, match=message):
            verify_chain(made, public_key=path)


def test_without_the_library_signing_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private, public = keys(tmp_path)
    made = write_chain(tmp_path / "runs")
    sign_card(made, private)
    monkeypatch.setitem(__import__("sys").modules, "cryptography.hazmat.primitives", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'lit-dpret\[sign\]'"):
        verify_chain(made, public_key=public)
    result = verify_chain(made)
    assert not result.failed and "pip install 'lit-dpret[sign]'" in result.not_checked[-1].text
