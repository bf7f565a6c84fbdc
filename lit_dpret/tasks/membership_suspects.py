"""Whom a membership attack is about: queries that the target was trained on, and queries that it was not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lit_dpret.audit.attacks.coins import Coins
from lit_dpret.datamodules.records import normalise
from lit_dpret.errors import ConfigurationError, DataError

Others = Literal["coins", "dev", "test"]

SHIFT = (
    "Members and others come from different splits, so that an attack may tell the splits apart and not the members. "
    "Numbers above one half, and above a ceiling, may be that."
)
MOST_POPULATION = 500


@dataclass(frozen=True, eq=False, repr=False)
class Suspects:
    """Queries in a fixed order: first those that are attacked, then the population that RMIA compares them with.

    Attributes:
        universe: Ids of all queries that shadow models may be trained on.
        ids: Of the suspects.
        member: Whether the target was trained on them, shape ``(suspects,)``.
        attacked: How many of them, from the first on, are attacked; the rest are no members.
        queries: The text of each row: a suspect with a passage of its.
        passages: The passages, as many.
        row_of: Which suspect a row belongs to, shape ``(rows,)``.
        fair: Whether a coin decided about each query of the universe, so that members and others are of one law.
        left_out: Queries of the universe whose text occurs there under several ids, which are not attacked.
        unanswered: Others that have no passage in the collection (a sample of passages leaves such), so that nothing
            is learnt from them; they are not attacked either.
    """

    universe: list[str]
    ids: list[str]
    member: NDArray[np.bool_]
    attacked: int
    queries: list[str]
    passages: list[str]
    row_of: NDArray[np.int64]
    fair: bool
    left_out: int
    unanswered: int = 0

    def __repr__(self) -> str:
        return f"Suspects({self.attacked} attacked, {len(self.ids) - self.attacked} in the population)"

    @property
    def population(self) -> NDArray[np.int64]:
        """Places of the population among the suspects."""
        return np.arange(self.attacked, len(self.ids))

    def texts(self) -> list[str]:
        """The query of each suspect, once."""
        firsts = np.unique(self.row_of, return_index=True)[1]
        return [self.queries[row] for row in firsts]


def choose_suspects(data: Any, others: Others, coins: Coins | None, *, count: int, rows: int, seed: int) -> Suspects:
    """Draw suspects from the data that the target was trained on.

    Guarantees:
        - With ``coins``, who is attacked does not depend on the coins, as the theorem of the one-run audit asks.
        - With a split, half of the attacked are members as far as there are enough.

    Args:
        data: The datamodule of the target, set up.
        others: Where queries that it was not trained on come from.
        coins: Of the target's run.
        count: Queries to attack.
        rows: Passages of a query that are looked at, from the first on.
        seed: Of the draw.

    Raises:
        ConfigurationError: There are no coins where ``others=coins`` says so.
        DataError: The coins are of other data, or there are too few queries on one side.
    """
    collection = data.collection
    trained = list(collection.split("train"))
    if others == "coins":
        if coins is None:
            raise ConfigurationError(
                "task.others=coins, but the run tossed none. Train the target with task.membership_coins=true, or take "
                "others from another split (task.others=dev), which may differ in more than membership."
            )
        if set(coins.heads) != set(trained):
            raise DataError(
                "The coins of the run are of other queries than the datamodule's train split: give the datamodule the "
                "settings that it was trained with."
            )
        outside = [query for query in trained if not coins.heads[query]]
    else:
        outside = list(collection.split(others))
    universe = trained if others == "coins" else [*trained, *outside]
    split_of = dict.fromkeys(outside, "train" if others == "coins" else others) | dict.fromkeys(trained, "train")
    known = {query: normalise(collection.queries[query]) for query in universe}
    copies = Counter(known.values())
    rng, held_out = np.random.default_rng(seed), set(outside)
    single = [query for query in universe if copies[known[query]] == 1]
    free = [query for query in single if collection.positives(split_of[query], query)]
    unanswered = len(single) - len(free)
    free = [free[place] for place in rng.permutation(len(free))]
    absent = [query for query in free if query in held_out]
    apart = min(MOST_POPULATION, len(absent) // 4)
    if others == "coins":
        chosen = free[: min(count, len(free) - 2 * apart)]
    else:
        half = min(count // 2, len(absent) - apart)
        present = [query for query in free if query not in held_out]
        chosen = [*present[:half], *absent[:half]]
    attacked = set(chosen)
    population = [query for query in absent if query not in attacked][:apart]
    member = np.array([query not in held_out for query in [*chosen, *population]])
    if not len(population) or len(set(member[: len(chosen)])) < 2:
        raise DataError(
            f"{len(free)} queries are too few for an attack, without copies and without those that have no passage: "
            "there must be members, others, and some to compare with. Raise datamodule.max_train_queries and "
            "datamodule.max_passages, where they are set."
        )
    texts: list[str] = []
    passages: list[str] = []
    row_of: list[int] = []
    for place, query in enumerate([*chosen, *population]):
        for passage in collection.positives(split_of[query], query)[:rows]:
            texts.append(collection.queries[query])
            passages.append(collection.passages[passage])
            row_of.append(place)
    return Suspects(
        universe=universe, ids=[*chosen, *population], member=member, attacked=len(chosen), queries=texts,
        passages=passages, row_of=np.array(row_of), fair=others == "coins", left_out=len(universe) - len(single),
        unanswered=unanswered,
    )  # fmt: skip
