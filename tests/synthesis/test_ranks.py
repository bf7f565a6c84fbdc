"""Ranks share out the groups of a data set: the files are those of one process, whoever made what and whoever died."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import job_ranks
import pytest
from tiny_generator import PASSAGES, SETTINGS, content

from lit_dpret.distributed.job import Job, job_here
from lit_dpret.errors import ConfigurationError
from lit_dpret.synthesis.shards import RankShards, ShardStore
from lit_dpret.synthesis.writer import synthesize


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    """A folder of a job, with the generator in it."""
    shutil.copytree(source, tmp_path / "g")
    return tmp_path


@pytest.mark.slow
def test_two_ranks_write_the_files_of_one_process(whole: Path, folder: Path) -> None:
    statuses, said = job_ranks.run("synthesize", folder, 2)
    assert statuses == [0, 0], said
    assert content(folder / "set") == content(whole)
    assert (folder / "set" / "privacy_card.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("again", [1, 2, 3])
def test_after_kill_9_of_a_rank_another_number_of_ranks_goes_on(whole: Path, folder: Path, again: int) -> None:
    statuses, said = job_ranks.run("synthesize", folder, 2, kill=(1, 1))
    assert statuses[1] == -9 and statuses[0] == 2, said
    assert "WorkerError" in said and "Another process of this job ended" in said
    assert not (folder / "set" / "privacy_card.json").exists()
    kept = len(list((folder / "set" / "shards").glob("[0-9]*")))
    assert kept >= 3, "the living rank went on with what was left"
    statuses, said = job_ranks.run("synthesize", folder, again)
    assert statuses == [0] * again, said
    assert content(folder / "set") == content(whole)


@pytest.mark.slow
def test_kill_9_of_the_first_rank_ends_the_others_in_words(whole: Path, folder: Path) -> None:
    statuses, said = job_ranks.run("synthesize", folder, 2, kill=(0, 1))
    assert statuses == [-9, 2], said
    assert "rank 1: WorkerError" in said
    synthesize(folder / "g", PASSAGES, folder / "set", **SETTINGS)
    assert content(folder / "set") == content(whole)


@pytest.mark.slow
def test_what_one_rank_cannot_do_is_said_by_all_in_the_same_words(folder: Path) -> None:
    statuses, said = job_ranks.run("refuse", folder, 2)
    assert statuses == [2, 2]
    assert said.count("StorageError: the disk of rank 1 is full") == 2, said


@pytest.mark.slow
def test_ranks_that_were_called_differently_are_refused(tmp_path: Path) -> None:
    statuses, said = job_ranks.run("differ", tmp_path, 2)
    assert statuses == [2, 2] and said.count(": runs/0, runs/1") == 2, said


def test_alone_nobody_is_asked(tmp_path: Path) -> None:
    for environment in (
        {},
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"SLURM_NTASKS": "4"},
    ):  # the last: a shell of an allocation
        with job_here(environment) as job:
            assert job == Job() and job.is_first and list(job.deal("x", [3, 1])) == [3, 1]


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"WORLD_SIZE": "2"}, "lacks MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "lacks RANK"),
        ({"WORLD_SIZE": "two"}, "is not a number"),
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, "torchrun"),
    ],
)
def test_an_environment_that_is_incomplete_is_refused(environment: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said), job_here(environment):
        pass


def test_a_journal_of_a_stopped_rank_is_believed_only_for_this_very_generation(tmp_path: Path) -> None:
    mine, other = {"seed": 1}, {"seed": 2}
    first = ShardStore(tmp_path, mine, 3)
    (tmp_path / "shards").mkdir(exist_ok=True)
    RankShards(tmp_path, {"shards": 3, **mine}, 1, [0, 1, 2]).add(1, [{"a": 1}])
    RankShards(tmp_path, {"shards": 3, **other}, 2, [0, 1, 2]).add(2, [{"a": 2}])
    assert first.missing == [0, 1, 2]
    assert ShardStore(tmp_path, mine, 3).missing == [0, 2]
    (tmp_path / "shards" / "000001.jsonl").write_text("{}\n", encoding="utf-8")
    assert ShardStore(tmp_path, mine, 3).missing == [0, 1, 2], "a shard that was changed is made again"
    assert json.loads((tmp_path / ".manifest.jsonl.rank1").read_text().splitlines()[1])["shard"] == 1
