"""Write a synthetic data set with a private generator: resumable, with the same result after any interruption.

The shapes that the model computes depend only on the list of passages (`canonical_groups`), so any run writes the same
bytes. Which passages get queries must not depend on the private queries, or the list reveals which passages people
asked about. So the caller has to declare that the list is public (under ``zero_out``, known to everybody).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lit_dpret.cards.amendments import with_notes
from lit_dpret.cards.card import CARD_NAME, CardFacts, inherit_card, read_card, write_card
from lit_dpret.cards.file import check_artefact
from lit_dpret.cards.provenance import environment_facts, version_of
from lit_dpret.cards.start import model_folder
from lit_dpret.distributed.ray_workers import device_named
from lit_dpret.errors import ConfigurationError, DataError, StorageError
from lit_dpret.modules.generator_folder import GeneratorModel, load_generator, read_contract, weights_hash
from lit_dpret.privacy.ledger.assumptions import Assumption
from lit_dpret.privacy.ledger.chain import left_behind
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME
from lit_dpret.synthesis.dataset_folder import (
    DATA_FILES,
    DataCard,
    SyntheticQuery,
    check_passages,
    passages_hash,
    write_dataset,
    write_readme,
    write_summary,
)
from lit_dpret.synthesis.groups import Generation, canonical_groups, draw_groups
from lit_dpret.synthesis.sampler import Decoding
from lit_dpret.synthesis.shards import MANIFEST_NAME, SHARDS_NAME, ShardStore, unwritable


def synthesize(
    generator_folder: str | Path,
    passages: Mapping[str, str],
    out: str | Path,
    *,
    passages_are_public: bool,
    language: str | None = None,
    license: str | None = None,
    tuning: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
    **settings: Any,
) -> Path:
    """Write queries for public passages with a generator, as a data set in BEIR's layout; return ``out``.

    Guarantees:
        - After any interruption, a second call continues. The data files then have the same bytes as those of an
          uninterrupted run (same machine and library versions), whatever ``workers`` each part used.
        - The queries of a passage do not depend on ``queries_per_passage``, except for how many there are.
        - The data set's privacy card carries the generator's claim and names its card.
        - Only the generator and the passages are read.

    Args:
        generator_folder: A folder written by ``QueryGenerator.save_model``, with its privacy card.
        passages: Text by id. Passages without text get no query.
        out: The folder to write to or to continue in.
        passages_are_public: Must be true: the list of passages was fixed without looking at the private queries, or
            the generator's claim treats it as public (``neighbours=zero_out``).
        language: Comma-separated ISO codes of the texts for the data card; None states none.
        license: Licence of the set for the data card, as the Hugging Face hub writes it; None states none.
        tuning: The data on which the settings above were chosen, as in `CardFacts`.
        progress: Called with (passages done, passages in total).
        settings: The settings of `Generation`.

    Raises:
        DataError: The generator's card is missing or about other weights, or the passages are malformed.
        ResumeError: ``out`` was begun with another configuration, or other versions of torch or transformers.
        StorageError: ``out`` cannot be written, is in use, or the disk is too small.
        WorkerError: Workers died or failed.
    """
    source, folder = model_folder(generator_folder), Path(out)
    if not source.exists():
        raise DataError(f"task.generator={source} does not exist.")
    if passages_are_public is not True:
        raise ConfigurationError(_why_public(source, passages_are_public))
    about = DataCard(
        title=f"Synthetic queries: {folder.resolve().name}",
        tags=["synthetic", "differential-privacy", "query-generation", "beir"], language=language, license=license,
    )  # fmt: skip
    how = Generation(**settings)
    # With workers, the device is on their machines.
    place = torch.device(how.device) if how.workers and how.device != "auto" else device_named(how.device)
    check_passages(passages)
    if not (source / CARD_NAME).is_file():
        raise DataError(
            f"{source} holds no {CARD_NAME}, so the claim of the queries would be unknown. Use a folder exported by a "
            "generator run; a run with privacy=none has a card too, which states no guarantee."
        )
    read_contract(source)  # names an artefact that is not a generator, before its card is judged
    check_artefact(source, read_card(source))  # an adapter next to the weights is loaded with them
    texts = {name: text for name, text in passages.items() if text.strip()}
    if not texts:
        raise DataError(f"None of the {len(passages)} passages has any text.")
    decoding: dict[str, Any] = {}  # filled in once lengths are known
    above = source.resolve().parent / LEDGER_NAME  # a run folder keeps its ledger next to model/

    def card_of(hashes: Mapping[str, str], environment: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the card of the set, which inherits the generator's claim."""
        return inherit_card(
            source / CARD_NAME,
            {"artifact_type": "dataset", "name": folder.resolve().name, "sha256": dict(hashes)},
            CardFacts(
                tuning=tuning,
                environment=environment,
                generation={
                    "doc_source": "declared_public",
                    "per_doc": how.queries_per_passage,
                    "decoding": dict(decoding),
                    "filters": [],
                    "seeds": [how.seed],
                },
                assumptions=[Assumption(list_assumption(read_card(source)["claim"]["neighbours"]), "unverified")],
            ),
            description="queries drawn from the generator for a public list of passages",
            parent_ledger=above if above.is_file() and not (source / LEDGER_NAME).exists() else None,
        )

    card_of({}, None)  # refuse a card that cannot be inherited before the work, not after it
    generator = load_generator(source)
    longest = generator.contract.max_query_length if how.max_new_tokens is None else how.max_new_tokens
    how = replace(how, max_new_tokens=longest, device=str(place))
    decoding |= asdict(how.decoding())
    configuration = drawing_facts(source, texts, how)
    groups = canonical_groups(generator.codec, texts, how.group_size)
    fits = partial(check_disk, folder, texts, draws=how.queries_per_passage, max_new_tokens=longest)
    with opened(folder, configuration, len(groups), check=fits) as store:
        alone = None if how.workers else generator
        del generator  # with workers, each loads its own
        draw_into(store, groups, texts, source, how, generator=alone, progress=progress)
        of = f"`{configuration['generator'][:16]}` (SHA-256 of its files)"
        about = replace(about, origin=[f"Generator: {of}, named in the privacy card.", "Filters: none."])
        amount = f"{how.queries_per_passage} per passage; seed {how.seed}"

        def queries() -> Iterator[SyntheticQuery]:
            return (SyntheticQuery(**record) for record in store.records())

        write_set(folder, queries, texts, configuration, about, card_of, amount=amount)
    return folder


