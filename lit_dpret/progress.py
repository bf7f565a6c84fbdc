"""Progress lines for terminals and log files: progress, speed and remaining time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType

Progress = Callable[[int, int], None]
_muted: ContextVar[bool] = ContextVar("muted", default=False)


@contextmanager
def without_progress() -> Iterator[None]:
    """Show no line within the block: for many small tasks whose progress an outer line shows."""
    token = _muted.set(True)
    try:
        yield
    finally:
        _muted.reset(token)


def tell_here(text: str) -> None:
    """Print a line that may depend on private rows, to the terminal alone.

    A logger may have a file that is shared later; terminal output is not kept.
    """
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


class ProgressLine:
    """One line, rewritten on a terminal and printed at intervals in a log file.

    Call it with ``(done, total)``.

    Args:
        label: A description of the work.
        every: Minimum seconds between two lines if the output is not a terminal.
        begun: The amount done before the line was created; None for the value of the first call.
    """

    def __init__(self, label: str, every: float = 15.0, *, begun: int | None = None) -> None:
        self._label = label
        self._start = time.monotonic()
        self._first = begun
        self._anchor: tuple[float, int] | None = None  # when the first unit was done, and the number done by then
        self._ended = False
        self._terminal = sys.stderr.isatty()
        self._every = 0.2 if self._terminal else every
        self._next = 0.0
        self._open = False

    def __call__(self, done: int, total: int, extra: str = "") -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = done
        if self._anchor is None and done > self._first:
            self._anchor = now, done
        ended, self._ended = self._ended, done >= total
        if _muted.get() or (ended and self._ended) or (done < total and now < self._next):
            return
        self._next = now + self._every
        elapsed = now - self._start
        left = self._left(now, done, total)
        share = f"{100 * done / total:3.0f}%" if total else "  0%"
        text = f"{self._label}: {share} {done}/{total}  {_clock(elapsed)} {left} {extra}".rstrip()
        if self._terminal:
            end = "\n" if done >= total else ""
            sys.stderr.write(f"\r\x1b[2K{text}{end}")
            self._open = done < total
        else:
            sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def _left(self, now: float, done: int, total: int) -> str:
        """Return the remaining time at the pace since the first unit, which often includes checks and loading."""
        if self._anchor is None or done >= total:
            return ""
        then, before = self._anchor
        return f"ETA {_clock((total - done) * (now - then) / (done - before))}" if done > before and now > then else ""

    def __enter__(self) -> ProgressLine:
        if self._terminal and not _muted.get():  # the first call may come after a minute
            sys.stderr.write(f"\r\x1b[2K{self._label} ...")
            sys.stderr.flush()
            self._open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:
            sys.stderr.write("\n")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
