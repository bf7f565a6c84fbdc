"""Train dense retrieval on private search queries under differential privacy, and prove it."""

from typing import TYPE_CHECKING

from lit_dpret.lazy import lazy_names

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lit_dpret.audit.testing import assert_private
    from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard, PublicValidation
    from lit_dpret.datamodules import PairsDataModule, UnitDataModule
    from lit_dpret.made_private import make_private
    from lit_dpret.modules import OptimizerSpec, PrivateModule
    from lit_dpret.privacy.modes import DPSGD, NoPrivacy
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "DPSGD": "privacy.modes",
            "NoPrivacy": "privacy.modes",
            "OptimizerSpec": "modules",
            "PairsDataModule": "datamodules",
            "PrivacyAccountant": "callbacks",
            "PrivacyCard": "callbacks",
            "PrivateModule": "modules",
            "PublicValidation": "callbacks",
            "UnitDataModule": "datamodules",
            "assert_private": "audit.testing",
            "make_private": "made_private",
        },
    )

__all__ = [
    "DPSGD",
    "NoPrivacy",
    "OptimizerSpec",
    "PairsDataModule",
    "PrivacyAccountant",
    "PrivacyCard",
    "PrivateModule",
    "PublicValidation",
    "UnitDataModule",
    "__version__",
    "assert_private",
    "make_private",
]
