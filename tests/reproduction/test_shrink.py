from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_generator import SHAPE, WORDS, generator

from lit_dpret.cards.card import CARD_NAME
from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.modules.generator_folder import GeneratorContract, GeneratorModel, load_generator
from lit_dpret.modules.language_models import load_language_model
from lit_dpret.synthesis.groups import draw_group
from lit_dpret.synthesis.sampler import Decoding
from reproduction.paper_000.shrink import SmallerGenerator, spread

CONTRACT = GeneratorContract(max_passage_length=12, max_query_length=8)
PASSAGES = {f"p{i}": " ".join(WORDS[i : i + 5]) for i in range(16)}


def shrink(
    teacher: Path, folder: Path, passages: dict[str, str] = PASSAGES, *, progress: Any = lambda *_: None, **how: Any
) -> Path:
    return SmallerGenerator(teacher=teacher, **how).write(passages, folder, contract=CONTRACT, progress=progress)


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    generator(config={**SHAPE, "num_layers": 3, "num_decoder_layers": 2}).save_model(tmp_path / "teacher")
    return tmp_path / "teacher"


@pytest.mark.costly
def test_the_smaller_generator_has_fewer_layers_and_units_and_writes_queries(teacher: Path, tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    folder = shrink(
        teacher, tmp_path / "small", layers=1, feed_forward=8, epochs=1, batch=8,
        progress=lambda done, total: steps.append((done, total)),
    )  # fmt: skip
    small = load_generator(folder)
    assert small.model.config.num_layers == small.model.config.num_decoder_layers == 1
    assert small.model.config.d_ff == 8 and small.contract == CONTRACT
    assert small.model.num_parameters() < load_language_model(teacher).num_parameters()
    assert steps[-1] == (32, 32) and steps == sorted(steps)
    again = shrink(teacher, tmp_path / "again", layers=1, feed_forward=8, epochs=1, batch=8)
    weights = load_language_model(again).state_dict()
    assert all(torch.equal(weights[name], value) for name, value in small.model.state_dict().items()), "the same seed"
    assert not (folder / CARD_NAME).exists(), "nothing private went in, and nothing is claimed"


def test_untrained_layers_are_those_of_the_teacher_and_narrow_ones_keep_the_units_that_say_most(
    teacher: Path, tmp_path: Path
) -> None:
    folder = shrink(teacher, tmp_path / "small", layers=2, feed_forward=8, epochs=1, batch=16, lr=1e-12)
    large, small = load_language_model(teacher).state_dict(), load_language_model(folder).state_dict()
    close = torch.testing.assert_close
    for mine, theirs in ((0, spread(3, 2)[0]), (1, spread(3, 2)[1])):
        name = "encoder.block.{}.layer.0.SelfAttention.q.weight"
        close(small[name.format(mine)], large[name.format(theirs)])
        inner, outer = (f"encoder.block.{{}}.layer.1.DenseReluDense.{side}.weight" for side in ("wi", "wo"))
        best = large[outer.format(theirs)].norm(dim=0).topk(8).indices.sort().values
        close(small[outer.format(mine)], large[outer.format(theirs)][:, best])
        close(small[inner.format(mine)], large[inner.format(theirs)][best])


@pytest.mark.costly
def test_training_brings_the_smaller_generator_nearer_to_what_the_teacher_writes(teacher: Path, tmp_path: Path) -> None:
    losses = []
    for lr in (1e-12, 1e-2):
        folder = shrink(teacher, tmp_path / f"lr{lr}", epochs=8, batch=8, lr=lr, top_p=0.1)
        losses.append(_loss(load_generator(folder), load_generator(teacher)))
    assert losses[1] < 0.9 * losses[0]


def _loss(small: GeneratorModel, teacher: GeneratorModel) -> float:
    """Of what the teacher writes, in nats per token, summed over passages."""
    decoding = Decoding(top_p=0.1, temperature=1.0, top_k=None, max_new_tokens=8, min_new_tokens=1)
    total = 0.0
    for query in draw_group(teacher, PASSAGES, 1, 0, decoding):
        ids = torch.tensor(small.codec.passages([PASSAGES[query.passage_id]]))
        labels = torch.tensor(small.codec.queries([query.text]))
        with torch.no_grad():
            total += float(small.model(input_ids=ids, labels=labels).loss)
    return total


def test_a_shape_that_is_not_smaller_no_passages_and_no_t5_are_refused(teacher: Path, tmp_path: Path) -> None:
    for changes, setting in (
        ({"layers": 0}, "task.shrink.layers=0"), ({"layers": 3}, "layers=3"), ({"feed_forward": 33}, "feed_forward=33"),
    ):  # fmt: skip
        with pytest.raises(ConfigurationError, match=setting):
            shrink(teacher, tmp_path / "small", **changes)
    with pytest.raises(ConfigurationError, match="passages"):
        shrink(teacher, tmp_path / "small", {})
    shape = {"model_type": "bart", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16,
             "decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2}  # fmt: skip
    generator(config=shape).save_model(tmp_path / "bart")
    with pytest.raises(UnsupportedModelError, match="bart"):
        shrink(tmp_path / "bart", tmp_path / "small")
