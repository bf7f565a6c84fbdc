"""`task=inversion`: measure how much an encoder's embeddings reveal of their texts."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_dpret.audit.attacks.decoder import (
    How,
    PrefixDecoder,
    Words,
    fit_decoder,
    load_language_model,
    losses_of,
    new_language_model,
)
from lit_dpret.audit.attacks.inversion import align, embedding_gain, identify, recovered, shuffled_order
from lit_dpret.callbacks import ProgressLine
from lit_dpret.datamodules.identity import data_facts
from lit_dpret.datamodules.readers import RecordFile
from lit_dpret.encoders import Side, TextEncoder, load_towers
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.files import write_whole
from lit_dpret.settings import Count, Least, Natural, Settings
from lit_dpret.synthesis.textsim.words import need
from lit_dpret.tasks.parts import Parts, check_run_dir
from lit_dpret.tasks.ranking import embedded_texts
from lit_dpret.tasks.stages import Stages, settings_fingerprint
from lit_dpret.tasks.uncovered import Owner, model_of, refuse_training_data, require_owner, tell_attack
from lit_dpret.texts import normalise

Arm = Literal["none", "shuffled", "own"]
LOSSES = "losses.pt"
_LABELS: dict[Arm, str] = {
    "none": "without embeddings", "shuffled": "with shuffled embeddings", "own": "with embeddings"
}  # fmt: skip


@dataclass(kw_only=True)
class Inversion(Settings):
    """Three attacks on embeddings: a probe with its control, naming a candidate, and reconstruction."""

    encoder: str | Path
    whose: Owner | None = None
    texts: str | Path | None = None
    split: str = "test"
    side: Side = "query"
    known: Annotated[int, Least(20)] = 4000
    attacked: Annotated[int, Least(20)] = 500
    language_model: str | Path | None = None
    how: How = "key_value"
    places: Count = 1
    max_tokens: Annotated[int, Least(2)] = 32
    steps: Count = 1000
    batch_size: Count = 64
    lr: float | None = None
    candidates: Annotated[int, Least(2)] = 100
    samples: Natural = 0
    attacker_encoder: str | Path | None = None
    confidence: float = 0.95
    device: str = "cpu"
    min_free_mb: float = 500

    def __post_init__(self) -> None:
        super().__post_init__()
        require_owner(self.whose, "the numbers are about these texts")
        if self.candidates > self.attacked:
            raise ConfigurationError(
                f"task.candidates={self.candidates} exceeds task.attacked={self.attacked}. Lower it, or raise "
                "task.attacked."
            )
        if self.lr is not None and not self.lr > 0:
            raise ConfigurationError(f"task.lr={self.lr} must be above 0.")
        if self.samples > self.attacked:
            raise ConfigurationError(f"task.samples={self.samples} exceeds task.attacked={self.attacked}. Lower it.")
        if self.samples and self.whose != "public":
            raise ConfigurationError(f"task.samples={self.samples} would print private texts. Set it to 0.")

    def run(self, parts: Parts) -> dict[str, float]:
        """Write ``inversion.json`` and ``.md``; ``internal_inversion`` for private texts; return the scores."""
        check_run_dir(parts.run_dir, min_free_mb=self.min_free_mb)
        need("sacrebleu")  # fails before any wasted encoding or training
        tower = self._tower(self.encoder)
        attacker = None if self.attacker_encoder is None else self._tower(self.attacker_encoder)
        known, attacked = self._drawn(parts)
        stages = Stages(parts.run_dir, resume=parts.resume, fingerprint=self._fingerprint(parts, known, attacked))
        embeddings = [self._encode(tower, part) for part in (known, attacked)]
        facts: dict[str, Any] = {
            "internal": self.whose == "private",
            "encoder": Path(str(self.encoder)).name,
            **data_facts(
                self.texts or parts.make_datamodule(), {str(i): text for i, text in enumerate([*known, *attacked])}
            ),
            "texts": {"whose": self.whose, "side": self.side, "known": len(known), "attacked": len(attacked)},
            "language_model": "a small new GPT-2" if self.language_model is None else Path(self.language_model).name,
            "how": self.how,
            "steps": self.steps,
            "confidence": self.confidence,
        }
        facts["ranking"] = self._ranking(attacker, known, attacked, embeddings)
        facts |= self._trained(parts, stages, tower, known, attacked, embeddings)
        tell_attack(parts, "inversion", f"Inversion of embeddings by {facts['encoder']}", facts, of="texts")
        return {
            "bits_per_token": facts["probe"]["bits"],
            "identified": (facts["ranking"]["mapped"] or facts["ranking"]["direct"])["value"],
            "exact": facts["inverter"]["own"]["exact"],
            "token_f1": facts["inverter"]["own"]["token_f1"],
        }

    # -- texts and embeddings ------------------------------------------------------------------

    def _tower(self, source: str | Path) -> TextEncoder:
        towers = load_towers(model_of(source))
        return towers.query_encoder if self.side == "query" else towers.passage_encoder

    def _drawn(self, parts: Parts) -> tuple[list[str], list[str]]:
        """Return the known and the attacked texts, all distinct."""
        once = {normalise(text): text for text in self._read(parts) if text.strip()}
        found = [once[key] for key in sorted(once)]
        if len(found) < self.known + self.attacked:
            raise DataError(
                f"There are {len(found)} different texts, fewer than task.known={self.known} and "
                f"task.attacked={self.attacked} together. Lower one of them, or choose another task.split."
            )
        order = np.random.default_rng(parts.seed).permutation(len(found))
        chosen = [found[place] for place in order[: self.known + self.attacked]]
        return chosen[: self.known], chosen[self.known :]

    def _read(self, parts: Parts) -> list[str]:
        if self.texts is not None:
            file = RecordFile(Path(self.texts), knob="task.texts")
            return [file.text(number, record, "text") for number, record in file]
        data = parts.read_data()
        collection = data.collection
        public = self.split == "passages" and data.has_public_passages  # otherwise they are rows of the private records
        if self.whose == "public" and not public:
            refuse_training_data(data, self.encoder, knob="task.whose")
        if self.split == "passages":
            return list(collection.passages.values())
        return [collection.queries[query] for query in collection.split(self.split)]

    def _encode(self, tower: TextEncoder, texts: Sequence[str]) -> Tensor:
        return embedded_texts(tower, texts, self.side, batch_size=self.batch_size, device=self.device)

    def _fingerprint(self, parts: Parts, known: Sequence[str], attacked: Sequence[str]) -> str:
        texts = [*known, *attacked]
        return settings_fingerprint(self, but=("confidence", "candidates"), seed=parts.seed, texts_in_order=texts)

    # -- the attacks ---------------------------------------------------------------------------

    def _ranking(
        self, attacker: TextEncoder | None, known: Sequence[str], attacked: Sequence[str], embeddings: Sequence[Tensor]
    ) -> dict[str, Any]:
        """Name texts with the attacker's encoder unchanged, and with the two spaces aligned on the known texts."""
        seen: list[NDArray[np.float64]] = [part.double().numpy() for part in embeddings]
        score = partial(identify, candidates=self.candidates, confidence=self.confidence)
        if attacker is None:
            return {
                "attacker": "the attacked encoder itself",
                "candidates": self.candidates,
                "direct": score(seen[1], seen[1]).to_dict(),
                "mapped": None,
            }
        guesses = self._encode(attacker, attacked).double().numpy()
        learned = align(seen[0], self._encode(attacker, known).double().numpy())
        return {
            "attacker": Path(str(self.attacker_encoder)).name,
            "candidates": self.candidates,
            "direct": score(seen[1], guesses).to_dict() if guesses.shape == seen[1].shape else None,
            "mapped": score(seen[1] @ learned, guesses).to_dict(),
        }

    def _trained(
        self, parts: Parts, stages: Stages, tower: TextEncoder, known: Sequence[str], attacked: Sequence[str],
        embeddings: Sequence[Tensor],
    ) -> dict[str, Any]:  # fmt: skip
        make, words = self._maker(parts, tower, known, embeddings[0].shape[1])
        ids = [words.ids(part) for part in (known, attacked)]
        given: dict[Arm, list[Tensor | None]] = {"none": [None, None], "own": [*embeddings]}
        given["shuffled"] = [part[torch.from_numpy(shuffled_order(len(part), seed=parts.seed))] for part in embeddings]
        losses: dict[str, Tensor] = {}
        inverter: dict[str, Any] = {}
        arms: dict[str, Any] = {}
        for arm in given:
            write = partial(self._written, words=words, tower=tower, attacked=attacked)
            work = partial(self._arm, arm=arm, make=make, write=write, ids=ids)
            result = stages.run(arm, lambda folder, _, w=work, g=given[arm]: w(folder, given=g, seed=parts.seed))  # type: ignore[misc]
            losses[arm] = torch.load(parts.run_dir / arm / LOSSES, weights_only=True)
            inverter[arm] = result["written"]
            arms[arm] = result
        counts = torch.tensor([float(len(row)) for row in ids[1]])
        probe = embedding_gain(losses["own"], losses["shuffled"], counts, confidence=self.confidence)
        without = float(torch.exp(losses["none"].sum() / counts.sum()))
        return {
            "probe": {
                **probe.to_dict(), "perplexity_without": without, "perplexity_untrained": arms["none"]["untrained"]
            },
            "inverter": {arm: inverter[arm] for arm in ("own", "shuffled")},
            "curves": {arm: found["losses"] for arm, found in arms.items()},
            "samples": [
                {"text": text, "own": own, "shuffled": other}
                for text, own, other in zip(attacked, arms["own"]["samples"], arms["shuffled"]["samples"], strict=False)
            ],
        }  # fmt: skip

    def _maker(self, parts: Parts, tower: TextEncoder, known: Sequence[str], dim: int) -> tuple[Any, Words]:
        """Return a function that builds the same decoder for every arm, and the tokens that it writes."""
        if self.language_model is None:
            words = Words(tower.tokenizer, self.max_tokens, only_of=known)
        else:
            words = Words(load_language_model(self.language_model)[1], self.max_tokens)

        def make(arm: str) -> PrefixDecoder:
            torch.manual_seed(parts.seed)
            if self.language_model is None:
                model = new_language_model(words.size, max_tokens=self.max_tokens, places=self.places, seed=parts.seed)
            else:
                model = load_language_model(self.language_model)[0]
            given = None if arm == "none" else dim
            return PrefixDecoder(model, dim=given, end=words.end, how=self.how, places=self.places)

        return make, words

    def _arm(
        self, folder: Path, *, arm: Arm, make: Any, write: Any, ids: Sequence[list[list[int]]],
        given: Sequence[Tensor | None], seed: int,
    ) -> dict[str, Any]:  # fmt: skip
        """Train and evaluate one language model; keep only losses and scores, since the model knows the texts."""
        decoder = make(arm).to(self.device)
        lr = self.lr or (1e-3 if self.language_model is None else 5e-5)
        begun, counts = losses_of(decoder, ids[1], given[1], batch_size=self.batch_size)
        with ProgressLine(f"language model {_LABELS[arm]}") as progress:
            seen = fit_decoder(
                decoder, ids[0], given[0], steps=self.steps, batch_size=self.batch_size, lr=lr, seed=seed,
                progress=progress,
            )  # fmt: skip
        sums, _ = losses_of(decoder, ids[1], given[1], batch_size=self.batch_size)
        content = io.BytesIO()
        torch.save(sums, content)
        write_whole(folder / LOSSES, content.getvalue(), owner_only=True)
        facts = {"losses": _thinned(seen), "untrained": float(torch.exp(begun.sum() / counts.sum()))}
        if arm == "none":
            return {**facts, "written": None, "samples": []}
        scores, written = write(decoder)
        return {**facts, "written": scores, "samples": written[: self.samples]}

    def _written(
        self, decoder: PrefixDecoder, *, words: Words, tower: TextEncoder, attacked: Sequence[str]
    ) -> tuple[dict[str, Any], list[str]]:
        """Return scores of the decoder's texts for the attacked texts' own embeddings, and the decoder's texts."""
        written: list[str] = []
        embeddings = self._encode(tower, attacked)
        for start in range(0, len(attacked), self.batch_size):
            rows = embeddings[start : start + self.batch_size].to(self.device)
            written += [words.text(ids) for ids in decoder.write(rows, max_tokens=self.max_tokens)]
        again = self._encode(tower, [text or " " for text in written])
        cosines = torch.nn.functional.cosine_similarity(again, embeddings).tolist()
        return asdict(recovered(written, list(attacked), cosines=cosines)), written


def _thinned(losses: Sequence[float], points: int = 100) -> list[tuple[int, float]]:
    """Return at most ``points`` means over blocks of equal length, each with the last step of its block."""
    every = -(-len(losses) // points)
    starts = range(0, len(losses), every)
    return [(min(at + every, len(losses)), float(np.mean(losses[at : at + every]))) for at in starts]
