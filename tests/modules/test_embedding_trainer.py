"""Any net in one embedding space: images and texts, under every mode that its loss can have, and its folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import tiny_images as tiny
import torch
from configured import composed
from pair_stand_ins import clipped_sum, plan_of
from stand_ins import fit
from tiny_models import WORDS, tiny_bert, tiny_tokenizer
from tiny_tasks import no_parts
from torch import Tensor, nn

from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard
from lit_dpret.callbacks.doctor import examine
from lit_dpret.callbacks.planning import plan_run, refuse_unread_rows
from lit_dpret.cards.card import read_card
from lit_dpret.cli import build_parts
from lit_dpret.datamodules import ImagesDataModule, PairsDataModule
from lit_dpret.encoders import Contract, TextEncoder, load_towers
from lit_dpret.encoders.st_folder import save_sentence_transformer
from lit_dpret.encoders.vision import EmbeddingNet, ResNet18
from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.losses import InBatchSoftmaxLoss
from lit_dpret.modules import DualEncoder, EmbeddingTrainer, OptimizerSpec
from lit_dpret.modules.kept_state import Looks
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME
from lit_dpret.privacy.modes import DPSGD, BatchClip, LogitDP, NoPrivacy, PerExampleDuplicated, PublicPassages
from lit_dpret.tasks import Export

DP: dict[str, Any] = {"eps": 50.0, "delta": 1e-3, "unit": "pair", "noise_multiplier": 2.0}
MODES: dict[str, Any] = {
    "none": lambda: NoPrivacy(),
    "batch_clip": lambda **draws: BatchClip(max_grad_norm=0.1, **DP, **draws),
    "per_example_duplicated": lambda **draws: PerExampleDuplicated(max_grad_norm=0.1, **DP, **draws),
    "logit_dp": lambda **draws: LogitDP(max_logit_grad_norm=0.1, norms="jacobian", sub_batches=2, **DP | draws),
}


def cli_parts(start: Path) -> Any:
    return build_parts(composed("model=embedding_trainer", f"init_from={start}"))


def small_net() -> EmbeddingNet:
    torch.manual_seed(0)
    return EmbeddingNet(dim=4, channels=(4, 4))


def of_images(**settings: Any) -> EmbeddingTrainer:
    known: dict[str, Any] = {"privacy": NoPrivacy(), "optimizer": OptimizerSpec(lr=0.01), "net": small_net()}
    return EmbeddingTrainer(**known | settings)


def text_encoder() -> TextEncoder:
    backbone = tiny_bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return TextEncoder(backbone, tiny_tokenizer(), Contract(query_max_length=8, passage_max_length=10))


def of_texts(**settings: Any) -> EmbeddingTrainer:
    known: dict[str, Any] = {"privacy": NoPrivacy(), "optimizer": OptimizerSpec(lr=0.01), "encoder": text_encoder()}
    return EmbeddingTrainer(**known | settings)


def images(folder: Path) -> ImagesDataModule:
    settings: dict[str, Any] = {"expected_batch_size": 6, "physical_batch_size": 12, "sampling": "poisson"}
    return ImagesDataModule(source="cifar10", folder=folder, **settings)


def texts(folder: Path) -> PairsDataModule:
    path = folder / "pairs.tsv"
    lines = [f"{WORDS[i]} {WORDS[i + 1]}\t{WORDS[i + 1]} {WORDS[(i + 5) % 12]}" for i in range(12)]
    path.write_text("query\tpassage\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return PairsDataModule(pairs=path, expected_batch_size=6, physical_batch_size=12, sampling="poisson")


class MeanOfWords(nn.Module):
    """The mean over a text; ``padded`` also over what fills it up to the longest of the batch."""

    dim = 4

    def __init__(self, *, padded: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.padded = nn.Embedding(len(WORDS) + 1, 4), padded

    def forward(self, ids: Tensor) -> Tensor:
        counts = torch.ones_like(ids) if self.padded else (ids > 0).long()
        return (self.words(ids) * counts[:, :, None]).sum(1) / counts.sum(1, keepdim=True)


class CentresManyTexts(MeanOfWords):
    """Takes the mean of all texts away, where there are enough of them."""

    def forward(self, ids: Tensor) -> Tensor:
        found = super().forward(ids)
        return found if len(found) < 5 else found - found.mean(0).detach()


class ClipsGradients(MeanOfWords):
    """Shortens the gradient of all its embeddings together, after the first step."""

    trained_by: Any = None

    def forward(self, ids: Tensor) -> Tensor:
        found = super().forward(ids)
        if found.requires_grad and self.trained_by[0].trainer.global_step > 0:
            found.register_hook(lambda gradient: gradient * (0.1 / gradient.norm()).clamp(max=1.0))
        return found


def padded_views(rows: list[Any]) -> dict[str, Tensor]:
    def side(texts: list[str]) -> Tensor:
        ids = [torch.tensor([1 + WORDS.index(word) for word in text.split()]) for text in texts]
        return nn.utils.rnn.pad_sequence(ids, batch_first=True)

    return {"query": side([row.query for row in rows]), "passage": side([row.passage for row in rows])}


NETS = {"own": (MeanOfWords, False), "padded": (MeanOfWords, True), "centred": (CentresManyTexts, False)}


def test_a_gradient_that_is_rescaled_by_those_of_other_texts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = ClipsGradients(padded=False)
    module = EmbeddingTrainer(
        privacy=MODES["logit_dp"](noise_seed=3), optimizer=OptimizerSpec(lr=0.01), net=net, views=padded_views
    )
    net.trained_by = (module,)
    made = iter(range(1, 100))  # every batch is looked at
    monkeypatch.setattr(Looks, "due", lambda looks, _: bool(setattr(looks, "made", next(made)) or True))
    with pytest.raises(UnsupportedModelError) as raised:
        fit(tmp_path / "run", module, texts(tmp_path), steps=2)
    assert raised.value.trap == "T11"


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("mode", ["batch_clip", "per_example_duplicated", "logit_dp"])
def test_an_embedding_that_depends_on_other_texts_of_the_batch_is_refused(mode: str, net: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.tsv"
    lines = [f"{' '.join(WORDS[: 1 + i % 5])}\t{' '.join(WORDS[i % 3 : 9])}" for i in range(12)]
    path.write_text("query\tpassage\n" + "\n".join(lines) + "\n", encoding="utf-8")
    data = PairsDataModule(pairs=path, expected_batch_size=10, physical_batch_size=12, sampling="poisson")
    module = EmbeddingTrainer(
        privacy=MODES[mode](noise_seed=3),
        optimizer=OptimizerSpec(lr=0.01),
        net=NETS[net][0](padded=NETS[net][1]),
        views=padded_views,
    )
    if net == "own":
        fit(tmp_path / "run", module, data, steps=2)
        return
    with pytest.raises(UnsupportedModelError, match="embedding") as raised:
        fit(tmp_path / "run", module, data, steps=2)
    assert raised.value.trap == "T11"


@pytest.mark.costly
@pytest.mark.parametrize("mode", MODES)
def test_images_train_under_every_mode_and_the_card_says_which_promise_was_made(mode: str, tmp_path: Path) -> None:
    module = of_images(privacy=MODES[mode](unit="image") if mode == "logit_dp" else MODES[mode]())
    before = module.net.state_dict()["embedding.weight"].clone()
    fit(tmp_path / "run", module, images(tiny.parquet(tmp_path / "images")), steps=2,
        extra=[PrivacyCard(run_dir=tmp_path / "run")])  # fmt: skip
    assert not torch.equal(before, module.net.state_dict()["embedding.weight"])
    claim = read_card(tmp_path / "run")["claim"]
    assert claim["guarantee"] == ("none" if mode == "none" else "dp")
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    if mode == "logit_dp":
        text = (tmp_path / "run" / "privacy_card.md").read_text(encoding="utf-8").lower()
        assert "one image with every view made of it" in text and "passage" not in text


def test_texts_give_the_loss_of_the_dual_encoder_with_the_same_encoder(tmp_path: Path) -> None:
    rows = texts(tmp_path).pair_rows("train")
    dual = DualEncoder(privacy=NoPrivacy(), optimizer=OptimizerSpec(), encoder=text_encoder(), temperature=1.0)
    assert isinstance(dual.loss, InBatchSoftmaxLoss)
    found = of_texts().per_row_loss(of_texts().collate_rows(rows))
    torch.testing.assert_close(found, dual.per_row_loss(dual.collate_rows(rows)), rtol=1e-5, atol=1e-6)
    module = of_texts()
    batch = module.collate_rows([rows[0], rows[0], rows[1]])
    with torch.no_grad():
        scores = module.embed(batch["query"], "query") @ module.embed(batch["passage"], "passage").T
    pulls = module.pair_loss(3).coefficients(scores, batch["answers"])
    assert pulls[0, 1] == 0 and pulls[1, 0] == 0 and pulls[0, 2] > 0, "an answer is no negative"


def test_exact_norms_of_images_give_the_sum_of_brute_force(tmp_path: Path) -> None:
    units = images(tiny.parquet(tmp_path)).train_units()
    rows = [units.rows(unit)[0] for unit in range(5)]
    sums = []
    for norms in ("jacobian", "brute_force"):
        privacy = LogitDP(**DP | {"max_logit_grad_norm": 0.02, "norms": norms})
        module = of_images(privacy=privacy)
        batch = module.collate_rows(rows)
        sums.append(clipped_sum(module, plan_of(privacy, module, n_max=5), batch))
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-4, atol=1e-7)
    assert float(sums[0].norm()) > 0


class Normed(nn.Module):
    dim = 8

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 8), nn.BatchNorm1d(8))

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.net(images)
        return found


def test_batch_normalisation_is_refused_by_name_under_privacy_alone() -> None:
    assert isinstance(of_images(net=Normed()).net, Normed)
    for mode in MODES.keys() - {"none"}:
        with pytest.raises(UnsupportedModelError, match=r"net\.2 is a BatchNorm1d .* Replace it with GroupNorm"):
            of_images(privacy=MODES[mode](), net=Normed())


def test_a_net_starts_from_the_folder_of_an_earlier_run(tmp_path: Path) -> None:
    first = of_images()
    first.save_model(tmp_path / "model")
    torch.manual_seed(1)
    second = of_images(net=EmbeddingNet(dim=4, channels=(4, 4)), encoder=tmp_path / "model")
    assert all(torch.equal(value, second.net.state_dict()[name]) for name, value in first.net.state_dict().items())
    assert second.pretrained == str(tmp_path / "model")  # the accountant asks whether that was private


@pytest.mark.costly
def test_a_private_run_is_continued_under_one_claim(tmp_path: Path) -> None:
    data, first = images(tiny.parquet(tmp_path / "images")), tmp_path / "first"
    fit(first, of_images(privacy=MODES["logit_dp"]()), data, steps=1, extra=[PrivacyCard(run_dir=first)])
    (first / "model" / "net.json").rename(tmp_path / "kept")
    for named in (first, first / "model"):
        with pytest.raises(ConfigurationError, match="init_from"):
            cli_parts(named)
    (tmp_path / "kept").rename(first / "model" / "net.json")
    places = {str(cli_parts(named).make_module.keywords["encoder"]) for named in (first, first / "model")}
    assert len(places) == 1
    second = PrivacyAccountant(run_dir=tmp_path / "second", init_from=first, eps_log_points=1)
    fit(tmp_path / "second", of_images(privacy=MODES["logit_dp"](), encoder=places.pop()), data, steps=1,
        accountant=second, extra=[PrivacyCard(run_dir=tmp_path / "second")])  # fmt: skip
    one, two = (read_card(tmp_path / name)["claim"] for name in ("first", "second"))
    assert two["guarantee"] == "dp" and two["epsilon"] > one["epsilon"]


@pytest.mark.parametrize("what", ["another shape", "no folder", "newer"])
def test_weights_of_another_net_are_refused(what: str, tmp_path: Path) -> None:
    of_images().save_model(tmp_path / "model")
    net, folder = small_net(), tmp_path / "model"
    if what == "another shape":
        net = EmbeddingNet(dim=5, channels=(4, 4))
    elif what == "no folder":
        folder = tmp_path / "nowhere"
    else:
        (folder / "net.json").write_text('{"schema": "lit-dpret/net/2"}', encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match=str(folder)):
        of_images(net=net, encoder=folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"net": None}, "model.net and model.encoder are both null"),
        ({"encoder": text_encoder()}, "Set model.net to null"),
        ({"privacy": PublicPassages(max_grad_norm=0.1, **DP)}, "choose|Choose model=dual_encoder"),
        ({"net": None, "encoder": text_encoder(), "views": lambda rows: {}}, "model.views"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        of_images(**settings)


def test_a_net_that_does_not_state_its_width_is_asked_for_it() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    with pytest.raises(ConfigurationError, match=r"model\.dim"):
        of_images(net=net).pair_shape()
    assert of_images(net=net, dim=3, positions=1).pair_shape() == {"dim": 3, "positions": 1, "shared": True}


def test_the_plan_takes_images_as_units_and_finds_no_user_with_too_many(tmp_path: Path) -> None:
    mode = DPSGD(eps=3.0, delta=1e-3, unit="pair", noise_multiplier=3.0, max_grad_norm=1.0, max_units_per_user=2)
    trainer = L.Trainer(accelerator="cpu", max_steps=6, max_epochs=-1, logger=False, enable_checkpointing=False)
    planned = plan_run(trainer, mode, images(tiny.parquet(tmp_path)))
    assert planned.steps == 6 and planned.steps_per_epoch == 2
    assert planned.plan is not None and planned.plan.budget.unit == "pair"


def test_texts_are_no_images(tmp_path: Path) -> None:
    module = of_texts(privacy=LogitDP(**DP | {"max_logit_grad_norm": 0.1, "unit": "image"}))
    with pytest.raises(ConfigurationError, match="grouped by query, pair, user"):
        fit(tmp_path / "run", module, texts(tmp_path), steps=1)


UNREAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "smaller images": ({"sizes": (16,)}, {}, r"datamodule\.image_size"),
    "images that are resized": ({"sizes": (16,)}, {"image_size": 24}, r"model\.net\.image_size=24"),
    "grey images": ({}, {"source": "fashion_mnist"}, r"model\.net\.in_channels=1"),
    "images for a text encoder": ({}, {}, r"model\.net"),
    "texts for a net": ({}, {}, r"model\.encoder"),
}


@pytest.mark.parametrize("mode", ["logit_dp", "none"])
@pytest.mark.parametrize("case", UNREAD)
def test_rows_that_the_module_cannot_read_are_refused_before_the_ledger_is_opened(
    case: str, mode: str, tmp_path: Path
) -> None:
    made, settings, named = UNREAD[case]
    grey = settings.get("source") == "fashion_mnist"
    folder = tiny.idx(tmp_path / "images") if grey else tiny.class_folders(tmp_path / "images", **made)
    known = {"source": "vision_folder", "folder": folder, "expected_batch_size": 6, "physical_batch_size": 12}
    data: Any = texts(tmp_path) if case == "texts for a net" else ImagesDataModule(**known | settings)
    module = (of_texts if case == "images for a text encoder" else of_images)(privacy=MODES[mode]())
    with pytest.raises(ConfigurationError, match=named):
        fit(tmp_path / "run", module, data, steps=1)
    assert not (tmp_path / "run" / LEDGER_NAME).exists()
    data.setup("fit")
    trainer = L.Trainer(accelerator="cpu", callbacks=[PrivacyAccountant(run_dir=tmp_path / "run")], logger=False)
    refused = examine(trainer, module, data).refused
    assert any(re.search(named, finding.text) for finding in refused)


class ScaledByTheFirst:
    """Views that are scaled by the first images that they see."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.scale = inner, None

    def __call__(self, rows: list[Any]) -> dict[str, Tensor]:
        found = self.inner(rows)
        self.scale = found["query"].std() if self.scale is None else self.scale
        return {side: images / self.scale for side, images in found.items()}


