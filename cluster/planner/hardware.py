"""Gpu, Link, Prices: the hardware that a plan calculates with, read from `gpus.yaml`.

Owns the catalogue's form and its look-ups by name. Rates are line rates of the data sheets; what of them is
reached is an assumption of the plan. Pure apart from reading the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from core.errors import InvalidConfig

_FILE = Path(__file__).with_name("gpus.yaml")
# a GPU that lacks arithmetic of one width computes at the next wider one
_WIDER = {"int4": "int8", "int8": "fp8", "fp8": "bf16"}


@dataclass(frozen=True, slots=True)
class Prices:
    """USD per GPU and hour; None where nothing is known. `source` says where from and of when."""

    on_demand: float | None = None
    reserved: float | None = None
    spot: float | None = None
    source: str = "given"

    def replaced(self, on_demand: float | None, reserved: float | None, spot: float | None) -> Prices:
        """What the caller gave instead of what the catalogue says."""
        given = {"on_demand": on_demand, "reserved": reserved, "spot": spot}
        own = {name: price for name, price in given.items() if price is not None}
        for name, price in own.items():
            if not 0 < price < math.inf:
                raise InvalidConfig(f"the {name} price must be above 0, and finite", key=name)
        if not own:
            return self
        return Prices(
            own.get("on_demand", self.on_demand),
            own.get("reserved", self.reserved),
            own.get("spot", self.spot),
            f"{self.source}; given: {', '.join(own)}",
        )


@dataclass(frozen=True, slots=True)
class Link:
    """A way for KV from one GPU to another. `bytes_per_s` one way, at line rate."""

    name: str
    title: str
    bytes_per_s: float
    is_within_node: bool
    source: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `flops` are dense rates by width of arithmetic (bf16, fp8, int8, int4), per second."""

    name: str
    title: str
    memory_bytes: float
    bytes_per_s: float
    flops: Mapping[str, float]
    gpus_per_node: int
    scale_up: Link
    prices: Prices
    source: str

    def flops_at(self, width: str) -> float:
        while width not in self.flops:
            width = _WIDER[width]
        return self.flops[width]


class Catalogue:
    """All GPUs and links of one file."""

    def __init__(self, path: Path = _FILE) -> None:
        self._raw: Mapping[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))

    @cached_property
    def links(self) -> Mapping[str, Link]:
        return MappingProxyType(
            {
                name: Link(name, raw["title"], raw["gbps"] * 1e9, raw["is_within_node"], raw["source"])
                for name, raw in self._raw["links"].items()
            }
        )

    @cached_property
    def gpus(self) -> Mapping[str, Gpu]:
        return MappingProxyType({name: self._gpu(name, raw) for name, raw in self._raw["gpus"].items()})

    def gpu(self, name: str) -> Gpu:
        """Raises InvalidConfig naming those that are known."""
        found = self.gpus.get(name.lower())
        if found is None:
            raise InvalidConfig(f"unknown GPU {name!r}; known are {', '.join(self.gpus)}", key="gpu")
        return found

    def link(self, name: str) -> Link:
        """Raises InvalidConfig naming those that are known."""
        found = self.links.get(name.lower())
        if found is None:
            raise InvalidConfig(f"unknown link {name!r}; known are {', '.join(self.links)}", key="link")
        return found

    def _gpu(self, name: str, raw: Mapping[str, Any]) -> Gpu:
        return Gpu(
            name,
            raw["title"],
            raw["memory_gb"] * 1e9,
            raw["bandwidth_gbps"] * 1e9,
            {width: rate * 1e12 for width, rate in raw["tflops"].items()},
            raw["gpus_per_node"],
            self.links[raw["scale_up"]],
            self._prices(raw.get("price")),
            raw["source"],
        )

    def _prices(self, raw: Mapping[str, Any] | None) -> Prices:
        if raw is None:
            return Prices(source="no list price is known")
        shares = self._raw["price_shares"]
        source = f"list price of {raw['as_of']} ({raw['source']})"
        missing = [kind for kind in ("reserved", "spot") if kind not in raw]
        if missing:
            source += "; " + ", ".join(f"{kind} {shares[kind]:.0%} of it" for kind in missing)
        on_demand = float(raw["on_demand"])
        return Prices(
            on_demand,
            float(raw.get("reserved", on_demand * shares["reserved"])),
            float(raw.get("spot", on_demand * shares["spot"])),
            source,
        )
