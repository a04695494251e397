"""What processes of one cluster show each other: the cluster token, a TLS identity, or both.

Owns the values, how a token is compared and how it travels with a call. Where they come from is the cluster's
business; gRPC is not imported here. Secrets are in no `repr`, so no log line and no traceback shows them.
Immutable, picklable; any thread.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field

from core.errors import InvalidConfig

TOKEN_METADATA_KEY = "baton-token"
MIN_TOKEN_LENGTH = 16


@dataclass(frozen=True, slots=True)
class ClusterToken:
    """A secret that every process of a cluster knows and no one else.

    At least MIN_TOKEN_LENGTH printable ASCII characters without spaces; raises InvalidConfig otherwise,
    without quoting it.
    """

    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        is_plain = self.secret.isascii() and self.secret.isprintable() and " " not in self.secret
        if len(self.secret) < MIN_TOKEN_LENGTH or not is_plain:
            raise InvalidConfig(
                f"the cluster token must be at least {MIN_TOKEN_LENGTH} printable ASCII characters, "
                "without spaces",
                key="security.token_file",
            )

    def matches(self, presented: str | bytes) -> bool:
        """In a time that does not tell how much of it was right."""
        shown = presented.encode("utf-8", "replace") if isinstance(presented, str) else presented
        return hmac.compare_digest(shown, self.secret.encode())


def new_cluster_token() -> ClusterToken:
    """256 random bits."""
    return ClusterToken(secrets.token_hex(32))


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """Mutual TLS: this process' certificate and key, and the authority that must have signed the other's.

    All PEM. `server_name` is the name that every worker's certificate carries; None: the address that is
    called.
    """

    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)
    authority: bytes = field(repr=False)
    server_name: str | None = None


@dataclass(frozen=True, slots=True)
class PeerSecurity:
    """What a process shows to those it calls and asks of those that call it. Neither: everybody may call."""

    token: ClusterToken | None = None
    tls: TlsIdentity | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with each call."""
        return () if self.token is None else ((TOKEN_METADATA_KEY, self.token.secret),)
