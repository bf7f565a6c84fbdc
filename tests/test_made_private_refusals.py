"""What `make_private` and its fit refuse, each by the argument or the hook that is to blame."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import peft
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from own_modules import Classifier, card_in, data, fit, made, row_loss, rows
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lit_dpret import (
    OptimizerSpec,
    PrivacyAccountant,
    PrivacyCard,
    PrivateModule,
    UnitDataModule,
    make_private,
)  # fmt: skip
from lit_dpret.errors import ConfigurationError, DataError, ResumeError, UnsupportedModelError
from lit_dpret.privacy.modes import DPSGD


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"optimizer": torch.optim.SGD}, "OptimizerSpec"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)}, "OptimizerSpec"),
        ({"batch_size": 32}, "expected_batch_size"),
        ({"resume": True}, "PrivacyAccountant"),
        ({"epsilon": 3}, r"\beps\b"),
        ({"neighbors": "zero_out"}, "neighbours"),
        ({"max_grad_nrom": 1.0}, "max_grad_norm"),
        ({"unit_of": len}, "UnitDataModule"),
        ({"eps": 0}, "eps=0 .*DataLoader"),
        ({"per_row_loss": None}, "per_row_loss"),
        ({"collate_fn": None}, "collate_fn"),
        ({"module": Classifier}, "module"),
        ({"per_row_loss": lambda batch: batch}, "per_row_loss"),
    ],
    ids=lambda given: "-".join(given) if isinstance(given, dict) else "",
)
def test_an_argument_that_is_no_such_thing_is_refused_at_once(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        made(**given)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: make_private(Classifier(), eps=3), "per_row_loss"),  # type: ignore[call-arg]
        (lambda: make_private(Classifier(), per_row_loss=row_loss), "eps"),  # type: ignore[call-arg]
        (lambda: make_private(eps=3, per_row_loss=row_loss), "module"),  # type: ignore[call-arg]
        (lambda: make_private(Classifier(), row_loss, eps=3), "per_row_loss"),  # type: ignore[misc, call-arg]
        (lambda: data(collate_fn=list), "make_private"),
        (lambda: data(batch_size=16), "expected_batch_size"),
        (lambda: data(shuffle=True), "sampling"),
        (lambda: data(user_of=len), "unit_of"),
        (lambda: data(unit_of=["a"] * 60), "unit_of"),
        (lambda: UnitDataModule(expected_batch_size=10), "dataset"),  # type: ignore[call-arg]
        (lambda: UnitDataModule(rows(), len, expected_batch_size=10), "unit_of"),  # type: ignore[misc]
        (lambda: PrivateModule(), "privacy"),  # type: ignore[call-arg]
        (lambda: PrivateModule(privacy=DPSGD(eps=3), target_epsilon=3), "DPSGD"),  # type: ignore[call-arg]
        (lambda: PrivateModule(privacy=DPSGD(eps=3), optimiser=None), "did you mean optimizer"),  # type: ignore[call-arg]
        (lambda: PrivateModule(privacy=DPSGD(eps=3), per_row_loss=row_loss), "per_row_loss"),  # type: ignore[call-arg]
    ],
)
def test_an_argument_that_is_missing_unknown_or_elsewhere_is_named(make: Callable[[], Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        make()


class WithoutALoss(PrivateModule):
    def __init__(self) -> None:
        super().__init__(privacy=DPSGD(eps=3.0, unit="record"), optimizer=OptimizerSpec(name="sgd", lr=0.1))
        self.net = nn.Linear(4, 3)

    def collate_rows(self, rows: Any) -> dict[str, Tensor]:
        return {"x": torch.stack([x for x, _ in rows])}


def logging_itself(model: Any, batch: Any) -> Tensor:
    losses = row_loss(model, batch)
    model.log("train_loss", losses.mean())
    return losses


REFUSED_LOSSES: dict[str, tuple[Callable[[], Any], str]] = {
    "of a private module that has none": (WithoutALoss, "per_row_loss"),
    "None": (lambda: made(per_row_loss=lambda model, batch: None), "per_row_loss"),
    "a list": (lambda: made(per_row_loss=lambda model, batch: list(row_loss(model, batch))), "per_row_loss"),
    "a mean": (lambda: made(per_row_loss=lambda model, batch: row_loss(model, batch).mean()), "row"),
    "one that logs itself": (
        lambda: made(per_row_loss=logging_itself),
        r"'train_loss' of per_row_loss.*derive from PrivateModule",
    ),
}


@pytest.mark.costly
@pytest.mark.parametrize("kind", REFUSED_LOSSES)
def test_a_loss_that_is_none_of_rows_is_refused_before_its_first_release(kind: str, tmp_path: Path) -> None:
    make, named = REFUSED_LOSSES[kind]
    with pytest.raises((UnsupportedModelError, ConfigurationError), match=named) as found:
        fit(tmp_path, make(), callbacks=[PrivacyAccountant(), PrivacyCard()])
    assert (found.value.trap == "T25") is (kind == "one that logs itself")
    assert '"intent"' not in (tmp_path / "privacy_ledger.jsonl").read_text(encoding="utf-8")


@pytest.mark.parametrize("setting", ["gradient_clip_val", "accumulate_grad_batches"])
def test_sums_that_lightning_would_clip_or_add_up_are_refused_by_what_does_it_here(
    setting: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=r"max_grad_norm|physical_batch_size"):
        fit(tmp_path, made(), **{setting: 2})


def test_a_spawned_process_is_refused_before_anything_is_sent_to_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="strategy='ddp'"):
        fit(tmp_path, made(), strategy="ddp_spawn", devices=2)
    assert not (tmp_path / "privacy_ledger.jsonl").exists()
    assert type(copy.deepcopy(made())).__name__ == type(made()).__name__


def test_a_data_module_of_units_is_refused_to_a_module_that_is_not_private(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="make_private"):
        fit(tmp_path, Classifier())


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"train_dataloaders": DataLoader(rows(), 20)}, "datamodule="),
        ({"datamodule": UnitDataModule}, r"datamodule=UnitDataModule\(\.\.\.\)"),
        ({"datamodule": rows()}, "unit_of"),
        ({"datamodule": rows}, "unit_of"),
    ],
    ids=["a loader", "a class", "a data set", "a function"],
)
def test_what_is_no_data_module_is_refused_for_one(given: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=named) as found:
        plain(max_steps=1, default_root_dir=tmp_path).fit(made(), **given)
    assert (found.value.trap == "T1") is ("train_dataloaders" in given)


def test_hooks_that_nobody_would_call_are_refused_by_name() -> None:
    class Hooked(Classifier):
        def on_train_epoch_end(self) -> None: ...

    with pytest.raises(UnsupportedModelError, match="on_train_epoch_end"):
        made(Hooked())


def test_what_is_private_already_is_not_wrapped() -> None:
    with pytest.raises(UnsupportedModelError, match="PrivateModule"):
        made(made())


@pytest.mark.parametrize(
    "row",
    [
        lambda number: {"text": f"t{number}", "label": number % 3},
        lambda number: (torch.zeros(number % 3 + 1), 0),
        lambda number: (object(), 0),
    ],
    ids=["texts", "of several lengths", "of no kind that torch collates"],
)
def test_rows_that_make_no_tensors_are_refused_by_the_setting_that_collates_them(row: Any, tmp_path: Path) -> None:
    with pytest.raises((UnsupportedModelError, DataError), match="collate_fn"):
        fit(tmp_path, made(), data([row(number) for number in range(60)]))


class Plainly(Classifier):
    """Is trained without privacy."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return row_loss(self, batch).mean()


