"""BridgeConfig and ReceiverConfig: sizes, silences and ways of the bridge's two sides."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class SharedMemory(StrEnum):
    """Whether payloads between processes of one host go through shared memory.

    AUTO: where both ends can, else over gRPC. REQUIRED: a handoff that cannot is refused. (The word is not
    "off": an unquoted `off` in a YAML file is no text.)
    """

    AUTO = "auto"
    NEVER = "never"
    REQUIRED = "required"


class CudaIpc(StrEnum):
    """Whether payloads between GPUs of one host stay on the device.

    AUTO: where both ends can, else as `shm` says. REQUIRED: a handoff that cannot is refused, and a worker
    without a GPU does not start.
    """

    AUTO = "auto"
    NEVER = "never"
    REQUIRED = "required"


class Distributed(StrEnum):
    """Whether payloads go through process groups of torch.distributed (NCCL between GPUs, else gloo), one for
    each pair of workers, where neither memory of the device nor of the host is shared.

    AUTO: where both ends can and nothing asks for encryption, which groups do not have; else over gRPC.
    REQUIRED: a handoff that cannot is refused.
    """

    AUTO = "auto"
    NEVER = "never"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class BridgeConfig:
    """How much is sent at once, and how long decode may be silent.

    `silence_s` is how long decode may not be heard before a transfer is given up; `keepalive_s` must be well
    below it.

    `frame_bytes` is the payload that consecutive blocks are packed to (a single larger block still travels),
    `max_bytes_in_flight` the payload of one ticket that is sent but not acknowledged.

    `max_warm_pairs`: connections and memory for so many workers are made before a request asks for them.

    `shm` chooses shared memory for decode workers on this host: `staging_bytes` of it for each of them, in
    frames of `staged_frame_bytes`. Attaching takes `attach_s` at most, and is tried again `attach_again_s`
    after it failed, ever later if that is in vain.

    `cuda_ipc` chooses memory of decode's GPU, for workers on GPUs of one host that reach one another:
    `device_staging_bytes` of it for each pair, in frames of `device_frame_bytes`.

    `distributed` chooses process groups: `group_staging_bytes` of memory at both ends of each pair, in frames
    of `group_frame_bytes`, each of which may take `group_s` before the group is given up.
    """

    frame_bytes: int = 1 << 20
    max_bytes_in_flight: int = 8 << 20
    keepalive_s: float = 1.0
    silence_s: float = 5.0
    reconnect_min_s: float = 0.05
    reconnect_max_s: float = 0.5
    abort_s: float = 2.0
    max_warm_pairs: int = 16
    idle_connection_s: float = 60.0
    shm: SharedMemory = SharedMemory.AUTO
    staging_bytes: int = 64 << 20
    staged_frame_bytes: int = 4 << 20
    attach_s: float = 1.0
    attach_again_s: float = 5.0
    cuda_ipc: CudaIpc = CudaIpc.AUTO
    device_staging_bytes: int = 128 << 20
    device_frame_bytes: int = 8 << 20
    distributed: Distributed = Distributed.AUTO
    group_staging_bytes: int = 64 << 20
    group_frame_bytes: int = 4 << 20
    group_s: float = 5.0

    def __post_init__(self) -> None:
        if min(self.frame_bytes, self.max_bytes_in_flight) < 1:
            raise ValueError("frame_bytes and max_bytes_in_flight must be positive")
        if not 0 < self.keepalive_s < self.silence_s:
            raise ValueError("keepalive_s must be positive and below silence_s")
        if not 0 < self.reconnect_min_s <= self.reconnect_max_s:
            raise ValueError("reconnect_min_s must be positive and at most reconnect_max_s")
        if self.max_warm_pairs < 0:
            raise ValueError("max_warm_pairs must not be negative")
        if self.abort_s <= 0 or self.idle_connection_s <= 0:
            raise ValueError("abort_s and idle_connection_s must be positive")
        if min(self.staging_bytes, self.staged_frame_bytes) < 1:
            raise ValueError("staging_bytes and staged_frame_bytes must be positive")
        if min(self.device_staging_bytes, self.device_frame_bytes) < 1:
            raise ValueError("device_staging_bytes and device_frame_bytes must be positive")
        if min(self.group_staging_bytes, self.group_frame_bytes) < 1:
            raise ValueError("group_staging_bytes and group_frame_bytes must be positive")
        if min(self.attach_s, self.attach_again_s, self.group_s) <= 0:
            raise ValueError("attach_s, attach_again_s and group_s must be positive")


@dataclass(frozen=True, slots=True)
class ReceiverConfig:
    """What a decode worker offers to prefill workers.

    `shm`: whether it does (`required`: it does not start where it cannot). `max_staging_bytes` of shared
    memory at most for all of them together; whoever comes when that is used up sends over gRPC. `cuda_ipc`
    and `max_device_staging_bytes`: the same for memory of its GPU, which is taken beside the pool of blocks.
    `distributed` and `max_group_staging_bytes`: the same for process groups, whose payloads may take
    `group_s` each; on a GPU their memory is the GPU's.
    """

    shm: SharedMemory = SharedMemory.AUTO
    max_staging_bytes: int = 1 << 30
    cuda_ipc: CudaIpc = CudaIpc.AUTO
    max_device_staging_bytes: int = 1 << 30
    distributed: Distributed = Distributed.AUTO
    max_group_staging_bytes: int = 1 << 30
    group_s: float = 5.0

    def __post_init__(self) -> None:
        if min(self.max_staging_bytes, self.max_device_staging_bytes, self.max_group_staging_bytes) < 1:
            raise ValueError(
                "max_staging_bytes, max_device_staging_bytes and max_group_staging_bytes must be positive"
            )
        if self.group_s <= 0:
            raise ValueError("group_s must be positive")
