"""The whole service on Triton kernels, once: HTTP, router, a prefill and a decode worker, the handoff."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.config import BatonConfig
from cluster.local import LocalSystem
from decode_worker.config import DecodeConfig
from engine.model.bundled import prepare_bundled_model
from engine.runner import ModelRunner
from engine.running_step import RunningStep
from engine.step import StepPlan
from prefill_worker.config import PrefillConfig
from router.config import PlanSetting, RouterConfig
from tests.kernels.toy_runner import PROMPT, triton_config
from tests.oracle import make_toy_checkpoint, oracle_greedy

_MAX_TOKENS = 4
_EOS = 2


def _config(folder: Path) -> BatonConfig:
    engine = triton_config(folder)
    return BatonConfig(
        engine=engine,
        prefill_engine=engine,
        decode_engine=engine,
        prefill=PrefillConfig(token_budget=32, max_num_seqs=4, model="toy"),
        # a step of the interpreter takes a while on a busy machine
        decode=DecodeConfig(
            max_num_seqs=8,
            model="toy",
            reservation_silence_s=60,
            commit_claim_s=60,
            ticket_wait_s=60,
        ),
        router=RouterConfig(model_name="toy", plan=PlanSetting.REMOTE, suspect_after_s=60),
    )


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter changes `triton.language` while a kernel runs, so steps of two threads take turns."""
    turn, start = threading.Lock(), ModelRunner.start

    def started(runner: ModelRunner, plan: StepPlan) -> RunningStep:
        with turn:
            return start(runner, plan)

    monkeypatch.setattr(ModelRunner, "start", started)


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("one_at_a_time")
async def test_split_answers_over_http_are_the_references(tmp_path: Path) -> None:
    folder = make_toy_checkpoint(tmp_path / "toy", tokenizer_from=prepare_bundled_model())
    system = LocalSystem(_config(folder))
    await system.start()
    try:
        async with system.app.router.lifespan_context(system.app), _client(system.app) as http:
            await _until_both_are_usable(http)

            async def complete(prompt: list[int], **fields: Any) -> list[list[int]]:
                body = {"model": "toy", "prompt": prompt, "max_tokens": _MAX_TOKENS, "return_token_ids": True}
                reply = await http.post("/v1/completions", json={**body, **fields})
                assert reply.status_code == 200, reply.text
                assert reply.headers["x-baton-plan"] == "remote"
                return [choice["token_ids"] for choice in reply.json()["choices"]]

            prompts = [PROMPT[:40], PROMPT[5:21], PROMPT[:1]]
            greedy = [complete(prompt, temperature=0) for prompt in prompts]
            sampled = [complete(PROMPT[:18], n=2, seed=7, temperature=1.0, top_p=0.9) for _ in range(2)]
            *answers, first, second = await asyncio.gather(*greedy, *sampled)
            for prompt, answer in zip(prompts, answers, strict=True):
                assert answer == [oracle_greedy(folder, prompt, _MAX_TOKENS, eos=(_EOS,))]
            assert first == second
            assert first[0] != first[1]
    finally:
        await system.stop()


def _client(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router", timeout=120)


async def _until_both_are_usable(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(30):
        while (await http.get("/ready")).json()["degraded"]:  # noqa: ASYNC110  (it tells nobody)
            await asyncio.sleep(0.05)
