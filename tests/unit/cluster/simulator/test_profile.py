"""A profile is read back as it was written, and a faulty one is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.simulator.profile import Profile, read_profile, write_profile
from cluster.simulator.step_price import BatchPrice
from core.errors import InvalidConfig
from tests.unit.cluster.simulator.world import SMALL

PROFILE = Profile(SMALL.layout, 1000, 16_384, SMALL.price, SMALL.link, 0.02)


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(PROFILE, path)
    assert read_profile(path) == PROFILE
    batches = (BatchPrice(1.0, 0.006, 1e-6), BatchPrice(4.0, 0.01, 2e-6))
    measured = replace(PROFILE, price=replace(PROFILE.price, batches=batches))
    write_profile(measured, path)
    assert read_profile(path) == measured


def test_faults_are_named(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    with pytest.raises(InvalidConfig, match="cannot be read"):
        read_profile(path)
    write_profile(PROFILE, path)
    path.write_text(path.read_text().replace('"num_blocks": 1000', '"num_blocks": 0'))
    with pytest.raises(InvalidConfig, match="num_blocks"):
        read_profile(path)
    path.write_text(path.read_text().replace('"num_blocks": 0', '"num_bloks": 7'))
    with pytest.raises(InvalidConfig, match="num_bloks"):
        read_profile(path)