def test_views_that_take_a_scale_from_the_first_images_are_refused_and_blank_ones_set_none(tmp_path: Path) -> None:
    views = ScaledByTheFirst(of_images().views)
    module = of_images(privacy=MODES["logit_dp"](), views=views)
    data = images(tiny.parquet(tmp_path / "images"))
    data.setup("fit")
    module.try_rows([data.blank_row(), data.blank_row()])
    assert views.scale is None
    with pytest.raises(UnsupportedModelError) as refused:
        fit(tmp_path / "run", module, data, steps=3)  # of which one draws two units
    assert refused.value.trap == "T11"


class FittedAtFirst(nn.Module):
    """A net that takes mean and deviation from its first images, in buffers or attributes, maybe in training alone."""

    def __init__(self, kept: str, when: str) -> None:
        super().__init__()
        self.kept, self.when, self.dim, self.inner = kept, when, 4, small_net()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("fitted", torch.zeros(()))
        self.last: Tensor | None = None

    def forward(self, images: Tensor) -> Tensor:
        if self.when == "always" or self.training:
            if self.kept == "buffers" and not self.fitted:
                self.mean.copy_(images.mean().detach())
                self.fitted.fill_(1)
            elif self.kept == "attributes" and self.last is None:
                self.last = images.mean().detach()
        found: Tensor = self.inner(images - (self.mean if self.last is None else self.last))
        return found


