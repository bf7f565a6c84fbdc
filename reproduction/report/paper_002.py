"""The numbers that paper 002 (Kong, Munoz Medina and Ribero, 2310.03104) prints, to stand beside ours.

Recall, precision and F-beta are those of the best class. Tables 3 and 4 are absolute; tables 1 and 2
divide the same by the row without privacy.
"""

from __future__ import annotations

from collections.abc import Mapping

METRICS = ("accuracy", "best_recall", "best_precision", "best_f_beta")
_Rows = Mapping[str, tuple[float, float, float, float]]

TABLE_1: Mapping[str, _Rows] = {
    "EmbeddingNet": {
        "Logit-DP": (0.819, 0.855, 0.812, 0.831),
        "Naive-DP": (0.827, 0.827, 0.812, 0.820),
        "Non-private": (1.0, 1.0, 1.0, 1.0),
    },
    "ResNet18": {
        "Logit-DP": (0.730, 0.871, 0.695, 0.768),
        "Naive-DP": (0.599, 0.672, 0.699, 0.685),
        "Non-private": (1.0, 1.0, 1.0, 1.0),
    },
}
TABLE_2: _Rows = {
    "Logit-DP": (1.013, 0.969, 0.954, 0.981),
    "Naive-DP": (0.946, 1.296, 0.665, 0.911),
    "Non-private": (1.0, 1.0, 1.0, 1.0),
}
TABLE_3: Mapping[str, _Rows] = {
    "EmbeddingNet": {
        "Logit-DP": (0.173, 0.254, 0.251, 0.253),
        "Naive-DP": (0.174, 0.242, 0.245, 0.243),
        "Non-private": (0.212, 0.300, 0.312, 0.306),
    },
    "ResNet18": {
        "Logit-DP": (0.202, 0.325, 0.268, 0.291),
        "Naive-DP": (0.169, 0.269, 0.284, 0.276),
        "Non-private": (0.278, 0.389, 0.388, 0.388),
    },
}
TABLE_4: _Rows = {
    "Logit-DP": (0.169, 0.432, 0.308, 0.336),
    "Naive-DP": (0.158, 0.578, 0.215, 0.313),
    "Non-private": (0.167, 0.446, 0.322, 0.343),
}