def plain(**settings: Any) -> L.Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    return L.Trainer(enable_progress_bar=False, accelerator="cpu", **quiet | settings)


def stepped(model: Any, lr: float = 0.1) -> Any:
    """Let an optimizer change a model once, and return the model."""
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=lr)
    row_loss(model, rows().tensors).mean().backward()
    optimizer.step()
    return model


def loaded(state: Any) -> Classifier:
    other = Classifier()
    other.load_state_dict(state)
    return other


def earlier() -> Any:
    """Return the weights that a plain training left behind in the middle; what was trained is gone."""
    trained = Classifier()
    optimizer = torch.optim.Adam(trained.parameters(), lr=0.1)
    kept: list[Any] = []
    for _ in range(6):
        optimizer.zero_grad()
        row_loss(trained, rows().tensors).mean().backward()
        optimizer.step()
        kept.append(copy.deepcopy(trained.state_dict()))
    return kept[2]


def from_a_file(folder: Path) -> Any:
    torch.save(earlier(), folder / "best.pt")
    return torch.load(folder / "best.pt")


def from_which_another_training_began() -> Any:
    best = earlier()
    stepped(loaded(best), lr=0.01)
    return best


def by_a_trainer() -> Classifier:
    model = Plainly()
    plain(max_steps=2).fit(model, DataLoader(rows(), 8))
    plain().validate(model, DataLoader(rows(), 8), verbose=False)
    return model


def adapted(module: Classifier) -> Any:
    return peft.get_peft_model(module, peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False))


def merged() -> Any:
    return stepped(adapted(Classifier())).merge_and_unload()


