"""What router and workers load, found or made before any process needs it: the checkpoint folder, and the
CPU operators.

Owns replacing the model's name by its folder in the configuration, so that every replica reads the same
files. Main thread.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from cluster.config import BatonConfig
from cluster.steps import Steps
from core.errors import InvalidConfig
from engine.model.config import ModelConfig
from engine.model.source import resolve_model
from engine.native.build import NativeUnavailable, build_library


def prepare_model(config: BatonConfig, steps: Steps) -> BatonConfig:
    """Resolve the model of each kind of worker, and settle the name it is served under.

    Raises InvalidConfig naming a model that is not there or not supported, so that no worker has to be
    started to find out.
    """
    _build_operators(config, steps)
    names = (config.prefill_engine.model, config.decode_engine.model)
    folders = {name: _prepared(name, steps) for name in dict.fromkeys(names)}
    prefill, decode = (folders[name] for name in names)
    served_name = config.router.model_name or decode.resolve().name
    return dataclasses.replace(
        config,
        prefill_engine=dataclasses.replace(config.prefill_engine, model=str(prefill)),
        decode_engine=dataclasses.replace(config.decode_engine, model=str(decode)),
        prefill=dataclasses.replace(config.prefill, model=served_name),
        decode=dataclasses.replace(config.decode, model=served_name),
        router=dataclasses.replace(config.router, model_name=served_name),
    )


def _build_operators(config: BatonConfig, steps: Steps) -> None:
    """Here, where one can see it, and not in each worker's start. Without a compiler workers run on torch's
    operators, unless the configuration insists.
    """
    engines = (config.prefill_engine, config.decode_engine)
    wishes = {engine.cpu_kernels for engine in engines if not engine.uses_triton} - {"torch"}
    if not wishes:
        return
    with steps.step("building the CPU operators") as tell:
        try:
            build_library()
        except NativeUnavailable as error:
            if "native" in wishes:
                raise InvalidConfig(
                    f"the CPU operators cannot be built: {error}", key="engine.cpu_kernels"
                ) from error
            tell(f"not possible, torch's are used, which are slower: {error}")


def _prepared(name: str, steps: Steps) -> Path:
    with steps.step(f"preparing the model {name}") as tell:
        folder = resolve_model(name, lambda what, fraction: tell(f"{what} {fraction:.0%}"))
        ModelConfig.from_folder(folder)  # refuses an architecture that the engine does not know
        return folder
