from __future__ import annotations

from pathlib import Path

import pytest

from cluster.settings import settings_from_environment, settings_from_file, settings_from_flags
from core.errors import InvalidConfig


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "baton.yaml"
    path.write_text(text)
    return path


def test_a_file_holds_sections_and_an_empty_section_is_empty(tmp_path: Path) -> None:
    path = write(tmp_path, "engine:\n  block_size: 16\nrouter:\n")
    assert settings_from_file(path) == {"engine": {"block_size": 16}, "router": {}}


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert settings_from_file(write(tmp_path, "# nothing\n")) == {}


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text", "engine: [1, 2"])
def test_a_file_that_is_not_sections_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InvalidConfig, match=r"baton\.yaml"):
        settings_from_file(path)


def test_a_file_that_is_not_utf8_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "baton.yaml"
    path.write_bytes(b"engine: {model: \xff}")
    with pytest.raises(InvalidConfig, match=r"baton\.yaml is not UTF-8"):
        settings_from_file(path)


@pytest.mark.parametrize(
    "text",
    ["engine: {block_size: 16}\nengine: {}\n", "engine:\n  block_size: 16\n  block_size: 32\n"],
)
def test_a_key_that_is_given_twice_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidConfig, match=r"baton\.yaml.*\n?.*(engine|block_size) is given twice"):
        settings_from_file(write(tmp_path, text))


def test_what_an_anchor_brings_may_be_set_anew(tmp_path: Path) -> None:
    path = write(tmp_path, "a: &a {x: 1, y: 1}\nb: &b {<<: *a, x: 2}\nc: {<<: *b, x: 3}\n")
    assert settings_from_file(path)["c"] == {"x": 3, "y": 1}


def test_a_missing_file_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"nowhere\.yaml"):
        settings_from_file(tmp_path / "nowhere.yaml")


def test_environment_names_become_paths_and_other_variables_are_left_alone() -> None:
    environment = {
        "BATON_PREFILL_WORKER__MAX_NUM_SEQS": "4",
        "BATON_ENGINE__KV__X": "1",
        "BATON_CONFIG": "f",
        "PATH": "/",
    }
    assert settings_from_environment(environment) == {
        "prefill_worker": {"max_num_seqs": "4"},
        "engine": {"kv": {"x": "1"}},
    }


def test_flags_are_read_with_equals_sign_or_space_and_dashes_are_underscores() -> None:
    flags = ["--engine.block-size=16", "--router.max_n", "4", "--engine.dtype=float32"]
    assert settings_from_flags(flags) == {
        "engine": {"block_size": "16", "dtype": "float32"},
        "router": {"max_n": "4"},
    }


def test_a_flag_value_may_be_negative_or_hold_an_equals_sign() -> None:
    assert settings_from_flags(["--a.b", "-1", "--c.d=x=y"]) == {"a": {"b": "-1"}, "c": {"d": "x=y"}}


@pytest.mark.parametrize("flag", ["--frobnicate", "--frobnicate=1", "stray", "-x", "--.a=1"])
def test_an_unknown_option_is_refused_by_its_name(flag: str) -> None:
    with pytest.raises(InvalidConfig, match=flag.partition("=")[0]):
        settings_from_flags([flag])


@pytest.mark.parametrize("flags", [["--engine.block_size"], ["--engine.block_size", "--router.x=1"]])
def test_a_setting_without_a_value_is_refused_by_its_name(flags: list[str]) -> None:
    with pytest.raises(InvalidConfig, match=r"engine\.block_size"):
        settings_from_flags(flags)
