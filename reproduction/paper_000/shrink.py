"""A smaller generator made from a public one: some of its layers, trained again by the complete one.

It copies layers of the larger generator and is trained on what that writes for public passages ("shrink and fine-tune":
Shleifer and Rush, 2020, 2010.13002; sequence-level distillation: Kim and Rush, 2016, 1606.07947). It uses no private
query, so the result is as public as the passages and weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel

from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.modules.families import padded
from lit_dpret.modules.generator_folder import (
    GeneratorContract,
    GeneratorModel,
    TextCodec,
    refuse_tuned_prompt,
    save_generator,
)
from lit_dpret.modules.language_models import load_language_model, load_tokenizer
from lit_dpret.settings import require_whole
from lit_dpret.synthesis.groups import canonical_groups, draw_group
from lit_dpret.synthesis.sampler import Decoding

_IGNORED = -100
Ids = list[int]


@dataclass(frozen=True, kw_only=True)
class SmallerGenerator:
    """A generator with some of the layers of a public one, trained on what that one writes for public passages."""

    teacher: str | Path  # hub name, folder or ``public_t5``: a T5 trained only on public data
    layers: int = 1  # encoder layers and decoder layers that are kept, spread evenly over the teacher's
    # Hidden units of each feed-forward layer that are kept, those with the largest weights; null for all.
    feed_forward: int | None = None
    epochs: int = 2  # passes over the pairs
    batch: int = 32  # pairs in a step
    lr: float = 2e-3  # peak learning rate of AdamW, which falls linearly to zero
    top_p: float = 0.8  # nucleus of the teacher's queries

    def __post_init__(self) -> None:
        require_whole("task.shrink", self, 1, "layers", "epochs", "batch")

    def write(
        self, passages: Mapping[str, str], folder: Path, *, contract: GeneratorContract, seed: int = 0,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Path:  # fmt: skip
        """Train the generator and write it to ``folder``, without a privacy card, since nothing private went in.

        The teacher draws a query for each of ``passages``, public texts by id; ``progress`` gets (done, total).
        """
        if not passages:
            raise ConfigurationError("The smaller generator learns from passages, but there are none.")
        refuse_tuned_prompt(self.teacher)
        codec = TextCodec(load_tokenizer(self.teacher), replace(contract, virtual_ids=()))
        large = load_language_model(self.teacher).eval()
        small = _cut(large, self.layers, self.feed_forward)
        pairs = self._taught(GeneratorModel(large, codec, Path(self.teacher)), passages, seed, progress)
        self._train(small, codec, pairs, seed, progress)
        return save_generator(folder, small.eval(), codec)

    def _taught(
        self, teacher: GeneratorModel, passages: Mapping[str, str], seed: int, progress: Callable[[int, int], None]
    ) -> list[tuple[Ids, Ids]]:
        """Return the token ids of each passage and of the query that the teacher draws for it."""
        decoding = Decoding(
            top_p=self.top_p, temperature=1.0, top_k=None, max_new_tokens=teacher.contract.max_query_length,
            min_new_tokens=1,
        )  # fmt: skip
        pairs: list[tuple[Ids, Ids]] = []
        with torch.no_grad():
            for group in canonical_groups(teacher.codec, passages, 64):
                drawn = draw_group(teacher, {name: passages[name] for name in group}, 1, seed, decoding)
                texts = teacher.codec.passages([passages[query.passage_id] for query in drawn])
                pairs += zip(texts, teacher.codec.queries([query.text for query in drawn]), strict=True)
                progress(len(pairs), 2 * len(passages))
        return pairs

    def _train(
        self, model: PreTrainedModel, codec: TextCodec, pairs: Sequence[tuple[Ids, Ids]], seed: int,
        progress: Callable[[int, int], None],
    ) -> None:  # fmt: skip
        pad = int(codec.tokenizer.pad_token_id)
        steps = self.epochs * -(-len(pairs) // self.batch)
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.lr, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / steps)
        order, done = torch.Generator().manual_seed(seed), 0
        model.train()
        for _ in range(self.epochs):
            places = torch.randperm(len(pairs), generator=order).tolist()
            for start in range(0, len(places), self.batch):
                rows = [pairs[place] for place in places[start : start + self.batch]]
                loss = model(
                    input_ids=padded([passage for passage, _ in rows], pad),
                    attention_mask=padded([[1] * len(passage) for passage, _ in rows], 0),
                    labels=padded([query for _, query in rows], _IGNORED),
                ).loss
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                done += 1
                progress(len(pairs) + round(len(pairs) * done / steps), 2 * len(pairs))


def spread(layers: int, kept: int) -> list[int]:
    """Return which of ``layers`` layers are kept: as far apart as possible, and including the last one.

    Example:
        >>> spread(12, 4), spread(2, 1)
        ([2, 5, 8, 11], [1])
    """
    return [round((i + 1) * layers / kept) - 1 for i in range(kept)]


def _cut(large: PreTrainedModel, layers: int, feed_forward: int | None) -> PreTrainedModel:
    """Return a T5 with some of the layers and hidden units of another, including their weights."""
    config = large.config
    if config.model_type != "t5":
        raise UnsupportedModelError(
            f"A smaller generator is cut out of a T5, but task.shrink.teacher is a {config.model_type}."
        )
    depths = {"encoder": config.num_layers, "decoder": config.num_decoder_layers}
    width = config.d_ff if feed_forward is None else feed_forward
    if layers > min(depths.values()) or not 1 <= width <= config.d_ff:
        raise ConfigurationError(
            f"task.shrink.layers={layers}, feed_forward={width} must be at most the teacher's {min(depths.values())} "
            f"layers of {config.d_ff} hidden units."
        )
    facts = {**config.to_dict(), "num_layers": layers, "num_decoder_layers": layers, "d_ff": width}
    small: PreTrainedModel = AutoModelForSeq2SeqLM.from_config(type(config)(**facts))
    weights, found = large.state_dict(), {}
    for name, value in small.state_dict().items():
        source = name
        for side, depth in depths.items():
            for i, layer in enumerate(spread(depth, layers)):
                if name.startswith(f"{side}.block.{i}."):
                    source = name.replace(f"{side}.block.{i}.", f"{side}.block.{layer}.", 1)
        if "relative_attention_bias" in name:  # T5 has it only in the first layer
            source = name
        found[name] = _narrowed(weights, source, value.shape)
    small.load_state_dict(found)
    return small


def _narrowed(weights: Mapping[str, torch.Tensor], name: str, shape: torch.Size) -> torch.Tensor:
    """Return a weight of the teacher, without the hidden units that are not kept."""
    weight = weights[name]
    for axis, (have, want) in enumerate(zip(weight.shape, shape, strict=True)):
        if have != want:
            outer = weights[name.replace(".wi.", ".wo.")]  # (width, hidden units): the influence of each unit
            best = outer.norm(dim=0).topk(want).indices.sort().values
            weight = weight.index_select(axis, best)
    return weight
