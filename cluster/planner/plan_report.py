"""A plan as a person reads it, and as JSON.

Owns the tables, their units and the list of assumptions; every number comes from `capacity`, `plan` and
`speculation`. Main thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.planner.capacity import CEILING, Capacity
from cluster.planner.hardware import Link, Prices
from cluster.planner.plan import Plan, Pool
from cluster.planner.speculation import Speculation

_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class PlanReport:
    """What is told of `plan`; `links` are those that KV may travel on."""

    plan: Plan
    links: tuple[Link, ...]
    prices: Prices
    speculation: Speculation

    def as_dict(self) -> dict[str, Any]:
        """All numbers, seconds and bytes, with the assumptions."""
        workload, shape = self.plan.workload, self.plan.decode.capacity.shape
        return {
            "model": {
                "name": shape.name,
                "kind": shape.kind,
                "num_params": shape.num_params,
                "num_active_params": shape.num_active_params,
                "weight_bytes": shape.weight_bytes,
                "kv_bytes_per_token": shape.kv_bytes_per_token,
                "kv_bytes_per_sequence": shape.kv_bytes(workload.longest),
            },
            "workload": asdict(workload),
            "targets": asdict(self.plan.targets),
            "prefill": self._pool(self.plan.prefill),
            "decode": self._pool(self.plan.decode),
            "num_gpus": self.plan.num_gpus,
            "prefill_gpus_per_decode_gpu": self.plan.ratio,
            "prefill_s": self.plan.prefill.capacity.prefill_s(workload.isl, workload.num_cached),
            "decode_ceiling_tokens_per_s": self.ceiling.decode_ceiling(),
            "decode_curve": [
                dict(zip(("batch", "step_s", "tokens_per_s"), row, strict=True)) for row in self.curve()
            ],
            "transfer_s": {link.name: self._transfer_s(link) for link in self.links},
            "speculation": asdict(self.speculation)
            | {"tokens_per_verify": self.speculation.tokens_per_verify},
            "usd_per_million": {
                kind: dict(
                    zip(("output_tokens", "all_tokens"), self.plan.usd_per_million(price), strict=True)
                )
                for kind, price in self._known_prices()
            },
            "assumptions": self.assumptions(),
        }

    @property
    def ceiling(self) -> Capacity:
        """The decode worker at the data sheet's rates."""
        worker = self.plan.decode.capacity
        return Capacity(worker.shape, worker.gpu, worker.num_gpus, CEILING)

    def curve(self) -> Iterator[tuple[int, float, float]]:
        """(batch, step in seconds, tokens per second) of a decode worker, as far as memory reaches."""
        worker, context = self.plan.decode.capacity, self.plan.workload.mean_context
        most = worker.num_sequences(self.plan.workload.longest)
        for batch in sorted({*(size for size in _BATCHES if size <= most), most}):
            step_s = worker.decode_step_s(batch, context)
            yield batch, step_s, batch / step_s

    def assumptions(self) -> list[str]:
        shape, shares = self.plan.decode.capacity.shape, self.plan.decode.capacity.shares
        gpu = self.plan.decode.capacity.gpu
        return [
            f"weights {shape.weight_bits:g} bits, KV {shape.kv_bits:g} bits per value",
            f"the GPUs of a worker share its weights evenly; the KV of a token can be shared by "
            f"{shape.kv_parts}, and more of them keep copies",
            f"{shares.memory:.0%} of GPU memory holds weights and KV; activations fit into the rest",
            f"{shares.bandwidth:.0%} of memory bandwidth in decode, {shares.flops:.0%} of dense FLOP/s "
            f"in prefill, {shares.link:.0%} of a link; communication inside a worker is part of it",
            f"pools are planned {shares.load:.0%} busy; Poisson arrivals, prompts and answers of one length",
            "90 % of requests keep the targets; the first token does not wait for the transfer",
            f"{self.plan.workload.num_cached} tokens of each prompt are cached on its prefill worker",
            f"{gpu.title}: {gpu.source}",
            f"prices: {self.prices.source}",
            *shape.notes,
        ]

    def print(self, console: Console) -> None:
        shape, workload = self.plan.decode.capacity.shape, self.plan.workload
        console.print(
            f"[bold]{shape.name}[/] ({shape.kind}, {shape.num_params / 1e9:.4g} B parameters, "
            f"{shape.num_active_params / 1e9:.4g} B active) on {self.plan.decode.capacity.gpu.title}\n"
            f"{workload.rate:g} requests/s of {workload.isl} + {workload.osl} tokens, "
            f"TTFT {_ms(self.plan.targets.ttft_s)}, ITL {_ms(self.plan.targets.itl_s)}\n"
        )
        for table in (self._pools(), self._memory(), self._curve(), self._transfers(), self._costs()):
            console.print(table)
        console.print(self._speculation_line())
        console.print("[bold]Assumptions[/]")
        for line in self.assumptions():
            console.print(f"  · {line}", soft_wrap=True)

    def _pool(self, pool: Pool) -> dict[str, Any]:
        return {
            "num_workers": pool.num_workers,
            "gpus_per_worker": pool.capacity.num_gpus,
            "latency_s": pool.latency_s,
            "batch": pool.batch,
            "usage": pool.usage,
            "num_sequences": pool.capacity.num_sequences(self.plan.workload.longest),
        }

    def _pools(self) -> Table:
        table = _table("Pools", "pool", "workers", "GPUs each", "GPUs", "busy", "expected at 90 %")
        for name, pool, what in (("prefill", self.plan.prefill, "TTFT"), ("decode", self.plan.decode, "ITL")):
            row = (pool.num_workers, pool.capacity.num_gpus, pool.num_gpus, f"{pool.usage:.0%}")
            table.add_row(name, *map(str, row), f"{what} {_ms(pool.latency_s)}")
        table.add_row("P:D", f"{self.plan.ratio:.2f}", "", str(self.plan.num_gpus), "", "")
        return table

    def _memory(self) -> Table:
        worker, workload = self.plan.decode.capacity, self.plan.workload
        table = _table(
            "Memory of a decode worker", "weights", "KV per token", "KV per sequence", "for KV", "sequences"
        )
        table.add_row(
            f"{worker.shape.weight_bytes / 1e9:.1f} GB",
            f"{worker.shape.kv_bytes_per_token / 1024:.1f} KiB",
            f"{worker.kv_bytes(workload.longest) / 1e9:.2f} GB",
            f"{worker.kv_budget_bytes / 1e9:.1f} GB",
            str(worker.num_sequences(workload.longest)),
        )
        return table

    def _curve(self) -> Table:
        ceiling = self.ceiling
        title = (
            f"Decode on {ceiling.num_gpus} GPU(s); ceiling {ceiling.decode_ceiling():.0f} tok/s at batch 1"
        )
        table = _table(title, "batch", "step", "tok/s per sequence", "tok/s")
        for batch, step_s, rate in self.curve():
            table.add_row(str(batch), _ms(step_s), f"{1 / step_s:.0f}", f"{rate:,.0f}")
        return table

    def _transfers(self) -> Table:
        workload = self.plan.workload
        prefill_s = self.plan.prefill.capacity.prefill_s(workload.isl, workload.num_cached)
        table = _table(
            f"Transfer of a prompt's KV; its prefill takes {_ms(prefill_s)}",
            "link",
            "time",
            "hidden behind it",
        )
        for link in self.links:
            seconds = self._transfer_s(link)
            table.add_row(
                link.title,
                _ms(seconds),
                "yes" if seconds <= prefill_s else f"no, {_ms(seconds - prefill_s)} late",
            )
        return table

    def _costs(self) -> Table:
        table = _table("USD per million tokens", "price", "per GPU hour", "output tokens", "all tokens")
        for kind, price in self._known_prices():
            outputs, both = self.plan.usd_per_million(price)
            table.add_row(kind.replace("_", " "), f"{price:.2f}", f"{outputs:.2f}", f"{both:.3f}")
        return table

    def _speculation_line(self) -> str:
        speculation, worker = self.speculation, self.plan.decode.capacity
        context, batch = self.plan.workload.mean_context, max(1, round(self.plan.decode.batch))
        return (
            f"Speculation at acceptance {speculation.acceptance:g} with {speculation.num_draft_tokens} draft "
            f"tokens: {speculation.tokens_per_verify:.1f} tokens per verify, "
            f"x {speculation.gain(worker, 1, context):.2f} at batch 1, "
            f"x {speculation.gain(worker, batch, context):.2f} at batch {batch}"
        )

    def _transfer_s(self, link: Link) -> float:
        return self.plan.prefill.capacity.transfer_s(self.plan.workload.isl, link)

    def _known_prices(self) -> Iterator[tuple[str, float]]:
        for kind in ("on_demand", "reserved", "spot"):
            price = getattr(self.prices, kind)
            if price is not None:
                yield kind, price


def _table(title: str, *columns: str) -> Table:
    table = Table(*columns, title=title, title_justify="left", title_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
