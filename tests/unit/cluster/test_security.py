"""Where the cluster's token and TLS files come from, and what is said when they cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config import config_from_settings
from cluster.security import SecurityConfig, peer_security, start_token
from core.errors import InvalidConfig
from core.peer_security import ClusterToken

SECRET = "0123456789abcdef"


def _file(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_without_any_setting_each_start_draws_a_token() -> None:
    tokens = {start_token(SecurityConfig(), {}) for _ in range(2)}
    assert len(tokens) == 2
    token = tokens.pop()
    assert token is not None
    assert peer_security(SecurityConfig(), token).token == token


def test_the_environment_gives_the_token_or_names_its_file(tmp_path: Path) -> None:
    path = _file(tmp_path / "token", SECRET + "\n")
    assert start_token(SecurityConfig(), {"BATON_CLUSTER_TOKEN": SECRET}) == ClusterToken(SECRET)
    assert start_token(SecurityConfig(), {"BATON_CLUSTER_TOKEN_FILE": str(path)}) == ClusterToken(SECRET)


def test_a_token_file_of_the_settings_is_read_by_each_process_itself(tmp_path: Path) -> None:
    config = SecurityConfig(token_file=_file(tmp_path / "token", SECRET))
    assert start_token(config, {}) is None
    assert peer_security(config, None).token == ClusterToken(SECRET)


def test_a_token_that_was_asked_for_and_not_handed_over_is_an_error() -> None:
    with pytest.raises(InvalidConfig):
        peer_security(SecurityConfig(), None)


def test_a_token_given_twice_is_an_error_that_names_both() -> None:
    environment = {"BATON_CLUSTER_TOKEN": SECRET, "BATON_CLUSTER_TOKEN_FILE": "/nowhere"}
    with pytest.raises(InvalidConfig, match="BATON_CLUSTER_TOKEN_FILE and BATON_CLUSTER_TOKEN"):
        start_token(SecurityConfig(), environment)


@pytest.mark.parametrize("variable", ["BATON_CLUSTER_TOKEN_FILE", "security.token_file"])
def test_a_token_file_that_cannot_be_used_is_named(tmp_path: Path, variable: str) -> None:
    def load(path: Path) -> None:
        if variable == "security.token_file":
            start_token(SecurityConfig(token_file=path), {})
        else:
            start_token(SecurityConfig(), {variable: str(path)})

    cases = [
        (tmp_path / "missing", "cannot read"),
        (_file(tmp_path / "open", SECRET, 0o644), "chmod 600"),
        (_file(tmp_path / "short", "abc"), "at least 16"),
    ]
    for path, why in cases:
        with pytest.raises(InvalidConfig, match=why) as caught:
            load(path)
        assert variable in caught.value.message
        assert str(path) in caught.value.message


def test_a_missing_tls_file_and_one_that_is_no_pem_are_named(tmp_path: Path) -> None:
    certificate = _file(tmp_path / "worker.pem", "-----BEGIN CERTIFICATE-----")
    other = _file(tmp_path / "other.pem", "hello")
    missing = SecurityConfig(
        tls_certificate_file=certificate, tls_key_file=tmp_path / "key.pem", tls_authority_file=certificate
    )
    with pytest.raises(InvalidConfig, match=r"tls_key_file: cannot read .*key\.pem"):
        peer_security(missing, ClusterToken(SECRET))
    wrong = SecurityConfig(
        tls_certificate_file=certificate, tls_key_file=other, tls_authority_file=certificate
    )
    with pytest.raises(InvalidConfig, match=r"tls_key_file: .*other\.pem holds no private key"):
        peer_security(wrong, ClusterToken(SECRET))


def test_settings_that_contradict_each_other_are_refused() -> None:
    for settings, why in (
        ({"tls_certificate_file": "/a", "tls_key_file": "/b"}, "tls_authority_file is missing"),
        ({"tls_server_name": "baton"}, "tls_server_name"),
        ({"is_token_required": False, "token_file": "/a"}, "token_file has no meaning"),
    ):
        with pytest.raises(InvalidConfig, match=why):
            config_from_settings({"security": settings})


def test_workers_that_other_machines_reach_cannot_be_left_unguarded() -> None:
    guarded_by_nothing = {"security": {"is_token_required": False}}
    assert config_from_settings(guarded_by_nothing).cluster.is_own
    with pytest.raises(InvalidConfig, match="is_token_required"):
        config_from_settings({**guarded_by_nothing, "cluster": {"ray_address": "auto"}})
    with_tls = {
        "is_token_required": False,
        "tls_certificate_file": "/a",
        "tls_key_file": "/b",
        "tls_authority_file": "/c",
    }
    config_from_settings({"security": with_tls, "cluster": {"ray_address": "auto"}})
