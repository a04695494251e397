"""Browser: a real one without a window, steered over its own protocol (Chrome DevTools).

Owns its process and what it saw: requests it made, errors it wrote to its console. It comes with Debian's
package `chromium`; `needs_browser` skips where it is not. Used on the test's event loop.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import pytest

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(
    PROGRAM is None, reason="no browser is installed (Debian package chromium)"
)

_START_S, _WAIT_S = 30.0, 20.0


class Browser:
    """One page. `requests` are the URLs it asked for, `errors` what went wrong in it."""

    def __init__(self, folder: Path, width: int = 1400, height: int = 1100) -> None:
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._profile = folder / "profile"
        self._size = (width, height)
        self._numbers = itertools.count(1)
        self._reading: asyncio.Task[None] | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def __aenter__(self) -> Browser:
        assert PROGRAM is not None
        self._process = await asyncio.create_subprocess_exec(
            *(PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
            *(f"--user-data-dir={self._profile}", "--remote-debugging-port=0"),
            *(f"--window-size={self._size[0]},{self._size[1]}", "about:blank"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._session = aiohttp.ClientSession()
        try:
            await self._attach()
        except BaseException:
            await self._end()
            raise
        return self

    async def _attach(self) -> None:
        port = await self._port()
        async with self._session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            pages = [target for target in await answer.json() if target["type"] == "page"]
        self._socket = await self._session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0)
        self._reading = asyncio.create_task(self._read())
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self._call(f"{domain}.enable")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._end()

    async def _end(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._socket is not None:
            await self._socket.close()
        await self._session.close()
        if self._process.returncode is None:
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), 10.0)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def open(self, url: str) -> None:
        await self._call("Page.navigate", url=url)

    async def value(self, script: str) -> Any:
        """What an expression of JavaScript is, in the page."""
        answer = await self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + _WAIT_S
        while not await self.value(f"Boolean({script})"):
            assert time.monotonic() < deadline, f"never: {script}; {self.errors}"
            await asyncio.sleep(0.1)

    async def picture(self, path: Path) -> None:
        answer = await self._call("Page.captureScreenshot", format="png")
        await asyncio.to_thread(path.write_bytes, base64.b64decode(answer["data"]))

    async def _port(self) -> int:
        file, deadline = self._profile / "DevToolsActivePort", time.monotonic() + _START_S
        while not (file.exists() and file.read_text().count("\n")):
            assert self._process.returncode is None, "the browser has ended"
            assert time.monotonic() < deadline, "the browser does not start"
            await asyncio.sleep(0.1)
        return int(file.read_text().split()[0])

    async def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        assert self._socket is not None
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        try:
            answer = await asyncio.wait_for(self._waiting[number], _WAIT_S)
        finally:
            del self._waiting[number]
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    async def _read(self) -> None:
        assert self._socket is not None
        async for message in self._socket:
            told = message.json()
            if (waiting := self._waiting.get(told.get("id"))) is not None:
                waiting.set_result(told)
            elif told.get("method") == "Network.requestWillBeSent":
                self.requests.append(told["params"]["request"]["url"])
            elif told.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(told["params"]["exceptionDetails"]))
            elif told.get("method") == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
                self.errors.append(str(told["params"]["entry"]))
