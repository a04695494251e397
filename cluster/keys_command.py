"""`baton keys`: makes, lists and revokes API keys in the keys file.

Owns the command line of it; the file's format belongs to `router.key_file`. A key is printed once, when it is
made. Running routers notice the change by themselves. Main thread.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from core.errors import InvalidConfig
from router.api_keys import KeyScope, new_entry, new_key, new_salt, tenant_id
from router.key_file import editing, read_key_file, write_key_file
from router.tenants_config import TenantLimits

FILE_VARIABLE = "BATON_ROUTER__TENANTS__KEYS_FILE"

keys = typer.Typer(help="API keys: add, list, revoke.", no_args_is_help=True)

_File = Annotated[
    Path | None, typer.Option("--file", help=f"The keys file; default ${FILE_VARIABLE}, then --config.")
]
_Config = Annotated[Path | None, typer.Option("--config", help="YAML file that names the keys file.")]
_IsOperator = Annotated[
    bool, typer.Option("--operator", help="The key may also read metrics and explanations of all tenants.")
]


@keys.command()
def add(
    tenant: Annotated[str, typer.Argument(help="Who the key belongs to; made by its first key.")],
    file: _File = None,
    config: _Config = None,
    is_operator: _IsOperator = False,
) -> None:
    """Make a key and print it: it is kept nowhere in plain text."""
    path = _path(file, config)
    key = new_key()
    with editing(path) as content:
        entry = new_entry(key, tenant, content.salt, _scope(is_operator), _today())
        write_key_file(path, replace(content, entries=(*content.entries, entry)))
    typer.echo(key)
    typer.echo(f"{entry.key_id} of tenant {entry.tenant} is in {path}; the key is not shown again", err=True)


@keys.command("list")
def list_keys(file: _File = None, config: _Config = None) -> None:
    """Show the keys by id, tenant and scope."""
    table = Table("id", "tenant", "scope", "created")
    for entry in read_key_file(_path(file, config)).entries:
        table.add_row(entry.key_id, entry.tenant, entry.scope.value, entry.created)
    Console(highlight=False).print(table)


@keys.command()
def revoke(
    key_id: Annotated[str, typer.Argument(help="As `baton keys list` shows it.")],
    file: _File = None,
    config: _Config = None,
) -> None:
    """Take a key away; running routers refuse it within seconds."""
    path = _path(file, config)
    with editing(path) as content:
        left = tuple(entry for entry in content.entries if entry.key_id != key_id)
        if len(left) == len(content.entries):
            raise InvalidConfig(f"there is no key {key_id} in {path}", key=key_id)
        write_key_file(path, replace(content, entries=left))
    typer.echo(f"{key_id} is revoked", err=True)


@keys.command()
def limit(
    tenant: Annotated[str, typer.Argument(help="Whose limits; those in the configuration count no more.")],
    requests: Annotated[int | None, typer.Option(help="Requests per minute.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(help="Prompt tokens per minute.")] = None,
    output_tokens: Annotated[int | None, typer.Option(help="Output tokens per minute.")] = None,
    concurrent_tokens: Annotated[int | None, typer.Option(help="Tokens of open requests.")] = None,
    file: _File = None,
    config: _Config = None,
) -> None:
    """Set a tenant's limits; running routers hold to them within seconds. What is not given is unlimited."""
    path = _path(file, config)
    with editing(path) as content:
        before = content.limits_of(tenant_id(tenant)) or TenantLimits(tenant)
        try:
            limits = replace(
                before,
                max_requests_per_minute=requests,
                max_prompt_tokens_per_minute=prompt_tokens,
                max_output_tokens_per_minute=output_tokens,
                max_concurrent_tokens=concurrent_tokens,
            )
        except ValueError as error:
            raise InvalidConfig(str(error), key=tenant) from error
        others = tuple(item for item in content.limits if item.name != tenant)
        write_key_file(path, replace(content, limits=(*others, limits)))
    typer.echo(f"the limits of {tenant} are in {path}", err=True)


@keys.command("hash")
def hash_key(
    tenant: Annotated[str, typer.Argument(help="Who the key belongs to.")],
    is_operator: _IsOperator = False,
) -> None:
    """Make a key without a file: prints it, then what to put into router.tenants.keys."""
    key = new_key()
    entry = new_entry(key, tenant, new_salt(), _scope(is_operator))
    typer.echo(key)
    typer.echo(entry.as_text())


def _scope(is_operator: bool) -> KeyScope:
    return KeyScope.OPERATOR if is_operator else KeyScope.CLIENT


def _today() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _path(file: Path | None, config: Path | None) -> Path:
    if file is not None:
        return file
    from cluster.config import load_config  # its packages take a second to import

    found = load_config(config, os.environ).router.tenants.keys_file
    if found is None:
        raise InvalidConfig(
            f"which file? give --file, or set router.tenants.keys_file ({FILE_VARIABLE})",
            key="router.tenants.keys_file",
        )
    return found
