"""The bridge: moves a ticket's KV blocks from prefill to decode. Knows tickets and blocks, not sequences."""
