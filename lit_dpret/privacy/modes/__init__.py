"""The privacy modes: one class each, chosen by ``privacy=``."""

from lit_dpret.privacy.modes.base import PlainGradients, PrivacyMode, StepCounts, Update
from lit_dpret.privacy.modes.dp_sgd import DPSGD
from lit_dpret.privacy.modes.none import NoPrivacy
from lit_dpret.privacy.modes.synthetic import SyntheticData

__all__ = ["DPSGD", "NoPrivacy", "PlainGradients", "PrivacyMode", "StepCounts", "SyntheticData", "Update"]
