"""Errors that a user can cause and fix, and the names of settings in their messages.

The command line prints only the message of a refusal, without a traceback, and exits with status 2. Inside another
project it is an ordinary exception, whose text uses Python's names for settings and values (`in_python`).
"""

import gzip
import re
import zlib
from collections.abc import Callable
from json import JSONDecodeError

#: Set by the command line, whose errors name its own settings.
on_command_line = False

#: The Python names of the command-line choices that errors mention.
_CHOICES = {
    "privacy": {
        "none": "NoPrivacy", "dp_sgd": "DPSGD", "logit_dp": "LogitDP", "batch_clip": "BatchClip",
        "synthetic": "SyntheticData", "per_example_duplicated": "PerExampleDuplicated",
        "public_passages": "PublicPassages",
    },
    "datamodule": {"pairs": "PairsDataModule", "synthetic": "SyntheticDataModule"},
    "model": {
        "generator": "QueryGenerator", "dual_encoder": "DualEncoder", "frozen_dual_encoder": "FrozenDualEncoder",
        "embedding_trainer": "EmbeddingTrainer",
    },
    "loss": {"margin_mse": "MarginMSELoss"},
    "negatives": {
        "bm25": "BM25Negatives", "dynamic": "DynamicNegatives", "gold": "GoldNegatives",
        "labelled": "LabelledNegatives",
    },
    "logger": {"wandb": "lit_dpret.callbacks.PublicWandbLogger"},
    "callbacks": {"with_throughput": "Throughput"},
    "trainer": {
        "cpu": "accelerator='cpu'", "tpu": "accelerator='tpu'", "ddp": "strategy='ddp'",
        "fsdp": "strategy=lit_dpret.distributed.fsdp.ShardingStrategy()",
        "deepspeed": "strategy=lit_dpret.distributed.zero.ZeroStrategy()",
        "tpu_processes": "strategy=lit_dpret.distributed.xla_processes.XLAProcesses()",
    },
}  # fmt: skip
_CALLBACKS = {
    "accountant": "PrivacyAccountant", "card": "PrivacyCard", "audit": "OneRunAudit",
    "evaluation": "RetrievalEvaluation", "throughput": "Throughput",
}  # fmt: skip
_VALUES = {"true": "True", "false": "False", "null": "None"}
_WORDS: tuple[tuple[str, Callable[[re.Match[str]], str]], ...] = (
    (r"(?<![\w.])resume=true\b", lambda found: "PrivacyAccountant(resume=True)"),
    (r"\bhydra\.run\.dir\b", lambda found: "default_root_dir of the Trainer"),
    # Arguments of objects that the user holds, but not file names.
    (
        r"(?<![\w./])(?:privacy|model|datamodule)\.(?=[a-z])"
        r"(?!(?:safetensors|json|jsonl|md|html|pt|py|ckpt|yaml|gguf)\b)",
        lambda found: "",
    ),
    (
        r"(?<![\w.])(" + "|".join(f"{group}=(?:{'|'.join(names)})" for group, names in _CHOICES.items()) + r")\b",
        lambda found: _choice(*found[1].split("=")),
    ),
    (
        rf"\bcallbacks\.({'|'.join(_CALLBACKS)})\b(?:\.(\w+)(?:=([^\s,;]*[^\s,;.:)]))?)?",
        lambda found: _CALLBACKS[found[1]] + (f"({found[2]}={found[3] or '...'})" if found[2] else ""),
    ),
    (r"(?<!lit-dpret )(?<![\w.])task=(?=[a-z])", lambda found: "lit-dpret task="),
    (
        r"(?<![\w.(])(init_from|init_from_is_public|trial_of)=([^\s,;]*[^\s,;.:)])",
        lambda found: f"PrivacyAccountant({found[1]}={_quoted(found[2])})",
    ),
    (r"(=|\bto |\bor |\bleave it )(true|false|null)\b", lambda found: found[1] + _VALUES[found[2]]),
)


def _choice(group: str, name: str) -> str:
    """Return a choice as Python writes it; for privacy with the argument, since a sentence may begin with it."""
    return f"privacy={_CHOICES[group][name]}" if group == "privacy" else _CHOICES[group][name]


def _quoted(value: str) -> str:
    """Return a text as Python writes it; return other values, and quoted texts, unchanged."""
    return value if value in (*_VALUES, *_VALUES.values()) or value[0] in "'\"" else repr(value)


def in_python(sentence: str) -> str:
    """Return an error message in the terms of the Python API.

    Example:
        >>> in_python("Say resume=true, raise privacy.eps=3, or set datamodule.cap to null.")
        'Say PrivacyAccountant(resume=True), raise eps=3, or set cap to None.'
        >>> in_python("Set callbacks.evaluation.card_entry=true, or choose privacy=none (task=plan tells more).")
        'Set RetrievalEvaluation(card_entry=True), or choose privacy=NoPrivacy (lit-dpret task=plan tells more).'
    """
    for pattern, words in _WORDS:
        sentence = re.sub(pattern, words, sentence)
    return sentence


