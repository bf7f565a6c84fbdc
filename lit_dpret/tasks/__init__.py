"""What the command line can be asked to do; one class each, chosen by ``task=``."""

from lit_dpret.tasks.ablate import Ablate
from lit_dpret.tasks.audit import Audit
from lit_dpret.tasks.build_silos import BuildSilos
from lit_dpret.tasks.canary_study import CanaryStudy
from lit_dpret.tasks.check_data import CheckData
from lit_dpret.tasks.compare import Compare
from lit_dpret.tasks.compare_modes import CompareModes
from lit_dpret.tasks.compare_negatives import CompareNegatives
from lit_dpret.tasks.doctor import Doctor
from lit_dpret.tasks.encode import Encode
from lit_dpret.tasks.evaluate import Evaluate
from lit_dpret.tasks.export import Export
from lit_dpret.tasks.federated import Federated
from lit_dpret.tasks.federated_attacks import FederatedAttacks
from lit_dpret.tasks.federated_generators import FederatedGenerators
from lit_dpret.tasks.federated_study import FederatedStudy
from lit_dpret.tasks.filter import Filter
from lit_dpret.tasks.fit import Fit
from lit_dpret.tasks.fit_scored import FitScored
from lit_dpret.tasks.hard_negatives import HardNegatives
from lit_dpret.tasks.histogram import Histogram
from lit_dpret.tasks.index import Index
from lit_dpret.tasks.inversion import Inversion
from lit_dpret.tasks.membership import Membership
from lit_dpret.tasks.paper_000 import Paper000
from lit_dpret.tasks.pipeline import Pipeline
from lit_dpret.tasks.plan import Plan
from lit_dpret.tasks.pretraining_overlap import PretrainingOverlap
from lit_dpret.tasks.pseudo_labels import PseudoLabels
from lit_dpret.tasks.ranker import Ranker
from lit_dpret.tasks.search import Search
from lit_dpret.tasks.second_task import SecondTask
from lit_dpret.tasks.similarity import Similarity
from lit_dpret.tasks.suite import Suite, SuitePart
from lit_dpret.tasks.sweep import Sweep
from lit_dpret.tasks.synthesize import Synthesize
from lit_dpret.tasks.trial import TrialOf
from lit_dpret.tasks.variant import Variant
from lit_dpret.tasks.variant_study import VariantStudy
from lit_dpret.tasks.verify import Verify
from lit_dpret.tasks.zero_shot import ZeroShot

__all__ = [
    "Ablate",
    "Audit",
    "BuildSilos",
    "CanaryStudy",
    "CheckData",
    "Compare",
    "CompareModes",
    "CompareNegatives",
    "Doctor",
    "Encode",
    "Evaluate",
    "Export",
    "Federated",
    "FederatedAttacks",
    "FederatedGenerators",
    "FederatedStudy",
    "Filter",
    "Fit",
    "FitScored",
    "HardNegatives",
    "Histogram",
    "Index",
    "Inversion",
    "Membership",
    "Paper000",
    "Pipeline",
    "Plan",
    "PretrainingOverlap",
    "PseudoLabels",
    "Ranker",
    "Search",
    "SecondTask",
    "Similarity",
    "Suite",
    "SuitePart",
    "Sweep",
    "Synthesize",
    "TrialOf",
    "Variant",
    "VariantStudy",
    "Verify",
    "ZeroShot",
]
