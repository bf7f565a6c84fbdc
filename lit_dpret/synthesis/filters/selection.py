"""Write a selection of released queries as a separate data set with the claim of the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_dpret.cards.card import CardFacts, inherit_card, read_card, write_card
from lit_dpret.errors import DataError, StorageError
from lit_dpret.privacy.ledger.assumptions import Assumption
from lit_dpret.synthesis.dataset_folder import (
    Counts,
    DataCard,
    terms_of,
    write_entries,
    write_readme,
    write_summary,
)
from lit_dpret.synthesis.filters.by_score import Progress, QueryFilter
from lit_dpret.synthesis.filters.released import ReleasedQueries, foreign_code, require_of_its_folder, trusted_beside


@dataclass(frozen=True, kw_only=True)
class Applied:
    """The result of one filter."""

    settings: Mapping[str, Any]
    asked: int
    kept: int
    lowest_kept: float | None  # the lowest score of the kept queries; None if it kept none
    # Some kept and some dropped queries, each as (score, query, passage id).
    examples: tuple[list[tuple[float, str, str]], list[tuple[float, str, str]]]
    trusts: tuple[Assumption, ...] = ()  # what the claim of the kept queries takes on trust, from `QueryFilter.check`

    def to_dict(self) -> dict[str, Any]:
        """Return the counts and settings as JSON values, without examples."""
        # A filter only gets released queries; whether its model saw private ones is decided, or declared.
        return {
            "uses_private_data": "no, as declared" if self.trusts else False,
            **self.settings,
            "asked": self.asked,
            "kept": self.kept,
            "lowest_kept": self.lowest_kept,
        }


def apply_filters(
    released: ReleasedQueries,
    filters: Sequence[QueryFilter],
    progress: Callable[[str], Progress] | None = None,
    *,
    examples: int = 5,
) -> tuple[ReleasedQueries, list[Applied]]:
    """Return the queries that pass all filters, each applied only to those that passed the previous ones.

    Every filter is checked before the first one scores.

    ``progress`` is called with the name of each filter and returns a function, called with (queries done, in total).
    Up to ``examples`` kept queries, and as many dropped ones, are recorded per filter.

    Raises:
        PrivateDataError: A filter would introduce private data.
        DataError: No query is left.
    """
    under, trusts = released, list[tuple[Assumption, ...]]()
    for one in filters:  # check it on queries under the claim that earlier filters leave them with
        trusts.append((*one.check(under), *foreign_code(one)))
        under = under.under(one.claim(under))
    done: list[Applied] = []
    left = released
    for one, trusted in zip(filters, trusts, strict=True):
        scores, kept = one.choose(left, progress and progress(one.name))
        if not kept.any():
            raise DataError(
                f"None of {len(left)} queries passes the filter {one.name} ({_shown(one.facts())}): no training "
                "data would remain. Loosen the filter, or check the generator: its queries may not fit their passages."
            )
        shown = tuple(
            [(float(scores[i]), left.queries[i].text, left.queries[i].passage_id) for i in _spread(mask, examples)]
            for mask in (kept, ~kept)
        )
        done.append(
            Applied(
                settings=one.facts(), asked=len(left), kept=int(kept.sum()), lowest_kept=float(scores[kept].min()),
                examples=(shown[0], shown[1]), trusts=trusted,
            )
        )  # fmt: skip
        left = left.only(kept.tolist()).under(one.claim(left))
    return left, done


def _spread(mask: Any, count: int) -> list[int]:
    """Return up to ``count`` indices of true values, spread evenly."""
    places = mask.nonzero()[0].tolist()
    step = max(1, len(places) // count) if count else 1
    return list(places[::step][:count])


def write_selection(
    kept: ReleasedQueries,
    out: str | Path,
    *,
    applied: Sequence[Applied],
    tuning: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
    language: str | None = None,
    license: str | None = None,
) -> Path:
    """Write the kept queries in BEIR's layout, with ids and metadata unchanged.

    Guarantees:
        - The privacy card makes the same claim as the card of the whole data set, and names it.
        - The card lists every filter with its settings.
        - A query only gets the card of a folder that contains it, word for word.

    ``applied`` comes from `apply_filters`; ``tuning`` and ``environment`` are those of `CardFacts`. Language and
    licence default to those of the whole set.

    Raises:
        StorageError: ``out`` is not empty.
        PrivateDataError: A query is not in the folder whose card it would get.
    """
    folder = Path(out)
    check_is_new(folder)
    require_of_its_folder(kept)
    name, source = folder.resolve().name, kept.folder
    card: dict[str, Any] | None = None
    filters = [one.to_dict() for one in applied]

    def card_of(hashes: Mapping[str, str], claimed: Path) -> dict[str, Any]:
        generation = dict(read_card(claimed)["generation"])
        trusts = [trust for one in applied for trust in one.trusts]
        trusts += trusted_beside(claimed, kept.claim) if kept.claim is not None else ()
        return inherit_card(
            kept.claim or claimed,
            {"artifact_type": "dataset", "name": name, "sha256": dict(hashes)},
            CardFacts(
                tuning=tuning,
                environment=environment,
                generation={**generation, "filters": [*generation.get("filters", []), *filters]},
                assumptions=list(dict.fromkeys(trusts)),
            ),
            description="a selection of the queries",
        )

    claimed = source if kept.provenance == "card" else None
    if claimed is not None:
        card_of({}, claimed)  # refuse a card that cannot be inherited before queries are written without one
    counts = Counts(queries=len(kept), passages=len({query.passage_id for query in kept}))
    hashes = write_entries(folder, lambda: kept, kept.passages)
    if claimed is not None:
        card = card_of(hashes, claimed)
        write_card(card, folder)
    origin = [
        f"A selection of `{source.resolve().name if source else 'queries'}`, by "
        + ("; then ".join(f"{_shown(one)} ({one['kept']} of {one['asked']} kept)" for one in filters) or "no filter")
        + "."
    ]
    tags = ["synthetic", "query-generation", "beir", "differential-privacy"] if card else ["beir"]
    terms = {} if source is None else terms_of(source)
    terms |= {key: value for key, value in (("language", language), ("license", license)) if value is not None}
    title = f"{'Synthetic' if card else 'Selected'} queries: {name}"
    about = DataCard(
        title=title, origin=origin, tags=tags, language=terms.get("language"), license=terms.get("license")
    )
    made = {"selection_of": None if source is None else source.name, "filters": filters}
    write_summary(folder, made, counts, hashes, terms=about.terms)
    write_readme(folder, about, counts, card)
    return folder


def check_is_new(folder: Path) -> None:
    """Refuse a folder that is not empty; `StorageError` names it."""
    if folder.exists() and any(folder.iterdir()):
        raise StorageError(f"{folder} is not empty, and will not be replaced. Choose another folder.")


def _shown(settings: Mapping[str, Any]) -> str:
    more = ", ".join(
        f"{key} {_shown(value) if isinstance(value, Mapping) else value}"
        for key, value in settings.items()
        if key not in ("filter", "asked", "kept", "lowest_kept", "uses_private_data") and value is not None
    )
    return f"{settings['filter']} ({more})" if more else str(settings["filter"])
