"""Callbacks of a run: accountant, card, evaluation, audit, progress and loggers. Import as ``lit_dpret.callbacks``.

The package is long because a fit refuses, by name, each known way in which a Trainer, a strategy or user code would
make an uncounted release. Each refusal is a few lines and a message that says what to do instead.
"""

from typing import TYPE_CHECKING

from lit_dpret.lazy import lazy_names

if TYPE_CHECKING:
    from lit_dpret.callbacks.doctor import Examination, Finding, examine
    from lit_dpret.callbacks.loggers import MetricsFile, PublicMlflowLogger, PublicTensorBoardLogger, PublicWandbLogger
    from lit_dpret.callbacks.one_run_audit import OneRunAudit
    from lit_dpret.callbacks.privacy_accountant import PrivacyAccountant
    from lit_dpret.callbacks.privacy_card import PrivacyCard
    from lit_dpret.callbacks.progress import ProgressLine, StepProgress, Throughput
    from lit_dpret.callbacks.public_validation import PublicValidation
    from lit_dpret.callbacks.retrieval_evaluation import RetrievalEvaluation
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "Examination": "doctor",
            "Finding": "doctor",
            "MetricsFile": "loggers",
            "OneRunAudit": "one_run_audit",
            "PrivacyAccountant": "privacy_accountant",
            "PrivacyCard": "privacy_card",
            "ProgressLine": "progress",
            "PublicMlflowLogger": "loggers",
            "PublicTensorBoardLogger": "loggers",
            "PublicValidation": "public_validation",
            "PublicWandbLogger": "loggers",
            "RetrievalEvaluation": "retrieval_evaluation",
            "StepProgress": "progress",
            "Throughput": "progress",
            "examine": "doctor",
        },
    )

__all__ = [
    "Examination",
    "Finding",
    "MetricsFile",
    "OneRunAudit",
    "PrivacyAccountant",
    "PrivacyCard",
    "ProgressLine",
    "PublicMlflowLogger",
    "PublicTensorBoardLogger",
    "PublicValidation",
    "PublicWandbLogger",
    "RetrievalEvaluation",
    "StepProgress",
    "Throughput",
    "examine",
]
