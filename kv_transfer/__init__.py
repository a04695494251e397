"""The bridge: moves KV blocks of a ticket from a prefill worker to a decode worker. Knows tickets and blocks,
not sequences.
"""
