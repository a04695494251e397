"""Staging: the memory of one pair, at prefill, while it is attached. Lives on the IO loop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Protocol

from kv_transfer.shm_slots import Sliceable, Slot, Slots
from kv_transfer.transport import Place

_log = logging.getLogger(__name__)


class Attached(Protocol):
    """Memory that this process may write, and the connection whose end gives it back."""

    @property
    def staging_id(self) -> int: ...

    @property
    def slots(self) -> Sliceable: ...

    def place(self, offset: int) -> Place:
        """What the frame of the next payload in the slot at `offset` names."""
        ...

    def publish(self, place: Place, offset: int, num_bytes: int) -> None:
        """The slot is filled, its frame is sent next: make sure that decode finds the payload."""
        ...

    def watch(self, on_end: Callable[[], None]) -> None:
        """Tell when decode has ended it, or it broke."""
        ...

    def close(self) -> None:
        """Let go of both."""
        ...


def watch_connection(connection: socket.socket, on_end: Callable[[], None]) -> None:
    """Decode says nothing on it but that it is over. Until `remove_reader`."""

    def hear() -> None:
        try:
            if connection.recv(1):
                return
        except BlockingIOError:
            return
        except OSError as error:
            _log.info("the connection of a staging memory broke: %r", error)
        on_end()

    asyncio.get_running_loop().add_reader(connection, hear)


class Staging:
    """The memory of one pair, while it is attached."""

    def __init__(self, attachment: Attached, slot_bytes: int) -> None:
        self.staging_id = attachment.staging_id
        self.slots = Slots(attachment.slots, slot_bytes)
        self.is_open = True
        self.is_on_device = not isinstance(attachment.slots, memoryview)
        self._attachment = attachment
        attachment.watch(self.close)

    def place(self, slot: Slot) -> Place:
        return self._attachment.place(slot.offset)

    def publish(self, place: Place, slot: Slot, num_bytes: int) -> None:
        """See Attached; nothing when it is closed: decode answers that the memory is lost."""
        if self.is_open:
            self._attachment.publish(place, slot.offset, num_bytes)

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
            self._attachment.close()