# What is trained on, and what has to stay alive meanwhile.
TRAINED: dict[str, Callable[[Path], tuple[Any, ...]]] = {
    "what an optimizer changed": lambda folder: (stepped(Classifier()),),
    "a deep copy of it": lambda folder: (copy.deepcopy(trained := stepped(Classifier())), trained),
    "its state dict": lambda folder: (loaded((trained := stepped(Classifier())).state_dict()), trained),
    "what a training left earlier and forgot": lambda folder: (loaded(earlier()),),
    "what it saved in a file": lambda folder: (loaded(from_a_file(folder)),),
    "what another training began with": lambda folder: (loaded(from_which_another_training_began()),),
    "what a Trainer trained": lambda folder: (by_a_trainer(),),
    "merged adapters": lambda folder: (merged(),),
    "a copy of merged adapters": lambda folder: (copy.deepcopy(adapters := merged()), adapters),
}


@pytest.mark.parametrize("kind", TRAINED)
def test_weights_that_this_process_trained_without_privacy_have_to_be_declared(kind: str, tmp_path: Path) -> None:
    model, *_alive = TRAINED[kind](tmp_path)
    with pytest.raises(ConfigurationError, match="init_from_is_public"):
        fit(tmp_path / "refused", made(model))
    if kind == "what a Trainer trained":
        with pytest.raises(ConfigurationError, match="init_from_is_public"):
            fit(tmp_path / "part", made(model.net, optimizer=OptimizerSpec(lr=0.1)))
        fit(tmp_path / "run", made(model), max_steps=1, callbacks=[PrivacyAccountant(init_from_is_public=True)])
        assert "init_from_is_public" in str(card_in(tmp_path / "run")["assumptions"])


@pytest.mark.costly
def test_adapters_of_a_checkpoint_are_known_when_they_are_merged(tmp_path: Path) -> None:
    kept = ModelCheckpoint(tmp_path / "kept", "{step}", every_n_train_steps=1, save_top_k=-1)
    fit(tmp_path / "first", made(adapted(Classifier()), optimizer=OptimizerSpec(lr=0.1)), callbacks=[kept], max_steps=3)
    (middle,) = (tmp_path / "kept").glob("*step=2.ckpt")
    state = torch.load(middle, weights_only=False)["state_dict"]
    loaded = adapted(Classifier())
    loaded.load_state_dict({name.removeprefix("module."): value for name, value in state.items()})
    with pytest.raises(ConfigurationError, match="init_from"):
        fit(tmp_path / "second", made(loaded.merge_and_unload(), optimizer=OptimizerSpec(lr=0.1)))


@pytest.mark.parametrize("lr", [1e-8, 1e-2])
def test_the_start_of_a_training_is_nobodys(lr: float, tmp_path: Path) -> None:
    public = {name: value * (1.5 + lr) for name, value in Classifier().state_dict().items()}  # of no other test
    baseline, fresh = loaded(copy.deepcopy(public)), loaded(copy.deepcopy(public))
    optimizer = torch.optim.AdamW(baseline.parameters(), lr=lr)
    row_loss(baseline, rows().tensors).mean().backward()
    optimizer.step()
    fit(tmp_path, made(fresh), max_steps=1)
    assert "assumed" in card_in(tmp_path)["pretraining"]["start"]


def test_what_no_step_changed_is_no_training(tmp_path: Path) -> None:
    first = Classifier()
    copied = loaded(copy.deepcopy(first.state_dict()))
    words = nn.Embedding(4096, 8)
    untouched = copy.deepcopy(words.state_dict())
    optimizer = torch.optim.SGD([*first.parameters(), *words.parameters()], lr=0.1)
    for _ in range(3):
        (row_loss(first, rows().tensors).mean() + words(torch.tensor([1, 2])).sum()).backward()
        optimizer.step()
    copied.words = nn.Embedding(4096, 8)
    copied.words.load_state_dict(untouched)
    fit(tmp_path, made(copied), max_steps=1)


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["loss", "count"])
def test_what_a_loss_counts_is_put_back_or_refused_where_it_hangs_on_it(tmp_path: Path, kind: str) -> None:
    class Warm(Classifier):
        seen, calls, last = 0, 0, 0

    def loss(model: Any, batch: Any) -> Tensor:
        model.calls, model.last = model.calls + 1, len(batch[1])
        share = min(1.0, model.seen / 1000) if kind == "loss" else float(model.seen > 10**6)
        model.seen += len(batch[1]) if counts else 0
        return row_loss(model, batch) * (1 + share)

    for counts in (True, False):
        module = make_private(warm := Warm(), per_row_loss=loss, eps=3, delta=1e-3)
        if counts and kind == "loss":
            with pytest.raises(UnsupportedModelError, match="keeps of one batch"):
                fit(tmp_path / "counts", module)
        else:
            with pytest.warns(UserWarning, match=r"Warm\.calls, Warm\.last" + r", Warm\.seen" * counts):
                fit(tmp_path / f"trains {counts}", module, max_steps=2)
            assert (warm.seen, warm.last, warm.calls) == (0, 0, 0)


