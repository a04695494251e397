"""Progress: how slow steps of a start tell what they are doing. A type only."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Told what is being done and how much of it, from 0 to 1. Called on the thread that does the work."""
