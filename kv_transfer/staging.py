"""Staging: the memory of one pair, at prefill, while it is attached. Lives on the IO loop."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Protocol

from kv_transfer.shm_slots import Sliceable, Slots

_log = logging.getLogger(__name__)


class Attached(Protocol):
    """Memory that this process may write, and the connection whose end gives it back."""

    @property
    def staging_id(self) -> int: ...

    @property
    def slots(self) -> Sliceable: ...

    @property
    def connection(self) -> socket.socket: ...

    def close(self) -> None:
        """Let go of both."""
        ...


class Staging:
    """The memory of one pair, while it is attached."""

    def __init__(self, attachment: Attached, slot_bytes: int) -> None:
        self.staging_id = attachment.staging_id
        self.slots = Slots(attachment.slots, slot_bytes)
        self.is_open = True
        self._attachment = attachment
        asyncio.get_running_loop().add_reader(attachment.connection, self._hear)

    def give_up(self, why: str) -> None:
        """Close it; a later offer asks for new memory."""
        if self.is_open:
            _log.warning("staging memory %x is given up: %s", self.staging_id, why)
            self.close()

    def close(self) -> None:
        """Nothing is written to the memory any more: decode gives it back."""
        if self.is_open:
            self.is_open = False
            self.slots.close()
            asyncio.get_running_loop().remove_reader(self._attachment.connection)
            self._attachment.close()

    def _hear(self) -> None:
        """Decode says nothing on the connection but that it is over."""
        try:
            if self._attachment.connection.recv(1):
                return
        except BlockingIOError:
            return
        except OSError as error:
            _log.info("the connection of staging %x broke: %r", self.staging_id, error)
        self.close()
