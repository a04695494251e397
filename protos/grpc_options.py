"""Settings of gRPC channels and servers between workers: message sizes, how fast a dead peer is noticed.

Values only; no gRPC is imported here.
"""

from __future__ import annotations

from core.peer_security import PeerSecurity

_UNLIMITED = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_UNLIMITED,
    # workers are reached directly, whatever proxy the environment names
    ("grpc.enable_http_proxy", 0),
    # A stopped peer, or one whose host is gone, is noticed within 3 s. It takes both limits: a keepalive
    # waits for a ping that is already on its way (of the bandwidth probe), and that one has its own limit of
    # a minute.
    ("grpc.keepalive_time_ms", 700),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # a restarted peer is another channel; until then try again quickly
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    *_UNLIMITED,
    # the clients' pings are wanted, however many
    ("grpc.http2.min_ping_interval_without_data_ms", 100),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.so_reuseport", 0),
]


def channel_options(security: PeerSecurity) -> list[tuple[str, int | str]]:
    """CHANNEL_OPTIONS, and whose certificate is expected."""
    name = None if security.tls is None else security.tls.server_name
    return [*CHANNEL_OPTIONS, *([("grpc.ssl_target_name_override", name)] if name is not None else [])]
