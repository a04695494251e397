"""The command `baton`: serve, stop, role, keys, version.

Owns the command line and turning errors of configuration into one line that names the setting. Each command's
work lives in a module of its own. Main thread.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from cluster.config_command import config
from cluster.decisions_command import decisions
from cluster.drain_command import drain
from cluster.keys_command import keys
from cluster.loadtest_command import loadtest
from cluster.model_command import fetch
from cluster.plan_command import plan
from cluster.role_command import role
from cluster.simulate_command import calibrate, simulate
from cluster.status_command import status
from core.errors import InvalidConfig, ServingError

_EXIT_FAILED = 1
_EXIT_BAD_CONFIG = 2

# settings are written --section.key=value
_WITH_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    name="baton",
    help="Serve language models with prefill and decode on separate workers.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(keys, name="keys")
app.add_typer(decisions, name="decisions")
app.command()(drain)
app.command()(role)
app.command()(plan)
app.command()(fetch)
app.command(context_settings=_WITH_SETTINGS)(config)
app.command()(loadtest)
app.command(context_settings=_WITH_SETTINGS)(simulate)
app.command(context_settings=_WITH_SETTINGS)(calibrate)
app.command()(status)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    is_local: Annotated[
        bool, typer.Option("--local", help="Run everything in this process, without Ray.")
    ] = False,
    file: Annotated[
        Path | None, typer.Option("--config", help="YAML file with one section per package.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    address: Annotated[
        str | None, typer.Option(help="A running Ray cluster to deploy onto: auto, or host:port.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The bundled model's name, a folder, or owner/name.")
    ] = None,
    num_prefill: Annotated[int | None, typer.Option("--prefill-replicas", help="Prefill workers.")] = None,
    num_decode: Annotated[int | None, typer.Option("--decode-replicas", help="Decode workers.")] = None,
) -> None:
    """Start the service, show that it answers, and stay until Ctrl-C.

    Every other setting: --section.key=value, BATON_SECTION__KEY=value or the YAML file, in this order of
    weight.
    """
    from cluster.config import load_config
    from cluster.local_command import serve_local
    from cluster.serve_command import serve as serve_on_ray

    console = Console(highlight=False)
    cluster = {
        "host": host,
        "port": port,
        "ray_address": address,
        "num_prefill_workers": num_prefill,
        "num_decode_workers": num_decode,
    }
    short: dict[str, Any] = {
        "engine": {"model": model},
        "cluster": cluster,
    }
    given = {
        section: {key: value for key, value in values.items() if value is not None}
        for section, values in short.items()
    }
    config = load_config(file, os.environ, context.args, given)
    raise typer.Exit(serve_local(config, console) if is_local else serve_on_ray(config, console))


@app.command()
def stop(
    port: Annotated[int | None, typer.Option(help="Stop only the service on this port.")] = None,
) -> None:
    """Stop what `baton serve` started, and clean up after one that was killed."""
    from cluster.stop_command import stop as stop_runs

    stop_runs(port, Console(highlight=False))


@app.command()
def version() -> None:
    """Print the version."""
    Console(highlight=False).print(f"baton {importlib.metadata.version('baton')}")


def main() -> None:
    """Entry point of the installed script: errors of settings become one line and exit status 2."""
    try:
        app()
    except InvalidConfig as error:
        _fail(error.message, _EXIT_BAD_CONFIG)
    except ServingError as error:
        _fail(error.message, _EXIT_FAILED)


def _fail(message: str, status: int) -> None:
    Console(stderr=True, highlight=False).print("[red]baton:[/]", escape(message), soft_wrap=True)
    sys.exit(status)
