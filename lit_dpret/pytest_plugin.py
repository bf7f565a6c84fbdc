"""The fixture ``assert_private``, in every pytest run where this package is installed.

pytest loads this module before any test, even for suites that never use the fixture, so it imports nothing heavy until
a test requests the fixture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lit_dpret.audit.testing import PrivacyReport


@pytest.fixture(scope="session")
def assert_private() -> Callable[..., PrivacyReport]:
    """Return `lit_dpret.audit.testing.assert_private`, which tests a module's private training step."""
    from lit_dpret.audit.testing import assert_private

    return assert_private
