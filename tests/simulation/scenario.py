"""Scenario: what a seed means: how many workers, which requests, what goes wrong and when.

Values only; `world` plays them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import StrEnum

from core.handoff import TicketState
from core.ids import Role
from core.request import Request, SamplingParams
from router.config import PlanSetting
from tests.simulation.chain_model import BLOCK_SIZE, VOCAB_SIZE, named
from tests.simulation.network import Weather

LONGEST_PROMPT = 40
LONGEST_OUTPUT = 24


@dataclass(frozen=True, slots=True)
class Client:
    """One request, when it comes, how long it may take, and whether its client leaves early."""

    request: Request
    at_s: float
    timeout_s: float
    leaves_after_s: float | None = None
    enough_after: int | None = None  # tokens of a sample after which its reader needs no more


class TroubleKind(StrEnum):
    """What a trouble does to its victim. `CUT_BRIDGE` parts it from a worker of the other role, `STORM`
    breaks, repeats and garbles whatever is sent anywhere meanwhile. `ROLE` has it take the other role.
    """

    KILL = "kill"
    STOP = "stop"
    CUT_BRIDGE = "cut_bridge"
    CUT_ROUTER = "cut_router"
    STORM = "storm"
    ROLE = "role"


@dataclass(frozen=True, slots=True)
class Trouble:
    """Begins `at_s`, or when a ticket of its victim comes to `state`. `victim` and `second` pick workers.

    After `lasts_s` a new process starts, perhaps at the dead one's address, or what was stopped or cut goes
    on.
    """

    kind: TroubleKind
    lasts_s: float
    at_s: float = 0.0
    role: Role | None = None
    state: TicketState | None = None
    victim: int = 0
    second: int = 0
    keeps_address: bool = False


@dataclass(frozen=True, slots=True)
class Scenario:
    """All that is decided beforehand; the rest is chance of the same seed."""

    seed: int
    num_prefill: int
    num_decode: int
    num_blocks: int
    plan: PlanSetting
    weather: Weather
    clients: tuple[Client, ...]
    troubles: tuple[Trouble, ...]


def scenario_of(seed: int) -> Scenario:
    chance = random.Random(seed)
    weather = Weather(
        slow=chance.choice((0.0, 0.02, 0.1)),
        broken=chance.choice((0.0, 0.0, 0.01, 0.05)),
        repeated=chance.choice((0.0, 0.1, 0.3)),
        corrupt=chance.choice((0.0, 0.0, 0.1)),
        slow_s=chance.choice((0.1, 1.0)),
    )
    num_troubles = chance.choice((0, 1, 2, 3, 5))
    return Scenario(
        seed=seed,
        num_prefill=chance.choice((0, 1, 1, 2)),
        num_decode=chance.choice((1, 1, 2)),
        num_blocks=chance.choice((20, 32, 64)),
        plan=chance.choice((PlanSetting.REMOTE, PlanSetting.REMOTE, PlanSetting.AUTO)),
        weather=weather,
        clients=_clients(chance),
        troubles=tuple(_trouble(chance) for _ in range(num_troubles)),
    )


def _clients(chance: random.Random) -> tuple[Client, ...]:
    shared = [[chance.randrange(3, VOCAB_SIZE) for _ in range(5 * BLOCK_SIZE)] for _ in range(2)]
    return tuple(_client(chance, number, chance.choice(shared)) for number in range(chance.randint(2, 7)))


def _client(chance: random.Random, number: int, shared: list[int]) -> Client:
    prefix = shared[: chance.choice((0, 2 * BLOCK_SIZE, 5 * BLOCK_SIZE))]
    own = [chance.randrange(3, VOCAB_SIZE) for _ in range(chance.randint(1, LONGEST_PROMPT - len(prefix)))]
    sampling = SamplingParams(
        max_tokens=chance.choice((1, 2, chance.randint(3, LONGEST_OUTPUT), LONGEST_OUTPUT)),
        seed=chance.randrange(1 << 31),
        temperature=chance.choice((0.0, 1.0)),
        ignore_eos=chance.choice((True, True, False)),
    )
    if chance.random() < 0.2:
        sampling = replace(sampling, stop_token_ids=(chance.randrange(3, VOCAB_SIZE),))
    request = Request(
        named(number),
        tuple(prefix + own),
        sampling,
        num_samples=chance.choice((1, 1, 1, 2)),
        is_prefix_cache_read=chance.random() < 0.9,
    )
    return Client(
        request,
        at_s=chance.random() * 4.0,
        timeout_s=chance.choice((5.0, 20.0, 40.0)),
        leaves_after_s=chance.random() * 3.0 if chance.random() < 0.15 else None,
        enough_after=chance.randint(1, 10) if chance.random() < 0.1 else None,
    )


def at_state(role: Role, state: TicketState, kind: TroubleKind, seed: int) -> Scenario:
    """One request on its way from a prefill worker to one of two decode workers, and one trouble for the
    worker of `role` when the ticket comes to `state` there.
    """
    chance = random.Random(seed)
    prompt = tuple(chance.randrange(3, VOCAB_SIZE) for _ in range(LONGEST_PROMPT - seed % BLOCK_SIZE))
    sampling = SamplingParams(LONGEST_OUTPUT, seed, temperature=float(seed % 2), ignore_eos=True)
    trouble = Trouble(kind, 4.0, role=role, state=state, keeps_address=seed % 2 == 1)
    return Scenario(
        seed=seed,
        num_prefill=1,
        num_decode=2,
        num_blocks=32,
        plan=PlanSetting.REMOTE,
        # a Generate that is there before the commit claims at once: only a late one leaves it committed
        weather=Weather(slow=0.3, slow_s=0.4) if state is TicketState.COMMITTED else Weather(),
        clients=(Client(Request(named(seed), prompt, sampling), 0.5, 40.0),),
        troubles=(trouble,),
    )


def _trouble(chance: random.Random) -> Trouble:
    return Trouble(
        kind=chance.choice((TroubleKind.KILL, *TroubleKind)),
        lasts_s=chance.choice((0.3, 2.0, 6.0)),
        at_s=0.5 + chance.random() * 5.0,
        victim=chance.randrange(100),
        second=chance.randrange(100),
        keeps_address=chance.random() < 0.5,
    )
