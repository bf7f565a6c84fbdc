"""What the command line can be asked to do; one class each, chosen by ``task=``."""

from lit_dpret.tasks.compare import Compare
from lit_dpret.tasks.compare_modes import CompareModes
from lit_dpret.tasks.compare_negatives import CompareNegatives
from lit_dpret.tasks.doctor import Doctor
from lit_dpret.tasks.encode import Encode
from lit_dpret.tasks.evaluate import Evaluate
from lit_dpret.tasks.export import Export
from lit_dpret.tasks.fit import Fit
from lit_dpret.tasks.index import Index
from lit_dpret.tasks.pipeline import Pipeline
from lit_dpret.tasks.plan import Plan
from lit_dpret.tasks.search import Search
from lit_dpret.tasks.second_task import SecondTask
from lit_dpret.tasks.synthesize import Synthesize
from lit_dpret.tasks.variant import Variant
from lit_dpret.tasks.variant_study import VariantStudy
from lit_dpret.tasks.zero_shot import ZeroShot

__all__ = [
    "Compare",
    "CompareModes",
    "CompareNegatives",
    "Doctor",
    "Encode",
    "Evaluate",
    "Export",
    "Fit",
    "Index",
    "Pipeline",
    "Plan",
    "Search",
    "SecondTask",
    "Synthesize",
    "Variant",
    "VariantStudy",
    "ZeroShot",
]
