"""Cached blocks that a decode worker sends to a prefill worker, against reading the same prompt there.

Real workers in processes of their own, real gRPC, no Ray and no router: this process calls them as a router
does. Each round has new prompts. *read*: prefill reads a prompt of so many tokens and one block. *pulled*: of
such a prompt decode has made all but the last block; it sends that first, then prefill reads the rest. Both
are seconds to the first token; ratios are those within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from pathlib import Path

from benchmarks.handoff import Requests, Worker, ms, ratio_of
from benchmarks.worker_process import WorkerSpec, worker_processes
from cluster.config import config_from_settings
from cluster.security import peer_security
from cluster.settings import settings_from_flags
from core.block_hash import hash_blocks, root_hash
from core.config import merge
from core.ids import Role, WorkerId, new_ticket_id
from core.jobs import LendJob
from core.kv_layout import KVLayout
from core.request import Request
from engine.model.bundled import prepare_bundled_model
from engine.runner import ModelRunner

DECODE, PREFILL = WorkerId("decode"), WorkerId("prefill")
WAYS = {"shm": "required", "grpc": "never"}
_TIME_LEFT_S = 120.0
_REST_S = 0.1


class Lending:
    """What is asked of decode, and how long it and the reading take."""

    def __init__(self, prefill: Worker, decode: Worker, layout: KVLayout) -> None:
        self._prefill = prefill
        self._decode = decode
        self._layout = layout

    async def made_by_decode(self, request: Request) -> None:
        async for _ in self._decode.token_times(request):
            pass

    async def pull(self, request: Request) -> float:
        """Seconds until all full blocks but the last are at prefill."""
        root = root_hash(request.cache_salt, self._layout.fingerprint, request.adapter)
        names = tuple(hash_blocks(root, request.prompt_token_ids, self._layout.block_size))[:-1]
        job = LendJob(request.request_id, new_ticket_id(), names, self._prefill.ref, _TIME_LEFT_S)
        started = time.perf_counter()
        result = await self._decode.calls.lend(job)
        assert result.num_sent_blocks == len(names), "the blocks are to travel"
        return time.perf_counter() - started

    async def read(self, request: Request) -> float:
        """Seconds until prefill has the first token."""
        started = time.perf_counter()
        await self._prefill.prefill(request, None)
        return time.perf_counter() - started


async def measure_length(
    lending: Lending, requests: Requests, layout: KVLayout, options: argparse.Namespace, num_tokens: int
) -> str:
    pulls: list[float] = []
    pulled: list[float] = []
    read: list[float] = []
    for number in range(-options.warm_up, options.rounds):
        size = num_tokens + layout.block_size
        conversation = requests.make(size, 1)
        await lending.made_by_decode(conversation)
        await asyncio.sleep(_REST_S)
        alone_s = await lending.read(requests.make(size, 1))
        await asyncio.sleep(_REST_S)
        pull_s = await lending.pull(conversation)
        rest_s = await lending.read(conversation)
        if number >= 0:
            pulls.append(pull_s)
            pulled.append(pull_s + rest_s)
            read.append(alone_s)
    megabytes = num_tokens * layout.bytes_per_token / 1e6
    speed = megabytes / 1e3 / statistics.median(pulls)
    return (
        f"| {num_tokens} | {megabytes:.1f} | {ms(statistics.median(read))} | {ms(statistics.median(pulls))} "
        f"| {speed:.2f} | {ms(statistics.median(pulled))} | {ratio_of(pulled, read):.3f} |"
    )


async def measure(options: argparse.Namespace) -> None:
    model = options.model or prepare_bundled_model()
    settings = settings_from_flags([f"--{text}" for text in options.set])
    settings = merge(settings, {"security": {"is_token_required": False}})  # all on the loopback device
    settings = merge(
        settings, {"engine": {"model": str(model)}, "decode": {"lending": {"shm": WAYS[options.way]}}}
    )
    config = config_from_settings(settings)
    layout = ModelRunner.load(config.engine_of(Role.PREFILL)).layout
    specs = [WorkerSpec(DECODE, Role.DECODE, settings), WorkerSpec(PREFILL, Role.PREFILL, settings)]
    with worker_processes(specs) as found:
        security = peer_security(config.security, None)
        decode, prefill = (Worker(found[worker_id][0], security) for worker_id in (DECODE, PREFILL))
        lending, requests = Lending(prefill, decode, layout), Requests()
        print(
            f"| tokens pulled ({options.way}) | MB | read ms | pull ms | GB/s | pulled ms | pulled : read |"
        )
        print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
        for num_tokens in options.tokens:
            print(await measure_length(lending, requests, layout, options, num_tokens), flush=True)
        for worker in (decode, prefill):
            await worker.calls.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="checkpoint folder; the bundled model unless given")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 1024, 1792])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--way", choices=list(WAYS), default="shm")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="as flags of `baton serve`"
    )
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
