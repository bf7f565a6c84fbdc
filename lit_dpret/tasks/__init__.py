"""The tasks of the command line; one class each, selected by ``task=`` and imported on demand.

Each setting is documented once, in `configs/task/NAME.yaml`, and on the site's page of every setting.

The package is long because five attacks, two audits and the trials of a sweep train their own models, and each task
checks a dozen settings.
"""

from __future__ import annotations

from lit_dpret.lazy import lazy_names

_MODULES = {
    "Audit": "audit",
    "BuildSilos": "build_silos",
    "CheckData": "check_data",
    "Compare": "compare",
    "Doctor": "doctor",
    "Encode": "encode",
    "Evaluate": "evaluate",
    "Evolve": "evolve",
    "Export": "export",
    "ExportEmbeddings": "export_embeddings",
    "Federated": "federated",
    "FederatedAttacks": "federated_attacks",
    "FederatedGenerators": "federated_generators",
    "Filter": "filter",
    "Fit": "fit",
    "FitScored": "fit_scored",
    "HardNegatives": "hard_negatives",
    "Histogram": "histogram",
    "Index": "index",
    "Inversion": "inversion",
    "Membership": "membership",
    "OwnLog": "own_log",
    "Pipeline": "pipeline",
    "Plan": "plan",
    "PretrainingOverlap": "pretraining_overlap",
    "PseudoLabels": "pseudo_labels",
    "Ranker": "ranking",
    "Search": "index",
    "Similarity": "similarity",
    "Sweep": "sweep",
    "Synthesize": "synthesize",
    "TrialOf": "trial",
    "Verify": "verify",
}

__all__ = list(_MODULES)
__getattr__ = lazy_names(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted(_MODULES)
