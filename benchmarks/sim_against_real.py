"""The simulator against the real service on this machine, as ratios.

`python -m benchmarks.sim_against_real [--seconds 60] [--rounds 1] [--workloads random prefix answers]
[--plan auto] [--patience 0] [--out DIR]` starts, in each round, `baton serve` with one prefill and one
decode worker, measures its prices (`baton calibrate --url`), sends workloads to it (`baton loadtest`), to a
new service each, and simulates them at those prices (`baton simulate`): `random`, prompts of 32 to 384
tokens that share nothing, `prefix`, prompts that begin with one of four texts of 512 tokens, and `answers`,
short prompts and long answers. Their rates are a part of what the prices allow. Prints what each side says,
and simulated : measured; within 10 %, of tails 20 %, passes, by the median of the rounds. Exit status 1:
something lies outside. `--plan`: of the router, on both sides. Needs the machine for itself, and says how
much of it others used; `--patience` waits for that, and repeats what others disturbed. A virtual machine's
cores are not equally fast all the time: how long a prompt that is read alone takes after each workload,
against the calibration, is printed (`machine`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import psutil

from benchmarks.servers import ServerSpec, running
from benchmarks.streaming import HOST
from benchmarks.timing import Timing
from cluster.loadtest.goodput import Slo, Summary
from cluster.loadtest.report import from_json
from cluster.simulator.profile import Profile, read_profile
from cluster.simulator.served_calibration import features_of_prompt

BATON = str(Path(sys.executable).with_name("baton"))
# KV is not pulled back in a simulation, and so not here
SERVE = f"{BATON} serve --port ${{PORT}} --prefill-replicas 1 --decode-replicas 1 --router.pull_timeout_s=0"
TOKEN_BUDGET = 512
PREFIX, NUM_PREFIXES = 512, 4
WARM_UP_S = 12.0
NEAR, NEAR_TAIL = 0.10, 0.20
QUIET = 0.08  # of the cores; a look of a few seconds finds about 2 % for the system alone
_LOOK_S = 5.0


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts of `fresh` tokens, perhaps behind a prefix that others have, and answers of `output` tokens.
    `share` of what the prices allow is asked for.
    """

    name: str
    fresh: tuple[int, int]
    output: tuple[int, int]
    has_prefix: bool
    share: float

    def rate(self, profile: Profile) -> float:
        """Requests a second: `share` of what one request at a time, its answer among three, would give."""
        price = profile.price
        read_s = price.seconds(features_of_prompt(sum(self.fresh) // 2, TOKEN_BUDGET))
        step_s = price.seconds((1.0, 0.0, 0.0, 3.0, 3.0 * sum(self.fresh)))
        return self.share / (read_s + sum(self.output) / 2 * step_s / 3)

    def slo(self, profile: Profile) -> Slo:
        """What most requests keep, and not all."""
        price = profile.price
        read_s = price.seconds(features_of_prompt(self.fresh[1], TOKEN_BUDGET))
        num_kv = 4.0 * (sum(self.fresh) + PREFIX * self.has_prefix)
        step_s = price.seconds((1.0, 0.0, 0.0, 4.0, num_kv))
        return Slo(round(3.0 * read_s + profile.front.request_s, 3), round(2.0 * step_s, 4))

    def write(self, path: Path, rate: float, seconds: float, seed: int) -> None:
        """A trace of Poisson arrivals, behind `WARM_UP_S` that do not count, in which each prefix comes three
        times at once. Which worker reads it is the router's choice on either side, and may differ.
        """
        chance, lines = random.Random(f"{self.name} {seed}"), []
        times = [number * WARM_UP_S / NUM_PREFIXES for number in range(NUM_PREFIXES) for _ in range(3)]
        firsts, now = len(times), WARM_UP_S
        while (now := now + chance.expovariate(rate)) < WARM_UP_S + seconds:
            times.append(now)
        for index, at in enumerate(times):
            length = chance.randint(*self.fresh)
            prefix = NUM_PREFIXES * index // firsts if index < firsts else chance.randrange(NUM_PREFIXES)
            ids = [prefix] if self.has_prefix else []
            lines.append(
                {
                    "timestamp": round(1e3 * at, 1),
                    "input_length": length + PREFIX * len(ids),
                    "output_length": chance.randint(*self.output),
                    "hash_ids": [*ids, NUM_PREFIXES + index],
                }
            )
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


LOADS = (
    Load("random", (32, 384), (16, 64), False, 0.55),
    Load("prefix", (32, 256), (16, 64), True, 0.45),
    Load("answers", (16, 64), (96, 192), False, 0.45),
)


def call(*arguments: str, allowed: tuple[int, ...] = (0, 1)) -> None:
    """One command of ours. Raises CalledProcessError for an exit status that is no result."""
    print("$ baton", *arguments, flush=True)
    done = subprocess.run([BATON, *arguments], check=False)
    if done.returncode not in allowed:
        raise subprocess.CalledProcessError(done.returncode, arguments)


def summary_of(folder: Path) -> Summary:
    """Of the one step of a report."""
    return from_json((folder / "report.json").read_bytes()).steps[0].summary


def num_good(side: Summary) -> int:
    return round(side.attainment * side.num_requests)


class Bystanders:
    """How much of the cores processes use that are not of this benchmark. Begins to count when it is made."""

    def __init__(self) -> None:
        self._began = self._used()

    def share(self) -> float:
        """Of all cores' time since then."""
        (began_s, all_s, own_s), (now_s, all_now_s, own_now_s) = self._began, self._used()
        num_cores = psutil.cpu_count() or 1
        return max(0.0, (all_now_s - all_s) - (own_now_s - own_s)) / ((now_s - began_s) * num_cores)

    def _used(self) -> tuple[float, float, float]:
        """The time; processor time of all; that of this process and its descendants."""
        times, own_s, me = psutil.cpu_times(), 0.0, psutil.Process()
        for process in (me, *me.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has just ended
                own_s += sum(process.cpu_times()[:4])
        return time.monotonic(), times.user + times.nice + times.system, own_s


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of one run. `limit`: how far from 1 the ratio may lie."""

    what: str
    measured: float
    simulated: float
    limit: float

    @property
    def ratio(self) -> float:
        return self.simulated / self.measured if self.measured else float("nan")


def compared(name: str, measured: Summary, simulated: Summary, seconds: float) -> list[Compared]:
    """All figures of one workload. Raises ValueError if a side has no answers."""
    if measured.ttft is None or measured.itl is None or simulated.ttft is None or simulated.itl is None:
        raise ValueError(f"{name}: too few answers were complete")
    return [
        Compared("goodput, 1/s", num_good(measured) / seconds, num_good(simulated) / seconds, NEAR),
        Compared("TTFT p50, ms", 1e3 * measured.ttft.p50, 1e3 * simulated.ttft.p50, NEAR),
        Compared("TTFT p99, ms", 1e3 * measured.ttft.p99, 1e3 * simulated.ttft.p99, NEAR_TAIL),
        Compared("ITL p50, ms", 1e3 * measured.itl.p50, 1e3 * simulated.itl.p50, NEAR),
        Compared("ITL p99, ms", 1e3 * measured.itl.p99, 1e3 * simulated.itl.p99, NEAR_TAIL),
    ]


def judged(name: str, rounds: list[list[Compared]]) -> bool:
    """Prints the medians over the rounds of one workload; whether all ratios are near enough."""
    is_near = True
    for figures in zip(*rounds, strict=True):
        real, virtual, ratio = (
            statistics.median(values)
            for values in zip(*((it.measured, it.simulated, it.ratio) for it in figures), strict=True)
        )
        is_inside = abs(ratio - 1.0) <= figures[0].limit
        is_near &= is_inside
        each = " ".join(f"{it.ratio:.2f}" for it in figures) if len(figures) > 1 else ""
        verdict = "" if is_inside else "outside"
        print(
            f"| {name} | {figures[0].what} | {real:.2f} | {virtual:.2f} | {ratio:.2f} | {each} | {verdict} |"
        )
    return is_near


async def measure(
    folder: Path,
    loads: Sequence[Load],
    seconds: float,
    rounds: int,
    plan: str,
    drain_s: float,
    patience: Patience,
) -> bool:
    """In each round measure prices; send each workload to a service of its own and simulate it. Compare."""
    routing = f"--router.plan={plan}"
    spec = ServerSpec("baton", f"{SERVE} {routing}", ready="/ready")
    pairs: dict[str, list[tuple[Path, Path]]] = {load.name: [] for load in loads}
    timing = Timing()
    for number in range(rounds):
        # again in each round: a virtual machine is not equally fast for long
        profile_file = folder / f"profile-{number}.json"
        async with running(spec, folder / f"calibrated-{number}.log") as endpoint:
            url = f"http://{HOST}:{endpoint.port}"
            await patience.run("calibrate", "--url", url, "--out", str(profile_file))
        profile = read_profile(profile_file)
        then = profile.pace
        assert then is not None
        for load in loads:
            name = f"{load.name}-{number}"
            trace, slo = folder / f"{name}.jsonl", load.slo(profile)
            load.write(trace, load.rate(profile), seconds, number)
            slos = ("--slo-ttft", str(slo.ttft_s), "--slo-itl", str(slo.itl_s))
            limits = ("--trace", str(trace), *slos, "--warm-up", str(WARM_UP_S))
            real, virtual = folder / f"{name}-real", folder / f"{name}-simulated"
            sent = ("--duration", str(WARM_UP_S + seconds), "--drain", str(drain_s), "--out", str(real))
            # new as the simulated one, of which nobody has learned anything
            async with running(spec, folder / f"{name}.log") as endpoint:
                url = f"http://{HOST}:{endpoint.port}"
                await patience.run("loadtest", "--url", url, *limits, *sent, seeds=count(number, rounds))
                now = await timing.pace(url)
            print(f"machine: a prompt alone takes {now.slower_than(then):.2f} times what it did", flush=True)
            played = ("--profile", str(profile_file), "--known-lengths", "--out", str(virtual), routing)
            await asyncio.to_thread(call, "simulate", *limits, *played)
            pairs[load.name].append((real, virtual))
    print("| workload | | measured | simulated | simulated : measured | each round | |")
    print("| --- | --- | ---: | ---: | ---: | --- | --- |")
    results = []
    for name, some in pairs.items():
        sides = [(summary_of(real), summary_of(virtual)) for real, virtual in some]
        results.append(judged(name, [compared(name, *both, seconds) for both in sides]))
    return all(results)


class Patience:
    """Waits until others leave the machine, `seconds` in all; what others did makes a run slower than a
    simulation can know.
    """

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    async def run(self, *arguments: str, seeds: Iterator[int] | None = None) -> None:
        """A command, again if others were at work meanwhile and there is patience left. `seeds`: of each try,
        so that no prompt is cached by one before.
        """
        while True:
            await self._await_quiet()
            others = Bystanders()
            seed = () if seeds is None else ("--seed", str(next(seeds)))
            await asyncio.to_thread(call, *arguments, *seed)
            share = others.share()
            print(f"others used {share:.0%} of the cores meanwhile", flush=True)
            if share <= QUIET or time.monotonic() > self._until:
                return

    async def _await_quiet(self) -> None:
        while time.monotonic() < self._until:
            others = Bystanders()
            await asyncio.sleep(_LOOK_S)
            if others.share() <= QUIET:
                return


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of each workload")
    parser.add_argument("--rounds", type=int, default=1, help="how often each, with other arrivals")
    names = [load.name for load in LOADS]
    parser.add_argument("--workloads", nargs="+", choices=names, default=names)
    parser.add_argument("--plan", choices=("auto", "remote", "local"), default="auto", help="of the router")
    parser.add_argument("--drain", type=float, default=60.0, help="seconds for the last answers")
    parser.add_argument("--out", type=Path, help="folder for reports, profile, traces; default: a new one")
    parser.add_argument("--patience", type=float, default=0.0, help="seconds to wait for a quiet machine")
    options = parser.parse_args()
    folder = options.out or Path(tempfile.mkdtemp(prefix="sim-against-real-"))
    folder.mkdir(parents=True, exist_ok=True)
    loads = [load for load in LOADS if load.name in options.workloads]
    patience = Patience(options.patience)
    is_near = asyncio.run(
        measure(folder, loads, options.seconds, options.rounds, options.plan, options.drain, patience)
    )
    print(f"reports, profile and traces in {folder}")
    return 0 if is_near else 1


if __name__ == "__main__":
    sys.exit(main())
