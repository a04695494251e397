from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRef(_message.Message):
    __slots__ = ("worker_id", "role", "epoch", "address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    epoch: int
    address: str
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., epoch: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "seed", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "ignore_eos", "stop_token_ids", "logprobs", "prompt_logprobs")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    seed: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: int
    prompt_logprobs: int
    def __init__(self, max_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., min_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "sampling", "model", "adapter", "num_samples", "cache_salt", "priority", "is_prefix_cache_read")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    IS_PREFIX_CACHE_READ_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: bytes
    sampling: SamplingParams
    model: str
    adapter: str
    num_samples: int
    cache_salt: str
    priority: int
    is_prefix_cache_read: bool
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., model: _Optional[str] = ..., adapter: _Optional[str] = ..., num_samples: _Optional[int] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., is_prefix_cache_read: _Optional[bool] = ...) -> None: ...

class SampleStart(_message.Message):
    __slots__ = ("sample_index", "emitted")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    emitted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sample_index: _Optional[int] = ..., emitted: _Optional[_Iterable[int]] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "top")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[Candidate]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ...) -> None: ...

class TokenDelta(_message.Message):
    __slots__ = ("sample_index", "position", "token_ids", "logprobs", "finish_reason", "num_cached_tokens")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    finish_reason: str
    num_cached_tokens: int
    def __init__(self, sample_index: _Optional[int] = ..., position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("receiver_epoch", "request", "samples", "ticket_id", "decode", "attempt", "time_left_s")
    RECEIVER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    receiver_epoch: int
    request: Request
    samples: _containers.RepeatedCompositeFieldContainer[SampleStart]
    ticket_id: str
    decode: WorkerRef
    attempt: int
    time_left_s: float
    def __init__(self, receiver_epoch: _Optional[int] = ..., request: _Optional[_Union[Request, _Mapping]] = ..., samples: _Optional[_Iterable[_Union[SampleStart, _Mapping]]] = ..., ticket_id: _Optional[str] = ..., decode: _Optional[_Union[WorkerRef, _Mapping]] = ..., attempt: _Optional[int] = ..., time_left_s: _Optional[float] = ...) -> None: ...

class PrefillReply(_message.Message):
    __slots__ = ("deltas", "num_cached_tokens", "queue_s", "compute_s", "prompt_logprobs")
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    deltas: _containers.RepeatedCompositeFieldContainer[TokenDelta]
    num_cached_tokens: int
    queue_s: float
    compute_s: float
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, deltas: _Optional[_Iterable[_Union[TokenDelta, _Mapping]]] = ..., num_cached_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("receiver_epoch", "request", "samples", "ticket_id", "attempt", "time_left_s")
    RECEIVER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    receiver_epoch: int
    request: Request
    samples: _containers.RepeatedCompositeFieldContainer[SampleStart]
    ticket_id: str
    attempt: int
    time_left_s: float
    def __init__(self, receiver_epoch: _Optional[int] = ..., request: _Optional[_Union[Request, _Mapping]] = ..., samples: _Optional[_Iterable[_Union[SampleStart, _Mapping]]] = ..., ticket_id: _Optional[str] = ..., attempt: _Optional[int] = ..., time_left_s: _Optional[float] = ...) -> None: ...

class Reading(_message.Message):
    __slots__ = ("queue_s", "compute_s", "wait_s", "cause")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    compute_s: float
    wait_s: float
    cause: str
    def __init__(self, queue_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., cause: _Optional[str] = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("delta", "prompt_logprobs", "reading")
    DELTA_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    READING_FIELD_NUMBER: _ClassVar[int]
    delta: TokenDelta
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    reading: Reading
    def __init__(self, delta: _Optional[_Union[TokenDelta, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., reading: _Optional[_Union[Reading, _Mapping]] = ...) -> None: ...

class LendRequest(_message.Message):
    __slots__ = ("receiver_epoch", "request_id", "ticket_id", "block_hashes", "to", "time_left_s")
    RECEIVER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    receiver_epoch: int
    request_id: str
    ticket_id: str
    block_hashes: bytes
    to: WorkerRef
    time_left_s: float
    def __init__(self, receiver_epoch: _Optional[int] = ..., request_id: _Optional[str] = ..., ticket_id: _Optional[str] = ..., block_hashes: _Optional[bytes] = ..., to: _Optional[_Union[WorkerRef, _Mapping]] = ..., time_left_s: _Optional[float] = ...) -> None: ...

class LendReply(_message.Message):
    __slots__ = ("num_tokens", "num_sent_blocks")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SENT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    num_sent_blocks: int
    def __init__(self, num_tokens: _Optional[int] = ..., num_sent_blocks: _Optional[int] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("receiver_epoch", "request_id", "ticket_id", "reason", "sample_index")
    RECEIVER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    receiver_epoch: int
    request_id: str
    ticket_id: str
    reason: str
    sample_index: int
    def __init__(self, receiver_epoch: _Optional[int] = ..., request_id: _Optional[str] = ..., ticket_id: _Optional[str] = ..., reason: _Optional[str] = ..., sample_index: _Optional[int] = ...) -> None: ...

class CancelReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("receiver_epoch",)
    RECEIVER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    receiver_epoch: int
    def __init__(self, receiver_epoch: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("ref", "is_draining", "num_waiting", "num_running", "num_waiting_tokens", "num_running_tokens", "num_blocks", "num_free_blocks", "num_cached_blocks", "num_held_blocks", "num_quarantined_blocks", "max_num_seqs", "prefill_tokens_per_s", "step_s", "num_shared_cores", "max_step_tokens", "max_chunk_tokens", "alone", "beside", "pairs")
    REF_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARED_CORES_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    BESIDE_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    ref: WorkerRef
    is_draining: bool
    num_waiting: int
    num_running: int
    num_waiting_tokens: int
    num_running_tokens: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_held_blocks: int
    num_quarantined_blocks: int
    max_num_seqs: int
    prefill_tokens_per_s: float
    step_s: float
    num_shared_cores: int
    max_step_tokens: int
    max_chunk_tokens: int
    alone: StepCost
    beside: StepCost
    pairs: _containers.RepeatedCompositeFieldContainer[PairStatus]
    def __init__(self, ref: _Optional[_Union[WorkerRef, _Mapping]] = ..., is_draining: _Optional[bool] = ..., num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting_tokens: _Optional[int] = ..., num_running_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_held_blocks: _Optional[int] = ..., num_quarantined_blocks: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., step_s: _Optional[float] = ..., num_shared_cores: _Optional[int] = ..., max_step_tokens: _Optional[int] = ..., max_chunk_tokens: _Optional[int] = ..., alone: _Optional[_Union[StepCost, _Mapping]] = ..., beside: _Optional[_Union[StepCost, _Mapping]] = ..., pairs: _Optional[_Iterable[_Union[PairStatus, _Mapping]]] = ...) -> None: ...

class PairStatus(_message.Message):
    __slots__ = ("worker_id", "epoch", "transport", "bytes_per_s", "num_bytes", "fallbacks", "is_warm", "problem")
    class NumBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class FallbacksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    IS_WARM_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    transport: str
    bytes_per_s: float
    num_bytes: _containers.ScalarMap[str, int]
    fallbacks: _containers.ScalarMap[str, int]
    is_warm: bool
    problem: str
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., transport: _Optional[str] = ..., bytes_per_s: _Optional[float] = ..., num_bytes: _Optional[_Mapping[str, int]] = ..., fallbacks: _Optional[_Mapping[str, int]] = ..., is_warm: _Optional[bool] = ..., problem: _Optional[str] = ...) -> None: ...

class StepCost(_message.Message):
    __slots__ = ("decode_s", "stream_s", "prefill_s", "token_s", "kv_s", "pair_s")
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    STREAM_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    KV_S_FIELD_NUMBER: _ClassVar[int]
    PAIR_S_FIELD_NUMBER: _ClassVar[int]
    decode_s: float
    stream_s: float
    prefill_s: float
    token_s: float
    kv_s: float
    pair_s: float
    def __init__(self, decode_s: _Optional[float] = ..., stream_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., token_s: _Optional[float] = ..., kv_s: _Optional[float] = ..., pair_s: _Optional[float] = ...) -> None: ...

class BlockEvent(_message.Message):
    __slots__ = ("kind", "block_hash", "parent", "tier")
    KIND_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    kind: str
    block_hash: bytes
    parent: bytes
    tier: int
    def __init__(self, kind: _Optional[str] = ..., block_hash: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., tier: _Optional[int] = ...) -> None: ...

class BlockDigest(_message.Message):
    __slots__ = ("count", "xor")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    XOR_FIELD_NUMBER: _ClassVar[int]
    count: int
    xor: int
    def __init__(self, count: _Optional[int] = ..., xor: _Optional[int] = ...) -> None: ...

class WatchEvent(_message.Message):
    __slots__ = ("number", "status", "events", "digest", "epoch", "age_s")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    number: int
    status: WorkerStatus
    events: _containers.RepeatedCompositeFieldContainer[BlockEvent]
    digest: BlockDigest
    epoch: int
    age_s: float
    def __init__(self, number: _Optional[int] = ..., status: _Optional[_Union[WorkerStatus, _Mapping]] = ..., events: _Optional[_Iterable[_Union[BlockEvent, _Mapping]]] = ..., digest: _Optional[_Union[BlockDigest, _Mapping]] = ..., epoch: _Optional[int] = ..., age_s: _Optional[float] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("receiver_epoch", "first_part", "end_part", "known")
    RECEIVER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_PART_FIELD_NUMBER: _ClassVar[int]
    END_PART_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    receiver_epoch: int
    first_part: int
    end_part: int
    known: bytes
    def __init__(self, receiver_epoch: _Optional[int] = ..., first_part: _Optional[int] = ..., end_part: _Optional[int] = ..., known: _Optional[bytes] = ...) -> None: ...

class SnapshotReply(_message.Message):
    __slots__ = ("epoch", "number", "first_part", "end_part", "changed", "hashes", "tiers")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FIRST_PART_FIELD_NUMBER: _ClassVar[int]
    END_PART_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    number: int
    first_part: int
    end_part: int
    changed: _containers.RepeatedScalarFieldContainer[int]
    hashes: bytes
    tiers: bytes
    def __init__(self, epoch: _Optional[int] = ..., number: _Optional[int] = ..., first_part: _Optional[int] = ..., end_part: _Optional[int] = ..., changed: _Optional[_Iterable[int]] = ..., hashes: _Optional[bytes] = ..., tiers: _Optional[bytes] = ...) -> None: ...

class RoleRequest(_message.Message):
    __slots__ = ("receiver_epoch", "role", "cause")
    RECEIVER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    receiver_epoch: int
    role: str
    cause: str
    def __init__(self, receiver_epoch: _Optional[int] = ..., role: _Optional[str] = ..., cause: _Optional[str] = ...) -> None: ...

class RoleReply(_message.Message):
    __slots__ = ("ref", "drain_s", "start_s")
    REF_FIELD_NUMBER: _ClassVar[int]
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    ref: WorkerRef
    drain_s: float
    start_s: float
    def __init__(self, ref: _Optional[_Union[WorkerRef, _Mapping]] = ..., drain_s: _Optional[float] = ..., start_s: _Optional[float] = ...) -> None: ...

class MetricsRequest(_message.Message):
    __slots__ = ("receiver_epoch",)
    RECEIVER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    receiver_epoch: int
    def __init__(self, receiver_epoch: _Optional[int] = ...) -> None: ...

class MetricsReply(_message.Message):
    __slots__ = ("exposition",)
    EXPOSITION_FIELD_NUMBER: _ClassVar[int]
    exposition: bytes
    def __init__(self, exposition: _Optional[bytes] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("code", "message", "details_json")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_JSON_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    details_json: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., details_json: _Optional[str] = ...) -> None: ...
