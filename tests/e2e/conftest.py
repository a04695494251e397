"""What all end-to-end tests find by name."""

from __future__ import annotations

from tests.e2e.fixtures import fleet, models, report, vocabulary

__all__ = ["fleet", "models", "report", "vocabulary"]
