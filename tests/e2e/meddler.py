"""Meddler: a TCP proxy between two workers that passes, swallows, refuses or damages what goes through it.

Owns its listening port and its threads. It knows nothing of gRPC: damage is one flipped bit in the middle of
each large piece on the way to the server, which is payload for all practical purposes.

A socket is closed only when both threads that use it have ended. Closed under a thread that is about to read
or write, its number would go to the next connection of this process, and that thread would take its bytes.
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


class _Link:
    """One client's connection and its own one to the target, used by two threads."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self._num_users = 2
        self._lock = threading.Lock()

    def shut(self) -> None:
        """Whoever reads or writes on it finds that it is over."""
        with self._lock:
            if self._num_users:
                self._shut()

    def leave(self) -> bool:
        """One of the two threads has ended; True when it was the last."""
        with self._lock:
            self._shut()
            self._num_users -= 1
            if self._num_users == 0:
                self.client.close()
                self.server.close()
            return self._num_users == 0

    def _shut(self) -> None:
        for connection in (self.client, self.server):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class Meddler:
    """Listens on a free port of 127.0.0.1 and forwards to `target_port`; `mode` may change at any time."""

    def __init__(self, target_port: int) -> None:
        self.mode = Mode.PASS
        self.num_bytes_to_server = 0
        self.num_damaged = 0
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._links: set[_Link] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        threading.Thread(target=self._accept, name="meddler", daemon=True).start()

    def cut(self) -> None:
        """Break all connections that are open now."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.shut()

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
            link = _Link(client, server)
            with self._lock:
                self._links.add(link)
            for is_to_server in (True, False):
                threading.Thread(target=self._pump, args=(link, is_to_server), daemon=True).start()

    def _pump(self, link: _Link, is_to_server: bool) -> None:
        source, sink = (link.client, link.server) if is_to_server else (link.server, link.client)
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
            pass  # the other direction, or `cut`, has shut it
        if link.leave():
            with self._lock:
                self._links.discard(link)

    def _damaged(self, data: bytes) -> bytes:
        self.num_damaged += 1
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]
