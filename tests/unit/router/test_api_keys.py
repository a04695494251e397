"""API keys: kept as hashes only, recognised, revoked, and refused in OpenAI's form."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from core.errors import Forbidden, InvalidConfig, Unauthorized
from core.ids import TenantId
from router.api_keys import KeyRing, KeyScope, entry_from_text, new_entry, new_key, new_salt
from router.key_file import KeyFile, editing, read_key_file, write_key_file
from router.tenants import Tenants
from router.tenants_config import TenantLimits, TenantsConfig
from tests.doubles import FakeTime
from tests.unit.router.api import serving
from tests.unit.router.model_answers import two_workers


def add_key(path: Path, tenant: str, scope: KeyScope = KeyScope.CLIENT) -> str:
    key = new_key()
    with editing(path) as content:
        entry = new_entry(key, tenant, content.salt, scope)
        write_key_file(path, replace(content, entries=(*content.entries, entry)))
    return key


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_key_is_found_among_others_and_kept_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = {add_key(path, tenant): tenant for tenant in ("a", "b", "a")}
    text = path.read_text()
    assert path.stat().st_mode & 0o077 == 0
    ring = KeyRing(read_key_file(path).entries)
    for key, tenant in keys.items():
        assert key not in text
        found = ring.find(key)
        assert found is not None
        assert found.tenant == tenant
    assert ring.find(next(iter(keys))[:-1]) is None
    assert ring.find("") is None
    assert ring.find("x" * 100_000) is None


def test_a_hashed_key_survives_the_way_through_a_setting() -> None:
    key = new_key()
    entry = new_entry(key, "acme", new_salt(), KeyScope.OPERATOR)
    again = entry_from_text(entry.as_text(), "keys[0]")
    assert again == entry
    assert KeyRing([again]).find(key) == entry


@pytest.mark.parametrize(
    "text", ["", "acme", "acme:00:11", "acme:zz:zz:client", f"a:{'0' * 32}:{'0' * 64}:x"]
)
def test_a_setting_that_is_no_hashed_key_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(InvalidConfig, match=r"router\.tenants\.keys\[0\]"):
        Tenants(TenantsConfig(keys=(text,)))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "not JSON"),
        ("[]", "version 1"),
        ('{"version": 1, "salt": "xyz", "keys": []}', "salt"),
        ('{"version": 1, "salt": "00112233445566778899", "keys": 1}', "list of keys"),
        ('{"version": 1, "salt": "00112233445566778899", "keys": [{"id": "a"}]}', r"keys\[0\]\.tenant"),
    ],
)
def test_a_wrong_keys_file_stops_the_start_by_name(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(InvalidConfig, match=rf"router\.tenants\.keys_file.*{named}"):
        Tenants(TenantsConfig(keys_file=path))


async def test_keys_that_come_and_go_are_noticed_and_a_broken_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    first = add_key(path, "a")
    time = FakeTime()
    tenants = Tenants(TenantsConfig(keys_file=path), time.sleep)
    second = add_key(path, "b")
    with pytest.raises(Unauthorized):
        tenants.caller(f"Bearer {second}")
    await tenants.reload()
    assert tenants.caller(f"Bearer {second}").tenant.tenant_id == "b"
    path.write_text("{")
    await tenants.reload()
    assert tenants.caller(f"Bearer {first}").tenant.tenant_id == "a"
    write_key_file(path, KeyFile(new_salt(), ()))
    await tenants.reload()
    with pytest.raises(Unauthorized):
        tenants.caller(f"Bearer {first}")


async def test_a_keys_file_that_could_not_be_read_once_is_read_again_without_having_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.json"
    revoked = add_key(path, "a")
    tenants = Tenants(TenantsConfig(keys_file=path))
    write_key_file(path, KeyFile(new_salt(), ()))
    with monkeypatch.context() as unreadable:
        unreadable.setattr("router.tenants.read_key_file", _denied)
        await tenants.reload()
    assert tenants.caller(f"Bearer {revoked}").key_id
    await tenants.reload()
    with pytest.raises(Unauthorized):
        tenants.caller(f"Bearer {revoked}")


def _denied(path: Path) -> KeyFile:
    raise InvalidConfig(f"{path} cannot be read: Permission denied")


def test_two_keys_of_a_tenant_share_a_salt_and_two_tenants_do_not(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    one, two, other = add_key(path, "a"), add_key(path, "a"), add_key(path, "b")
    tenants = Tenants(TenantsConfig(keys_file=path))
    salts = [tenants.caller(f"Bearer {key}").tenant.cache_salt for key in (one, two, other)]
    assert salts[0] == salts[1] != salts[2]
    assert "" not in salts
    shared = Tenants(TenantsConfig(keys_file=path, share_prefixes=True))
    assert {shared.caller(f"Bearer {key}").tenant.cache_salt for key in (one, other)} == {""}


def test_limits_belong_to_the_tenant_that_they_name_or_to_any() -> None:
    config = TenantsConfig(limits=(TenantLimits("a", weight=2), TenantLimits("*", weight=3)))
    tenants = Tenants(config)
    assert tenants.tenant(TenantId("a")).limits.weight == 2
    assert tenants.tenant(TenantId("b")).limits.weight == 3


async def test_limits_in_the_keys_file_go_first_and_change_with_it(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = add_key(path, "a")
    config = TenantsConfig(keys_file=path, limits=(TenantLimits("a", max_requests_per_minute=5),))
    tenants = Tenants(config)
    content = read_key_file(path)
    for wanted in (7, 9):
        limits = TenantLimits("a", max_requests_per_minute=wanted, weight=2.0)
        write_key_file(path, replace(content, limits=(limits,)))
        await tenants.reload()
        assert tenants.caller(f"Bearer {key}").tenant.limits == limits
    write_key_file(path, content)
    await tenants.reload()
    assert tenants.caller(f"Bearer {key}").tenant.limits == config.limits[0]


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ([{"name": "a", "max_requests": 1}], "limits[0].max_requests"),
        ([{"name": "a", "max_requests_per_minute": 0}], "max_requests_per_minute"),
        ([{"name": "a", "kv_share": 0.5}], "kv_share"),
        ([{"name": "a"}, {"name": "a"}], "twice"),
        ([{"name": "*", "weight": 2.0}], "limits[0].name"),
        ({"a": 1}, "no list"),
    ],
)
def test_limits_that_cannot_be_meant_are_refused_by_name(tmp_path: Path, limits: object, named: str) -> None:
    path = tmp_path / "keys.json"
    add_key(path, "a")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"limits": limits}))
    with pytest.raises(InvalidConfig, match=re.escape(named)):
        read_key_file(path)


def test_metrics_need_an_operators_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    client, operator = add_key(path, "a"), add_key(path, "a", KeyScope.OPERATOR)
    tenants = Tenants(TenantsConfig(keys_file=path))
    with pytest.raises(Forbidden):
        tenants.operator(f"Bearer {client}")
    assert tenants.operator(f"bearer {operator}").is_operator


async def test_without_a_known_key_everything_but_health_is_401(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = add_key(path, "a")
    async with serving(*two_workers(), tenants=TenantsConfig(keys_file=path)) as api:
        for headers in ({}, bearer("sk-x"), {"authorization": key}, {"authorization": "Basic eDp5"}):
            for path_, answer in (
                ("/v1/models", await api.http.get("/v1/models", headers=headers)),
                ("/v1/completions", await api.post("/v1/completions", headers, prompt="x", max_tokens=1)),
                ("/v1/chat", await api.post("/v1/chat/completions", headers, stream=True)),
                ("/metrics", await api.http.get("/metrics", headers=headers)),
            ):
                assert answer.status_code == 401, path_
                assert answer.headers["www-authenticate"] == "Bearer"
                error = answer.json()["error"]
                assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
                assert key not in error["message"]
        assert (await api.http.get("/health")).status_code == 200
        assert (await api.http.get("/ready")).status_code == 200
        assert (await api.post("/v1/completions", bearer(key), prompt="x", max_tokens=1)).status_code == 200
        assert (await api.http.get("/v1/models", headers=bearer(key))).status_code == 200
        assert (await api.http.get("/metrics", headers=bearer(key))).status_code == 403
