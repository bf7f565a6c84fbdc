"""The frozen dual encoder: what a row's loss depends on, how it trains, what it saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen_heads import PASSAGES, QUERIES, frozen, losses, rows, tower
from pair_stand_ins import clipped_sum, data_module, plan_of
from stand_ins import Line, dp, fit
from tiny_models import WORDS
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from lit_dpret.encoders import load_towers
from lit_dpret.errors import ConfigurationError, DataError, UnsupportedModelError
from lit_dpret.losses import SigmoidPairLoss
from lit_dpret.modules.frozen_dual_encoder import FrozenDualEncoder, principal_directions
from lit_dpret.modules.optimizers import OptimizerSpec
from lit_dpret.modules.public_pool import row_by_row
from lit_dpret.privacy.batches import take_rows
from lit_dpret.privacy.clipping import make_engine
from lit_dpret.privacy.modes import (
    DPSGD,
    BatchClip,
    LogitDP,
    NoPrivacy,
    PerExampleDuplicated,
    PrivacyMode,
    PublicPassages,
    SyntheticData,
)

# -- what a row's loss is --------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"head": "both"}, {"head_dim": 3}], ids=["query", "both", "directions"])
def test_untrained_it_is_the_encoder_itself(settings: dict[str, Any]) -> None:
    encoder = tower()
    module = FrozenDualEncoder(privacy=NoPrivacy(), optimizer=OptimizerSpec(), encoder=encoder, **settings)
    module.prepare_texts(PASSAGES)
    texts = list(QUERIES.values())
    torch.testing.assert_close(module.encode_queries(texts), encoder.encode(texts, "query"))
    torch.testing.assert_close(module.encode_passages(texts), encoder.encode(texts, "passage"))


@pytest.mark.parametrize("settings", [{}, {"pool_size": 5}, {"head": "both"}], ids=["all", "a drawn pool", "the batch"])
def test_the_loss_is_the_cross_entropy_over_the_passages_that_do_not_answer_the_query(settings: dict[str, Any]) -> None:
    module, lines = frozen(**settings), rows()
    names = [line.passage_id for line in lines] if "head" in settings else list(PASSAGES)
    if "pool_size" in settings:
        chosen = module.pool(0).chosen
        assert chosen is not None and len(set(chosen.tolist())) == 5
        names = [names[i] for i in chosen.tolist()]
    queries = module.encode_queries([line.query for line in lines])
    for line, query, loss in zip(lines, queries, losses(module, lines), strict=True):
        others = [name for name in names if name not in line.positives]
        candidates = module.encode_passages([PASSAGES[name] for name in (line.passage_id, *others)])
        torch.testing.assert_close(loss, cross_entropy((candidates @ query / 0.1).unsqueeze(0), torch.tensor([0])))


def test_the_pool_depends_on_seed_and_step_and_not_on_the_queries() -> None:
    def pool(module: FrozenDualEncoder, step: int) -> list[int]:
        chosen = module.pool(step).chosen
        assert chosen is not None
        return chosen.tolist()

    one, same, other = frozen(pool_size=5), frozen(pool_size=5), frozen(pool_size=5, pool_seed=1)
    same.prepare_texts(PASSAGES, {"q0": "something else"})
    torch.manual_seed(99)
    assert [pool(one, step) for step in (0, 1, 2)] == [pool(same, step) for step in (0, 1, 2)]
    assert pool(one, 0) != pool(one, 1)
    assert pool(one, 0) != pool(other, 0)


@pytest.mark.parametrize("pool_size", [None, 5])
def test_changing_one_query_changes_the_losses_and_gradients_of_its_own_rows_alone(pool_size: int | None) -> None:
    module = frozen(pool_size=pool_size).double()
    module.passage_embeddings = module.passage_embeddings.double()
    before, after = rows(), rows({**QUERIES, "q3": "the best policy my"})

    def cast(lines: list[Line]) -> dict[str, Tensor]:
        batch = module.collate_rows(lines)
        return {**batch, "query": batch["query"].double()}

    first, second = (module.per_row_loss(cast(lines)) for lines in (before, after))
    weight = module.query_head.weight
    for i, line in enumerate(before):
        one, two = (torch.autograd.grad(loss[i], weight, retain_graph=True)[0] for loss in (first, second))
        if line.query_id == "q3":
            assert abs(first[i] - second[i]) > 1e-3 and (one - two).norm() > 1e-3
        else:
            torch.testing.assert_close(first[i], second[i], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)


@pytest.mark.costly
@pytest.mark.parametrize("cached", [True, False])
def test_under_a_guarantee_no_query_has_a_say_in_another_ones_embedding(cached: bool, tmp_path: Path) -> None:
    texts = {f"q{i}": " ".join(WORDS[(7 * i + j * (1 + i % 5)) % 13] for j in range(1 + i % 11)) for i in range(100)}

    def found(queries: dict[str, str], asked: dict[str, str]) -> Tensor:
        cache = tmp_path if cached else None
        module = FrozenDualEncoder(
            privacy=dp(tmp_path), optimizer=OptimizerSpec(), encoder=tower(query_max_length=24), cache_dir=cache
        )
        module.prepare_texts(PASSAGES, queries)
        lines = [Line(name, text, "p0", PASSAGES["p0"], frozenset({"p0"})) for name, text in asked.items()]
        return module.collate_rows(lines)["query"]

    for gone in ("q10", "q43", "q99"):
        left = {name: text for name, text in texts.items() if name != gone}
        alone = torch.cat([found({}, {name: text}) for name, text in [*left.items()][:9]])
        assert torch.equal(found(texts, left), found(left, left))
        assert torch.equal(found({}, left), found(left, left)) and torch.equal(found(left, left)[:9], alone)


def test_the_gradient_made_a_few_rows_at_a_time_is_the_gradient() -> None:
    torch.manual_seed(0)
    table, target = torch.randn(30, 6), torch.randint(30, (11,))

    def loss(part: slice, embeddings: Tensor) -> Tensor:
        return cross_entropy(embeddings @ table.T, target[part], reduction="none")

    weights = torch.rand(11)
    results = []
    for rows_at_once in (1, 4, 11, 100):
        leaf = torch.randn(11, 6, generator=torch.Generator().manual_seed(3)).requires_grad_()
        found = row_by_row(loss, leaf, rows_at_once=rows_at_once)
        results.append((found.detach(), torch.autograd.grad((found * weights).sum(), leaf)[0]))
    leaf = torch.randn(11, 6, generator=torch.Generator().manual_seed(3)).requires_grad_()
    plain = loss(slice(None), leaf)
    plain_gradient = torch.autograd.grad((plain * weights).sum(), leaf)[0]
    for found, gradient in results:
        torch.testing.assert_close(found, plain.detach())
        torch.testing.assert_close(gradient, plain_gradient)


# -- what is frozen, and what is looked up ---------------------------------------------------


@pytest.mark.parametrize(
    ("head", "names"), [("query", ["query_head.weight"]), ("both", ["query_head.weight", "passage_head.weight"])]
)
def test_the_heads_are_all_there_is_to_train_and_to_save(head: str, names: list[str]) -> None:
    module = frozen(head=head)
    assert [name for name, _ in module.named_parameters()] == names
    assert sorted(module.state_dict()) == sorted(names)
    assert not any(parameter.requires_grad for parameter in module.encoder.parameters())
    assert not module.train().encoder.training


def test_known_texts_are_encoded_once_and_new_ones_when_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    module = frozen()
    encoded: list[str] = []
    encode = module.encoder.encode

    def count(texts: Any, side: Any, **settings: Any) -> Tensor:
        encoded.extend(texts)
        return encode(texts, side, **settings)

    monkeypatch.setattr(module.encoder, "encode", count)
    module.collate_rows(rows())
    module.encode_passages(list(PASSAGES.values()))
    assert encoded == []
    embeddings = module.encode_queries([QUERIES["q0"], "the life", QUERIES["q1"], "the life"])
    assert encoded == ["the life"]
    head = module.query_head.weight.detach()
    expected = normalize(encode([QUERIES["q0"], "the life", QUERIES["q1"], "the life"], "query") @ head.T, dim=-1)
    torch.testing.assert_close(embeddings, expected)


def test_a_second_module_takes_the_embeddings_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = frozen(cache_dir=tmp_path)
    second = FrozenDualEncoder(privacy=NoPrivacy(), optimizer=OptimizerSpec(), encoder=tower(), cache_dir=tmp_path)
    monkeypatch.setattr(second.encoder, "forward", lambda *_, **__: pytest.fail("encoded again"))
    second.prepare_texts(PASSAGES, QUERIES)
    assert torch.equal(first.passage_embeddings, second.passage_embeddings)
    assert [path.stat().st_mode & 0o077 for path in tmp_path.iterdir()] == [0, 0]


def test_a_positive_outside_the_encoded_passages_is_refused_by_id() -> None:
    module = frozen()
    line = Line("q", "my house", "elsewhere", "policy", frozenset({"elsewhere"}))
    with pytest.raises(DataError, match="'elsewhere'"):
        module.collate_rows([line])


# -- training --------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"pool_size": 5}, {"head_dim": 3}], ids=["all", "a pool", "directions"])
def test_ghost_clipping_of_the_head_equals_the_loop_over_units(settings: dict[str, Any]) -> None:
    module, lines = frozen(**settings), rows()
    batch = module.collate_rows(lines)
    slots = {name: slot for slot, name in enumerate(QUERIES)}
    unit_ids = torch.tensor([slots[line.query_id] for line in lines])
    mask = torch.ones(len(QUERIES), dtype=torch.bool)
    for bound in (0.05, 1e6):
        sums, norms = [], []
        for engine in ("ghost", "loop"):
            clipper = make_engine(engine, module, max_grad_norm=bound)
            stats = clipper.add(lambda i=slice(None): module.per_row_loss(take_rows(batch, i)), unit_ids, mask)
            norms.append(stats.norms.float())
            found = clipper.take()
            assert set(found) == {"query_head.weight"}
            sums.append(found["query_head.weight"])
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(sums[0], sums[1], rtol=1e-4, atol=1e-6)
        assert 0 < sums[0].norm() <= bound * len(QUERIES) * 1.001


SAVED_HEAD = "a folder that a query head was saved to"
NOISE: dict[str, Any] = {"eps": 3.0, "delta": 1e-3, "noise_multiplier": 20.0}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"pool_size": 0}, "model.pool_size"),
        ({"pool_size": 5, "head": "both"}, "model.pool_size"),
        ({"pool_seed": -1}, "model.pool_seed"),
        ({"head": "passage"}, "model.head"),
        ({"head": "both", "privacy": DPSGD(**NOISE)}, r"model\.head=query"),
        ({"head_dim": 0}, "model.head_dim=0"),
        ({"head_dim": 1000}, "model.head_dim=1000"),
        ({"negatives": "batch", "privacy": PublicPassages(**NOISE)}, r"model\.negatives=batch.*public_passages"),
        ({"loss": SigmoidPairLoss(temperature=1.0), "privacy": PublicPassages(**NOISE)}, r"model\.loss=Sigmoid"),
        ({"privacy": PublicPassages(passage_gradient="own", **NOISE)}, r"privacy\.passage_gradient=own"),
        ({"encoder": SAVED_HEAD, "head": "both", "negatives": "batch"}, r"model\.encoder"),
        ({"encoder": SAVED_HEAD, "head_dim": 2}, r"model\.encoder"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    if settings.get("encoder") == SAVED_HEAD:
        settings = settings | {"encoder": frozen().save_model(tmp_path / "model")}
    with pytest.raises((ConfigurationError, UnsupportedModelError), match=named):
        frozen(**settings)


# -- saving ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "projected"),
    [({"head": "query"}, False), ({"head": "query"}, True), ({"head": "both"}, False), ({"head": "both"}, True),
     ({"head_dim": 3}, False), ({"head": "both", "head_dim": 3}, False), ({"head": "shared", "head_dim": 3}, False)],
)  # fmt: skip
def test_the_saved_folder_gives_the_same_embeddings(tmp_path: Path, settings: dict[str, Any], projected: bool) -> None:
    encoder = tower(query_prefix="query: ", passage_prefix="passage: ")
    if projected:
        torch.manual_seed(4)
        encoder = encoder.changed(projection=nn.Linear(16, 6))
    module = frozen(encoder=encoder, **settings)
    loaded = load_towers(module.save_model(tmp_path / "model"))
    queries, passages = list(QUERIES.values()), list(PASSAGES.values())
    torch.testing.assert_close(loaded.query_encoder.encode(queries, "query"), module.encode_queries(queries))
    torch.testing.assert_close(loaded.passage_encoder.encode(passages, "passage"), module.encode_passages(passages))
    assert loaded.query_encoder.contract.query_prefix == "query: "


@pytest.mark.parametrize("head", ["query", "both"])
def test_sentence_transformers_computes_the_same_embeddings(tmp_path: Path, head: str) -> None:
    reason = "sentence-transformers is not a dependency of ours; where it is installed, it must agree"
    st = pytest.importorskip("sentence_transformers", reason=reason)
    module = frozen(head=head, encoder=tower(query_prefix="query: "))
    model = st.SentenceTransformer(str(module.save_model(tmp_path / "model")), device="cpu")
    queries, passages = list(QUERIES.values()), list(PASSAGES.values())
    ours = module.encode_queries(queries), module.encode_passages(passages)
    theirs = (
        model.encode_query(queries, convert_to_tensor=True),
        model.encode_document(passages, convert_to_tensor=True),
    )
    torch.testing.assert_close(theirs, ours)


# -- the heads over frozen embeddings under every privacy mode ---------------------------------


SAMPLING: dict[str, Any] = {
    "sampling": "truncated_poisson", "cap": 6, "expected_batch_size": 4, "physical_batch_size": 6,
}  # fmt: skip


def of_mode(
    privacy: PrivacyMode, *, kind: type[FrozenDualEncoder] = FrozenDualEncoder, **settings: Any
) -> FrozenDualEncoder:
    known = {"optimizer": OptimizerSpec(name="sgd", lr=0.1), "encoder": tower(), "temperature": 1.0}
    return kind(privacy=privacy, **{**known, **settings})


MODES: dict[str, Callable[[dict[str, Any]], PrivacyMode]] = {
    "none": lambda noise: NoPrivacy(sub_batches=2),
    "dp_sgd": lambda noise: DPSGD(max_grad_norm=0.1, **noise),
    "batch_clip": lambda noise: BatchClip(max_grad_norm=0.1, sub_batches=2, **noise),
    "per_example_duplicated": lambda noise: PerExampleDuplicated(max_grad_norm=0.1, sub_batches=2, **noise),
    "logit_dp": lambda noise: LogitDP(max_logit_grad_norm=0.1, sub_batches=2, **noise),
    "public_passages": lambda noise: PublicPassages(max_grad_norm=0.1, pool_size=5, **noise),
}


@pytest.mark.like(3)
@pytest.mark.parametrize("head", ["query", "both", "shared"])
@pytest.mark.parametrize("name", [*MODES])
def test_every_mode_trains_every_head(name: str, head: str, tmp_path: Path) -> None:
    mode = MODES[name]({**NOISE, "secret_file": tmp_path / "secret"})
    if name in ("dp_sgd", "public_passages") and head != "query":
        with pytest.raises(ConfigurationError, match=r"model\.head=query"):
            of_mode(mode, head=head)
        return
    module = of_mode(mode, head=head)
    before = {key: value.clone() for key, value in module.named_parameters()}
    fit(tmp_path / "run", module, data_module(tmp_path / "data", **SAMPLING), steps=2)
    assert before and all(not torch.equal(value, before[key]) for key, value in module.named_parameters())
    module.save_model(tmp_path / "model")


class Denoised(FrozenDualEncoder):
    """Leaves out as false negatives what shares many letters: more than twelve, or in a small batch any."""

    small = 4

    def collate_rows(self, rows: Any) -> Any:
        batch = super().collate_rows(rows)
        shared = torch.tensor([[len(set(q.query) & set(p.passage)) for p in rows] for q in rows])
        return batch | {"answers": batch["answers"] | (shared > (0 if len(rows) < self.small else 12))}


class DenoisedByPair(Denoised):
    small = 0


@pytest.mark.parametrize(("kind", "bound"), [(LogitDP, "max_logit_grad_norm"), (BatchClip, "max_grad_norm")])
def test_answers_that_depend_on_a_third_row_are_refused_and_those_of_two_rows_are_not(
    kind: Any, bound: str, tmp_path: Path
) -> None:
    mode, looked = kind(**{bound: 0.1, "noise_seed": 1}, **NOISE), list[int]()

    class Watched(DenoisedByPair):
        def collate_rows(self, rows: Any) -> Any:
            looked.append(len(rows))
            return super().collate_rows(rows)

    data = data_module(tmp_path / "data", **SAMPLING)
    fit(tmp_path / "fine", of_mode(mode, kind=Watched), data, steps=6)
    assert looked[-1] + looked[-2] == looked[-3], "both halves of the last batch too, whose step is no power of two"
    with pytest.raises(UnsupportedModelError, match="answers") as refused:
        fit(tmp_path / "run", of_mode(mode, kind=Denoised), data, steps=6)
    assert refused.value.trap == "T11"


class Centred(FrozenDualEncoder):
    """Takes the mean of the batch before from its embeddings."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.center: Any = 0.0

    def pair_batch(self, rows: Any) -> Any:
        pairs, center = super().pair_batch(rows), self.center
        with torch.no_grad():
            self.center = pairs.embed_queries(rows["query"]).mean(0)
        return replace(
            pairs,
            embed_queries=lambda features: nn.functional.normalize(self.embed(features, "query") - center),
            embed_passages=lambda features: nn.functional.normalize(self.embed(features, "passage") - center),
        )


