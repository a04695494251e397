"""Profile: what a kind of worker is, as a file: its KV, what its steps take and what its link carries.

Owns the form and reading it back strictly; `calibration` measures one, a person may write one. Pure but for
reading and writing the file.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

import orjson

from cluster.simulator.front import FrontPrice
from cluster.simulator.jitter import Jitter
from cluster.simulator.machine_pace import Pace
from cluster.simulator.sharing import Sharing
from cluster.simulator.step_price import LinkPrice, StepPrice
from core.config import from_mapping
from core.errors import InvalidConfig
from core.kv_layout import KVLayout


@dataclass(frozen=True, slots=True)
class Profile:
    """`typical_error`: by how much measured steps differ from their price, median of the ratios; 0 if
    nothing was measured. `sharing`: of workers on one host; None: not known. `front`: of a router. `jitter`:
    of its steps. `pace`: of the machine when prices were measured; None: not known.
    """

    layout: KVLayout
    num_blocks: int
    max_context: int
    price: StepPrice
    link: LinkPrice
    typical_error: float = 0.0
    sharing: Sharing | None = None
    front: FrontPrice = field(default_factory=FrontPrice)
    jitter: Jitter = field(default_factory=Jitter)
    pace: Pace | None = None

    def __post_init__(self) -> None:
        for name in ("num_blocks", "max_context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")


def read_profile(path: Path) -> Profile:
    """Raises InvalidConfig naming the file and the field."""
    try:
        tree = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise InvalidConfig(f"{path} cannot be read as a profile: {error}", key="profile") from error
    return from_mapping(Profile, tree, "profile")


def write_profile(profile: Profile, path: Path) -> None:
    path.write_bytes(orjson.dumps(asdict(profile), option=orjson.OPT_INDENT_2))
