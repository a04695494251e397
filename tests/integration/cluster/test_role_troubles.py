"""A change of role that does not work out: nothing of it stays, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

import prefill_worker.worker
from cluster.config import config_from_settings
from cluster.role_worker import RoleWorker, Surroundings
from cluster.workers import AnyWorker
from core.clock import MonotonicClock
from core.errors import InvalidConfig, WorkerDraining, WorkerError
from core.ids import RequestId, Role, WorkerId, WorkerRef, new_epoch, new_ticket_id
from core.jobs import PrefillJob, SampleStart
from core.request import Request, SamplingParams
from core.role_change import RoleCause, RoleOrder
from engine.config import EngineConfig
from engine.loaded_model import LoadedModel, load_model
from engine.runner import ModelRunner
from kv_transfer.loopback import LoopbackDirectory
from tests.integration.cluster.role_fleet import refusal, settings
from tests.integration.decode_worker.conftest import prompt_ids
from tests.oracle import make_toy_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_checkpoint(tmp_path_factory.mktemp("toy"), eos_token_id=2, max_position_embeddings=512)


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> LoadedModel:
    return load_model(EngineConfig(model=str(checkpoint), threads=1))


def a_prefill_worker(loaded: LoadedModel, checkpoint: Path, offer: Surroundings | None = None) -> RoleWorker:
    config = config_from_settings(settings(checkpoint))
    around = offer or Surroundings(connect=lambda wanted: LoopbackDirectory().connect)
    ref = WorkerRef(WorkerId("p0"), Role.PREFILL, new_epoch(), "")
    runner = ModelRunner(loaded, config.engine_of(Role.PREFILL))
    return RoleWorker(runner, config, ref, MonotonicClock(), around)


def num_listening() -> int:
    return sum(task.get_name() == "accept staging" for task in asyncio.all_tasks())


async def test_a_role_that_cannot_be_offered_here_leaves_nothing_behind_however_often_it_is_tried(
    loaded: LoadedModel, checkpoint: Path
) -> None:
    def offer(worker: AnyWorker) -> None:
        worker.offer_shared_memory()
        if worker.ref.role is Role.DECODE:
            raise InvalidConfig("what decode requires is not here", key="bridge")

    around = Surroundings(connect=lambda wanted: LoopbackDirectory().connect, offer=offer)
    worker = a_prefill_worker(loaded, checkpoint, around)
    await worker.start()
    assert num_listening() == 1
    for _ in range(3):
        error = await refusal(worker.change_role(RoleOrder(worker.ref, Role.DECODE, RoleCause.EMPTY_POOL)))
        assert isinstance(error, InvalidConfig)
        assert num_listening() == 1
    assert worker.ref.role is Role.PREFILL
    assert worker.is_healthy()
    await worker.stop()
    assert num_listening() == 0


async def test_a_prefill_worker_whose_step_hangs_gives_its_role_up_in_time_and_its_prompts_to_others(
    loaded: LoadedModel, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_worker.worker, "_LEAVE_S", 0.2)
    worker = a_prefill_worker(loaded, checkpoint)
    await worker.start()
    hangs, gate = asyncio.Event(), threading.Event()
    loop, current = asyncio.get_running_loop(), worker.current

    def hang() -> None:
        loop.call_soon_threadsafe(hangs.set)
        gate.wait(60)

    current._thread.post(hang)
    await hangs.wait()
    sampling = SamplingParams(max_tokens=1, seed=1, temperature=0.0)
    request = Request(RequestId("r"), prompt_ids(40), sampling)
    job = PrefillJob(request, (SampleStart(0),), new_ticket_id(), None, 1, 60.0)
    reading = asyncio.create_task(refusal(worker.prefill(job)))
    stop = current._thread.stop
    monkeypatch.setattr(current._thread, "stop", lambda: stop(0.1))
    async with asyncio.timeout(20):
        order = RoleOrder(worker.ref, Role.DECODE, RoleCause.EMPTY_POOL)
        assert isinstance(await refusal(worker.change_role(order)), WorkerError)
        assert isinstance(await reading, WorkerDraining)
        assert not worker.is_healthy(), "it is to be replaced"
        await worker.stop()
    gate.set()


async def test_a_role_whose_step_thread_does_not_end_is_not_followed_by_another_on_the_same_pool(
    loaded: LoadedModel, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = a_prefill_worker(loaded, checkpoint)
    await worker.start()
    thread = worker.current._thread
    with monkeypatch.context() as patch:
        patch.setattr(thread, "stop", lambda: None)
        order = RoleOrder(worker.ref, Role.DECODE, RoleCause.OPERATOR)
        assert isinstance(await refusal(worker.change_role(order)), WorkerError)
    assert worker.ref.role is Role.PREFILL
    assert not worker.is_healthy(), "it is to be replaced"
    thread.stop()
    await worker.stop()
