"""The bridge between processes whose blocks are on GPUs of one host: payloads go from device to device.

Owns how prefill asks for memory on decode's device. Messages, and payloads where that memory cannot be had,
go by the transport that this one stands on. Lives on the IO loop; copies on the device's thread.
"""

from __future__ import annotations

from collections.abc import Callable

from core.errors import InvalidConfig
from core.ids import WorkerRef
from kv_transfer.config import BridgeConfig, CudaIpc
from kv_transfer.device_thread import DeviceThread
from kv_transfer.ipc_handshake import OpenedRegion, attach_device
from kv_transfer.shm_handshake import Fallback, Hello, obstacle_of
from kv_transfer.staged_transport import StagedTransport, StagingWish, Underlying
from kv_transfer.transport import CUDA_IPC, Connect, OfferedStaging, Pair


def connect_on_device(
    config: BridgeConfig, device: DeviceThread | None, connect: Callable[[WorkerRef], Underlying]
) -> Connect:
    """Transports that stand on those of `connect`, as `config.cuda_ipc` says. Raises InvalidConfig if it is
    required and there is no device.
    """
    if config.cuda_ipc is CudaIpc.REQUIRED and device is None:
        raise InvalidConfig("bridge.cuda_ipc is required, but this worker's blocks are not on a device")
    if config.cuda_ipc is CudaIpc.NEVER or device is None:
        return connect
    return lambda ref: CudaIpcTransport(connect(ref), config, device)


class CudaIpcTransport(StagedTransport):
    """To one decode worker, whose device this one may reach or not."""

    name = CUDA_IPC

    def __init__(self, inner: Underlying, config: BridgeConfig, device: DeviceThread) -> None:
        wish = StagingWish(
            config.device_staging_bytes,
            config.device_frame_bytes,
            config.cuda_ipc is CudaIpc.REQUIRED,
            config.attach_s,
            config.attach_again_s,
            prefix="cuda_ipc_",
        )
        super().__init__(inner, wish)
        self._device = device

    def obstacle(self, offered: OfferedStaging) -> Fallback | None:
        return obstacle_of(offered.device)

    async def attach(self, offered: OfferedStaging, pair: Pair, num_bytes: int) -> OpenedRegion:
        assert offered.device is not None
        hello = Hello(offered.device.token, pair.decode.epoch, pair.prefill.epoch, num_bytes)
        return await attach_device(self._device, offered.device, hello, self._wish.attach_s)
