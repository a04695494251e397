"""The checkpoint folder that router and workers load, found or made before any process needs it.

Owns replacing the model's name by its folder in the configuration, so that every replica reads the same
files. Main thread.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from cluster.config import BatonConfig
from cluster.steps import Steps
from engine.model.source import resolve_model


def prepare_model(config: BatonConfig, steps: Steps) -> BatonConfig:
    """Resolve the model of each kind of worker. Raises InvalidConfig naming a model that is not there or not
    supported.
    """
    folders = {
        name: _prepared(name, steps) for name in {config.prefill_engine.model, config.decode_engine.model}
    }
    prefill = dataclasses.replace(config.prefill_engine, model=str(folders[config.prefill_engine.model]))
    decode = dataclasses.replace(config.decode_engine, model=str(folders[config.decode_engine.model]))
    return dataclasses.replace(config, engine=decode, prefill_engine=prefill, decode_engine=decode)


def _prepared(name: str, steps: Steps) -> Path:
    with steps.step(f"preparing the model {name}") as tell:
        return resolve_model(name, lambda what, fraction: tell(f"{what} {fraction:.0%}"))
