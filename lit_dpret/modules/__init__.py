"""Lightning modules: one training loop, and the model families built on it.

The package is long because the checks of a fit live here: a user's module is examined
while it trains, for couplings of rows (`coupling_check`) and for what hooks write between batches (`hook_watch`).
"""

from typing import TYPE_CHECKING

from lit_dpret.lazy import lazy_names

if TYPE_CHECKING:
    from lit_dpret.modules.as2 import AS2DualEncoder
    from lit_dpret.modules.dual_encoder import DualEncoder
    from lit_dpret.modules.embedding_trainer import EmbeddingTrainer
    from lit_dpret.modules.frozen_dual_encoder import FrozenDualEncoder
    from lit_dpret.modules.optimizers import OptimizerSpec
    from lit_dpret.modules.private_module import PrivateModule
    from lit_dpret.modules.query_generator import QueryGenerator
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "AS2DualEncoder": "as2",
            "DualEncoder": "dual_encoder",
            "EmbeddingTrainer": "embedding_trainer",
            "FrozenDualEncoder": "frozen_dual_encoder",
            "OptimizerSpec": "optimizers",
            "PrivateModule": "private_module",
            "QueryGenerator": "query_generator",
        },
    )

__all__ = [
    "AS2DualEncoder",
    "DualEncoder",
    "EmbeddingTrainer",
    "FrozenDualEncoder",
    "OptimizerSpec",
    "PrivateModule",
    "QueryGenerator",
]
