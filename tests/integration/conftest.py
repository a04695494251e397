"""The integration suite runs with Ray blocked."""

from __future__ import annotations

from tests.without_ray import block_ray

block_ray()
