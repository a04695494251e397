"""What the first request of a pair pays for, and does not pay where the pair was made ready before.

Prefill's end runs in this process, decode's in a child, each with a real pool of blocks. Each round makes a
new prefill worker for each way, twice: one hands over at once, one meets the decode worker first, as it does
when that appears. Timed is the first handover, from the offer to the commit's reply; beside it the second one
of the same pair. One line for each way: medians of the rounds, and the median of the ratios within them.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics

import torch

from benchmarks.transfer import LAYOUTS, WAYS, Handover, decode_process, filled


async def measure(options: argparse.Namespace) -> None:
    layout = LAYOUTS[options.layout]
    num_blocks = layout.num_blocks(options.tokens)
    pool = filled(layout, num_blocks, 1)
    times: dict[tuple[str, str], list[float]] = {}
    async with decode_process(options.layout, num_blocks) as (decode, _):
        for number in range(-1, options.rounds):
            for way, config in WAYS.items():
                for name in ("cold", "warm"):
                    pair = Handover(pool, decode, config)
                    if name == "warm":
                        await pair.meet()
                    found = {name: await pair.first(), f"{name}, second": await pair.first()}
                    await pair.close()
                    if number >= 0:
                        for what, seconds in found.items():
                            times.setdefault((way, what), []).append(1e3 * seconds)
    for way in WAYS:
        cold, warm, second = (times[way, name] for name in ("cold", "warm", "warm, second"))
        saved = statistics.median(a - b for a, b in zip(cold, warm, strict=True))
        print(
            f"first handoff {way}: cold {statistics.median(cold):.1f} ms, met before "
            f"{statistics.median(warm):.1f}, the second {statistics.median(second):.1f}; "
            f"saves {saved:.1f} ms; best rounds {min(cold):.1f}, {min(warm):.1f}, {min(second):.1f}; "
            f"{options.layout}, {options.tokens} tokens, {num_blocks * layout.block_bytes / 1e6:.1f} MB, "
            f"{options.rounds} rounds"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", choices=list(LAYOUTS), default="135m-fp32")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    asyncio.run(measure(options))


if __name__ == "__main__":
    main()
