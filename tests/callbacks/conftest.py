from __future__ import annotations

from collections.abc import Callable

import pytest

from lit_dpret.privacy.ledger import passed, trained


@pytest.fixture
def another_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forget what only this process knows, as if a file had come from elsewhere."""

    def forget() -> None:
        monkeypatch.setattr(trained, "_values", {})
        monkeypatch.setattr(trained, "_left", {})
        monkeypatch.setattr(passed, "_noted", [])
        monkeypatch.setattr(trained, "outside_steps", passed.OutsideSteps())
        monkeypatch.setattr(trained, "_built", set())
        monkeypatch.setattr(trained, "_stepped", type(trained._stepped)())
        monkeypatch.setattr(trained, "_begun", set())
        monkeypatch.setattr(trained, "_adapted", type(trained._adapted)())

    return forget
