"""Test a private training step: ``assert_private`` for custom modules, in a user's own tests."""

from lit_dpret.audit.testing.private import PrivacyReport, assert_private
from lit_dpret.errors import PrivacyViolation

__all__ = ["PrivacyReport", "PrivacyViolation", "assert_private"]
