from __future__ import annotations

import socket

import pytest

from cluster.ports import choose_port, free_ports, is_port_free
from core.errors import InvalidConfig

HOST = "127.0.0.1"


def test_a_listener_makes_a_port_taken_even_if_it_would_share_it() -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((HOST, 0))
        listener.listen()
        port = int(listener.getsockname()[1])
        assert not is_port_free(HOST, port)
        with pytest.raises(InvalidConfig, match=str(port)):
            choose_port(HOST, port)
    assert choose_port(HOST, port) == port


def test_a_port_that_only_has_old_connections_is_free() -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = int(listener.getsockname()[1])
        with socket.create_connection((HOST, port)):
            accepted, _ = listener.accept()
            accepted.close()  # the server's side of the connection now lingers in TIME_WAIT
    assert is_port_free(HOST, port)


def test_free_ports_are_different_and_free() -> None:
    ports = free_ports(HOST, 20)
    assert len(set(ports)) == 20
    assert all(is_port_free(HOST, port) for port in ports)


def test_port_zero_becomes_a_real_one() -> None:
    assert choose_port(HOST, 0) > 0
