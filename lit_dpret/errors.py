"""The words in which this project refuses.

A refusal is one sentence that names the value, the reason and the knob, written in the words of the
command line. The command line prints it alone, without a traceback, and exits with status 2;
inside another project it is an ordinary exception, whose text says Python's words for the values
(`in_python`). Nothing here imports anything of ours, so every layer may raise it.
"""

import re

#: Set by the command line, whose errors name its own settings.
on_command_line = False

_MODES = {
    "none": "NoPrivacy", "dp_sgd": "DPSGD", "logit_dp": "LogitDP", "batch_clip": "BatchClip",
    "synthetic": "SyntheticData",
    "per_example_duplicated": "PerExampleDuplicated", "public_passages": "PublicPassages",
}  # fmt: skip
_VALUES = {"true": "True", "false": "False", "null": "None"}
_WORDS = (
    (re.compile(r"(?<![\w.])resume=true\b"), lambda found: "PrivacyAccountant(resume=True)"),
    (re.compile(r"\bhydra\.run\.dir\b"), lambda found: "default_root_dir of the Trainer"),
    (re.compile(rf"\bprivacy=({'|'.join(_MODES)})\b"), lambda found: f"privacy={_MODES[found[1]]}"),
    (re.compile(r"(=|\bto )(true|false|null)\b"), lambda found: found[1] + _VALUES[found[2]]),
)


def in_python(sentence: str) -> str:
    """Return a refusal as a library says it.

    Example:
        >>> in_python("Say resume=true, or set datamodule.cap to null.")
        'Say PrivacyAccountant(resume=True), or set datamodule.cap to None.'
    """
    for pattern, words in _WORDS:
        sentence = pattern.sub(words, sentence)
    return sentence


class LitDpretError(Exception):
    """Something a user can cause and a user can mend.

    Args:
        args: The sentence.
        trap: Which trap of `lit_dpret.callbacks.traps` it keeps out of (``T1`` and so on), where it is one of those.
    """

    def __init__(self, *args: object, trap: str | None = None) -> None:
        super().__init__(*args)
        self.trap = trap

    def __str__(self) -> str:
        sentence = super().__str__()
        return sentence if on_command_line else in_python(sentence)


class ConfigurationError(LitDpretError, ValueError):
    """A setting, or a combination of settings, that cannot be honoured."""


class DataError(LitDpretError, ValueError):
    """Input data that is missing, malformed or contradicts itself.

    Args:
        args: The sentence; it may name files, lines, ids and columns, and never a text.
        kind: What sort of problem it is, in words; reports count problems by it.
        trap: As for `LitDpretError`.
    """

    def __init__(self, *args: object, kind: str = "malformed data", trap: str | None = None) -> None:
        super().__init__(*args, trap=trap)
        self.kind = kind


class PrivateDataError(LitDpretError, TypeError):
    """Private data, or a model of private data, where only released artefacts may enter."""


class UnsupportedModelError(LitDpretError, TypeError):
    """A model or layer for which a privacy claim cannot be made."""


class UnsupportedAccountingError(ConfigurationError):
    """A sampling law, accountant and neighbouring relation that no library judges together."""


class BudgetExceededError(LitDpretError, RuntimeError):
    """The next release would spend more than the budget allows."""


class LedgerError(LitDpretError, RuntimeError):
    """The ledger is broken, or contradicts what is about to run."""


class ResumeError(LitDpretError, RuntimeError):
    """A run cannot go on from where it stopped without breaking its claim."""


class StorageError(LitDpretError, OSError):
    """The disk is full, or the run folder cannot be written."""


class DeviceMemoryError(LitDpretError, MemoryError):
    """A step does not fit into memory, however it is cut."""


class WorkerError(LitDpretError, RuntimeError):
    """A process that worked for this one died or failed; what it had finished is kept."""


class VerificationError(LitDpretError, RuntimeError):
    """A privacy card, or something that it names, is not what it says."""


class PrivacyViolation(LitDpretError, AssertionError):
    """A mechanism that was put to the test does not do what its privacy claim says."""


def schema_problem(found: object, known: str) -> str | None:
    """Say why a file of schema ``found`` cannot be read as ``known``, as the rest of a sentence; None if it can.

    Example:
        >>> schema_problem("lit-dpret/privacy-card/1", "lit-dpret/privacy-card/1")
        >>> schema_problem("lit-dpret/privacy-card/3", "lit-dpret/privacy-card/1")
        "its schema is 'lit-dpret/privacy-card/3', and this lit-dpret reads 'lit-dpret/privacy-card/1'."
    """
    return None if found == known else f"its schema is {found!r}, and this lit-dpret reads {known!r}."


def first_line(error: BaseException) -> str:
    """Return what an error of another library says, in one line; a first line that ends in a colon with its second."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])
