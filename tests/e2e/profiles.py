"""Profiles: the small systems that the case catalogue speaks of, as settings of this product.

Values only.
"""

from __future__ import annotations

from tests.e2e.harness import Profile

STD = Profile("std")
"""One prefill and one decode worker, everything by default."""

SPLIT = Profile("split", {"router.plan": "remote"})
"""Like STD, but each prompt is prefilled remotely and handed over, however short."""

MONO = Profile("mono", {"router.plan": "local", "engine.enable_prefix_cache": False})
"""The reference: decode prefills by itself, nothing is cached."""

ALONE = Profile("alone", {"router.plan": "local"})
"""Decode prefills by itself, with its prefix cache."""

CTX = Profile("ctx", {"router.plan": "remote", "router.max_context": 256})

CHUNK = Profile("chunk", {"router.plan": "remote", "prefill.token_budget": 32})

TINY = Profile(
    "tiny",
    {
        "router.plan": "remote",
        "prefill_engine.num_kv_blocks": 48,
        "decode_engine.num_kv_blocks": 24,
        "decode.max_num_seqs": 4,
    },
)

TINIEST = Profile(
    "tiniest",
    {
        "router.plan": "remote",
        "router.max_hold_s": 0,
        "decode_engine.num_kv_blocks": 12,
        "decode.max_num_seqs": 4,
    },
)
"""Two sequences of a hundred tokens do not fit together, and the router holds none of them back."""

MULTI = Profile("multi", num_decode=3)

PAIR = Profile("pair", {"router.plan": "remote"}, num_decode=2)
"""Two decode workers: one may be killed."""

WIRE = Profile(
    "wire",
    {
        "router.plan": "remote",
        "prefill.bridge.shm": "never",
        "prefill.bridge.distributed": "never",
    },
    num_decode=2,
)
"""Like PAIR, with all payloads on the sockets, where they can be counted."""

FOUR = Profile("four", {"router.plan": "remote"}, num_prefill=2, num_decode=2)
"""Two of each kind: whichever is killed, another one of its kind is there."""
