"""What processes show each other: compared whole, shown to nobody else."""

from __future__ import annotations

import pickle

import pytest

from core.errors import InvalidConfig
from core.peer_security import ClusterToken, PeerSecurity, TlsIdentity, new_cluster_token

SECRET = "0123456789abcdef"


def test_only_the_whole_token_matches() -> None:
    token = ClusterToken(SECRET)
    assert token.matches(SECRET)
    assert token.matches(SECRET.encode())
    for wrong in ("", SECRET[:-1], SECRET + "0", SECRET.upper(), "0" * 16, "é" * 16, b"\xff" * 16):
        assert not token.matches(wrong)


def test_each_new_token_is_another() -> None:
    tokens = {new_cluster_token().secret for _ in range(50)}
    assert len(tokens) == 50
    assert all(len(secret) == 64 for secret in tokens)


def test_no_text_about_the_security_of_a_process_holds_a_secret() -> None:
    security = PeerSecurity(ClusterToken(SECRET), TlsIdentity(b"CERT", b"SECRETKEY", b"CA", "baton"))
    for text in (repr(security), str(security), f"{security.token}"):
        assert SECRET not in text
        assert "SECRETKEY" not in text


def test_it_travels_to_other_processes() -> None:
    security = PeerSecurity(new_cluster_token(), TlsIdentity(b"a", b"b", b"c"))
    assert pickle.loads(pickle.dumps(security)) == security


@pytest.mark.parametrize(
    "secret", ["", "short", "0123456789abcde\n", "0123456789 abcdef", "0123456789äbcdef"]
)
def test_a_token_that_cannot_travel_in_a_header_is_refused_without_being_quoted(secret: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        ClusterToken(secret)
    assert not secret.strip() or secret.strip() not in caught.value.message


def test_nothing_is_shown_where_nothing_is_asked() -> None:
    assert PeerSecurity().metadata == ()
    assert PeerSecurity(ClusterToken(SECRET)).metadata == (("baton-token", SECRET),)
