"""Train a small public cross-encoder, the teacher of `made_labelled` in `experiment=ablate_eps3`.

    pip install "lit-dpret[quickstart,hf]" accelerate
    python scripts/public_cross_encoder.py --pairs FOLDER FILE --out runs/cross_encoder

Use it on machines without a hub. With a hub, prefer a cross-encoder that was trained on a hundred times as many pairs
(`task.teacher=cross-encoder/ms-marco-MiniLM-L6-v2`). Pairs are public questions with their passages: a folder in BEIR's
layout, whose train split is read, or a file in the format of `datamodule.pairs`. Negatives are passages that the
encoder ranks near the question but that do not answer it. No private query may be among the pairs. Nothing here checks
that; `task.teacher` declares it.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.cross_encoder import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.losses import ListNetLoss

from lit_dpret.datamodules import PairsDataModule
from lit_dpret.encoders.backbones import resolve_folder
from lit_dpret.errors import ConfigurationError

# The loss compares with the softmax of the labels; this far from 0, it selects the right passage alone. Labels of 1
# and 0 would teach margins of at most 1.
_RIGHT = 10.0


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pairs", type=Path, nargs="+", required=True, help="folders in BEIR's layout, or files of pairs"
    )
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write")
    parser.add_argument("--encoder", default="minilm", help="encoder to start from, and to find negatives with")
    parser.add_argument(
        "--limit", type=int, default=10_000, help="at most this many questions per folder, drawn at random"
    )
    parser.add_argument("--negatives", type=int, default=3, help="negatives per question")
    parser.add_argument("--depth", type=int, default=30, help="draw negatives from this many nearest passages")
    parser.add_argument("--max-length", type=int, default=80, help="tokens of a pair that are read")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def questions(source: Path, encoder: SentenceTransformer, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield questions, each with a right passage and some wrong ones that are near it."""
    coins = random.Random(args.seed)
    data = PairsDataModule(**{"folder" if source.is_dir() else "pairs": source}, passages_are_public=True)
    data.setup("fit")
    asked, judged = data.evaluation_set("train")
    right = {name: {p for p, grade in grades.items() if grade > 0} for name, grades in judged.items()}
    chosen = sorted(name for name in asked if right[name])
    chosen = coins.sample(chosen, min(args.limit, len(chosen)))
    passages = dict(sorted(data.public_passages().items()))
    names = list(passages)
    embedded = encoder.encode(list(passages.values()), convert_to_tensor=True, normalize_embeddings=True)
    for start in range(0, len(chosen), 1024):
        part = chosen[start : start + 1024]
        found = encoder.encode([asked[name] for name in part], convert_to_tensor=True, normalize_embeddings=True)
        nearest = (found @ embedded.T).topk(min(args.depth, len(names))).indices.tolist()
        for name, places in zip(part, nearest, strict=True):
            wrong = [names[i] for i in places if names[i] not in right[name]]
            if len(wrong) < args.negatives:
                continue
            listed = [sorted(right[name])[0], *coins.sample(wrong, args.negatives)]
            labels = [_RIGHT] + [0.0] * args.negatives
            yield {"query": asked[name], "docs": [passages[doc] for doc in listed], "labels": labels}


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    torch.manual_seed(args.seed)
    source = str(resolve_folder(args.encoder))
    encoder = SentenceTransformer(source, device="cpu")
    encoder.max_seq_length = args.max_length
    rows = [row for pairs in args.pairs for row in questions(pairs, encoder, args)]
    random.Random(args.seed).shuffle(rows)
    if not rows:
        raise ConfigurationError(
            f"--pairs {' '.join(map(str, args.pairs))}: no question has --negatives={args.negatives} passages near it "
            "that do not answer it. Give more pairs, or lower --negatives."
        )
    print(f"{len(rows)} questions")
    model = CrossEncoder(source, num_labels=1, max_length=args.max_length)
    settings = CrossEncoderTrainingArguments(
        output_dir=str(args.out) + ".work", num_train_epochs=args.epochs, per_device_train_batch_size=16,
        learning_rate=args.lr, warmup_steps=50, bf16=True, use_cpu=not torch.cuda.is_available(), save_strategy="no",
        logging_steps=50, report_to="none", seed=args.seed,
    )  # fmt: skip
    CrossEncoderTrainer(
        model=model, args=settings, train_dataset=Dataset.from_list(rows), loss=ListNetLoss(model)
    ).train()
    model.save_pretrained(str(args.out))


if __name__ == "__main__":
    main()