def told(sentence: str) -> str:
    """Return a message with settings named the way the user sets them."""
    return sentence if on_command_line else in_python(sentence)


class LitDpretError(Exception):
    """An error that a user can cause and fix."""

    def __init__(self, *args: object, trap: str | None = None) -> None:
        super().__init__(*args)
        self.trap = trap  # the trap of `lit_dpret.callbacks.traps` that the error prevents, such as ``T1``

    def __str__(self) -> str:
        return told(self.sentence)

    @property
    def sentence(self) -> str:
        """The text for cards, which others recompute: identical wherever the error was raised."""
        return super().__str__()


class ConfigurationError(LitDpretError, ValueError):
    """A setting, or a combination of settings, that is not supported."""


class DataError(LitDpretError, ValueError):
    """Input data that is missing, malformed or contradicts itself.

    The sentence may name files, lines, ids and columns, but never a text; reports count problems by their ``kind``.
    """

    record: tuple[str, int] | None = None  # the file and the number of the record that is left out because of it

    def __init__(self, *args: object, kind: str = "malformed data", trap: str | None = None) -> None:
        super().__init__(*args, trap=trap)
        self.kind = kind


class PrivateDataError(LitDpretError, TypeError):
    """Private data, or a model trained on it, where only released artefacts are allowed."""


class UnsupportedModelError(LitDpretError, TypeError):
    """A model or layer for which a privacy claim cannot be made."""


class UnplannedError(ConfigurationError):
    """The cost of a run is decided while it runs, so nothing can be planned or reserved for it."""


class UnsupportedAccountingError(ConfigurationError):
    """A sampling law, accountant and neighbouring relation that no library supports together."""


class AccountingMemoryError(LitDpretError, MemoryError):
    """The privacy accounting of the releases does not fit into memory."""


class BudgetExceededError(LitDpretError, RuntimeError):
    """The next release would spend more than the budget allows."""


class DivergenceError(LitDpretError, ArithmeticError):
    """The weights of a private run are NaN or infinite: further steps would spend budget and change nothing."""


class LedgerError(LitDpretError, RuntimeError):
    """The ledger is broken, or contradicts the next operation."""


class ResumeError(LitDpretError, RuntimeError):
    """A run cannot continue from its last state without breaking its claim."""


class StorageError(LitDpretError, OSError):
    """The disk is full, or the run folder cannot be written."""


class DeviceMemoryError(LitDpretError, MemoryError):
    """A step does not fit into memory in batches of any size."""


class WorkerError(LitDpretError, RuntimeError):
    """A worker process died or failed; its finished results are kept."""


class VerificationError(LitDpretError, RuntimeError):
    """A privacy card, or something that it names, does not match its description."""


class PrivacyViolation(LitDpretError, AssertionError):
    """A tested mechanism does not satisfy its privacy claim."""


def schema_problem(found: object, known: str) -> str | None:
    """Explain why a file of schema ``found`` cannot be read as ``known``; None if it can.

    Example:
        >>> schema_problem("lit-dpret/privacy-card/1", "lit-dpret/privacy-card/1")
        >>> schema_problem("lit-dpret/privacy-card/3", "lit-dpret/privacy-card/1")
        "its schema is 'lit-dpret/privacy-card/3', and this lit-dpret reads 'lit-dpret/privacy-card/1'."
    """
    return None if found == known else f"its schema is {found!r}, and this lit-dpret reads {known!r}."


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, joined with the second if the first ends in a colon."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])


def unwritten(error: Exception) -> str:
    """Return why a file could not be written: the system's message, even if safetensors wraps it.

    Example:
        >>> unwritten(OSError(28, "No space left on device")), unwritten(ValueError("Error while serializing: full"))
        ('No space left on device', 'Error while serializing: full')
    """
    return getattr(error, "strerror", None) or first_line(error)


def in_words(error: BaseException) -> str:
    """Return in plain words why a file or a message cannot be read; of the values that Python quotes, keep only key
    names.

    Texts of the data are left out, since errors are printed and logged.

    Example:
        >>> in_words(KeyError("data")), in_words(EOFError("Compressed file ended"))
        ("it has no 'data'", 'its compressed data end too early')
    """
    if isinstance(error, KeyError) and error.args:
        return f"it has no {error.args[0]!r}"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not a {error.encoding.upper()} text"
    if isinstance(error, JSONDecodeError):
        return f"it is not JSON, from line {error.lineno} column {error.colno} on"
    if isinstance(error, EOFError):
        return "its compressed data end too early"
    if isinstance(error, gzip.BadGzipFile | zlib.error):
        return "its compressed data are broken"
    if isinstance(error, OSError):
        return error.strerror or str(error) or "it cannot be opened"
    return "a part of it is missing or malformed"
