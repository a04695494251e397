"""Names of metrics and of the moments in a request's life.

Owns the words only, so that workers, router, dashboards and documents agree; the counters live where they
are counted.
"""

from __future__ import annotations

TTFT_SECONDS = "baton_ttft_seconds"
ITL_SECONDS = "baton_itl_seconds"
E2E_SECONDS = "baton_e2e_seconds"
REQUESTS = "baton_requests"
REQUESTS_STARTED = "baton_requests_started"
HTTP_RESPONSES = "baton_http_responses"
PLACEMENTS = "baton_placements"
PREDICTED_CACHED_TOKENS = "baton_predicted_cached_tokens"
PREDICTION_RATIO = "baton_prediction_ratio"
RETRIES = "baton_retries"
WORKERS = "baton_workers"
ROUTER_REQUESTS = "baton_router_requests"

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
