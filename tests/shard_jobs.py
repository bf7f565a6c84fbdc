"""Jobs for the ranks of `rank_runs.Server` with sharded parameters (FSDP2)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from lit_dpret.distributed.fsdp import ShardingStrategy


def fit(folder: Path, rank: int, world: int, *, trainer: dict[str, Any] | None = None, **given: Any) -> dict[str, Any]:
    """Run `rank_runs.fit`, in shards if there are several ranks."""
    import rank_runs

    chosen = {"strategy": ShardingStrategy(), "devices": world} if world > 1 else {}
    found: dict[str, Any] = rank_runs.fit(folder, rank, world, trainer=chosen | (trainer or {}), **given)
    return found


def short_of_memory(folder: Path, rank: int, world: int, **given: Any) -> dict[str, Any]:
    """Run `rank_runs.short_of_memory`, in shards."""
    import rank_runs

    strategy = {"strategy": ShardingStrategy(), "devices": world}
    found: dict[str, Any] = rank_runs.short_of_memory(folder, rank, world, trainer=strategy, **given)
    return found


def find_size(
    folder: Path, rank: int, world: int, *, room: list[int], told: int | None = None, **given: Any
) -> dict[str, Any]:
    """Fit and find how many rows fit, limited by ``room`` on each rank, or take the number ``told``."""
    import stand_ins
    import torch

    real = stand_ins.Regression
    tried = folder / f"tried{rank}"  # a file, because what a loss keeps in memory is reset after the batch
    tried.write_text("", encoding="utf-8")

    class Growing(real):  # type: ignore[misc, valid-type]
        def longest_rows(self, count: int) -> dict[str, Any]:
            return {"inputs": torch.full((count, 4), 0.5), "target": torch.zeros(count)}

        def per_row_loss(self, rows: dict[str, Any]) -> Any:
            if torch.is_grad_enabled():
                if bool((rows["inputs"] == 0.5).all()):
                    with tried.open("a", encoding="utf-8") as file:
                        file.write(f"{len(rows['target'])} ")
                if len(rows["target"]) > room[rank]:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().per_row_loss(rows)

    class Finding(stand_ins.Numbers):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.finds_physical_batch_size = told is None

    stand_ins.Regression, stand_ins.Numbers = Growing, Finding  # type: ignore[misc]
    data = {"sampling": "poisson"} | ({} if told is None else {"physical_batch_size": told})
    found = fit(folder, rank, world, data=data, **given)
    return found | {"tried": [int(size) for size in tried.read_text(encoding="utf-8").split()]}


def generate(
    folder: Path, rank: int, world: int, *, sharded: bool = True, steps: int = 4, resume: bool = False,
    privacy: dict[str, Any] | None = None, model: dict[str, Any] | None = None, precision: str = "32-true",
    lora: bool = False, kill_at: int | None = None, short_at: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train a tied T5 by the function of ``task=fit``, write its model and card, and return whole weights.

    ``short_at``: the forward pass for which memory runs out on the last rank.
    """
    import functools
    from types import SimpleNamespace

    import lightning as L
    import rank_runs
    import tiny_generator
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from stand_ins import KillAt, Numbers, Units, _Items
    from torch.utils.data import DataLoader

    from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard
    from lit_dpret.privacy.ledger import gate, private_run
    from lit_dpret.privacy.modes import DPSGD, NoPrivacy
    from lit_dpret.tasks.fit import Training, train
    from lit_dpret.tasks.parts import CHECKPOINTS

    private_run.random_secrets = gate.random_secrets = SimpleNamespace(token_hex=lambda size: "ab" * size)  # type: ignore[assignment]
    pairs = tiny_generator.copy_pairs(40)

    class Pairs(Units):
        def rows(self, unit: int) -> list[Any]:
            return [pairs[unit]]

    class Texts(Numbers):
        def train_dataloader(self) -> Any:
            items = _Items(Pairs(self.size))
            return DataLoader(items, batch_sampler=self.batch_sampler, collate_fn=self.collate_fn)

    L.seed_everything(0, verbose=False)
    chosen = {"eps": 8.0, "delta": 1e-3, "noise_multiplier": 2.0, "accountant": "rdp", "max_grad_norm": 0.1,
              "secret_file": folder.parent / "secret"}  # fmt: skip
    mode = NoPrivacy() if privacy == {"none": True} else DPSGD(**chosen | (privacy or {}))
    module = tiny_generator.generator(privacy=mode, **(model or {}))
    if lora:
        from peft import LoraConfig, get_peft_model

        module.model = get_peft_model(module.model, LoraConfig(r=2, target_modules=["q", "v"], init_lora_weights=False))
        tiny_generator.note_built(module)
    passes, real = [0], type(module).per_row_loss

    def losses(self: Any, rows: Any) -> Any:
        passes[0] += torch.is_grad_enabled()
        if passes[0] == short_at and rank == world - 1 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(self, rows)

    type(module).per_row_loss = losses  # type: ignore[method-assign]
    settings: dict[str, Any] = {"accelerator": "cpu", "devices": world, "max_steps": steps, "max_epochs": -1}
    settings |= {"enable_progress_bar": False, "enable_model_summary": False, "precision": precision}
    if sharded:
        settings["strategy"] = ShardingStrategy()
    accountant = PrivacyAccountant(run_dir=folder, resume=resume, eps_log_points=1, replay="never")
    callbacks = [accountant, *([] if lora else [PrivacyCard(run_dir=folder)]),
                 ModelCheckpoint(dirpath=folder / CHECKPOINTS, every_n_train_steps=2, save_last=True),
                 *([] if kill_at is None else [KillAt(kill_at)])]  # fmt: skip
    train(
        module,
        Texts(40, sampling="poisson", expected_batch_size=None, sample_rate=0.2, physical_batch_size=4),
        Training(
            run_dir=folder,
            make_trainer=functools.partial(L.Trainer, **settings),
            callbacks=callbacks,
            resume=resume,
            several_ranks=True,
        ),
    )
    held = {name: type(p).__name__ for name, p in module.named_parameters()}
    found = {name: rank_runs.whole(p.detach()).double().flatten().tolist() for name, p in module.named_parameters()}
    optimizer = module.optimizers()
    state = [v for each in optimizer.state.values() for v in each.values() if torch.is_tensor(v) and v.dim()]
    local = sum((v.to_local() if hasattr(v, "to_local") else v).numel() for v in state)
    kinds = sorted({str(p.dtype) for p in module.parameters()})
    return {"weights": found, "held": held, "state": local, "kinds": kinds, "attempt": accountant._gate.attempt,
            "in_blocks": module.in_blocks, "passes": passes[0]}  # fmt: skip


