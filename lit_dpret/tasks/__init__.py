"""What the command line can be asked to do; one class each, chosen by ``task=``."""

from lit_dpret.tasks.doctor import Doctor
from lit_dpret.tasks.encode import Encode
from lit_dpret.tasks.evaluate import Evaluate
from lit_dpret.tasks.fit import Fit
from lit_dpret.tasks.index import Index
from lit_dpret.tasks.pipeline import Pipeline
from lit_dpret.tasks.plan import Plan
from lit_dpret.tasks.search import Search
from lit_dpret.tasks.synthesize import Synthesize

__all__ = ["Doctor", "Encode", "Evaluate", "Fit", "Index", "Pipeline", "Plan", "Search", "Synthesize"]
