"""The status page in a real browser: it shows workers, flows and routes, and asks nobody else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from router.api_keys import KeyScope, new_entry, new_key, new_salt
from tests.e2e import profiles
from tests.e2e.browser import Browser, needs_browser
from tests.e2e.client import COMPLETIONS
from tests.e2e.fleet import Fleet
from tests.e2e.harness import Profile

PICTURES = os.environ.get("BATON_TEST_PICTURES")
"""A folder in which pictures of the page are kept, to be looked at."""

_SECRET = "Zanzibar"


def _picture(tmp_path: Path, name: str) -> Path:
    return (Path(PICTURES) if PICTURES else tmp_path) / f"{name}.png"


@needs_browser
async def test_it_shows_workers_flows_and_routes_and_nothing_of_what_was_said(
    fleet: Fleet, tmp_path: Path
) -> None:
    system = fleet.system(profiles.SPLIT)
    for length in (5, 40):
        system.client.answer_all(COMPLETIONS, prompt=f"{_SECRET} is " * length, max_tokens=6, temperature=0)
    origin = f"http://127.0.0.1:{system.port}"
    async with Browser(tmp_path) as browser:
        await browser.open(f"{origin}/dashboard")
        await browser.until("document.querySelectorAll('#calls tr').length >= 4")
        await browser.until("document.querySelector('#live.on')")
        await browser.until("document.querySelectorAll('path.flow').length === 1")
        workers = await browser.value(
            "[...document.querySelectorAll('[data-worker]')].map((card) => card.dataset.worker)"
        )
        assert workers == ["prefill-0", "decode-0"]
        text: str = await browser.value("document.body.innerText")
        for shown in ("prefill-0 → decode-0", "remote", "of KV held", "Recent routes", "costs"):
            assert shown in text
        assert _SECRET not in await browser.value("document.documentElement.outerHTML")
        await browser.picture(_picture(tmp_path, "light"))
        light = await browser.value("getComputedStyle(document.body).backgroundColor")
        await browser.value("document.getElementById('theme').click()")
        assert await browser.value("getComputedStyle(document.body).backgroundColor") != light
        await browser.picture(_picture(tmp_path, "dark"))
        assert browser.errors == []
        strangers = [url for url in browser.requests if not url.startswith((origin, "data:", "about:"))]
        assert strangers == []


@needs_browser
async def test_with_keys_it_asks_for_an_operators_key_and_shows_nothing_before(
    fleet: Fleet, tmp_path: Path
) -> None:
    keys = {scope: new_key() for scope in KeyScope}
    entries = [new_entry(key, "acme", new_salt(), scope).as_text() for scope, key in keys.items()]
    settings: dict[str, Any] = {"router.tenants.keys": entries}
    profile = Profile("keyed", settings, api_key=keys[KeyScope.OPERATOR])
    system = fleet.system(profile)
    async with Browser(tmp_path) as browser:
        await browser.open(f"http://127.0.0.1:{system.port}/dashboard")
        await browser.until("document.getElementById('key-form')?.hidden === false")
        assert await browser.value("document.getElementById('content').hidden")
        assert await browser.value("document.querySelectorAll('[data-worker]').length") == 0
        for key, words in (("wrong", "not known"), (keys[KeyScope.CLIENT], "not an operator")):
            await browser.value(_enter(key))
            await browser.until(f"document.getElementById('key-error').textContent.includes('{words}')")
        await browser.picture(_picture(tmp_path, "key"))
        await browser.value(_enter(keys[KeyScope.OPERATOR]))
        await browser.until("document.querySelectorAll('[data-worker]').length === 2")
        assert await browser.value("document.getElementById('key-form').hidden")


def _enter(key: str) -> str:
    return (
        f"document.getElementById('key').value = '{key}'; document.querySelector('#key-form button').click()"
    )
