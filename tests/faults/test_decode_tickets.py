"""Each fault at each state of a ticket: no block is lost, and the stream carries the reference's tokens.

Messages are dropped, repeated, reordered, late, aborted, silent or cancelled; the Generate comes before,
between or after them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.errors import Cancelled, DeadlineExceeded, HandoffError, StepFailed, WorkerDraining
from core.jobs import CancelJob
from core.request import FinishReason
from engine.config import EngineConfig
from engine.loaded_model import LoadedModel, load_model
from engine.running_step import RunningStep
from engine.step import StepPlan
from tests.faults.decode_site import MAX_TOKENS, DecodeSite, Heard, Prompt
from tests.oracle import make_toy_checkpoint

IDS = tuple((7 * i * i + 3 * i + 5) % 512 for i in range(14))  # three full blocks and a tail
NUM_BLOCKS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_checkpoint(tmp_path_factory.mktemp("toy"), eos_token_id=2)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    torch.set_num_threads(1)
    return load_model(EngineConfig(model=str(folder), threads=1))


@pytest.fixture
def site(loaded: LoadedModel, folder: Path) -> DecodeSite:
    return DecodeSite(loaded, folder)


# ---------------------------------------------------------------- the ways to each state


def unknown(site: DecodeSite, prompt: Prompt) -> None:
    """Nothing was heard of the ticket."""


def reserved(site: DecodeSite, prompt: Prompt) -> None:
    site.offer(prompt)


def sending(site: DecodeSite, prompt: Prompt) -> None:
    site.offer(prompt)
    site.write(prompt, 0)
    site.write(prompt, 3)


def committed(site: DecodeSite, prompt: Prompt) -> None:
    site.offer(prompt)
    for index in (3, 1, 0, 2):
        site.write(prompt, index)
    site.commit(prompt, NUM_BLOCKS)


def aborted(site: DecodeSite, prompt: Prompt) -> None:
    sending(site, prompt)
    site.abort(prompt)


def aborted_first(site: DecodeSite, prompt: Prompt) -> None:
    site.abort(prompt)


def expired(site: DecodeSite, prompt: Prompt) -> None:
    sending(site, prompt)
    site.wait(5.0)


def expired_after_commit(site: DecodeSite, prompt: Prompt) -> None:
    committed(site, prompt)
    site.wait(2.0)


STATES = [unknown, reserved, sending, committed, aborted, aborted_first, expired, expired_after_commit]


# ---------------------------------------------------------------- the faults


def nothing(site: DecodeSite, prompt: Prompt) -> None:
    """No fault: what comes next is the Generate."""


def repeat_offer(site: DecodeSite, prompt: Prompt) -> None:
    site.offer(prompt)


def repeat_push(site: DecodeSite, prompt: Prompt) -> None:
    site.write(prompt, 0)
    site.write(prompt, 0)


def push_out_of_order(site: DecodeSite, prompt: Prompt) -> None:
    for index in reversed(range(NUM_BLOCKS)):
        site.write(prompt, index)


def commit_too_early(site: DecodeSite, prompt: Prompt) -> None:
    site.commit(prompt, NUM_BLOCKS)


def commit_with_a_frame_dropped(site: DecodeSite, prompt: Prompt) -> None:
    site.write(prompt, 1)
    site.commit(prompt, NUM_BLOCKS - 1)


def push_outside(site: DecodeSite, prompt: Prompt) -> None:
    site.loop.write(prompt.ticket.ticket_id, NUM_BLOCKS, 1, prompt.blocks[0])


def abort(site: DecodeSite, prompt: Prompt) -> None:
    site.abort(prompt)
    site.abort(prompt)


def silence(site: DecodeSite, prompt: Prompt) -> None:
    site.wait(6.0)


def only_keepalives(site: DecodeSite, prompt: Prompt) -> None:
    for _ in range(3):
        site.wait(1.5)
        site.keepalive(prompt)


def cancel(site: DecodeSite, prompt: Prompt) -> None:
    site.loop.cancel(CancelJob(prompt.request.request_id, prompt.ticket.ticket_id))


def drain(site: DecodeSite, prompt: Prompt) -> None:
    site.loop.is_draining = True


FAULTS = [
    nothing,
    repeat_offer,
    repeat_push,
    push_out_of_order,
    commit_too_early,
    commit_with_a_frame_dropped,
    push_outside,
    abort,
    silence,
    only_keepalives,
    cancel,
    drain,
]

Act = Callable[[DecodeSite, Prompt], None]


def suffer(site: DecodeSite, prompt: Prompt, fault: Act) -> None:
    """A fault, whose refusals are the protocol's own."""
    with contextlib.suppress(HandoffError):
        fault(site, prompt)
    site.loop.check()