def test_pairs_that_remember_the_batch_before_are_refused(tmp_path: Path) -> None:
    mode = LogitDP(max_logit_grad_norm=0.1, norms="brute_force", noise_seed=1, **NOISE)
    with pytest.raises(UnsupportedModelError, match="keeps of one batch"):
        fit(tmp_path / "run", of_mode(mode, kind=Centred), data_module(tmp_path / "data", **SAMPLING), steps=2)


@pytest.mark.parametrize("head", ["query", "both", "shared"])
def test_auto_takes_the_closed_form_and_it_gives_the_sum_of_the_exact_norms(head: str, tmp_path: Path) -> None:
    sums = {}
    data = data_module(tmp_path / "data")
    for norms in ("auto", "brute_force"):
        module = of_mode(LogitDP(max_logit_grad_norm=0.01, norms=norms, **NOISE), head=head).double()
        module.prepare(data)
        with torch.no_grad():  # away from the identity, where a shared head has no gradient of some pairs
            module.query_head.weight.add_(0.1 * torch.randn(16, 16, generator=torch.Generator().manual_seed(1)))
        rows = module.collate_rows(list(data.pair_rows())[:5])
        rows = {name: value.double() if value.is_floating_point() else value for name, value in rows.items()}
        sums[norms] = clipped_sum(module, plan_of(module.privacy, module, n_max=5), rows)
        mode: Any = module.privacy
        assert type(mode._norms).__name__ == ("LinearHead" if norms == "auto" else "BruteForce")
    torch.testing.assert_close(sums["auto"], sums["brute_force"], rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("mode", [NoPrivacy(), SyntheticData()], ids=lambda mode: mode.name)
def test_without_a_mechanism_of_its_own_it_can_be_trained_either_way(mode: PrivacyMode) -> None:
    assert of_mode(mode, negatives="batch").coupled_loss
    assert not of_mode(mode, negatives="pool").coupled_loss


# -- a head in the principal directions of the public passages --------------------------------


DIM = 3


def matrix(module: FrozenDualEncoder, head: nn.Linear) -> Tensor:
    """The head as a matrix on embeddings, from its definition."""
    assert module.basis is not None
    inside = torch.eye(DIM) - head.weight.detach()
    return torch.eye(len(module.basis)) - module.basis @ inside @ module.basis.T


def test_the_directions_are_those_of_the_largest_singular_values() -> None:
    embeddings = torch.randn(50, 6) * torch.tensor([5.0, 4.0, 3.0, 1.0, 0.5, 0.1])
    found = principal_directions(embeddings, 3)
    _, _, directions = torch.linalg.svd(embeddings.double())
    torch.testing.assert_close((found.double().T @ directions[:3].T).abs(), torch.eye(3).double(), atol=1e-5, rtol=0)


def test_what_lies_across_the_directions_stays_as_it_is() -> None:
    module = frozen(head_dim=DIM)
    assert module.basis is not None and module.query_head.weight.shape == (DIM, DIM)
    features = torch.randn(5, len(module.basis))
    across = features - features @ module.basis @ module.basis.T
    torch.testing.assert_close(module.represent(across, "query"), across)
    torch.testing.assert_close(module.represent(features, "query"), features @ matrix(module, module.query_head).T)


def test_a_checkpoint_keeps_its_directions_whatever_passages_come_later() -> None:
    module, other = frozen(head_dim=DIM), frozen(head_dim=DIM)
    assert module.basis is not None and other.basis is not None
    module.basis.neg_()  # as another library might have signed them
    other.load_state_dict(module.state_dict())
    other.prepare_texts(dict(list(PASSAGES.items())[:4]))
    torch.testing.assert_close(other.basis, module.basis)
    other.prepare_texts(PASSAGES, QUERIES)
    torch.testing.assert_close(losses(other, rows()), losses(module, rows()))


def test_training_goes_on_from_a_saved_query_head(tmp_path: Path) -> None:
    first = frozen()
    folder = first.save_model(tmp_path / "model")
    again = FrozenDualEncoder(privacy=NoPrivacy(), optimizer=OptimizerSpec(), encoder=folder)
    assert torch.equal(again.query_head.weight, first.query_head.weight) and again.query_head.weight.requires_grad
    assert [name for name, each in again.named_parameters() if each.requires_grad] == ["query_head.weight"]
    for side, texts in (("query", QUERIES), ("passage", PASSAGES)):
        found = [getattr(one, f"encode_{'queries' if side == 'query' else 'passages'}")(list(texts.values()))
                 for one in (first, again)]  # fmt: skip
        torch.testing.assert_close(found[1], found[0])
