"""The decode worker behind gRPC: same tokens, typed errors, a broken call detaches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from core.block_hash import NUM_PARTS
from core.errors import ContextTooLong, ServingError, StaleEpoch, WrongRole
from core.ids import Epoch, new_ticket_id
from core.jobs import CancelJob, PrefillJob, SampleStart, SnapshotJob
from core.peer_security import PeerSecurity
from decode_worker.service import serve
from protos import codec
from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import WorkerStub
from tests.doubles import settle
from tests.integration.decode_worker.conftest import Answer, MakeSite, Site, prompt_ids
from tests.oracle import oracle_greedy


class Client:
    """A stub of the worker's service that raises what the worker raised."""

    def __init__(self, stub: Any, channel: grpc.aio.Channel, epoch: Epoch) -> None:
        self.stub = stub
        self.channel = channel
        self.epoch = epoch

    async def answer(self, job: Any) -> Answer:
        answer = Answer()
        try:
            async for message in self.stub.Generate(codec.generate_request(job, self.epoch)):
                answer.add(codec.decode_generate_event(message))
        except grpc.aio.AioRpcError as error:
            raise typed(error) from error
        return answer


def typed(error: grpc.aio.AioRpcError) -> ServingError:
    metadata: Any = error.trailing_metadata()
    return codec.decode_error(dict(metadata)[codec.ERROR_METADATA_KEY])


@pytest.fixture
async def open_client() -> AsyncIterator[Any]:
    opened: list[Any] = []

    async def make(site: Site) -> Client:
        server, port = await serve(site.worker, "127.0.0.1", PeerSecurity())
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        opened.append((server, channel))
        stub = WorkerStub(channel)  # type: ignore[no-untyped-call]
        return Client(stub, channel, site.worker.ref.epoch)

    yield make
    for server, channel in opened:
        await channel.close()
        await server.stop(1.0)


async def test_a_stream_over_the_wire_is_the_references(make_site: MakeSite, open_client: Any) -> None:
    site = await make_site()
    client = await open_client(site)
    ids = prompt_ids(40)
    answer = await client.answer(site.job(site.request(ids, logprobs=1, prompt_logprobs=0)))
    assert answer.token_ids == oracle_greedy(site.folder, ids, 12, eos=(2,))
    assert len(answer.logprobs) == len(answer.token_ids)
    assert len(answer.prompt_logprobs) == 39


async def test_a_message_for_another_incarnation_is_refused_by_each_call(
    make_site: MakeSite, open_client: Any
) -> None:
    site = await make_site()
    client = await open_client(site)
    client.epoch = Epoch(client.epoch + 2)
    with pytest.raises(StaleEpoch):
        await client.answer(site.job(site.request(prompt_ids(5))))
    for call in (
        client.stub.Cancel(codec.cancel_request(CancelJob(site.request(()).request_id), client.epoch)),
        client.stub.Metrics(pb.MetricsRequest(receiver_epoch=client.epoch)),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert isinstance(typed(caught.value), StaleEpoch)


async def test_errors_cross_the_wire_with_their_type(make_site: MakeSite, open_client: Any) -> None:
    site = await make_site()
    client = await open_client(site)
    with pytest.raises(ContextTooLong) as caught:
        await client.answer(site.job(site.request(prompt_ids(513))))
    assert caught.value.details["max_context"] == 512


async def test_prefill_is_not_this_workers_role(make_site: MakeSite, open_client: Any) -> None:
    site = await make_site()
    client = await open_client(site)
    job = PrefillJob(site.request(prompt_ids(5)), (SampleStart(0),), new_ticket_id(), None, 0, 5.0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.stub.Prefill(codec.prefill_request(job, client.epoch))
    assert isinstance(typed(caught.value), WrongRole)


@pytest.mark.parametrize("how", ["cancel the call", "close the channel"])
async def test_a_broken_call_detaches_and_its_blocks_are_freed(
    make_site: MakeSite, open_client: Any, how: str
) -> None:
    site = await make_site(num_kv_blocks=128, detach_grace_s=0.05)
    client = await open_client(site)
    job = site.job(site.request(prompt_ids(30), max_tokens=450, ignore_eos=True))
    site.gate.hold(after=5)
    call = client.stub.Generate(codec.generate_request(job, client.epoch))
    await call.read()
    if how == "cancel the call":
        call.cancel()
    else:
        await client.channel.close()
    await site.gate.reached()
    await site.until(lambda: site.num_open_streams == 0)
    site.gate.release()
    await site.settle()
    assert site.gate.num_steps == 6, "the step that had begun was the last"


async def test_cancel_watch_and_metrics_answer(
    make_site: MakeSite, open_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    site: Site = await make_site(num_kv_blocks=128)
    cancel, is_heard = site.worker.cancel, asyncio.Event()

    async def cancel_and_tell(job: CancelJob) -> None:
        is_heard.set()
        await cancel(job)

    monkeypatch.setattr(site.worker, "cancel", cancel_and_tell)
    client = await open_client(site)
    job = site.job(site.request(prompt_ids(30), max_tokens=450, ignore_eos=True))
    site.gate.hold(after=2)
    running = asyncio.create_task(client.answer(job))
    await site.gate.reached()
    cancelling = client.stub.Cancel(codec.cancel_request(CancelJob(job.request.request_id), client.epoch))
    await asyncio.wait_for(is_heard.wait(), 5)
    await settle()
    site.gate.release()
    await cancelling
    with pytest.raises(ServingError) as caught:
        await running
    assert caught.value.code == "cancelled"
    watching = client.stub.Watch(pb.WatchRequest(receiver_epoch=client.epoch))
    digest = codec.decode_watch_event(await watching.read()).digest
    request = codec.snapshot_request(SnapshotJob(0, NUM_PARTS), client.epoch)
    page = codec.block_page(await client.stub.Snapshot(request))
    assert digest is not None
    assert digest[0] == len(page.hashes) > 0
    watching.cancel()
    reply = await client.stub.Metrics(pb.MetricsRequest(receiver_epoch=client.epoch))
    assert b"baton_generated_tokens_total" in reply.exposition
    assert b"baton_tickets" in reply.exposition
