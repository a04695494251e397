"""Ports for servers that bind them later: free ones, and none that a connection could take meanwhile."""

from __future__ import annotations

import random
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster import ports
from core.errors import InvalidConfig

HOST = "127.0.0.1"


@pytest.fixture
def system_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the system says it gives to connections."""
    path = tmp_path / "range"
    path.write_text("32768\t60999\n")
    monkeypatch.setattr(ports, "_SYSTEM_RANGE", path)
    return path


def test_ports_are_different_and_below_those_of_connections(system_range: Path) -> None:
    found = ports.free_ports(HOST, 50)
    assert len(set(found)) == 50
    assert all(20_000 <= port < 32_768 for port in found)
    system_range.write_text("24000 60999")
    assert all(20_000 <= port < 24_000 for port in ports.free_ports(HOST, 20))


def test_two_who_seeded_their_chance_alike_do_not_draw_the_same(system_range: Path) -> None:
    random.seed(1)
    first = ports.free_ports(HOST, 20)
    random.seed(1)
    assert ports.free_ports(HOST, 20) != first


@pytest.mark.parametrize("text", ["1024 65535", "20500 60999"])
def test_where_connections_have_all_of_them_the_system_chooses(system_range: Path, text: str) -> None:
    system_range.write_text(text)
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    found = ports.free_ports(HOST, 5)
    assert len(set(found)) == 5
    assert all(low <= port <= high for port in found)


@pytest.mark.parametrize("text", ["", "many"])
def test_a_range_that_cannot_be_read_is_no_reason_to_fail(system_range: Path, text: str) -> None:
    system_range.write_text(text)
    assert len(set(ports.free_ports(HOST, 3))) == 3
    system_range.unlink()
    assert len(set(ports.free_ports(HOST, 3))) == 3


@pytest.mark.parametrize("listens_at", [HOST, "0.0.0.0"])
def test_a_port_that_somebody_listens_on_is_not_chosen(
    system_range: Path, monkeypatch: pytest.MonkeyPatch, listens_at: str
) -> None:
    (taken, free) = ports.free_ports(HOST, 2)
    offered = iter([taken, taken, free])
    monkeypatch.setattr(ports, "_CHANCE", SimpleNamespace(randrange=lambda first, end: next(offered)))
    with socket.socket() as listener:
        listener.bind((listens_at, taken))
        listener.listen(1)
        assert ports.free_ports(HOST, 1) == [free]
        with pytest.raises(InvalidConfig, match="in use"):
            ports.choose_port(HOST, taken)
    assert ports.choose_port(HOST, free) == free