def finish_transfer(site: DecodeSite, prompt: Prompt) -> None:
    """What an undisturbed prefill would still send."""
    with contextlib.suppress(HandoffError, WorkerDraining):
        held = site.offer(prompt)
        missing = [index for index in range(NUM_BLOCKS) if index not in held]
        for index in missing:
            site.write(prompt, index)
        site.commit(prompt, len(missing))


def assert_right(site: DecodeSite, prompt: Prompt, heard: Heard, num_emitted: int = 1) -> None:
    site.run(lambda: heard.is_ended)
    tokens = tuple(heard.token_ids)
    assert tokens == prompt.answer[num_emitted : num_emitted + len(tokens)], "a wrong token"
    if heard.error is None:
        assert heard.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        assert num_emitted + len(tokens) == len(prompt.answer)
    site.wait(200.0)
    site.loop.check()
    assert site.runner.cache.allocator.num_held == 0, "blocks were kept"
    assert site.loop.num_unfinished == site.num_live_tickets == 0


@pytest.mark.parametrize("fault", FAULTS, ids=lambda item: item.__name__)
@pytest.mark.parametrize("state", STATES, ids=lambda item: item.__name__)
class TestFaultAtEachState:
    def test_before_the_generate(self, site: DecodeSite, state: Act, fault: Act) -> None:
        prompt = site.prompt(IDS, "r")
        state(site, prompt)
        suffer(site, prompt, fault)
        finish_transfer(site, prompt)
        assert_right(site, prompt, site.begin(prompt.job()))

    def test_while_the_generate_waits(self, site: DecodeSite, state: Act, fault: Act) -> None:
        prompt = site.prompt(IDS, "r")
        state(site, prompt)
        heard = site.begin(prompt.job())
        suffer(site, prompt, fault)
        finish_transfer(site, prompt)
        assert_right(site, prompt, heard)

    def test_while_it_runs(self, site: DecodeSite, state: Act, fault: Act) -> None:
        prompt = site.prompt(IDS, "r")
        state(site, prompt)
        finish_transfer(site, prompt)
        heard = site.begin(prompt.job())
        for _ in range(2):
            site.loop.step()
        suffer(site, prompt, fault)
        assert_right(site, prompt, heard)
        if fault not in (cancel, drain):
            assert heard.error is None

    def test_and_nobody_ever_generates(self, site: DecodeSite, state: Act, fault: Act) -> None:
        prompt = site.prompt(IDS, "r")
        state(site, prompt)
        suffer(site, prompt, fault)
        site.wait(5.0)
        site.wait(5.0)
        assert site.runner.cache.allocator.num_held == 0


@pytest.mark.parametrize("state", STATES, ids=lambda item: item.__name__)
def test_a_deadline_ends_the_stream_at_each_state(site: DecodeSite, state: Act) -> None:
    prompt = site.prompt(IDS, "r")
    state(site, prompt)
    heard = site.begin(prompt.job(time_left_s=1.0))
    site.wait(1.0)
    assert isinstance(heard.error, DeadlineExceeded)
    site.wait(5.0)
    assert site.runner.cache.allocator.num_held == 0, "the ticket outlived its silence"
    assert_right(site, prompt, heard)


@pytest.mark.parametrize("state", STATES, ids=lambda item: item.__name__)
def test_a_cancel_while_the_generate_waits_or_runs_ends_it_at_once(site: DecodeSite, state: Act) -> None:
    prompt = site.prompt(IDS, "r")
    state(site, prompt)
    heard = site.begin(prompt.job())
    site.loop.step()
    cancel(site, prompt)
    assert isinstance(heard.error, Cancelled)
    assert site.runner.cache.allocator.num_held == 0
    finish_transfer(site, prompt)
    assert_right(site, prompt, heard)


