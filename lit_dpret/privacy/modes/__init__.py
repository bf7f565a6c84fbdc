"""The privacy modes: one class each, chosen by ``privacy=``."""

from typing import TYPE_CHECKING

from lit_dpret.lazy import lazy_names

if TYPE_CHECKING:
    from lit_dpret.privacy.modes.base import PrivacyMode, StepCounts, Update
    from lit_dpret.privacy.modes.batch_clip import BatchClip
    from lit_dpret.privacy.modes.coupled import CoupledMode
    from lit_dpret.privacy.modes.dp_sgd import DPSGD
    from lit_dpret.privacy.modes.gaussian import GaussianMode
    from lit_dpret.privacy.modes.logit_dp import LogitDP
    from lit_dpret.privacy.modes.per_example_duplicated import PerExampleDuplicated
    from lit_dpret.privacy.modes.plain import NoPrivacy, PlainGradients, SyntheticData
    from lit_dpret.privacy.modes.public_passages import PublicPassages
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "BatchClip": "batch_clip",
            "CoupledMode": "coupled",
            "DPSGD": "dp_sgd",
            "GaussianMode": "gaussian",
            "LogitDP": "logit_dp",
            "NoPrivacy": "plain",
            "PerExampleDuplicated": "per_example_duplicated",
            "PlainGradients": "plain",
            "PrivacyMode": "base",
            "PublicPassages": "public_passages",
            "StepCounts": "base",
            "SyntheticData": "plain",
            "Update": "base",
        },
    )

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
