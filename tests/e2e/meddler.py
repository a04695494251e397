"""Meddler: a TCP proxy between two workers that passes, swallows, refuses or damages what goes through it.

Owns its listening port and its threads. It knows nothing of gRPC: damage is one flipped bit in the middle of
each large piece on the way to the server, which is payload for all practical purposes.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from enum import StrEnum


class Mode(StrEnum):
    PASS = "pass"
    SWALLOW = "swallow"
    REFUSE = "refuse"
    DAMAGE = "damage"


_LARGE = 8192


class Meddler:
    """Listens on a free port of 127.0.0.1 and forwards to `target_port`; `mode` may change at any time."""

    def __init__(self, target_port: int) -> None:
        self.mode = Mode.PASS
        self.num_bytes_to_server = 0
        self.num_damaged = 0
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        threading.Thread(target=self._accept, name="meddler", daemon=True).start()

    def cut(self) -> None:
        """Break all connections that are open now."""
        with self._lock:
            opened, self._sockets = self._sockets, set()
        for connection in opened:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.mode is Mode.REFUSE:
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self._target_port))
            except OSError:
                client.close()
                continue
            with self._lock:
                self._sockets |= {client, server}
            for source, sink, is_to_server in ((client, server, True), (server, client, False)):
                arguments = (source, sink, is_to_server)
                threading.Thread(target=self._pump, args=arguments, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_to_server: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if self.mode is Mode.SWALLOW:
                    continue
                if is_to_server:
                    self.num_bytes_to_server += len(data)
                    if self.mode is Mode.DAMAGE and len(data) >= _LARGE:
                        data = self._damaged(data)
                sink.sendall(data)
        except OSError:
            pass  # the other direction, or `cut`, has closed it
        for connection in (source, sink):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _damaged(self, data: bytes) -> bytes:
        self.num_damaged += 1
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]