def test_a_step_that_fails_once_for_all_is_survived_by_all(
    site: DecodeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = site.prompt(IDS, "a"), site.prompt(IDS[1:], "b")
    heard = [site.begin(prompt.job(is_resumed=False)) for prompt in (first, second)]
    site.abort(first)
    site.abort(second)
    start, failures = site.runner.start, iter([True, False, True])

    def fail_sometimes(plan: StepPlan) -> RunningStep:
        if len(plan.scheduled) > 1 and next(failures, False):
            raise RuntimeError("a kernel fault")
        return start(plan)

    monkeypatch.setattr(site.runner, "start", fail_sometimes)
    for prompt, item in zip((first, second), heard, strict=True):
        site.run(lambda item=item: item.is_ended)
        assert item.error is None
        assert tuple(item.token_ids) == prompt.answer


def test_a_request_that_fails_alone_ends_with_a_typed_error(
    site: DecodeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = site.prompt(IDS, "r")
    committed(site, prompt)
    heard = site.begin(prompt.job())

    def fail(plan: StepPlan) -> RunningStep:
        raise RuntimeError("a kernel fault")

    monkeypatch.setattr(site.runner, "start", fail)
    assert_right(site, prompt, heard)
    assert isinstance(heard.error, StepFailed)


PROMPTS = [IDS, IDS[:8], IDS[:9], IDS[2:], IDS[:3]]
ACTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["offer", "write", "commit", "send", "abort", "keepalive", "begin", "cancel", "step", "wait"]
        ),
        st.integers(0, len(PROMPTS) - 1),
        st.integers(0, 3),
    ),
    max_size=40,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(acts=ACTS, overlap=st.sampled_from(["off", "on"]))
def test_any_messages_in_any_order_over_a_small_pool(
    loaded: LoadedModel, folder: Path, acts: list[tuple[str, int, int]], overlap: Literal["off", "on"]
) -> None:
    site = DecodeSite(loaded, folder, 12, overlap, max_num_seqs=3, token_budget=16, prefill_chunk=5)
    prompts = [site.prompt(ids, f"r{index}") for index, ids in enumerate(PROMPTS)]
    heard: list[tuple[Prompt, Heard]] = []
    begun: set[int] = set()
    for name, index, detail in acts:
        prompt = prompts[index]
        with contextlib.suppress(HandoffError):
            if name == "offer":
                site.offer(prompt)
            elif name == "write":
                site.write(prompt, min(detail, len(prompt.blocks) - 1))
            elif name == "commit":
                site.commit(prompt, len(prompt.blocks))
            elif name == "send":
                held = site.offer(prompt)
                missing = [i for i in range(len(prompt.blocks)) if i not in held]
                for i in missing:
                    site.write(prompt, i)
                site.commit(prompt, len(missing))
            elif name == "abort":
                site.abort(prompt)
            elif name == "keepalive":
                site.keepalive(prompt)
            elif name == "begin" and index not in begun:
                begun.add(index)
                heard.append((prompt, site.begin(prompt.job())))
            elif name == "cancel" and detail == 0:
                cancel(site, prompt)
            elif name == "step":
                site.loop.step()
                site.loop.check()
            elif name == "wait":
                site.wait((0.1, 1.0, 2.0, 5.0)[detail])
    for prompt, item in heard:
        site.run(lambda item=item: item.is_ended)
        assert tuple(item.token_ids) == prompt.answer[1 : 1 + len(item.token_ids)]
        if item.error is None:
            assert len(item.token_ids) == len(prompt.answer) - 1
        else:
            assert isinstance(item.error, Cancelled | DeadlineExceeded)
    site.run(lambda: not site.loop.step())  # what is cancelled keeps its blocks while a step computes it
    site.wait(200.0)
    assert site.runner.cache.allocator.num_held == 0
    assert max(len(prompt.answer) for prompt in prompts) <= MAX_TOKENS
