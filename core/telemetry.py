"""Names of metrics and of the moments in a request's life.

Owns the words only, so that workers, router, dashboards and documents agree; the counters live where they
are counted.
"""

from __future__ import annotations

from enum import StrEnum

TTFT_SECONDS = "baton_ttft_seconds"
TTFT_PART_SECONDS = "baton_ttft_part_seconds"
TRANSFER_WAIT_SECONDS = "baton_transfer_wait_seconds"
ITL_STALL_SECONDS = "baton_itl_stall_seconds"
ITL_SECONDS = "baton_itl_seconds"
E2E_SECONDS = "baton_e2e_seconds"
REQUESTS = "baton_requests"
REQUESTS_STARTED = "baton_requests_started"
HTTP_RESPONSES = "baton_http_responses"
PLACEMENTS = "baton_placements"
PREDICTED_CACHED_TOKENS = "baton_predicted_cached_tokens"
PREDICTION_RATIO = "baton_prediction_ratio"
RETRIES = "baton_retries"
PULLS = "baton_pulls"
PULLED_TOKENS = "baton_pulled_tokens"
RESUMED_TOKENS = "baton_resumed_tokens"
WORKERS = "baton_workers"
WORKER_ROLE = "baton_worker_role"
ROLE_CHANGES = "baton_role_changes"
ROLE_CHANGE_SECONDS = "baton_role_change_seconds"
ROUTER_REQUESTS = "baton_router_requests"
ROUTER_PLACES = "baton_router_places"
TENANT_TOKENS = "baton_tenant_tokens"
TENANT_REQUESTS = "baton_tenant_requests"
TENANT_REFUSALS = "baton_tenant_refusals"
TENANT_LIMIT = "baton_tenant_limit"
USAGE_LOST = "baton_usage_lost"

INDEX_BLOCKS = "baton_index_blocks"
INDEX_CONFIDENCE = "baton_index_confidence"
INDEX_DRIFT_BLOCKS = "baton_index_drift_blocks"
INDEX_EVENT_LAG_SECONDS = "baton_index_event_lag_seconds"
INDEX_REPAIRS = "baton_index_repairs"
INDEX_PREDICTIONS = "baton_index_predictions"
INDEX_DIGEST_MISMATCHES = "baton_index_digest_mismatches"
INDEX_EVENTS_IGNORED = "baton_index_events_ignored"

NUM_RUNNING = "baton_num_running"
NUM_WAITING = "baton_num_waiting"
NUM_WAITING_TOKENS = "baton_num_waiting_tokens"
KV_UTILIZATION = "baton_kv_utilization"
KV_BLOCKS = "baton_kv_blocks"
KV_LEAK_DIFFERENCE = "baton_kv_leak_difference"
PREFIX_QUERY_TOKENS = "baton_prefix_query_tokens"
PREFIX_HIT_TOKENS = "baton_prefix_hit_tokens"
PREEMPTIONS = "baton_preemptions"
PROMPT_TOKENS = "baton_prompt_tokens"
GENERATED_TOKENS = "baton_generated_tokens"
STEP_SECONDS = "baton_step_seconds"
WEIGHT_BYTES = "baton_weight_bytes"
SEQUENCES_FINISHED = "baton_sequences_finished"
KV_SLOT_TOKENS = "baton_kv_slot_tokens"

TICKETS = "baton_tickets"
TICKETS_TOTAL = "baton_tickets_ended"
KV_TRANSFER_BYTES = "baton_kv_transfer_bytes"
KV_TRANSFER_SECONDS = "baton_kv_transfer_seconds"
KV_PUSH_SECONDS = "baton_kv_push_seconds"
KV_EXPOSED_SECONDS = "baton_kv_exposed_seconds"
KV_TRANSFER_FAILURES = "baton_kv_transfer_failures"
KV_TRANSFER_FALLBACKS = "baton_kv_transfer_fallbacks"
KV_STAGING_BYTES = "baton_kv_staging_bytes"
KV_DEVICE_STAGING_BYTES = "baton_kv_device_staging_bytes"
KV_GROUP_STAGING_BYTES = "baton_kv_group_staging_bytes"
KV_PAIR_TRANSPORT = "baton_kv_pair_transport"
KV_PAIR_BYTES = "baton_kv_pair_bytes"
KV_PAIR_BYTES_PER_SECOND = "baton_kv_pair_bytes_per_second"
KV_PAIR_FALLBACKS = "baton_kv_pair_fallbacks"
KV_WARM_PAIRS = "baton_kv_warm_pairs"


class TTFTPart(StrEnum):
    """Where the time to a first token went; the parts of one prompt add up to its TTFT.

    ADMIT: reading the body, keys, limits, the router's own line. TOKENIZE: what the body means, in tokens.
    PLACE: naming blocks, choosing workers, waiting for one. PULL: cached blocks on their way from a decode
    worker to the one that reads. RETRY: what was lost on workers that failed.
    QUEUE: on the worker that reads, up to its first step for the prompt. PREFILL: from there to the sampled
    token. FIRST_TOKEN: from there into the router: messages, and decode's consent to take the KV.
    """

    ADMIT = "admit"
    TOKENIZE = "tokenize"
    PLACE = "place"
    PULL = "pull"
    RETRY = "retry"
    QUEUE = "queue"
    PREFILL = "prefill"
    FIRST_TOKEN = "first_token"


class StallCause(StrEnum):
    """Why a stream that had begun paused. PREEMPT: its blocks were needed by an older one. LOCAL_PREFILL: the
    KV did not come, decode read the prompt itself. RESUME: its worker was lost, it went on elsewhere.
    """

    PREEMPT = "preempt"
    LOCAL_PREFILL = "local_prefill"
    RESUME = "resume"
