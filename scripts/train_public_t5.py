"""Train the small public T5 that ships in `lit_dpret/assets/public_t5`.

    python scripts/train_public_t5.py --data ../shared/data --out public_t5 --minutes 30

The model learns to write a question about a passage, from text whose licence allows publishing the weights.
Private fine-tuning starts from this prior. Training uses no private query, and publishes a hash of every
question used so that anyone can check (`lit_dpret.assets.overlap`). To resume a killed run from its last
checkpoint, repeat the same command.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
for _path in (str(ROOT), str(ROOT / "scripts")):
    if _path not in sys.path:
        sys.path.insert(0, _path)

import torch  # noqa: E402
from public_t5 import sources, tasks  # noqa: E402
from public_t5.measure import export, held_out, measure, token_loss, write_card  # noqa: E402
from public_t5.training import MAX_TARGET, Trainer, build_model, encode, log_frequencies, write_circuits  # noqa: E402
from public_t5.vocabulary import fast_tokenizer, train_vocabulary  # noqa: E402
from transformers import T5ForConditionalGeneration  # noqa: E402

from lit_dpret.assets.overlap import HASH_FILE, write_hashes  # noqa: E402
from lit_dpret.errors import ConfigurationError, LitDpretError  # noqa: E402

# The share of each source in a draw; sources with few texts have a small share, so that none is repeated too often.
SHARES = {
    "squad": 1.0, "squad-unanswerable": 0.25, "squad-sentences": 1.0, "usagov": 0.3, "medquad": 0.45,
    "novels": 0.08, "eltec": 0.07, "state_union": 0.05, "inaugural": 0.01,
}  # fmt: skip


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with squad_dev, medquad, real_queries, pretrain_text"
    )
    parser.add_argument("--nqg", type=Path, help="data/processed of github.com/xinyadu/nqg (more SQuAD pairs)")
    parser.add_argument(
        "--usagov", type=Path, help="usagov_md of github.com/GSA-TTS/10x-usagov-wrangler (usa.gov pages)"
    )
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write")
    parser.add_argument("--work", type=Path, help="folder for checkpoint, vocabulary and log; default <out>.work")
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="training time; the learning rate reaches zero at its end"
    )
    parser.add_argument(
        "--export-every", type=float, default=15.0, help="minutes between exports; the first comes early"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--salient", type=int, default=70_000, help="number of pseudo-questions to prepare")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--d-model", type=int, default=192)
    parser.add_argument("--d-ff", type=int, default=512)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2, help="layers of the encoder, and of the decoder")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--embedding-factor", type=float, default=2.0)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    chosen = parser.parse_args(argv)
    if chosen.minutes <= 0:
        raise ConfigurationError(f"--minutes {chosen.minutes} leaves no time to train: give a positive number")
    if chosen.d_model % chosen.heads:
        raise ConfigurationError(
            f"--d-model {chosen.d_model} is not divisible by --heads {chosen.heads}: choose a divisor"
        )
    chosen.work = chosen.work or chosen.out.with_name(chosen.out.name + ".work")
    return chosen


def gather(chosen: argparse.Namespace) -> tuple[tasks.Mixture, dict[str, list[sources.Pair]]]:
    """Return the training mixture, and the held-out pairs: the dev splits of SQuAD (articles) and MedQuAD (foci)."""
    pairs = sources.squad(chosen.data, ("train", "test")) + sources.medquad(chosen.data, ("train", "test"))
    prose = sources.prose(chosen.data)
    for name in ("squad", "medquad"):
        prose[name] = sorted({pair.passage for pair in pairs if pair.source == name})
    if chosen.nqg:
        pairs += sources.squad_sentences(chosen.nqg)
    if chosen.usagov:
        more, prose["usagov"] = sources.usagov(chosen.usagov)
        pairs += more
    mixture = tasks.Mixture(pairs, prose, sources.questions_alone(chosen.data), SHARES, chosen.salient, chosen.seed)
    answered = [p for p in sources.squad(chosen.data, ("dev",)) if p.source == "squad"]
    return mixture, {"squad": answered, "medquad": sources.medquad(chosen.data, ("dev",))}


def vocabulary_lines(mixture: tasks.Mixture, limit: int = 6_000) -> list[str]:
    """Return text for the vocabulary: every real question twice, and up to `limit` passages of each source.

    The small sources on health, law and money are repeated, so that their words become pieces.
    """
    questions = [pair.question for pair in mixture.pairs] + mixture.questions_alone
    lines = questions * 2
    for name, texts in mixture.prose.items():
        chosen = texts[:: max(1, len(texts) // limit)][:limit]
        lines += chosen * (4 if name in ("usagov", "state_union") else 1)
    return [line for line in map(sources.clean, lines) if line]


def main(argv: list[str] | None = None) -> int:
    chosen = arguments(argv)
    torch.set_num_threads(chosen.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    chosen.work.mkdir(parents=True, exist_ok=True)
    journal = (chosen.work / "log.txt").open("a", encoding="utf-8")

    def log(line: str) -> None:
        line = f"{time.strftime('%H:%M:%S')} {line}"
        print(line, flush=True)
        print(line, file=journal, flush=True)

    mixture, held = gather(chosen)
    passages = sum(map(len, mixture.prose.values()))
    log(f"{len(mixture.pairs)} pairs, {len(mixture.questions_alone)} questions alone, {passages} passages")
    vocabulary = chosen.work / "spiece.model"
    if not vocabulary.is_file():
        train_vocabulary(vocabulary_lines(mixture), vocabulary, chosen.vocabulary, chosen.threads)
        log(f"vocabulary written to {vocabulary}")
    tokenizer = fast_tokenizer(vocabulary)

    torch.manual_seed(chosen.seed)
    shape = {"d_model": chosen.d_model, "d_ff": chosen.d_ff, "heads": chosen.heads, "layers": chosen.layers}
    model = build_model(vocabulary=chosen.vocabulary, **shape)
    counted = encode(tokenizer, mixture.draw(10_000, 0.0, random.Random(chosen.seed)), 8, MAX_TARGET)
    write_circuits(model, log_frequencies([target for _, target in counted], chosen.vocabulary))
    settings: dict[str, Any] = {
        **shape, "vocabulary": chosen.vocabulary, "seed": chosen.seed, "learning_rate": chosen.learning_rate,
        "embedding_factor": chosen.embedding_factor, "batch_tokens": chosen.batch_tokens,
    }  # fmt: skip
    examples = {name: held_out(pairs, 400) for name, pairs in held.items()}
    exported = [-1.0]

    def after_checkpoint(done: float) -> None:
        losses = {name: token_loss(model, tokenizer, rows[:150]) for name, rows in examples.items()}
        log("held-out loss " + " ".join(f"{name} {loss:.3f}" for name, loss in losses.items()))
        elapsed = trainer.progress.elapsed / 60
        if done >= 1.0 or exported[0] < 0 or elapsed - exported[0] >= chosen.export_every:
            exported[0] = elapsed
            export(model, tokenizer, vocabulary, chosen.out)
            count = write_hashes(mixture.questions(), chosen.out / HASH_FILE)
            log(f"exported to {chosen.out} ({count} question hashes)")

    trainer = Trainer(
        model, tokenizer, mixture, chosen.minutes * 60, chosen.work / "checkpoint.pt", seed=chosen.seed,
        learning_rate=chosen.learning_rate, embedding_factor=chosen.embedding_factor,
        batch_tokens=chosen.batch_tokens, on_checkpoint=after_checkpoint,
    )  # fmt: skip
    log(f"{sum(p.numel() for p in model.parameters())} parameters, {chosen.threads} threads")
    if trainer.resume(settings):
        log(f"resumed after {trainer.progress.elapsed / 60:.1f} of {chosen.minutes} minutes")
    trainer.run(settings, log)

    final = T5ForConditionalGeneration.from_pretrained(chosen.out)
    state = trainer.progress
    facts = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "settings": settings,
        "minutes": state.elapsed / 60,
        "steps": state.steps,
        "examples": state.examples,
        "source_tokens": state.source_tokens,
        "target_tokens": state.target_tokens,
        "tokens_per_second": (state.source_tokens + state.target_tokens) / state.elapsed,
        "questions_hashed": len({*map(sources.clean, mixture.questions())}),
        "held_out": {name: asdict(measure(final, tokenizer, rows)) for name, rows in examples.items()},
    }
    (chosen.work / "facts.json").write_text(json.dumps(facts, indent=1))
    log(f"measured: {chosen.work / 'facts.json'}; model card: {write_card(chosen.out, facts)}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LitDpretError as error:
        print(f"{error}", file=sys.stderr)
        sys.exit(2)
