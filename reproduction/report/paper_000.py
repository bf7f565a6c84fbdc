"""The numbers that paper 000 (Carranza et al., "Synthetic Query Generation for Privacy-Preserving Deep Retrieval
Systems using Differentially Private Language Models") prints, to stand beside ours.

Paper 001 is an earlier version with the same numbers in other tables. An epsilon of None is the paper's infinity.
"""

from __future__ import annotations

from collections.abc import Mapping

Point = tuple[str, float | None]
"""Source and epsilon, as the paper's tables name a row."""

ORIGINAL = "Original"
MAIN, SIZES = "T5-Base", ("T5-Small", "T5-Base", "T5-Large", "T5-XL")
SETS = (
    "arguana", "cqadup", "dbpedia", "fiqa", "hotpot", "nfcorpus", "quora", "scidocs", "scifact", "covid", "touche"
)  # fmt: skip

#: Table 1: what was searched, and what section 5.2.1 says was best.
TABLE_1: Mapping[str, tuple[tuple[float, ...], float]] = {
    "learning rate": ((0.001, 0.0005, 0.00025, 0.000125), 0.001),
    "clipping norm": ((0.1, 0.25, 0.5, 1.0), 0.1),
    "batch size": ((128, 256, 512, 1024), 1024),
    "epochs": ((10, 20, 30), 30),
}
#: Table 2: one passage with the queries that were made for it, by source and epsilon.
TABLE_2_PASSAGE = (
    "The main cast of the show: Mickey Mouse, Minnie Mouse, Donald Duck, Daisy Duck, Goofy, and Pluto star in the "
    "series, which focuses on interacting with the viewer to stimulate problem solving."
)
TABLE_2: Mapping[Point, str] = {
    (ORIGINAL, None): "characters from the Mickey Mouse clubhouse show",
    ("T5-Base", None): "the Mickey Mouse show cast",
    ("T5-Base", 16.0): "what is the most important characters in the series",
    ("T5-Base", 8.0): "what is in this series?",
    ("T5-Base", 3.0): "what is in this code for dfr1",
    ("T5-XL", 3.0): "issue with show by mickey mouse",
    ("T5-Large", 3.0): "what is the most animated characters on disney cartoon show",
    ("T5-Small", 3.0): "what is isn't a character will do a story",
}
#: Tables 3 and 4: nDCG@10 and Recall@10 on MS MARCO.
TABLE_3: Mapping[Point, tuple[float, float]] = {
    (ORIGINAL, None): (0.2525, 0.4098),
    ("T5-Base", None): (0.2590, 0.4192),
    ("T5-Base", 16.0): (0.2027, 0.3342),
    ("T5-Base", 8.0): (0.1912, 0.3196),
    ("T5-Base", 3.0): (0.1830, 0.3108),
    ("T5-XL", 3.0): (0.1854, 0.3098),
    ("T5-Large", 3.0): (0.1833, 0.3094),
    ("T5-Small", 3.0): (0.1346, 0.2272),
}
TABLE_4: Mapping[Point, tuple[float, float]] = {
    (ORIGINAL, None): (0.2525, 0.4098),
    (ORIGINAL, 16.0): (0.0523, 0.0862),
    (ORIGINAL, 8.0): (0.0386, 0.0649),
    (ORIGINAL, 3.0): (0.0234, 0.0388),
}
#: Table 5: nDCG@10, then Recall@10, in the order of `SETS`.
TABLE_5: Mapping[Point, tuple[tuple[float, ...], tuple[float, ...]]] = {
    (ORIGINAL, None): (
        (0.2653, 0.2659, 0.3905, 0.2257, 0.5232, 0.2974, 0.8126, 0.1857, 0.4527, 0.4971, 0.2764),
        (0.5569, 0.3368, 0.1479, 0.2440, 0.3706, 0.1013, 0.8989, 0.1071, 0.5801, 0.0116, 0.0530),
    ),
    (ORIGINAL, 16.0): (
        (0.2132, 0.0990, 0.1272, 0.0870, 0.1422, 0.1331, 0.6856, 0.0792, 0.2051, 0.3133, 0.1185),
        (0.4388, 0.1325, 0.0313, 0.0906, 0.1108, 0.0365, 0.7762, 0.0503, 0.2969, 0.0063, 0.0149),
    ),
    ("T5-Base", 16.0): (
        (0.2757, 0.2474, 0.3728, 0.2140, 0.5122, 0.2971, 0.7850, 0.1750, 0.4645, 0.4351, 0.2547),
        (0.5768, 0.3165, 0.1217, 0.2261, 0.3398, 0.1110, 0.8763, 0.1066, 0.5848, 0.0101, 0.0489),
    ),
}
#: Table 6: BLEU and MAUVE.
TABLE_6: Mapping[Point, tuple[float, float]] = {
    ("T5-Base", None): (0.2939, 0.9763),
    ("T5-Base", 16.0): (0.0984, 0.3715),
    ("T5-Base", 8.0): (0.0940, 0.3431),
    ("T5-Base", 3.0): (0.0856, 0.2974),
    ("T5-XL", 3.0): (0.1021, 0.7117),
    ("T5-Large", 3.0): (0.1096, 0.6359),
    ("T5-Small", 3.0): (0.0436, 0.2296),
}
TABLE_6_FOOTNOTE = (
    "The paper prints two BLEU values for one row: T5-Base at epsilon 3 has 0.0856 in the upper half of its table 6 "
    "and 0.0940 in the lower half, beside the same MAUVE of 0.2974. 0.0940 is also its value at epsilon 8. The first "
    "one stands here."
)
#: Table 7: copies to (rank among 100, share that leaked).
TABLE_7: Mapping[float | None, Mapping[int, tuple[float, float]]] = {
    None: {10: (1, 0.67), 100: (1, 1.0)},
    16.0: {10: (43, 0.0), 100: (32, 0.0)},
}
#: Section 5.2.3: shares of MS MARCO found exactly in C4; the first is an upper bound in the text ("<1.9%").
OVERLAP_SHARES: Mapping[str, float] = {"queries": 0.019, "passages": 0.22}
