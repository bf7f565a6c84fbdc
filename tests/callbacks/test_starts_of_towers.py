"""An encoder that is frozen beside the module tree has a known origin as well, however it came there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cards import Run, make_plan
from negative_cases import dual
from stand_ins import fit
from tiny_models import tiny_bert, tiny_tokenizer
from tiny_tasks import retriever, write_log

from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard
from lit_dpret.cards.card import read_card
from lit_dpret.cards.start import read_start
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.encoders import Contract, TextEncoder, load_towers
from lit_dpret.encoders.st_folder import save_sentence_transformer
from lit_dpret.errors import ConfigurationError, LitDpretError
from lit_dpret.modules import DualEncoder, EmbeddingTrainer, FrozenDualEncoder, OptimizerSpec
from lit_dpret.negatives import StaticNegatives
from lit_dpret.privacy.ledger import trained
from lit_dpret.privacy.modes import DPSGD, NoPrivacy, PublicPassages


def tower() -> TextEncoder:
    return TextEncoder(tiny_bert(), tiny_tokenizer(), Contract(query_max_length=8, passage_max_length=10))


def data(tmp_path: Path) -> PairsDataModule:
    folder = tmp_path / "log"
    return PairsDataModule(
        folder=folder if folder.exists() else write_log(folder), sampling="poisson", expected_batch_size=16
    )


def train(folder: Path, module: Any, **settings: Any) -> Path:
    fit(folder, module, data(folder.parent), steps=2, extra=[PrivacyCard(run_dir=folder)], **settings)
    return folder


def private(tmp_path: Path, encoder: Any) -> FrozenDualEncoder:
    return retriever(
        privacy=DPSGD(eps=8.0, noise_multiplier=2.0, secret_file=tmp_path / "secret"), encoder=encoder,
        max_query_length=8, max_passage_length=10,
    )  # fmt: skip


def refused(tmp_path: Path, module: Any, **settings: Any) -> None:
    with pytest.raises(LitDpretError) as raised:
        train(tmp_path / "second", module, **settings)
    assert raised.value.trap == "T30", raised.value


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DualEncoder]:
    """A run without privacy, in a folder with its card and model, and its module."""
    module = DualEncoder(privacy=NoPrivacy(), optimizer=OptimizerSpec(lr=1e-2), encoder=tower())
    return train(tmp_path_factory.mktemp("earlier") / "first", module), module


def the_object(folder: Path, module: DualEncoder) -> Any:
    return module.encoder


def of_a_checkpoint(folder: Path, module: DualEncoder) -> Any:
    return DualEncoder.load_from_checkpoint(folder / "checkpoints" / "last.ckpt", encoder=tower()).encoder


def loaded_from_its_folder(folder: Path, module: DualEncoder) -> Any:
    return TextEncoder.from_pretrained(folder / "model", normalise=True)


def of_a_folder_without_card(folder: Path, module: DualEncoder) -> Any:
    return str(module.save_model(folder / "mine"))


def around_its_transformer(folder: Path, module: DualEncoder) -> Any:
    inner = module.encoder
    return TextEncoder(inner.backbone, inner.tokenizer, inner.contract)


WAYS = [the_object, of_a_checkpoint, loaded_from_its_folder, of_a_folder_without_card, around_its_transformer]


@pytest.mark.slow
def test_a_private_run_of_separate_towers_is_continued_under_one_claim(tmp_path: Path) -> None:
    def separate(encoder: Any) -> DualEncoder:
        mode = PublicPassages(eps=8.0, noise_multiplier=2.0, secret_file=tmp_path / "secret", passage_gradient="own")
        return dual(mode, encoder=encoder, towers="separate", max_query_length=8, max_passage_length=10)

    first = train(tmp_path / "first", separate(tower()))
    refused(tmp_path, separate(str(first / "model")))
    counted = PrivacyAccountant(run_dir=tmp_path / "next", init_from=first, eps_log_points=1)
    train(tmp_path / "next", separate(str(first / "model")), accountant=counted)
    one, two = (read_card(tmp_path / name)["claim"] for name in ("first", "next"))
    assert two["guarantee"] == "dp" and two["epsilon"] > one["epsilon"]


@pytest.mark.parametrize(
    ("way", "elsewhere"),
    [*((way, False) for way in WAYS), (of_a_checkpoint, True), (loaded_from_its_folder, True)],
    ids=lambda value: "in another process" if value is True else getattr(value, "__name__", "here"),
)
def test_a_frozen_encoder_that_was_trained_on_private_data_is_refused(
    way: Callable[[Path, DualEncoder], Any], elsewhere: bool, run: tuple[Path, DualEncoder], tmp_path: Path,
    another_process: Callable[[], None],
) -> None:  # fmt: skip
    if elsewhere:
        another_process()
    refused(tmp_path, private(tmp_path, way(*run)))


@pytest.mark.parametrize("kept", ["encoder", "module"])
def test_a_teacher_from_a_folder_with_a_card_is_refused(
    kept: str, run: tuple[Path, DualEncoder], tmp_path: Path, another_process: Callable[[], None]
) -> None:
    another_process()
    module, folder = private(tmp_path, tower()), run[0] / "model"
    whole = kept == "module"
    lengths = {"max_query_length": 8, "max_passage_length": 10}
    teacher = retriever(privacy=NoPrivacy(), encoder=folder, **lengths) if whole else loaded_from_its_folder(*run)
    module.teachers = [teacher]
    refused(tmp_path, module)


def its_adapters_merged() -> Any:
    lora = {"r": 2, "target_modules": ["query", "value"]}
    return DualEncoder(privacy=NoPrivacy(), optimizer=OptimizerSpec(lr=1e-2), encoder=tower(), lora=lora)


def two_towers() -> Any:
    return DualEncoder(privacy=NoPrivacy(), optimizer=OptimizerSpec(lr=1e-2), encoder=tower(), towers="separate")


def a_head_folded_in() -> Any:
    return retriever(privacy=NoPrivacy(), head="shared", head_dim=4)


def one_net() -> Any:
    return EmbeddingTrainer(privacy=NoPrivacy(), optimizer=OptimizerSpec(lr=1e-2), encoder=tower())


MAKERS = [its_adapters_merged, two_towers, a_head_folded_in, one_net]


@pytest.mark.costly
@pytest.mark.parametrize(
    "make", [pytest.param(make, marks=[] if make is a_head_folded_in else pytest.mark.slow) for make in MAKERS],
    ids=lambda make: make.__name__,
)  # fmt: skip
def test_a_folder_that_a_trained_module_wrote_tells_another_process_of_it_without_a_card(
    make: Callable[[], Any], tmp_path: Path, another_process: Callable[[], None]
) -> None:
    module = make()
    written = module.save_model(tmp_path / "written")
    train(tmp_path / "before", private(tmp_path, load_towers(written).passage_encoder))
    train(tmp_path / "first", module)
    assert module.save_model(tmp_path / "written") == written
    another_process()
    for encoder in load_towers(written):
        refused(tmp_path, private(tmp_path, encoder))
    (written / trained.NOTE_NAME).write_text("[]")
    refused(tmp_path, private(tmp_path, load_towers(written).query_encoder))
    make().save_model(written)
    train(tmp_path / "after", private(tmp_path, load_towers(written).passage_encoder))


# -- a ledger that is all that is left ----------------------------------------------------------------


def lonely(root: Path, *, ledger: str = ".", model: str = "model", mode: str = "dp_sgd") -> Path:
    """A model without card and note, and somewhere about it the ledger of the run that trained it."""
    save_sentence_transformer(root / model, tower())
    Run(root / ledger, make_plan(), mode=mode).train(steps=1)
    return root / model


def adapters_of(base: Path, folder: Path) -> Path:
    """A folder of adapters on a model; what is adapted is named in a file alone."""
    import peft

    save_sentence_transformer(folder, tower())
    adapted = peft.get_peft_model(tiny_bert(), peft.LoraConfig(r=2, target_modules=["query"]))
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(folder)
    return folder


PLACES: dict[str, Callable[[Path], Path]] = {
    "the run folder around model/": lonely,
    "the folder itself": lambda root: lonely(root, ledger="public", model="public"),
    "the run folder around a tower in model/": lambda root: lonely(root, model="model/query_encoder"),
    "a run without privacy": lambda root: lonely(root, mode="none"),
    "the base of adapters": lambda root: adapters_of(lonely(root), root.parent / "adapters"),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_ledger_tells_who_trained_a_folder_that_lost_its_card_and_note(place: str, tmp_path: Path) -> None:
    encoder = PLACES[place](tmp_path / "first")
    refused(tmp_path, private(tmp_path, encoder))
    refused(tmp_path, DualEncoder(
        privacy=PublicPassages(eps=8.0, noise_multiplier=2.0, pool_size=8, secret_file=tmp_path / "secret"),
        optimizer=OptimizerSpec(lr=1e-2), encoder=str(encoder), max_query_length=8, max_passage_length=10,
    ))  # fmt: skip


def test_adapters_that_only_a_setting_names_are_asked_what_they_stand_on(tmp_path: Path) -> None:
    """As of a model that was merged with them since: nothing in it names them any more."""
    module = private(tmp_path, tower())
    module.pretrained = str(adapters_of(lonely(tmp_path / "first"), tmp_path / "adapters"))
    refused(tmp_path, module)


def test_what_a_run_without_privacy_trains_names_the_run_whose_ledger_lay_beside_its_start(tmp_path: Path) -> None:
    start = str(lonely(tmp_path / "first"))
    lengths = {"max_query_length": 8, "max_passage_length": 10}
    module = DualEncoder(privacy=NoPrivacy(), optimizer=OptimizerSpec(lr=1e-2), encoder=start, **lengths)
    train(tmp_path / "between", module)
    assert "dp_sgd" in (tmp_path / "between" / "model" / trained.NOTE_NAME).read_text(encoding="utf-8")


def test_a_ledger_that_is_not_of_a_folder_refuses_nothing(tmp_path: Path) -> None:
    Run(tmp_path, make_plan()).train(steps=1)  # of another run, in the folder where models lie
    Run(tmp_path / "public" / "run", make_plan()).train(steps=1)
    save_sentence_transformer(tmp_path / "public", tower())
    train(tmp_path / "second", private(tmp_path, tmp_path / "public"))


# -- honest runs -----------------------------------------------------------------------------


@pytest.mark.costly
@pytest.mark.parametrize("ready", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_public_frozen_encoder_passes_again_and_again(ready: bool, tmp_path: Path) -> None:
    public = tower()
    if not ready:
        save_sentence_transformer(tmp_path / "public", public)
    for number in range(2):
        module = private(tmp_path, public if ready else tmp_path / "public")
        assert read_card(train(tmp_path / f"run{number}", module))["claim"]["guarantee"] == "dp"
    train(tmp_path / "dual", DualEncoder(privacy=NoPrivacy(), optimizer=OptimizerSpec(), encoder=tower()))
    train(tmp_path / "last", private(tmp_path, public if ready else tmp_path / "public"))


@pytest.mark.slow
@pytest.mark.parametrize("ready", [False, True])
def test_a_frozen_encoder_of_the_run_that_is_named_as_the_start_is_counted(ready: bool, tmp_path: Path) -> None:
    mode = PublicPassages(eps=8.0, noise_multiplier=2.0, pool_size=8, secret_file=tmp_path / "secret")
    module = DualEncoder(privacy=mode, optimizer=OptimizerSpec(lr=1e-2), encoder=tower())
    first = train(tmp_path / "first", module)
    encoder = module.encoder if ready else first / "model"
    refused(tmp_path, private(tmp_path, encoder))
    counting = PrivacyAccountant(run_dir=tmp_path / "third", init_from=first, eps_log_points=1)
    third = train(tmp_path / "third", private(tmp_path, encoder), accountant=counting)
    assert read_card(third)["claim"]["epsilon"] > read_card(first)["claim"]["epsilon"]


@pytest.mark.costly
def test_a_folder_that_is_declared_public_is_believed_whichever_run_wrote_it(
    tmp_path: Path, another_process: Callable[[], None]
) -> None:
    module = one_net()
    train(tmp_path / "first", module)
    written = module.save_model(tmp_path / "written")
    another_process()
    settings = {"init_from": written, "init_from_is_public": True, "eps_log_points": 1}
    counting = PrivacyAccountant(run_dir=tmp_path / "second", **settings)
    train(tmp_path / "second", private(tmp_path, written), accountant=counting)


@pytest.mark.costly
@pytest.mark.parametrize(
    "named", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["init_from", "model.encoder"]
)
def test_the_folder_of_a_run_without_privacy_names_the_private_run_that_it_began_with(
    named: bool, tmp_path: Path, another_process: Callable[[], None]
) -> None:
    """Or taking its weights alone, without card and ledger, would make a public start of what was private."""
    mode = PublicPassages(eps=8.0, noise_multiplier=2.0, pool_size=8, secret_file=tmp_path / "secret")
    first = train(tmp_path / "first", DualEncoder(privacy=mode, optimizer=OptimizerSpec(lr=1e-2), encoder=tower()))
    for number in (2, 3):  # over several generations
        another_process()
        module = DualEncoder(
            privacy=NoPrivacy(), optimizer=OptimizerSpec(lr=1e-2), encoder=str(first / "model"), max_query_length=8,
            max_passage_length=10,
        )  # fmt: skip
        folder = tmp_path / f"run{number}"
        settings = {"init_from": first} if named else {}
        accountant = PrivacyAccountant(run_dir=folder, eps_log_points=1, **settings)
        first = train(folder, module, accountant=accountant)
    written = Path(shutil.copytree(first / "model", tmp_path / "alone"))
    for card in written.glob("privacy_card.*"):
        card.unlink()
    assert {each.privacy for each in trained.noted_in(written)} == {"public_passages", "none"}
    with pytest.raises(ConfigurationError, match="init_from=") as raised:
        read_start(written, public=True)
    assert raised.value.trap == "T30"


@pytest.mark.costly
def test_a_source_of_negatives_that_served_another_run_brings_none_of_its_weights(tmp_path: Path) -> None:
    source = StaticNegatives(depth=8)
    train(tmp_path / "first", dual(NoPrivacy(), encoder=tower(), negatives={"static": source}))
    mode = DPSGD(eps=8.0, noise_multiplier=2.0, secret_file=tmp_path / "secret")
    train(tmp_path / "second", dual(mode, encoder=tower(), negatives={"static": source}))
