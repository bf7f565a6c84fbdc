"""A PNG as a block of a document."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

from lit_dpret.cards.page import esc, md
from lit_dpret.errors import DataError
from lit_dpret.files import write_whole


@dataclass(frozen=True)
class Picture:
    """A PNG: within the page in HTML, beside it in Markdown."""

    path: Path
    says: str

    def html(self) -> str:
        data = base64.b64encode(self.path.read_bytes()).decode()
        return (
            f'<figure><img src="data:image/png;base64,{data}" alt="{esc(self.says)}" style="max-width:100%"></figure>'
        )

    def markdown(self) -> str:
        return f"![{md(self.says)}]({self.path.name})"


def copied_picture(source: Path, path: Path, says: str) -> Picture:
    """The picture of another report, copied to ``path``.

    Raises:
        DataError: There is none.
        StorageError: The copy cannot be written.
    """
    try:
        content = source.read_bytes()
    except OSError as error:
        raise DataError(f"{source} cannot be read: {error.strerror}.") from error
    return Picture(write_whole(path, content, owner_only=True), says)
