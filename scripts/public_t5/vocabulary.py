"""A custom sentencepiece vocabulary, and the same as a fast tokenizer that needs no hub.

Contract: pad 0, `</s>` 1, `<unk>` 2; NFKC and case folding are part of the tokenizer, so "Deductible" and
"deductible" are the same; unseen characters fall back to bytes; `</s>` is appended; the last ids are the
`SENTINELS` marks of span corruption; `generate_query:` is one piece.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from public_t5.tasks import PROMPT, SENTINELS

MODEL_MAX_LENGTH = 512


def train_vocabulary(lines: Iterable[str], path: Path, size: int, threads: int) -> None:
    partial = path.with_suffix(".partial")
    with partial.open("wb") as out:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=out, vocab_size=size - SENTINELS, model_type="unigram",
            byte_fallback=True, normalization_rule_name="nmt_nfkc_cf", character_coverage=0.9995, pad_id=0, eos_id=1,
            unk_id=2, bos_id=-1, user_defined_symbols=[PROMPT.strip()], num_threads=threads, minloglevel=1,
        )  # fmt: skip
    partial.replace(path)


def fast_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Return the fast tokenizer that splits text as the sentencepiece model at `path` does."""
    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined,unused-ignore]
    proto.ParseFromString(path.read_bytes())
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap),
            normalizers.Strip(left=True, right=True),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(replacement="▁", prepend_scheme="always")]
    )
    sentinels = [f"<extra_id_{i}>" for i in range(SENTINELS)]
    marks = ("<pad>", "</s>", "<unk>", *sentinels)
    tokenizer.add_special_tokens([AddedToken(mark, lstrip=True, normalized=False) for mark in marks])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        extra_special_tokens=sentinels, model_max_length=MODEL_MAX_LENGTH, clean_up_tokenization_spaces=False,
    )  # fmt: skip