def drawing_facts(source: Path, texts: Mapping[str, str], how: Generation) -> dict[str, Any]:
    """Return everything that determines the drawn queries; ``how`` has its lengths and device resolved."""
    return {
        "generator": weights_hash(source),
        "passages": passages_hash(texts),
        "queries_per_passage": how.queries_per_passage,
        "seed": how.seed,
        **asdict(how.decoding()),
        "group_size": how.group_size,
        "device": torch.device(how.device).type,
        "precision": how.precision,
        "threads": how.threads,
        **{package: version_of(package) for package in ("torch", "transformers")},
    }


def draw_into(
    store: ShardStore,
    groups: Sequence[Sequence[str]],
    texts: Mapping[str, str],
    source: Path,
    how: Generation,
    *,
    generator: GeneratorModel | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Draw the missing shards, and write each as soon as it is complete.

    The arguments are those of `synthesize` and `draw_groups`.
    """
    total = sum(map(len, groups))
    done = total - sum(len(groups[index]) for index in store.missing)
    if progress is not None:
        progress(done, total)
    if store.missing:
        # Longest passages first: running out of memory shows at once, not after hours.
        tasks = ((index, {name: texts[name] for name in groups[index]}) for index in reversed(store.missing))
        with closing(draw_groups(tasks, source, how, generator=generator)) as drawing:
            for index, records in drawing:
                store.add(index, records)
                done += len(groups[index])
                if progress is not None:
                    progress(done, total)
    store.seal()


def write_set(
    folder: Path,
    queries: Callable[[], Iterator[SyntheticQuery]],
    texts: Mapping[str, str],
    configuration: Mapping[str, Any],
    about: DataCard,
    card_of: Callable[[Mapping[str, str], Mapping[str, Any]], dict[str, Any]],
    *,
    amount: str,
) -> None:
    """Write the data files, cards and ``generation.json`` of the drawn queries.

    ``queries`` yields the queries again at each call. Passages, decoding and ``amount`` (how much was drawn) follow
    the first line of the origin of ``about``. ``card_of`` makes the privacy card from the SHA-256 of the files and the
    environment.
    """
    counts, hashes = write_dataset(folder, queries, texts)
    if counts.queries == 0:
        raise DataError(
            f"All {counts.drawn} queries were empty: the generator writes nothing. Train it longer or with less noise, "
            "or raise task.min_new_tokens."
        )
    environment = environment_facts(device=configuration["device"], precision=configuration["precision"])
    card = with_notes(card_of(hashes, environment), folder)
    write_card(card, folder)
    decoding = {field.name: configuration[field.name] for field in fields(Decoding)}
    first, *rest = about.origin
    origin = [
        first,
        f"Passages: a list declared public. {list_assumption(card['claim']['neighbours'])}",
        f"Decoding: {', '.join(f'{key} {value}' for key, value in decoding.items() if value is not None)}; {amount}; "
        f"precision {configuration['precision']}, on {configuration['device']}, {configuration['group_size']} passages "
        "at a time.",
        *rest,
    ]
    write_summary(folder, configuration, counts, hashes, terms=about.terms)
    write_readme(folder, replace(about, origin=origin), counts, card)


def list_assumption(neighbours: str | None) -> str:
    """Return the assumption on the list of passages under which the generator's claim covers the set."""
    text = "The list of passages was fixed without looking at the private queries"
    if neighbours == "zero_out":
        return f"{text}, or is that of the training data, which the claim (zero-out) takes as known to everybody."
    return f"{text}."


def _why_public(source: Path, declared: object) -> str:
    """Return why nothing is generated for a list that was not declared public, depending on the generator's claim."""
    given = f"task.passages_are_public={str(declared).lower()}: "
    if not (source / CARD_NAME).is_file() or read_card(source)["claim"]["neighbours"] != "zero_out":
        return given + (
            "writing queries only for passages that had private queries reveals which passages those are, and the "
            "privacy claim would not cover it: removing or replacing a query would change that list. Give a "
            "list that was fixed without looking at the queries (the whole corpus, or a public sample of it) and set "
            "task.passages_are_public=true."
        )
    return given + (
        "the data set publishes the list of passages. If these are the passages that had private queries, it reveals "
        "which passages those are; the generator's claim (neighbours=zero_out) treats that as public, and protects "
        "only what was asked about them. Set task.passages_are_public=true if that may be known, or if the list was "
        "fixed without looking at the queries; otherwise give the whole corpus, or a public sample of it."
    )


@contextmanager
def opened(
    folder: Path, configuration: Mapping[str, Any], count: int, *, check: Callable[[], None]
) -> Iterator[ShardStore]:
    """Yield the shards of ``folder``, which is locked; call ``check`` before anything is written there."""
    check()
    with alone_in(folder):
        yield ShardStore(folder, configuration, count)


def check_disk(folder: Path, texts: Mapping[str, str], *, draws: int, max_new_tokens: int) -> None:
    """Refuse, before it starts, a generation whose result would not fit on the disk.

    The passages are written once as corpus and once per draw as pairs. A drawn query is stored in a shard, in two
    files of queries and in two qrels, at about 6 bytes per token and 300 of framing.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        foreign = [] if (folder / MANIFEST_NAME).exists() else [name for name in DATA_FILES if (folder / name).exists()]
        probe = folder / f".probe.{os.getpid()}"
        probe.touch()
        probe.unlink()
        free = shutil.disk_usage(folder).free
        finished = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    except OSError as error:
        raise unwritable(folder, error) from error
    if foreign:
        raise StorageError(
            f"{folder / foreign[0]} exists and is not from this command; it will not be replaced. Choose another "
            "output folder."
        )
    text_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts.values())
    needed = int(1.1 * (1 + draws) * text_bytes) + len(texts) * (200 + draws * (500 + 3 * 6 * min(max_new_tokens, 32)))
    if free + finished < needed:
        raise StorageError(
            f"{folder} has {free / 1e6:.0f} MB free, and {len(texts)} passages with {draws} queries each need about "
            f"{(needed - finished) / 1e6:.0f} MB. Free some space, give fewer passages, or choose another output "
            "folder."
        )


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Lock the shards folder for one process; the operating system releases the lock when the process ends."""
    try:
        import fcntl
    except ImportError:  # this system has no such locks
        yield
        return
    shards = folder / SHARDS_NAME
    shards.mkdir(exist_ok=True)
    descriptor = os.open(shards, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StorageError(
                f"{folder} is being written by another process. Wait for it, or choose another output folder."
                f"{left_behind(descriptor)}"
            ) from error
        yield
    finally:
        os.close(descriptor)
