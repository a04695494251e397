"""SecurityConfig, and from it what this process shows the others and asks of them.

Owns where the cluster's token and its TLS files come from. A `baton serve` draws a token of its own unless it
is given one, and hands it to its processes inside Ray, which asks for a token of its own; it is in no command
line, no file and no log. Files are read by each process on its own host. Runs once, at start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from core.errors import InvalidConfig
from core.peer_security import ClusterToken, PeerSecurity, TlsIdentity, new_cluster_token

TOKEN_VARIABLE = "BATON_CLUSTER_TOKEN"
TOKEN_FILE_VARIABLE = "BATON_CLUSTER_TOKEN_FILE"


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """Who may call a worker.

    `is_token_required`: whoever knows the cluster's token. It is drawn for each start, or read from
    `token_file` on each host. The three TLS files (PEM) go together: with them, both ends of each connection
    must also show a certificate of `tls_authority_file`. `tls_server_name` is the name in every worker's
    certificate; without it, certificates name the addresses that workers listen on.
    """

    is_token_required: bool = True
    token_file: Path | None = None
    tls_certificate_file: Path | None = None
    tls_key_file: Path | None = None
    tls_authority_file: Path | None = None
    tls_server_name: str | None = None

    @property
    def is_tls(self) -> bool:
        return self.tls_certificate_file is not None

    def __post_init__(self) -> None:
        names = ("tls_certificate_file", "tls_key_file", "tls_authority_file")
        missing = [name for name in names if getattr(self, name) is None]
        if 0 < len(missing) < len(names):
            raise ValueError(f"{missing[0]} is missing: mutual TLS needs " + ", ".join(names))
        if self.tls_server_name is not None and missing:
            raise ValueError("tls_server_name has no meaning without the TLS files")
        if self.token_file is not None and not self.is_token_required:
            raise ValueError("token_file has no meaning while is_token_required is false")


def start_token(config: SecurityConfig, environment: Mapping[str, str]) -> ClusterToken | None:
    """The token that this start hands to its processes: that of the environment, else a new one. None where
    none is required, or where each reads `token_file` by itself.

    Raises InvalidConfig naming the variable or file that cannot be used.
    """
    given = [
        name
        for name, value in (
            ("security.token_file", config.token_file),
            (TOKEN_FILE_VARIABLE, environment.get(TOKEN_FILE_VARIABLE)),
            (TOKEN_VARIABLE, environment.get(TOKEN_VARIABLE)),
        )
        if value
    ]
    if len(given) > 1:
        raise InvalidConfig(f"the cluster token is given twice: {' and '.join(given)}", key=given[1])
    if not config.is_token_required:
        return None
    if config.token_file is not None:
        read_token(config.token_file, "security.token_file")
        return None
    if named := environment.get(TOKEN_FILE_VARIABLE):
        return read_token(Path(named), TOKEN_FILE_VARIABLE)
    if secret := environment.get(TOKEN_VARIABLE):
        return ClusterToken(secret)
    return new_cluster_token()


def peer_security(config: SecurityConfig, handed: ClusterToken | None) -> PeerSecurity:
    """What this process shows and asks, with the token that it was `handed`. Reads files.

    Raises InvalidConfig naming a missing or unusable file.
    """
    token = handed
    if token is None and config.token_file is not None:
        token = read_token(config.token_file, "security.token_file")
    if config.is_token_required and token is None:
        raise InvalidConfig("the cluster token is required, but was not handed over", key="security")
    return PeerSecurity(token, _tls(config))


def read_token(path: Path, setting: str) -> ClusterToken:
    """The token that a file holds. Raises InvalidConfig if other users can read it."""
    secret = _read(path, setting)
    if path.stat().st_mode & 0o077:
        raise InvalidConfig(f"{setting}: {path} can be read by other users; `chmod 600` it", key=setting)
    try:
        return ClusterToken(secret.decode("ascii").strip())
    except UnicodeDecodeError:
        raise InvalidConfig(f"{setting}: {path} holds no token (not ASCII)", key=setting) from None
    except InvalidConfig as error:
        raise InvalidConfig(f"{setting}: {path}: {error.message}", key=setting) from None


def _tls(config: SecurityConfig) -> TlsIdentity | None:
    certificate, key, authority = (
        config.tls_certificate_file,
        config.tls_key_file,
        config.tls_authority_file,
    )
    if certificate is None or key is None or authority is None:
        return None
    return TlsIdentity(
        certificate=_pem(certificate, "security.tls_certificate_file", "CERTIFICATE"),
        key=_pem(key, "security.tls_key_file", "PRIVATE KEY"),
        authority=_pem(authority, "security.tls_authority_file", "CERTIFICATE"),
        server_name=config.tls_server_name,
    )


def _pem(path: Path, setting: str, kind: str) -> bytes:
    """gRPC takes whatever it is given and fails each handshake later, so what it is is looked at here."""
    data = _read(path, setting)
    if f"{kind}-----".encode() not in data:
        raise InvalidConfig(f"{setting}: {path} holds no {kind.lower()} in PEM", key=setting)
    return data


def _read(path: Path, setting: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidConfig(f"{setting}: cannot read {path}: {error.strerror}", key=setting) from error
