"""Without keys, pages of other sites neither change roles nor read the state, though a browser here asks."""

from __future__ import annotations

import pytest

from core.errors import Forbidden
from core.ids import Role
from router.own_page import refuse_foreign_pages
from tests.unit.router.api import serving
from tests.unit.router.scripted import ScriptedWorker


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "127.0.0.1:8000"},
        {"host": "localhost:8000", "sec-fetch-site": "same-origin", "origin": "http://localhost:8000"},
        {"host": "[::1]:8000", "sec-fetch-site": "none"},
        {"host": "baton.localhost"},
    ],
)
def test_whoever_asks_this_machine_by_itself_is_let_in(headers: dict[str, str]) -> None:
    refuse_foreign_pages(headers)


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "127.0.0.1:8000", "sec-fetch-site": "cross-site"},
        {"host": "localhost:8000", "sec-fetch-site": "same-site"},
        {"host": "127.0.0.1:8000", "origin": "https://evil.example"},
        {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:3000"},
        {"host": "127.0.0.1:8000", "origin": "null"},
        {"host": "evil.example:8000", "sec-fetch-site": "same-origin", "origin": "http://evil.example:8000"},
        {"host": "localhost.evil.example"},
        {"host": "[::1"},
        {},
    ],
)
def test_pages_of_others_and_names_that_may_have_been_bent_are_not(headers: dict[str, str]) -> None:
    with pytest.raises(Forbidden):
        refuse_foreign_pages(headers)


async def test_a_page_of_another_site_gets_nowhere() -> None:
    async with serving(ScriptedWorker(Role.DECODE, "d")) as api:
        foreign = {"sec-fetch-site": "cross-site", "content-type": "text/plain"}
        for path in ("/admin/role", "/admin/drain", "/debug/route"):
            assert (await api.post(path, foreign, worker="d", role="prefill")).status_code == 403
        assert (await api.http.get("/dashboard/state", headers={"host": "evil.example"})).status_code == 403
        assert (await api.http.get("/dashboard/state")).status_code == 200
