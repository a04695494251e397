"""`baton fetch`: a model on this machine before it is needed, so that no start waits for a download.

Owns what is printed. Set-up commands of a cluster's nodes run it. Main thread.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from cluster.config import BatonConfig, config_from_settings
from cluster.model_folder import prepare_model
from cluster.steps import Steps


def fetch(
    model: Annotated[
        str | None, typer.Argument(help="As for `baton serve --model`; default: the bundled model.")
    ] = None,
) -> None:
    """Prepare a model and the CPU operators on this machine, and print the model's folder."""
    config: BatonConfig = config_from_settings({} if model is None else {"engine": {"model": model}})
    typer.echo(prepare_model(config, Steps(Console(stderr=True))).decode_engine.model)