def pieces(folder: Path, rank: int, world: int) -> dict[str, Any]:
    """Compare `ShardedParameters`, and what uses them, with whole tensors."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh

    from lit_dpret.distributed import fsdp, shards
    from lit_dpret.distributed.blocks import own_blocks
    from lit_dpret.distributed.shards import place_of
    from lit_dpret.errors import UnsupportedModelError
    from lit_dpret.modules import OptimizerSpec
    from lit_dpret.privacy import noise
    from lit_dpret.privacy.noise import KeyedStream

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world,))
    shards.BUCKET, noise.BLOCK = 120, 8

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)])
            self.head, self.tied = nn.Linear(5, 7, bias=False), nn.Linear(5, 7)
            self.tied.weight = self.head.weight
            self.blocks.append(nn.Sequential(self.head))  # not a separate block: the head is used outside too
            self.lone, self.frozen = nn.Parameter(torch.ones(1)), nn.Linear(3, 2).requires_grad_(False)
            self.register_buffer("counted", torch.arange(3.0))

    module, plain = Tied(), Tied()
    blocks = [block is module.blocks[i] for i, block in enumerate(own_blocks(module))]
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.add_(rank)  # rank 0's values must win
    sharded = fsdp.ShardedParameters(module, mesh)
    first = [id(p) for p in module.parameters()]
    with sharded.whole():
        gathered = {name: p.detach().clone() for name, p in module.named_parameters()}
        inside = [id(p) for p in module.parameters()]
        with torch.no_grad():
            module.lone.fill_(99.0)  # discarded: it is a copy
        with sharded.whole():
            pass
        still_whole = not hasattr(module.lone, "full_tensor")
    with sharded.whole():
        same_objects = [id(p) for p in module.parameters()] == inside
    values = dict(plain.named_parameters())
    seen: dict[str, Any] = {
        "blocks": blocks, "tied": module.tied.weight is module.head.weight, "still_whole": still_whole,
        "gathered": all(torch.equal(gathered[name], p) for name, p in values.items()), "same_objects": same_objects,
        "buffers": module.counted.tolist(), "shards_again": [id(p) for p in module.parameters()] == first,
        "frozen": [p.requires_grad for p in module.frozen.parameters()],
    }  # fmt: skip

    random = torch.Generator().manual_seed(1)
    of_rank = [{name: torch.randn(p.shape, generator=random) for name, p in values.items()} for _ in range(world)]
    mine = {name: t.clone() for name, t in of_rank[rank].items()}
    mine["lone"] = mine["lone"].bfloat16()
    totals = {name: sum(each[name] for each in of_rank) for name in values}
    cut = sharded.add_up(mine)
    seen["emptied"] = mine == {}
    seen["kept_in"] = str(cut["lone"].dtype)
    seen["sums"] = max(float((cut[n].full_tensor() - t).abs().max()) for n, t in totals.items() if n != "lone")

    stream, key = KeyedStream(b"s" * 32, "run"), {"attempt": 0, "step": 3, "parameter": "w", "salt": "x"}
    exact = []
    for name, total in totals.items():
        part, start = place_of(cut[name])
        whole = stream.normal(total.shape, **key).flatten()  # type: ignore[arg-type]
        drawn = stream.normal(part.shape, start=start, **key)  # type: ignore[arg-type]
        exact.append(torch.equal(drawn.flatten(), whole[start : start + part.numel()]))
    seen["noise"], seen["rows"] = (
        all(exact),
        [int(place_of(cut["blocks.3.0.weight"])[0].shape[0]), place_of(cut["lone"])[1]],
    )

    seen["optimizers"] = {}
    for name, knobs in {"sgd": {"momentum": 0.9}, "adam": {}, "adamw": {"weight_decay": 0.1}, "adam_bc": {}}.items():
        left, right = Tied(), Tied()
        over = fsdp.ShardedParameters(right, mesh)
        spec = OptimizerSpec(name=name, lr=0.05, **knobs)  # type: ignore[arg-type]
        stepped = [spec.build(net.parameters(), steps=0, noise_std=0.1) for net in (left, right)]
        for _ in range(3):
            gradients = {n: torch.randn(p.shape, generator=random) for n, p in left.named_parameters()}
            parts = over.add_up({n: g / world for n, g in gradients.items()})
            for net, given in ((left, gradients), (right, parts)):
                for n, p in net.named_parameters():
                    p.grad = given[n] if p.requires_grad else None
            for optimizer in stepped:
                optimizer.step()
        pairs = zip(right.parameters(), left.parameters(), strict=True)
        seen["optimizers"][name] = max(float((a.detach().full_tensor() - b.detach()).abs().max()) for a, b in pairs)

    with sharded.assembled(here=rank == 0):
        holds = {name: p for name, p in module.named_parameters()}
        seen["assembled"] = all(not hasattr(p, "full_tensor") for p in holds.values())
        seen["equal"] = rank > 0 or all(torch.equal(holds[name], p) for name, p in values.items())
        seen["tied_inside"] = module.tied.weight is module.head.weight
    seen["shards_after"] = [id(p) for p in module.parameters()] == first

    class Number(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.0))

    try:
        fsdp.ShardedParameters(Number(), mesh)
    except UnsupportedModelError as error:
        seen["refused"] = str(error)
    return seen


def evaluated(folder: Path, rank: int, world: int) -> dict[str, Any]:
    """Train a model that rank 0 alone evaluates between steps, in inference mode."""
    import stand_ins
    import torch
    from torch import Tensor, nn

    from lit_dpret.callbacks import RetrievalEvaluation

    class Deep(stand_ins.Regression):
        def __init__(self, **settings: Any) -> None:
            torch.manual_seed(0)
            super().__init__(dropout=0.0, **settings)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])

        def hidden(self, inputs: Tensor) -> Tensor:
            hidden: Tensor = self.net[0](inputs)
            for block in self.blocks:
                hidden = hidden + block(hidden)
            return hidden

        def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
            return (self.net[1](self.hidden(rows["inputs"])).squeeze(-1) - rows["target"]).square()

        @torch.inference_mode()
        def encode_queries(self, texts: list[str]) -> Tensor:
            return self.hidden(torch.tensor([[float(text.count(letter)) for letter in "abcd"] for text in texts]))

        encode_passages = encode_queries

    class Judged(stand_ins.Numbers):
        def evaluation_set(self, split: str) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
            return {f"q{i}": "ab" * i + "c" for i in range(9)}, {f"q{i}": {f"p{i}": 1} for i in range(9)}

        def public_passages(self) -> dict[str, str]:
            return {f"p{i}": "abb" * i + "d" * (i % 2) for i in range(9)}

    settings = {"strategy": ShardingStrategy(), "devices": world} if world > 1 else {}
    mode = stand_ins.dp(folder.parent, eps=50.0, accountant="rdp", noise_multiplier=2.0, noise_seed=5)
    evaluation = RetrievalEvaluation(data="public", every_n_steps=2, metrics=["mrr@10"])
    runner = stand_ins.fit(folder, Deep(privacy=mode), Judged(sampling="poisson"), extra=[evaluation], **settings)
    return {"mrr": float(runner.callback_metrics["val/mrr@10"]), "step": runner.global_step}


def kept_private(folder: Path, rank: int, world: int, *, way: str, strategy: str) -> None:
    """Fit and keep a number of its rows next to its weights in some ``way``, or nothing, and save them."""
    import rank_runs
    import stand_ins
    import torch

    from lit_dpret.callbacks import PrivacyCard
    from lit_dpret.modules.hook_watch import HookWatch

    class Keeping(stand_ins.Regression):
        last = 0.0

        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.register_buffer("of_rows", torch.zeros(()))
            self.register_buffer("unsaved", torch.zeros(()), persistent=False)
            self.frozen = torch.nn.Linear(2, 2).requires_grad_(False)

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            self.last = 0.5
            if way == "buffer":
                self.get_buffer("of_rows").fill_(self.last)

        def get_extra_state(self) -> Any:
            return {"of_rows": self.last if way == "extra state" else None}

        def set_extra_state(self, state: Any) -> None:
            pass

        def state_dict(self, *given: Any, **named: Any) -> Any:
            found = super().state_dict(*given, **named)
            if way == "metadata":
                found._metadata[""]["of_rows"] = [self.last]
            return found

    # These check only some batches.
    HookWatch.compare = HookWatch.compare_last = lambda *_, **named: None  # type: ignore[method-assign]
    chosen: Any = strategy
    if strategy == "fsdp":
        chosen = ShardingStrategy()
    elif strategy.startswith("stage"):
        from lit_dpret.distributed.zero import ZeroStrategy

        chosen = ZeroStrategy(stage=int(strategy[-1]))
    module = Keeping(privacy=rank_runs.make_mode(folder.parent / "secret", name="dp_sgd"))
    stand_ins.fit(
        folder, module, stand_ins.Numbers(sampling="poisson"), steps=3, save_every=100, strategy=chosen, devices=world,
        extra=[PrivacyCard(run_dir=folder)],
    )  # fmt: skip


def quiet(folder: Path, rank: int, world: int, *, how: str, sharded: bool) -> dict[str, Any]:
    """Fit while the privacy mode of the last rank treats the noise differently than it reports."""
    import rank_runs

    from lit_dpret.privacy.modes import DPSGD, Update
    from lit_dpret.privacy.noise import KeyedStream

    real, normal = DPSGD.privatize, KeyedStream.normal

    def without(self: Any, sums: dict[str, Any], **key: Any) -> Update:
        update = real(self, sums, **key)
        for name in update.gradients:
            update.gradients[name] = sums[name] / update.denominator
        return update

    if how == "without" and rank == world - 1:
        DPSGD.privatize = without  # type: ignore[method-assign]
    if how == "shared":  # each rank draws the noise of its part as if the part were at the start of the parameter
        KeyedStream.normal = lambda *a, **k: normal(*a, **k | {"start": 0})  # type: ignore[method-assign]
    mode = {"name": "dp_sgd", "clip_fraction_budget": 0.1}
    job = fit if sharded else rank_runs.fit
    found: dict[str, Any] = job(folder, rank, world, mode=mode, steps=12)
    return found


def _tensors_alive(expected: float) -> int:
    """Count the tensors of this process; retry for some seconds while a thread of the backend holds a message."""
    import gc
    import time

    from torch import Tensor

    for _ in range(50):
        gc.collect()
        count = sum(type(each) is Tensor for each in gc.get_objects())
        if count <= expected:
            break
        time.sleep(0.1)
    return count


def by_block(
    folder: Path, rank: int, world: int, *, clip_groups: str = "flat", checkpointing: bool = False, half: bool = False,
    breaks: str | None = None, engine_name: str = "ghost",
) -> dict[str, Any]:  # fmt: skip
    """Compare sums of a tied T5 added up block by block with those of one process; report bytes held at once.

    Ranks have different numbers of physical batches, and the last has none. The first unit dominates. With ``breaks``,
    rank 0 loses its step in the ``forward`` pass or the ``sum`` of its second batch, and restarts in smaller ones.
    """
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import T5Config, T5ForConditionalGeneration

    from lit_dpret.distributed import fsdp
    from lit_dpret.distributed.block_by_block import BlockByBlock
    from lit_dpret.distributed.ranks import Ranks
    from lit_dpret.modules.physical_batches import PhysicalBatches
    from lit_dpret.privacy.batches import UnitBatch
    from lit_dpret.privacy.clipping import make_engine

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world,))
    words, units = 50, 9

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            shape = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 3, "num_heads": 3, "vocab_size": words}
            config = T5Config(**shape, dropout_rate=0.0, decoder_start_token_id=0, tie_word_embeddings=True)
            self.t5 = T5ForConditionalGeneration(config)
            if checkpointing:
                self.t5.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

        def losses(self, ids: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
            logits = self.t5(input_ids=ids, labels=labels, use_cache=False).logits.float()
            return nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1) * scale

    random = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(1, words, (units, n), generator=random) for n in (7, 5))
    scale = torch.tensor([1e4, *[1.0] * (units - 1)])

    def add_to(engine: Any, model: Model, chosen: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            engine.add(
                lambda: model.losses(ids[chosen], labels[chosen], scale[chosen]),
                torch.arange(len(chosen)), torch.ones(len(chosen), dtype=torch.bool),
            )  # fmt: skip

    def engine_of(model: Model) -> Any:
        return make_engine(engine_name, model, max_grad_norm=0.1, clip_groups=clip_groups)

    # Units of each rank, by physical batch: the last rank has none, and the first one batch more.
    first = [[0, 1], [2, 3], [4]]
    plan = [first, [[5, 6], [7, 8], []], *[[[], [], []]] * (world - 2)] if world > 1 else [[*first, [5, 6], [7, 8]]]
    model = Model().train()
    alone = engine_of(model)
    for chosen in plan[0] if world == 1 else [batch for rows in plan for batch in rows if batch]:
        add_to(alone, model, torch.tensor(chosen))
    expected = alone.take()

    dominating = engine_of(model)
    add_to(dominating, model, torch.tensor([0]))
    norm = torch.cat([s.flatten() for s in dominating.take().values()]).norm()

    sharded = fsdp.ShardedParameters(model, mesh, compute_dtype=torch.bfloat16 if half else None)
    if half:  # expected sums of the same rounded copies, gathered at once
        with sharded.whole():
            at_once = engine_of(model)
            for chosen in (batch for rows in plan for batch in rows if batch):
                add_to(at_once, model, torch.tensor(chosen))
            expected = at_once.take()
    store = BlockByBlock(sharded, Ranks.here())
    with store.placed():
        engine = engine_of(model)
    engine.store = store

    held = {"weights": 0, "sums": 0}
    real_ask = store._ask

    def ask(wanted: int) -> list[int]:
        now = sum(c.memory.untyped_storage().nbytes() // c.memory.element_size() for c in sharded.cuts.values())
        held["weights"] = max(held["weights"], now)
        held["sums"] = max(held["sums"], sum(s.numel() for s in engine._sums.values()))
        return real_ask(wanted)

    store._ask, calls = ask, [0]  # type: ignore[method-assign]
    broken = [False]

    def contribute(batch: UnitBatch, first: int) -> None:
        chosen = batch.rows["units"] if batch.rows else torch.zeros(0, dtype=torch.long)
        calls[0] += 1
        fails = rank == 0 and breaks is not None and not broken[0] and batch.part == 1
        if len(chosen):
            if fails and breaks == "forward":
                broken[0] = True
                raise torch.OutOfMemoryError("CUDA out of memory.")
            if fails and breaks == "sum":
                broken[0] = True
                real_add, done = store.add, [0]

                def add(part: int, sums: dict[str, Tensor]) -> None:
                    done[0] += 1
                    if done[0] == 3:  # two blocks of this batch have been added up already
                        store.add = real_add  # type: ignore[method-assign]
                        raise torch.OutOfMemoryError("CUDA out of memory.")
                    real_add(part, sums)

                store.add = add  # type: ignore[method-assign]
            add_to(engine, model, chosen)

    physical = PhysicalBatches(contribute, engine.forget, store.settle)
    gaps: list[float] = []
    alive: list[int] = []
    for step in range(3):
        for number, chosen in enumerate(plan[rank]):
            index = torch.tensor(chosen, dtype=torch.long)
            batch = UnitBatch(
                rows={"units": index} if chosen else None, unit_ids=torch.arange(len(chosen)),
                mask=torch.ones(len(chosen), dtype=torch.bool), attempt=0, step=step, part=number,
                last=number == len(plan[rank]) - 1,
            )  # fmt: skip
            with store.passes():
                physical.add(batch, may_split=True, advice="")
            gathered = sum(c.memory.untyped_storage().nbytes() for c in sharded.cuts.values())
        found = engine.take()
        whole = {name: own.full_tensor() for name, own in found.items()}
        assert whole.keys() == expected.keys()
        gaps.append(max(float((whole[n] - expected[n]).abs().max()) for n in whole))
        del found, whole
        alive.append(_tensors_alive(expected=alive[-1] if step == 2 else math.inf))
    sizes = [sum(cut.cut.numel() for cut in block.cuts.values()) for block in sharded.blocks]
    return {
        "gaps": gaps, "largest": float(max(s.abs().max() for s in expected.values())), "norm": float(norm),
        "held": held, "rest": sizes[-1], "block": max(sizes[:-1]), "all": sum(sizes), "after": gathered,
        "alive": alive, "calls": calls[0], "types": sorted({type(p).__name__ for p in model.parameters()}),
        "padding": sum(c.memory.numel() - c.cut.numel() for c in sharded.cuts.values()),
    }  # fmt: skip
