"""What the kernel counted on TCP connections, asked over netlink (Linux sock_diag).

Owns the request and the reading of `tcp_info`; the layout is the kernel's include/uapi/linux/inet_diag.h and
tcp.h. No privileges needed.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_NLM_F_REQUEST, _NLM_F_DUMP, _NLMSG_ERROR, _NLMSG_DONE = 0x1, 0x300, 2, 3
_INET_DIAG_INFO = 2
_ESTABLISHED = 1
_DIAG_MESSAGE = struct.Struct("<BBBB48sIIIII")
# tcp_info: tcpi_bytes_acked and tcpi_bytes_received are the u64 at 120 and 128.
_BYTES_ACKED, _BYTES_RECEIVED = 120, 128


@dataclass(frozen=True, slots=True)
class Connection:
    """One end of an established TCP connection; bytes are payload the kernel acknowledged or received."""

    local_port: int
    remote_port: int
    inode: int
    bytes_sent: int
    bytes_received: int


def connections() -> list[Connection]:
    """All established TCP connections of this network namespace, IPv4 and IPv6."""
    found: list[Connection] = []
    for family in (socket.AF_INET, socket.AF_INET6):
        found += _dump(family)
    return found


def received_on_port(port: int) -> dict[tuple[int, int], int]:
    """Bytes that the listener's side of each connection to `port` has received, by (remote port, inode)."""
    return {(c.remote_port, c.inode): c.bytes_received for c in connections() if c.local_port == port}


def listening_ports(pid: int) -> set[int]:
    """Ports on which the process listens."""
    inodes = socket_inodes(pid)
    ports: set[int] = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[9]) in inodes:
                ports.add(int(fields[1].rsplit(":", 1)[1], 16))
    return ports


def socket_inodes(pid: int) -> set[int]:
    """Inodes of the sockets that the process has open."""
    inodes: set[int] = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:  # closed since it was listed
            continue
        if target.startswith("socket:["):
            inodes.add(int(target[8:-1]))
    return inodes


def _dump(family: int) -> Iterator[Connection]:
    body = struct.pack("<BBBBI", family, socket.IPPROTO_TCP, 1 << (_INET_DIAG_INFO - 1), 0, 1 << _ESTABLISHED)
    body += bytes(48)
    flags = _NLM_F_REQUEST | _NLM_F_DUMP
    message = struct.pack("<IHHII", 16 + len(body), _SOCK_DIAG_BY_FAMILY, flags, 1, 0) + body
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as channel:
        channel.settimeout(5.0)
        channel.send(message)
        while True:
            data = channel.recv(1 << 20)
            while data:
                length, kind = struct.unpack_from("<IH", data)
                if kind == _NLMSG_DONE:
                    return
                if kind == _NLMSG_ERROR:
                    (code,) = struct.unpack_from("<i", data, 16)
                    raise OSError(-code, "sock_diag refused the request")
                yield _connection(data[16:length])
                data = data[(length + 3) & ~3 :]


def _connection(message: bytes) -> Connection:
    fields = _DIAG_MESSAGE.unpack_from(message)
    identity, inode = fields[4], fields[9]
    local_port, remote_port = struct.unpack_from(">HH", identity)
    info = _attribute(message[_DIAG_MESSAGE.size :], _INET_DIAG_INFO)
    sent = received = 0
    if len(info) >= _BYTES_RECEIVED + 8:
        (sent,) = struct.unpack_from("<Q", info, _BYTES_ACKED)
        (received,) = struct.unpack_from("<Q", info, _BYTES_RECEIVED)
    return Connection(local_port, remote_port, inode, sent, received)


def _attribute(data: bytes, wanted: int) -> bytes:
    while len(data) >= 4:
        length, kind = struct.unpack_from("<HH", data)
        if kind == wanted:
            return data[4:length]
        data = data[(length + 3) & ~3 :]
    return b""
