"""`baton status` against a real router over HTTP, with and without keys, and where nothing answers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from typer.testing import CliRunner

from cluster.cli import app as baton
from cluster.ports import free_ports
from cluster.status_command import fetch_state
from core.errors import InvalidConfig, ServingError
from core.ids import Epoch, Role, WorkerId
from core.jobs import WatchEvent
from core.pair_status import PairStatus
from router.api_keys import KeyScope, new_entry, new_key, new_salt
from router.tenants_config import TenantsConfig
from tests.doubles import settle
from tests.unit.kv_transfer.doubles import until
from tests.unit.router.api import serving
from tests.unit.router.scripted import ScriptedWorker, new_status

PAIR = PairStatus(
    WorkerId("d"), Epoch(7), "shm", 2.5e9, (("grpc", 10_000_000), ("shm", 90_000_000)), (("limit", 2),), True
)


@asynccontextmanager
async def router(**tenants: Any) -> AsyncIterator[str]:
    """Its URL; worker `p` hands KV to `d`."""
    prefill, decode = ScriptedWorker(Role.PREFILL, "p"), ScriptedWorker(Role.DECODE, "d")
    async with serving(prefill, decode, **tenants) as api:
        prefill.tell(WatchEvent(0, status=replace(new_status(prefill.ref), pairs=(PAIR,))))
        decode.tell(WatchEvent(0, status=new_status(decode.ref)))
        await settle()
        port = free_ports("127.0.0.1", 1)[0]
        config = uvicorn.Config(
            api.app, host="127.0.0.1", port=port, log_level="warning", ws="none", lifespan="off"
        )
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            await task


async def run(*arguments: str, key: str | None = None) -> str:
    """What it prints; the error that it ends with is raised."""
    environment = {"COLUMNS": "200", "BATON_API_KEY": key}
    result = await asyncio.to_thread(CliRunner().invoke, baton, ["status", *arguments], env=environment)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


async def test_workers_and_pairs_are_shown_with_way_rate_and_fallbacks() -> None:
    async with router() as url:
        shown = await run("--url", url)
        for word in ("shm", "2.50", "shm 90.0 MB", "limit 2", "prefill", "decode", "alive"):
            assert word in shown, shown
        told = json.loads(await run("--url", url, "--json"))
    assert told["url"] == url
    workers = {worker["id"]: worker for worker in told["workers"]}
    assert len(workers["p"]["epoch"]) == 16
    (pair,) = workers["p"]["status"]["pairs"]
    assert pair == {
        "to": "d",
        "to_epoch": "0000000000000007",
        "transport": "shm",
        "gb_per_s": 2.5,
        "bytes": {"grpc": 10_000_000, "shm": 90_000_000},
        "fallbacks": {"limit": 2},
        "is_warm": True,
        "problem": None,
    }


async def test_where_keys_are_asked_for_only_an_operators_shows_it() -> None:
    operator, client, salt = new_key(), new_key(), new_salt()
    keys = (
        new_entry(operator, "ops", salt, KeyScope.OPERATOR).as_text(),
        new_entry(client, "shop", new_salt()).as_text(),
    )
    async with router(tenants=TenantsConfig(keys=keys)) as url:
        assert "shm" in await run("--url", url, key=operator)
        with pytest.raises(ServingError, match=r"operator's API key: \$BATON_API_KEY is not set"):
            await run("--url", url)
        with pytest.raises(ServingError, match=r"the key in \$BATON_API_KEY is not one"):
            await run("--url", url, key=client)


async def test_where_nothing_runs_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("cluster.status_command.run_directories", list)
    with pytest.raises(InvalidConfig, match="no service that this user has started"):
        await run()
    with pytest.raises(InvalidConfig, match="on port 8123"):
        await run("--port", "8123")
    with pytest.raises(ServingError, match="does not answer"):
        await run("--url", f"http://127.0.0.1:{free_ports('127.0.0.1', 1)[0]}")
    with pytest.raises(InvalidConfig, match="begins with http"):
        await run("--url", "localhost:8000")


class _Stranger(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.keys.append(self.headers.get("authorization"))  # type: ignore[attr-defined]
        if self.path.startswith("/moved"):
            self.send_response(302)
            self.send_header("location", "/elsewhere")
        else:
            self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"hello": 1}')

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def test_what_is_no_router_is_told_apart_and_a_key_is_not_sent_on() -> None:
    with HTTPServer(("127.0.0.1", 0), _Stranger) as server:
        server.keys = []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(ServingError, match="no Baton router"):
            fetch_state(url, None)
        with pytest.raises(ServingError, match="302"):
            fetch_state(f"{url}/moved", "secret")
        assert server.keys == [None, "Bearer secret"]  # type: ignore[attr-defined]
        server.shutdown()
