"""Private queries and public passages, read, checked and grouped into units. Import as ``lit_dpret.datamodules``.

The package is long because every reader names file, line and column of each problem without showing a text, and because
images, federated silos and four public layouts are read here without separate libraries.
"""

from typing import TYPE_CHECKING

from lit_dpret.lazy import lazy_names

if TYPE_CHECKING:
    from lit_dpret.datamodules.beir import BeirDataModule
    from lit_dpret.datamodules.huggingface import HuggingFaceDataModule
    from lit_dpret.datamodules.images import ImagesDataModule
    from lit_dpret.datamodules.insuranceqa import InsuranceQADataModule
    from lit_dpret.datamodules.msmarco import MSMarcoDataModule
    from lit_dpret.datamodules.own_units import UnitDataModule
    from lit_dpret.datamodules.pairs import PairsDataModule
    from lit_dpret.datamodules.silo import SiloDataModule
    from lit_dpret.datamodules.squad import SquadDataModule
    from lit_dpret.datamodules.synthetic import SyntheticDataModule
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "BeirDataModule": "beir",
            "HuggingFaceDataModule": "huggingface",
            "ImagesDataModule": "images",
            "InsuranceQADataModule": "insuranceqa",
            "MSMarcoDataModule": "msmarco",
            "PairsDataModule": "pairs",
            "SiloDataModule": "silo",
            "SquadDataModule": "squad",
            "SyntheticDataModule": "synthetic",
            "UnitDataModule": "own_units",
        },
    )

__all__ = [
    "BeirDataModule",
    "HuggingFaceDataModule",
    "ImagesDataModule",
    "InsuranceQADataModule",
    "MSMarcoDataModule",
    "PairsDataModule",
    "SiloDataModule",
    "SquadDataModule",
    "SyntheticDataModule",
    "UnitDataModule",
]
