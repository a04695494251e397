"""The decode phase: reservations for arriving KV, continuous batching of running streams, and local prefill
beside them.
"""