def test_a_loss_that_couples_rows_is_refused_and_leaves_a_folder_that_is_said_to_hold_nothing_that_was_spent(
    tmp_path: Path,
) -> None:
    def coupled(model: Any, batch: Any) -> Tensor:
        loss = row_loss(model, batch)
        return loss - loss.mean()

    with pytest.raises(UnsupportedModelError, match="row"):
        fit(tmp_path, made(per_row_loss=coupled))
    assert '"intent"' not in (tmp_path / "privacy_ledger.jsonl").read_text()
    with pytest.raises(ResumeError, match="delete it"):
        fit(tmp_path, made())
    (tmp_path / "privacy_ledger.jsonl").unlink()
    fit(tmp_path, made(), max_steps=1)
    with pytest.raises(ResumeError, match="already holds"):
        fit(tmp_path, made(), max_steps=1)


@pytest.mark.costly
@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_loss_without_a_value_on_rows_that_are_no_data_is_refused_before_the_ledger(
    factor: float, tmp_path: Path
) -> None:
    def broken(model: Any, batch: Any) -> Tensor:
        return row_loss(model, batch) * factor

    made_up = [(torch.zeros(4), torch.tensor(1)), (torch.ones(4), torch.tensor(0))]
    with pytest.raises(ConfigurationError, match="per_row_loss"):
        fit(tmp_path / "refused", made(per_row_loss=broken, public_rows=made_up))
    assert not (tmp_path / "refused" / "privacy_ledger.jsonl").exists()
    fit(tmp_path / "trained", made(public_rows=made_up), max_steps=2)
    assert card_in(tmp_path / "trained")["claim"]["guarantee"] == "dp"


def test_a_mode_that_a_hook_replaces_after_the_plan_is_refused(tmp_path: Path) -> None:
    module, callback = made(noise_multiplier=4.0), L.Callback()
    callback.on_fit_start = lambda *_: setattr(module, "privacy", DPSGD(eps=3.0))  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match="privacy of"):
        fit(tmp_path, module, callbacks=[callback])


def _padded(given: list[Any]) -> Any:
    texts, labels = zip(*given, strict=True)
    return nn.utils.rnn.pad_sequence(texts, batch_first=True), torch.tensor(labels)


class _Summing(Classifier):
    """Sums over all places of a text, those that it is filled up to included."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(self.words(x).sum(1))
        return found


@pytest.mark.parametrize("long", [1, 2, 6])
def test_padding_that_counts_is_refused_whoever_holds_the_longest_text(long: int, tmp_path: Path) -> None:
    """The longest texts come first, where they are collated without the others too."""
    torch.manual_seed(3)
    texts = [torch.randint(1, 20, (60 if row < long else 2 + row,)) for row in range(12)]
    log = [(text, row % 3) for row, text in enumerate(texts)]
    units = UnitDataModule(log, sampling="full_batch")
    with pytest.raises(UnsupportedModelError) as refused:
        fit(tmp_path, made(_Summing(), collate_fn=_padded, noise_multiplier=4.0), units, max_steps=1)
    assert refused.value.trap == "T11"


def test_a_checkpoint_of_a_plain_training_is_refused_by_name(tmp_path: Path) -> None:
    runner = plain(max_steps=1, default_root_dir=tmp_path)
    runner.fit(Plainly(), DataLoader(rows(), batch_size=20))
    runner.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(ResumeError) as found:
        fit(tmp_path / "run", made(Plainly()), ckpt_path=tmp_path / "plain.ckpt")
    assert found.value.trap == "T30"


class Attends(Classifier):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention = nn.TransformerEncoderLayer(4, 2, 8, dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(self.attention(x[:, None])[:, 0])
        return found


@pytest.mark.costly
def test_dropout_in_a_layer_whose_rows_are_run_alone_is_refused_before_the_ledger_opens(tmp_path: Path) -> None:
    for way_out, dropout, engine in (("none", 0.0, "vmap"), ("loop", 0.1, "loop")):
        fit(tmp_path / way_out, made(Attends(dropout), engine=engine), max_steps=1)
    private = made(Attends(0.1), engine="vmap")
    with pytest.raises(UnsupportedModelError, match=r"dropout=0\.1.*engine=loop"):
        fit(tmp_path, private, max_steps=1)
    assert not (tmp_path / "privacy_ledger.jsonl").exists()
