"""Whether a worker's bridge uses its device, decided once at start. Runs on the starting thread."""

from __future__ import annotations

import logging
from collections.abc import Callable

from core.errors import InvalidConfig
from kv_transfer.config import CudaIpc
from kv_transfer.device_memory import DeviceMemory
from kv_transfer.device_thread import DeviceThread

_log = logging.getLogger(__name__)


def shared_device(share: Callable[[], DeviceMemory | None], wanted: CudaIpc) -> DeviceThread | None:
    """What `share` gives, with its thread; None where it is not wanted, or not there.

    `share` raises OSError for a device that cannot be shared: InvalidConfig if it is required.
    """
    if wanted is CudaIpc.NEVER:
        return None
    try:
        memory = share()
    except OSError as error:
        if wanted is CudaIpc.REQUIRED:
            raise InvalidConfig(f"bridge.cuda_ipc is required, but cannot be had: {error!r}") from error
        _log.warning("the device is not shared with other workers of this host: %r", error)
        return None
    return None if memory is None else DeviceThread(memory)
