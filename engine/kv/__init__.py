"""Paged KV:

The tensors (pool), who owns which block (allocator), hash → block (prefix_cache), sequences and tickets
(cache).
"""
