"""Upload a folder as a repository of the Hugging Face hub, with checks beforehand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from lit_dpret.encoders.backbones import hub_answers
from lit_dpret.errors import ConfigurationError, StorageError, first_line

T = TypeVar("T")


@dataclass(frozen=True)
class HubRepository:
    """A repository of models or data sets, which need not exist yet.

    The token is that of ``hf auth login`` or ``HF_TOKEN``, and is written nowhere.
    """

    name: str
    private: bool = True
    kind: Literal["model", "dataset"] = "model"

    def check(self) -> None:
        """Refuse an impossible upload before the work starts."""
        from huggingface_hub import get_token

        if get_token() is None:
            raise ConfigurationError(f"task.push_to_hub={self.name} needs a token. Run hf auth login, or set HF_TOKEN.")
        if not hub_answers():
            raise ConfigurationError(
                f"task.push_to_hub={self.name}: the hub does not answer, or HF_HUB_OFFLINE is set."
            )
        self._asked(lambda api: api.whoami())
        if self.private and self._asked(
            lambda api: (
                api.repo_exists(self.name, repo_type=self.kind)
                and not api.repo_info(self.name, repo_type=self.kind).private
            )
        ):
            raise ConfigurationError(
                f"task.push_to_hub={self.name} is there and anybody can read it. Set task.push_private=false if the "
                f"{self.kind} may be public, or name another repository."
            )

    def send(self, folder: Path) -> str:
        """Upload the files of a folder in one commit; return the address of the repository."""

        def sent(api: Any) -> str:
            url = api.create_repo(self.name, repo_type=self.kind, private=self.private, exist_ok=True)
            api.upload_folder(
                repo_id=self.name, repo_type=self.kind, folder_path=folder,
                commit_message=f"The {self.kind} with its privacy card",
            )  # fmt: skip
            return str(url)

        try:
            return self._asked(sent)
        except ConfigurationError as error:
            raise StorageError(
                f"{error} The {self.kind} is whole in {folder}; to send it later: hf upload {self.name} {folder} "
                f"--repo-type {self.kind}{' --private' if self.private else ''}."
            ) from error

    def _asked(self, ask: Callable[[Any], T]) -> T:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError

        try:
            return ask(HfApi())
        except (OSError, ValueError, HfHubHTTPError) as error:
            status = getattr(getattr(error, "response", None), "status_code", None)
            way = (
                " Log in by hf auth login, or set HF_TOKEN, with a token that may write there."
                if status in (401, 403)
                else ""
            )
            raise ConfigurationError(
                f"task.push_to_hub={self.name}: the hub refuses: {first_line(error).rstrip('.')}.{way}"
            ) from error
