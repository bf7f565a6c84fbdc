"""The privacy modes: one class each, chosen by ``privacy=``."""

from lit_dpret.privacy.modes.base import PlainGradients, PrivacyMode, StepCounts, Update
from lit_dpret.privacy.modes.batch_clip import BatchClip
from lit_dpret.privacy.modes.coupled import CoupledMode
from lit_dpret.privacy.modes.dp_sgd import DPSGD
from lit_dpret.privacy.modes.gaussian import GaussianMode
from lit_dpret.privacy.modes.logit_dp import LogitDP
from lit_dpret.privacy.modes.none import NoPrivacy
from lit_dpret.privacy.modes.per_example_duplicated import PerExampleDuplicated
from lit_dpret.privacy.modes.public_passages import PublicPassages
from lit_dpret.privacy.modes.synthetic import SyntheticData

__all__ = [
    "DPSGD",
    "BatchClip",
    "CoupledMode",
    "GaussianMode",
    "LogitDP",
    "NoPrivacy",
    "PerExampleDuplicated",
    "PlainGradients",
    "PrivacyMode",
    "PublicPassages",
    "StepCounts",
    "SyntheticData",
    "Update",
]
