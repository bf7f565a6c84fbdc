"""How the commands of a page are executed at a tiny size, and which are not, with the reason. Not a test.

Everything that makes a shown command smaller stands in `TINY`, everything that a page takes for granted in
`page_stages.STAGES`, and everything that is not executed in `NOT_EXECUTED` and `OTHER_PROGRAMS`.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from shown_commands import ROOT

from lit_dpret.cli import USER_ERROR, with_task

SMALL_DATA = ["datamodule.expected_batch_size=8", "datamodule.physical_batch_size=8"]
SMALL_LENGTHS = ["model.max_passage_length=16", "model.max_query_length=8"]
SAMPLE = ["datamodule.max_passages=500"]  # with the queries that they answer
SMALL_CANARIES = [
    "task.trainings=1",
    "task.steps=2",
    "task.batch=8",
    "task.measure.draws=2",
    "task.canaries.repetitions=[1,2]",
    "task.canaries.candidates=10",
    "task.canaries.passage_words=6",
]
SMALL_PIPELINE = ["task.generator_steps=2", "task.generator_batch=8", "task.generator_physical_batch=8",
                  "task.retriever_steps=2", "task.retriever_batch=8", "task.max_passages=100",
                  "task.generator.max_passage_length=16", "task.retriever.max_passage_length=16"]  # fmt: skip
TWO_ON_THE_CPU = ["trainer.accelerator=cpu", "trainer.devices=2", "trainer.num_nodes=1", "trainer.precision=32-true"]


def _more(part: str, *settings: str) -> str:
    """Settings of one part of ``task=suite``, as one setting of the suite."""
    quoted = ",".join(f'"{setting}"' for setting in settings)
    return f"task.parts.{part}.more=[{quoted}]"


# What stands before a command's own settings, which therefore overrule it: under truncated Poisson sampling the
# accountant takes a minute for the smallest run, under Poisson sampling a second; some attacks need no shadow models;
# silos of invented words with an encoder of their own train in a second.
QUICK: dict[str, list[str]] = {
    "privacy=dp_sgd": ["datamodule.sampling=poisson"],
    "privacy=public_passages": ["datamodule.sampling=poisson"],
    "task=ablate": ["datamodule.sampling=poisson"],
    "experiment=ablate_eps3": ["task.only=[none_pool,public,made_prompts]"],
    "experiment=tune_eps3": ["task.only=[none_pool,clip_05]"],
    "task=membership": ["task.shadows=4"],
    "experiment=pdd_as2": [
        "federated.silos=planted",
        "++federated.planted.clients=3",
        "++federated.planted.entities=8",
        "++federated.planted.told=4",
        "++federated.planted.questions=3",
        "federated.model.encoder=planted",
        "federated.model.layers=null",
    ],
}

# A choice or a setting of a command, and what makes a run of it take seconds. Later lines overrule earlier ones.
TINY: dict[str, list[str]] = {
    "trainer=cpu": ["trainer.max_steps=2"],
    "trainer=ddp": ["trainer.max_steps=2", *TWO_ON_THE_CPU],
    "trainer=fsdp": ["trainer.max_steps=2", *TWO_ON_THE_CPU],
    "trainer=deepspeed": ["trainer.max_steps=2", *TWO_ON_THE_CPU],
    "datamodule=insuranceqa": [*SMALL_DATA, *SAMPLE],
    "datamodule=pairs": SMALL_DATA,
    "datamodule=synthetic": SMALL_DATA,
    "datamodule=hf": SMALL_DATA,
    "datamodule=msmarco": SMALL_DATA,
    "datamodule=squad": SMALL_DATA,
    "datamodule=cifar10": [*SMALL_DATA, "datamodule.max_images=100"],
    "model=generator": SMALL_LENGTHS,
    "model=dual_encoder": SMALL_LENGTHS,
    "model=frozen_dual_encoder": SMALL_LENGTHS,
    "canaries=papers": ["model.max_passage_length=64", "model.max_query_length=32", "canaries.repetitions=[1,2]",
                        "canaries.candidates=10"],
    "callbacks=with_audit": ["model.max_query_length=32", "callbacks.audit.canaries=32",
                             "callbacks.audit.max_share=0.5"],
    "task=pipeline": SMALL_PIPELINE,
    "task=own_log": [*SMALL_PIPELINE[:-2], "task.passage_length=16"],
    "task=synthesize": ["task.max_passages=24", "task.max_new_tokens=6", "task.group_size=8"],
    "task=evolve": ["privacy.eps=50", "task.generations=2", "task.population=24", "task.max_passages=24",
                    "task.max_new_tokens=6", "task.group_size=8", "task.threshold=0",
                    "datamodule.max_train_queries=100"],
    "task=compare_modes": ["task.max_passages=100", "task.seeds=2", "task.eps=[3]", "task.min_free_mb=1",
                           "task.only=[none,synthetic]"],
    "task=ablate": ["task.max_passages=100", "task.seeds=2", "task.min_free_mb=1",
                    "task.retriever.max_passage_length=16", "task.variants.none_pool.steps=2"],
    "experiment=ablate_eps3": ["task.written_passages=20", "task.likeness_texts=null",
                               *(f"task.generators.{name}.{small}" for name in ("full", "prompts", "warm")
                                 for small in ("steps=2", "batch=8", "model.max_passage_length=16")),
                               *(f"task.variants.{name}.{small}" for small in ("steps=2", "batch=8")
                                 for name in ("public", "made", "made_prompts", "made_warm"))],
    "task=compare_negatives": ["task.max_passages=100", "task.seeds=2", "task.steps=2", "task.batch=8",
                               "task.min_free_mb=1", "task.retriever.max_passage_length=16",
                               "task.only=[in_batch,static,dynamic]"],
    "task=audit": ["task.measure.draws=2"],
    "task=canaries": SMALL_CANARIES,
    "task=federated": ["task.seeds=[0]", "task.systems=[bm25,stage1,fed_negative]", "federated.stage2.batch_size=4"],
    "federated=inprocess": ["federated.privacy.accountant=rdp"],
    "federated=flower": ["federated.privacy.accountant=rdp"],
    "task=build_silos": ["task.clients=3", "task.max_train_queries=12", "task.max_passages=12", "task.min_train=4",
                         "task.min_test=1"],
    "task=federated_attacks": ["task.layers=1", "task.candidates=5", "task.request_eps=[8]", "task.update_eps=[8]",
                               "task.centroids=4", "task.max_passage_length=16", "task.max_query_length=8"],
    "task=federated_generators": ["task.batch_size=8", "task.max_new_tokens=6", "task.queries_per_passage=1"],
    "task=membership": ["task.queries=24"],
    "task=inversion": ["task.known=100", "task.attacked=20", "task.steps=5", "task.batch_size=8", "task.candidates=5"],
    "task=plan": ["privacy.accountant=rdp"],
    "task.units=532000": ["datamodule.expected_batch_size=1024"],
    "task=similarity": ["task.max_texts=50", "task.seeds=1"],
    "task=variants": ["task.seeds=[0]", "task.epochs=1", "task.batch_size=20", "task.held_out_images=20",
                      "task.held_out_group=10", "privacy.sub_batches=2"],
    "task=second_task": ["task.data=null", "task.epochs=1"],
    "task=paper_000": [*(setting.replace("task.", "task.pipeline.", 1) for setting in SMALL_PIPELINE),
                       *(setting.replace("task.", "task.canaries.", 1) for setting in SMALL_CANARIES),
                       "task.canary_queries=null",
                       "task.eps=[3]", "task.min_free_mb=1", "task.shrink_passages=50", "task.shrink.epochs=1",
                       "task.similarity.max_texts=50", "task.similarity.seeds=1", "task.grid.max_passages=24",
                       "task.grid.lr=[0.001]", "task.grid.batch=[8]", "task.grid.epochs=[0.001]"],
    "experiment=paper_002": ["task.only=[embedding_net,fine_tune]", "task.min_free_mb=1",
                             _more("embedding_net", "task.seeds=[0]", "task.epochs=1", "task.batch_size=20",
                                   "task.held_out_images=20", "task.held_out_group=10", "privacy.sub_batches=2",
                                   "task.variants.naive_dp_1000.batch_size=10"),
                             _more("fine_tune", "task.seeds=[0]", "task.epochs=1", "task.data=null")],
    "experiment=paper_004": ["task.only=[silos,encoder,cases,inversion,table_1]", "task.min_free_mb=1",
                             _more("silos", "task.max_train_queries=12", "task.max_passages=50"),
                             _more("encoder", "federated.clients=3"),
                             _more("inversion", "task.known=100", "task.attacked=20", "task.steps=5",
                                   "task.batch_size=8", "task.candidates=5"),
                             _more("table_1", "task.seeds=[0]", "task.systems=[bm25,stage1,fed_negative]",
                                   "federated.clients=3", "federated.stage2.batch_size=4")],
    "experiment=pdd_as2": ["federated.clients=3", "federated.stage1.top_k=10", "federated.stage1.batch_size=4",
                           "federated.stage2.batch_size=4", "federated.stage2.n=4", "federated.stage2.top_k=10",
                           "federated.model.max_sentence_length=16", "federated.model.max_query_length=8"],
    "federated.silos=silos": ["federated.model.encoder=minilm", "federated.model.layers=1"],  # not of invented words
    "task=federated_study": ["task.seeds=[0]"],
    "task.study=data_ratio": ["task.values=[0.5,1]"],
    "task.study=hubness": ["task.values=[10,20]"],
    "task.study=clients": ["task.values=[3,6]"],
    "experiment=best_eps3": ["privacy.pool_size=64"],
    "experiment=direct_eps3": ["model.pool_size=64"],
    "experiment=generator_t5_xl": ["model.pretrained=public_t5"],
}  # fmt: skip

# Commands of ours that are not executed; each is composed, and what it constructs is checked, in test_pages.py.
NOT_EXECUTED: dict[str, str] = {
    "datamodule.path=someone/questions": "needs the Hugging Face hub",
    "task.source=medquad": "needs MedQuAD: tests/federated/test_silo_data.py reads a small one",
    "task.source=newsqa": "needs NewsQA: tests/federated/test_silo_data.py reads a small one",
    "google-t5/": "needs the Hugging Face hub and a GPU",
    "model.pretrained=smollm2": "needs 540 MB, and hours: tests/modules/test_decoder_only.py reads a small one",
    "federated.superlink=": "needs a running SuperLink: tests/federated/test_superlink.py starts one",
    "--superlink ": "the same",
}

# Those that are executed where a library of an extra is installed.
NEEDS: dict[str, str] = {
    "trainer=tpu": "torch_xla",
    "trainer=deepspeed": "deepspeed",
    "task.search=faiss:": "faiss",
    "sweep ": "wandb",
    "train_cli.py": "jsonargparse",
    "logger=mlflow": "mlflow",
    "logger=tensorboard": "tensorboard",
    "logger=wandb": "wandb",
    "lit-dpret silo": "flwr",
    "task.sign_with=": "cryptography",
}

# Commands that a page shows because of where they stop, with a part of what they say then.
STOPS: dict[str, str] = {
    "federated=flower federated.privacy.eps=8 task.seeds": "federated.superlink is null",
}

# Programs that are not ours, by their first words.
OTHER_PROGRAMS: dict[str, str] = {
    "pip install": "needs the network; the extras that it names are compared with pyproject.toml",
    "python -m venv": "a new environment: tests/test_installed.py makes one",
    ". .venv/bin/activate": "belongs to the line above",
    "pytest": "is what runs this",
    "docker": "needs a container engine, which the tests do not have",
    "export": "for the server of the line below",
    "flower-superlink": "a server that runs until it is stopped: tests/federated/test_superlink.py starts one",
    "flwr supernode": "needs that server: tests/federated/test_superlink.py does it",
    "scripts/xla_env.sh": "makes an environment of 7.5 GB",
    "python scripts/public_cross_encoder.py": "is in a clone: tests/test_public_cross_encoder.py runs it",
}


def shortened(arguments: Sequence[str]) -> list[str]:
    """The settings of a shown command, with those that make a run of it tiny around them."""
    if arguments[:1] in (["silo"], ["list"]):
        return list(arguments)
    given = with_task(list(arguments))
    with initialize_config_module(version_base="1.3", config_module="lit_dpret.configs"):
        cfg = compose("train", overrides=[word for word in given if not word.startswith("-")], return_hydra_config=True)
    chosen = {f"{group}={choice}" for group, choice in OmegaConf.to_container(cfg.hydra.runtime.choices).items()}  # type: ignore[union-attr]
    chosen.update(given)

    def those(table: dict[str, list[str]]) -> list[str]:
        return [setting for choice, settings in table.items() if choice in chosen for setting in settings]

    return [*those(QUICK), *given, *those(TINY)]


class Desk:
    """A folder in which commands are typed one after the other, each in a process that has imported everything."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "said.log"
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["lit_dpret.cli", "lightning.pytorch"])

    def ours(self, arguments: Sequence[str], *, launcher: str = "", stops: str = "") -> None:
        """Run ``lit-dpret`` with ``arguments``; what has two ranks is started as a shell would.

        Args:
            arguments: Those after ``lit-dpret``.
            launcher: What starts the ranks.
            stops: It has to be refused in these words; empty where it has to end well.

        Raises:
            AssertionError: It ended otherwise; with what it said.
        """
        if launcher == "torchrun":
            self.other(
                [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "lit_dpret", *arguments]
            )
        elif "trainer.devices=2" in arguments:
            self.other([sys.executable, "-m", "lit_dpret", *arguments])
        else:
            given = (list(arguments), self.folder, self.log, _surroundings(self.folder))
            process = self._context.Process(target=_run, args=given)
            process.start()
            process.join()
            ended = process.exitcode == USER_ERROR and stops in self._said() if stops else process.exitcode == 0
            assert ended, f"lit-dpret {' '.join(arguments)}\n{self._said()}"

    def other(self, command: Sequence[str]) -> None:
        """Run any program; ``> FILE`` at the end is where it writes to."""
        environment = os.environ | _surroundings(self.folder)
        redirected = ">" in command
        typed, into = (command[:-2], command[-1]) if redirected else (command, os.devnull)
        with self.log.open("w") as log, (self.folder / into).open("w") as file:
            out = file if redirected else log
            done = subprocess.run(typed, cwd=self.folder, env=environment, stdout=out, stderr=log, check=False)
        assert done.returncode == 0, f"{' '.join(command)}\n{self._said()}"

    def _said(self) -> str:
        return self.log.read_text(encoding="utf-8")[-3000:] if self.log.exists() else "nothing"


def _surroundings(folder: Path) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(folder / "state"), "HOME": str(folder / "home"), "WANDB_MODE": "offline",
            "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # fmt: skip


def _run(arguments: list[str], folder: Path, log: Path, surroundings: dict[str, str]) -> None:
    """In the new process: what the installed program does."""
    from lit_dpret import cli

    os.environ.update(surroundings)
    os.chdir(folder)
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.argv = [str(ROOT / "train.py"), *arguments]
    cli.main()