@pytest.mark.parametrize("kept", ["buffers", "attributes"])
@pytest.mark.parametrize("when", ["always", "in training"])
def test_a_net_that_is_fitted_at_its_first_use_is_not_by_blank_images_and_not_by_a_look(
    kept: str, when: str, tmp_path: Path
) -> None:
    net = FittedAtFirst(kept, when)
    module = of_images(privacy=MODES["logit_dp"](), net=net)
    data = images(tiny.parquet(tmp_path / "images"))
    data.setup("fit")
    module.train()
    module.try_rows([data.blank_row(), data.blank_row()])
    assert not net.fitted and net.last is None
    if when == "always" or kept == "attributes":  # logit_dp trains in evaluation mode
        with pytest.raises(UnsupportedModelError) as refused:
            fit(tmp_path / "run", module, data, steps=3)  # of which one draws two units
        assert refused.value.trap == "T11"
        return
    fit(tmp_path / "run", module, data, steps=2, extra=[PrivacyCard(run_dir=tmp_path / "run")])
    assert not net.fitted and net.last is None and (tmp_path / "run" / "model").is_dir()


def test_images_of_the_size_that_a_net_is_built_for_are_read(tmp_path: Path) -> None:
    data = ImagesDataModule(source="vision_folder", folder=tiny.class_folders(tmp_path / "images", sizes=(16,)))
    data.setup("fit")
    before = torch.get_rng_state()
    for net in (EmbeddingNet(image_size=16), ResNet18(), EmbeddingNet(image_size=16).to(torch.bfloat16)):
        torch.set_rng_state(before)
        module = of_images(net=net)
        refuse_unread_rows(module, data)
        assert module.training and torch.equal(torch.get_rng_state(), before)


@pytest.mark.costly
def test_a_checkpoint_of_texts_is_exported_and_one_of_a_net_is_refused_for_its_reason(tmp_path: Path) -> None:
    save_sentence_transformer(tmp_path / "base", text_encoder())
    settings: dict[str, Any] = {"encoder": str(tmp_path / "base"), "max_query_length": 8, "max_passage_length": 10}
    cases = {"texts": (of_texts(**settings), texts(tmp_path)),
             "net": (of_images(), images(tiny.parquet(tmp_path / "images")))}  # fmt: skip
    for name, (module, data) in cases.items():
        run = tmp_path / name
        fit(run, module, data, steps=1, save_every=1, extra=[PrivacyCard(run_dir=run)])
        export = Export(checkpoint=run)
        if name == "net":
            with pytest.raises(ConfigurationError, match=r"task\.checkpoint=.*model/"):
                export.run(no_parts(tmp_path / f"{name} out"))
            continue
        export.run(no_parts(tmp_path / f"{name} out"))
        (exported,) = (tmp_path / f"{name} out").glob("*/modules.json")
        found = load_towers(exported.parent).query_encoder.encode(WORDS, "query")
        assert torch.equal(found, module.net.encode(WORDS, "query"))
