"""The prefill worker over real gRPC: the same values, typed errors, and a broken call that stops the work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from core.block_hash import NUM_PARTS
from core.errors import ContextTooLong, ReservationRefused, ServingError, StaleEpoch, WrongRole
from core.ids import Epoch
from core.jobs import BlockPage, CancelJob, GenerateJob, SampleStart, SnapshotJob
from core.peer_security import PeerSecurity
from prefill_worker.service import serve
from protos import codec
from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import WorkerStub
from tests.integration.prefill_worker.conftest import MakeSite, Site, prompt_ids
from tests.oracle import oracle_greedy


@pytest.fixture
async def site(make_site: MakeSite) -> Site:
    made: Site = await make_site(token_budget=4)
    return made


@pytest.fixture
async def stub(site: Site) -> AsyncIterator[WorkerStub]:
    server, port = await serve(site.worker, "127.0.0.1", PeerSecurity())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield WorkerStub(channel)
    await server.stop(grace=None)


def error_of(caught: pytest.ExceptionInfo[grpc.aio.AioRpcError]) -> ServingError:
    metadata = dict(caught.value.trailing_metadata() or ())
    return codec.decode_error(metadata[codec.ERROR_METADATA_KEY])


async def test_prefill_answers_what_the_worker_answers(site: Site, stub: WorkerStub) -> None:
    ids = prompt_ids(40)
    job = site.job(ids, logprobs=1)
    result = codec.prefill_result(await stub.Prefill(codec.prefill_request(job, site.worker.ref.epoch)))
    assert list(result.deltas[0].token_ids) == oracle_greedy(site.folder, ids, 1)
    assert len(result.deltas[0].logprobs[0].top) == 1
    assert result.compute_s > 0
    await asyncio.wait_for(site.decode.arrivals[job.ticket_id].ended.wait(), 5)
    await site.settle()


async def test_errors_arrive_with_their_type_and_details(site: Site, stub: WorkerStub) -> None:
    epoch = site.worker.ref.epoch
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Prefill(codec.prefill_request(site.job(prompt_ids(600)), epoch))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    error = error_of(caught)
    assert isinstance(error, ContextTooLong)
    assert error.details["num_tokens"] == 600
    site.decode.refusal = ReservationRefused("no room")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Prefill(codec.prefill_request(site.job(prompt_ids(200)), epoch))
    assert isinstance(error_of(caught), ReservationRefused)
    await site.settle()


async def test_a_message_for_another_incarnation_is_refused(site: Site, stub: WorkerStub) -> None:
    stale = Epoch(site.worker.ref.epoch + 2)
    job = site.job(prompt_ids(20))
    calls = [
        stub.Prefill(codec.prefill_request(job, stale)),
        stub.Cancel(codec.cancel_request(CancelJob(job.request.request_id), stale)),
        stub.Metrics(pb.MetricsRequest(receiver_epoch=stale)),
        stub.Snapshot(codec.snapshot_request(SnapshotJob(0, NUM_PARTS), stale)),
        stub.Watch(pb.WatchRequest(receiver_epoch=stale)).read(),
    ]
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert isinstance(error_of(caught), StaleEpoch)
    assert site.decode.offers == []


async def test_generate_is_refused_by_role(site: Site, stub: WorkerStub) -> None:
    job = GenerateJob(site.job(prompt_ids(20)).request, (SampleStart(0),), None, attempt=0, time_left_s=1.0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(codec.generate_request(job, site.worker.ref.epoch)).read()
    assert isinstance(error_of(caught), WrongRole)


async def test_a_call_that_the_client_drops_stops_the_work(site: Site, stub: WorkerStub) -> None:
    job = site.job(prompt_ids(480))
    site.gate.hold(after=6)
    call = stub.Prefill(codec.prefill_request(job, site.worker.ref.epoch))
    await asyncio.wait_for(site.decode.first_write.wait(), 5)
    await site.gate.reached()
    call.cancel()
    arrival = site.decode.arrivals[job.ticket_id]
    await asyncio.wait_for(arrival.ended.wait(), 1)
    assert arrival.abort_reason is not None
    site.gate.release()
    await site.settle()
    assert site.gate.num_steps == 7, "the step that had begun was the last"
    assert site.value("baton_generated_tokens_total") == 0


async def test_cancel_metrics_and_watch_go_through(site: Site, stub: WorkerStub) -> None:
    epoch = site.worker.ref.epoch
    watch = stub.Watch(pb.WatchRequest(receiver_epoch=epoch))
    first = codec.decode_watch_event(await watch.read())
    assert first.digest is not None
    reply = await stub.Snapshot(codec.snapshot_request(SnapshotJob(0, NUM_PARTS), epoch))
    assert codec.block_page(reply) == BlockPage(epoch, 0, 0, NUM_PARTS, tuple(range(NUM_PARTS)))
    job = site.job(prompt_ids(480))
    site.gate.hold(after=6)
    call = stub.Prefill(codec.prefill_request(job, epoch))
    await asyncio.wait_for(site.decode.first_write.wait(), 5)
    await stub.Cancel(codec.cancel_request(CancelJob(job.request.request_id, job.ticket_id), epoch))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert error_of(caught).http_status == 499
    reply = await stub.Metrics(pb.MetricsRequest(receiver_epoch=epoch))
    assert b"baton_num_running" in reply.exposition
    watch.cancel()
    site.gate.release()
    await site.settle()
