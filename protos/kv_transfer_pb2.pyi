from protos import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KVLayout(_message.Message):
    __slots__ = ("model", "num_layers", "num_kv_heads", "head_dim", "block_size", "dtype", "scales")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SCALES_FIELD_NUMBER: _ClassVar[int]
    model: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    scales: str
    def __init__(self, model: _Optional[str] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., block_size: _Optional[int] = ..., dtype: _Optional[str] = ..., scales: _Optional[str] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("ticket_id", "request_id", "prefill", "decode", "layout", "num_tokens", "block_hashes", "num_samples", "num_growth_tokens", "is_prefix_cache_read")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NUM_GROWTH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_PREFIX_CACHE_READ_FIELD_NUMBER: _ClassVar[int]
    ticket_id: str
    request_id: str
    prefill: _inference_pb2.WorkerRef
    decode: _inference_pb2.WorkerRef
    layout: KVLayout
    num_tokens: int
    block_hashes: bytes
    num_samples: int
    num_growth_tokens: int
    is_prefix_cache_read: bool
    def __init__(self, ticket_id: _Optional[str] = ..., request_id: _Optional[str] = ..., prefill: _Optional[_Union[_inference_pb2.WorkerRef, _Mapping]] = ..., decode: _Optional[_Union[_inference_pb2.WorkerRef, _Mapping]] = ..., layout: _Optional[_Union[KVLayout, _Mapping]] = ..., num_tokens: _Optional[int] = ..., block_hashes: _Optional[bytes] = ..., num_samples: _Optional[int] = ..., num_growth_tokens: _Optional[int] = ..., is_prefix_cache_read: _Optional[bool] = ...) -> None: ...

class OfferRequest(_message.Message):
    __slots__ = ("receiver_epoch", "ticket", "time_left_s", "version")
    RECEIVER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    receiver_epoch: int
    ticket: Ticket
    time_left_s: float
    version: int
    def __init__(self, receiver_epoch: _Optional[int] = ..., ticket: _Optional[_Union[Ticket, _Mapping]] = ..., time_left_s: _Optional[float] = ..., version: _Optional[int] = ...) -> None: ...

class StagingAddress(_message.Message):
    __slots__ = ("host_id", "socket_name", "token", "device_id")
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    SOCKET_NAME_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    host_id: str
    socket_name: str
    token: bytes
    device_id: str
    def __init__(self, host_id: _Optional[str] = ..., socket_name: _Optional[str] = ..., token: _Optional[bytes] = ..., device_id: _Optional[str] = ...) -> None: ...

class OfferReply(_message.Message):
    __slots__ = ("held", "staging", "device_staging", "group")
    HELD_FIELD_NUMBER: _ClassVar[int]
    STAGING_FIELD_NUMBER: _ClassVar[int]
    DEVICE_STAGING_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    held: _containers.RepeatedScalarFieldContainer[int]
    staging: StagingAddress
    device_staging: StagingAddress
    group: GroupAddress
    def __init__(self, held: _Optional[_Iterable[int]] = ..., staging: _Optional[_Union[StagingAddress, _Mapping]] = ..., device_staging: _Optional[_Union[StagingAddress, _Mapping]] = ..., group: _Optional[_Union[GroupAddress, _Mapping]] = ...) -> None: ...

class GroupAddress(_message.Message):
    __slots__ = ("backend",)
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    backend: str
    def __init__(self, backend: _Optional[str] = ...) -> None: ...

class MeetRequest(_message.Message):
    __slots__ = ("receiver_epoch", "prefill", "layout", "version")
    RECEIVER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    receiver_epoch: int
    prefill: _inference_pb2.WorkerRef
    layout: KVLayout
    version: int
    def __init__(self, receiver_epoch: _Optional[int] = ..., prefill: _Optional[_Union[_inference_pb2.WorkerRef, _Mapping]] = ..., layout: _Optional[_Union[KVLayout, _Mapping]] = ..., version: _Optional[int] = ...) -> None: ...

class MeetReply(_message.Message):
    __slots__ = ("staging", "device_staging", "group")
    STAGING_FIELD_NUMBER: _ClassVar[int]
    DEVICE_STAGING_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    staging: StagingAddress
    device_staging: StagingAddress
    group: GroupAddress
    def __init__(self, staging: _Optional[_Union[StagingAddress, _Mapping]] = ..., device_staging: _Optional[_Union[StagingAddress, _Mapping]] = ..., group: _Optional[_Union[GroupAddress, _Mapping]] = ...) -> None: ...

class GroupMessage(_message.Message):
    __slots__ = ("hello", "grant", "refusal", "key", "payload")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    hello: GroupHello
    grant: GroupGrant
    refusal: str
    key: GroupKey
    payload: GroupPayload
    def __init__(self, hello: _Optional[_Union[GroupHello, _Mapping]] = ..., grant: _Optional[_Union[GroupGrant, _Mapping]] = ..., refusal: _Optional[str] = ..., key: _Optional[_Union[GroupKey, _Mapping]] = ..., payload: _Optional[_Union[GroupPayload, _Mapping]] = ...) -> None: ...

class GroupHello(_message.Message):
    __slots__ = ("receiver_epoch", "sender_epoch", "backend", "num_bytes", "nonce")
    RECEIVER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SENDER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    receiver_epoch: int
    sender_epoch: int
    backend: str
    num_bytes: int
    nonce: bytes
    def __init__(self, receiver_epoch: _Optional[int] = ..., sender_epoch: _Optional[int] = ..., backend: _Optional[str] = ..., num_bytes: _Optional[int] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class GroupGrant(_message.Message):
    __slots__ = ("group_id", "nonce")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    group_id: int
    nonce: bytes
    def __init__(self, group_id: _Optional[int] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class GroupKey(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: bytes
    def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class GroupPayload(_message.Message):
    __slots__ = ("number", "offset", "num_bytes")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    number: int
    offset: int
    num_bytes: int
    def __init__(self, number: _Optional[int] = ..., offset: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("receiver_epoch", "sender_epoch", "ticket_id", "num_tokens", "num_pushed_blocks", "checksum")
    RECEIVER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SENDER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PUSHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    receiver_epoch: int
    sender_epoch: int
    ticket_id: str
    num_tokens: int
    num_pushed_blocks: int
    checksum: int
    def __init__(self, receiver_epoch: _Optional[int] = ..., sender_epoch: _Optional[int] = ..., ticket_id: _Optional[str] = ..., num_tokens: _Optional[int] = ..., num_pushed_blocks: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("num_written_blocks", "num_written_bytes")
    NUM_WRITTEN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_written_blocks: int
    num_written_bytes: int
    def __init__(self, num_written_blocks: _Optional[int] = ..., num_written_bytes: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("receiver_epoch", "sender_epoch", "ticket_id", "reason", "time_left_s")
    RECEIVER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SENDER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    receiver_epoch: int
    sender_epoch: int
    ticket_id: str
    reason: str
    time_left_s: float
    def __init__(self, receiver_epoch: _Optional[int] = ..., sender_epoch: _Optional[int] = ..., ticket_id: _Optional[str] = ..., reason: _Optional[str] = ..., time_left_s: _Optional[float] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KeepAliveRequest(_message.Message):
    __slots__ = ("receiver_epoch", "sender_epoch", "ticket_id")
    RECEIVER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SENDER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    receiver_epoch: int
    sender_epoch: int
    ticket_id: str
    def __init__(self, receiver_epoch: _Optional[int] = ..., sender_epoch: _Optional[int] = ..., ticket_id: _Optional[str] = ...) -> None: ...

class KeepAliveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
