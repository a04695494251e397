"""Who may call a worker, over real gRPC: the token, mutual TLS, both; all calls of both services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from core.errors import Unauthenticated, WorkerLost
from core.ids import Epoch, RequestId, Role, TicketId, WorkerRef
from core.jobs import CancelJob, GenerateJob, PrefillJob, SampleStart
from core.kv_layout import KVLayout
from core.peer_security import ClusterToken, PeerSecurity, TlsIdentity, new_cluster_token
from kv_transfer.grpc_transport import SERVICE, GrpcTransport
from kv_transfer.transport import CommitClaim, Fence, Pair
from protos.service import serve_worker
from router.worker_clients import GrpcWorker
from tests.integration.certificates import Authority
from tests.unit.router.scripted import ScriptedWorker, answer, new_request

WAIT_S = 5.0
TOKEN = new_cluster_token()
STRANGERS = {
    "nothing": PeerSecurity(),
    "wrong": PeerSecurity(new_cluster_token()),
    "cut": PeerSecurity(ClusterToken(TOKEN.secret[:-1])),
    "longer": PeerSecurity(ClusterToken(TOKEN.secret + "0")),
}


@asynccontextmanager
async def served(security: PeerSecurity) -> AsyncIterator[ScriptedWorker]:
    """A scripted decode worker behind the product's server, and a bridge that must not be reached."""
    worker = ScriptedWorker(Role.DECODE, "d", epoch=7)
    server, port = await serve_worker(worker, "127.0.0.1", security, _add_bridge)
    worker.ref = replace(worker.ref, address=f"127.0.0.1:{port}")
    try:
        yield worker
    finally:
        await server.stop(grace=None)


def _add_bridge(server: grpc.aio.Server) -> None:
    def reached(*_: Any) -> Any:
        raise AssertionError("an unauthenticated call was handled")

    unary = {name: grpc.unary_unary_rpc_method_handler(reached) for name in ("Offer", "Commit", "Abort")}
    handlers: dict[str, Any] = {**unary, "Push": grpc.stream_stream_rpc_method_handler(reached)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


@asynccontextmanager
async def calling(ref: WorkerRef, security: PeerSecurity) -> AsyncIterator[GrpcWorker]:
    client = GrpcWorker(ref, security)
    try:
        yield client
    finally:
        await client.close()


def _generate_job() -> GenerateJob:
    return GenerateJob(new_request(max_tokens=3), (SampleStart(0),), None, 1, 30.0)


def _calls(client: GrpcWorker) -> dict[str, Callable[[], Any]]:
    prefill = PrefillJob(new_request(), (SampleStart(0),), TicketId(""), None, 1, 30.0)
    return {
        "prefill": lambda: client.prefill(prefill),
        "generate": lambda: anext(client.generate(_generate_job())),
        "cancel": lambda: client.cancel(CancelJob(RequestId("r"))),
        "watch": lambda: anext(client.watch()),
        "metrics": client.metrics,
    }


@pytest.mark.parametrize("stranger", STRANGERS)
async def test_each_call_of_a_stranger_is_refused_and_reaches_no_worker(stranger: str) -> None:
    async with served(PeerSecurity(TOKEN)) as worker, calling(worker.ref, STRANGERS[stranger]) as client:
        for name, call in _calls(client).items():
            async with asyncio.timeout(WAIT_S):
                with pytest.raises(Unauthenticated) as caught:
                    await call()
            assert TOKEN.secret not in str(caught.value), name
        assert (worker.prefills, worker.generates, worker.cancels) == ([], [], [])


async def test_whoever_shows_the_token_is_answered() -> None:
    async with served(PeerSecurity(TOKEN)) as worker, calling(worker.ref, PeerSecurity(TOKEN)) as client:
        for call in _calls(client).values():
            async with asyncio.timeout(WAIT_S):
                await call()
        job = _generate_job()
        tokens = [t async for event in client.generate(job) for t in event.delta.token_ids]
        assert tokens == answer(job.request, 0)


@pytest.mark.parametrize("stranger", STRANGERS)
async def test_no_stranger_can_push_blocks_form_a_group_learn_of_memory_or_end_tickets(stranger: str) -> None:
    fence = Fence(Epoch(7), Epoch(9), TicketId("ab" * 16))
    async with served(PeerSecurity(TOKEN)) as worker:
        transport = GrpcTransport(worker.ref, STRANGERS[stranger])
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(Unauthenticated):
                await transport.commit(fence, CommitClaim(1, 1, 1))
            with pytest.raises(Unauthenticated):
                await transport.abort(fence, "mine", 1.0)
            for stream in (await transport.open_push(), transport.open_group()):
                with pytest.raises(Unauthenticated):
                    await anext(stream.acks())
            layout = KVLayout("toy", num_layers=1, num_kv_heads=1, head_dim=2, block_size=4)
            with pytest.raises(Unauthenticated):
                await transport.ask(Pair(replace(worker.ref, role=Role.PREFILL), worker.ref, layout))
        await transport.close()


async def test_a_stranger_who_sends_nothing_is_refused_all_the_same() -> None:
    async with (
        served(PeerSecurity(TOKEN)) as worker,
        grpc.aio.insecure_channel(worker.ref.address) as channel,
        asyncio.timeout(WAIT_S),
    ):
        call = channel.stream_stream("/baton.inference.Worker/Generate")()
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("dns_name", [None, "baton-worker"])
async def test_both_ends_of_mutual_tls_know_each_other(dns_name: str | None) -> None:
    authority = Authority()
    security = PeerSecurity(TOKEN, authority.identity(dns_name))
    caller = PeerSecurity(TOKEN, authority.identity(dns_name))
    async with served(security) as worker, calling(worker.ref, caller) as client:
        job = _generate_job()
        async with asyncio.timeout(WAIT_S):
            tokens = [t async for event in client.generate(job) for t in event.delta.token_ids]
        assert tokens == answer(job.request, 0)
        transport = GrpcTransport(worker.ref, PeerSecurity(None, caller.tls))
        with pytest.raises(Unauthenticated):  # TLS alone is not enough where the token is asked for, too
            await transport.abort(Fence(Epoch(7), Epoch(9), TicketId("ab" * 16)), "mine", 1.0)
        await transport.close()


def _mixed(own: TlsIdentity, authority: bytes) -> TlsIdentity:
    return replace(own, authority=authority)


async def test_a_certificate_of_another_authority_or_none_connects_to_nobody() -> None:
    authority, other = Authority(), Authority("other")
    own = authority.identity()
    strangers = {
        "plain text": PeerSecurity(TOKEN),
        "signed by another": PeerSecurity(TOKEN, _mixed(other.identity(), authority.pem)),
        "expects another": PeerSecurity(TOKEN, _mixed(own, other.pem)),
        "expects another name": PeerSecurity(TOKEN, replace(own, server_name="another")),
    }
    async with served(PeerSecurity(TOKEN, own)) as worker:
        for name, security in strangers.items():
            async with calling(worker.ref, security) as client:
                async with asyncio.timeout(WAIT_S):
                    with pytest.raises(WorkerLost):
                        await client.metrics()
            assert not worker.generates, name
