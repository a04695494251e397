from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from cluster.access import with_start_key
from cluster.config import BatonConfig, config_from_settings, load_config
from core.errors import InvalidConfig
from core.ids import Role


def test_without_settings_every_section_has_its_defaults() -> None:
    assert config_from_settings({}) == BatonConfig()


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text(
        "cluster:\n  port: 1\n  num_routers: 2\n  num_decode_workers: 2\n  num_prefill_workers: 2\n"
    )
    environment = {
        "BATON_CLUSTER__PORT": "3",
        "BATON_CLUSTER__NUM_DECODE_WORKERS": "3",
        "BATON_CLUSTER__NUM_PREFILL_WORKERS": "3",
    }
    flags = ["--cluster.num-prefill-workers=4", "--cluster.port=4"]
    cluster = load_config(file, environment, flags, {"cluster": {"port": 5}}).cluster
    assert (cluster.num_routers, cluster.num_decode_workers, cluster.num_prefill_workers, cluster.port) == (
        2,
        3,
        4,
        5,
    )


def test_the_environment_names_the_file_unless_a_flag_does(tmp_path: Path) -> None:
    named, flagged = tmp_path / "named.yaml", tmp_path / "flagged.yaml"
    named.write_text("cluster: {port: 1}\n")
    flagged.write_text("cluster: {port: 2}\n")
    environment = {"BATON_CONFIG": str(named)}
    assert load_config(None, environment).cluster.port == 1
    assert load_config(flagged, environment).cluster.port == 2


def test_a_kind_of_worker_overrides_the_shared_engine_section() -> None:
    config = config_from_settings({"engine": {"block_size": 32}, "decode_engine": {"num_kv_blocks": 24}})
    assert config.engine_of(Role.PREFILL).block_size == config.engine_of(Role.DECODE).block_size == 32
    assert config.engine_of(Role.DECODE).num_kv_blocks == 24
    assert config.engine_of(Role.PREFILL).num_kv_blocks == config.engine.num_kv_blocks == 0


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("--engine.blocksize=16", "engine.blocksize"),
        ("--decode_engine.blocksize=16", "decode_engine.blocksize"),
        ("--gateway.port=1", "gateway"),
        ("--cluster.port=http", "cluster.port"),
        ("--cluster.port=80.5", "cluster.port"),
        ("--prefill.token_budget=many", "prefill.token_budget"),
        ("--router.plan=sometimes", "router.plan"),
        ("--engine.enable_prefix_cache=maybe", "engine.enable_prefix_cache"),
        ("--cluster.port.number=1", "cluster.port"),
    ],
)
def test_an_unknown_key_or_a_wrong_type_is_refused_by_name(flag: str, named: str) -> None:
    with pytest.raises(InvalidConfig, match=rf"\b{named}\b"):
        load_config(None, {}, [flag])


@pytest.mark.parametrize(
    "cluster", [{"port": 70000}, {"num_routers": 0}, {"num_decode_workers": 0}, {"drain_timeout_s": 0}]
)
def test_an_impossible_cluster_is_refused_by_name(cluster: dict[str, int]) -> None:
    with pytest.raises(InvalidConfig, match=f"cluster: .*{next(iter(cluster))}"):
        config_from_settings({"cluster": cluster})


def test_the_whole_configuration_travels_to_a_replica() -> None:
    config = config_from_settings({"router": {"plan": "remote"}, "engine": {"block_size": 32}})
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_listening_beyond_this_machine_needs_api_keys(host: str) -> None:
    with pytest.raises(InvalidConfig, match=r"cluster\.host.*router\.tenants\.keys_file"):
        config_from_settings({"cluster": {"host": host}})
    guarded = config_from_settings(
        {"cluster": {"host": host}, "router": {"tenants": {"keys_file": "/x/keys"}}}
    )
    assert guarded.router.tenants.are_keys_required


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_on_this_machine_nobody_needs_a_key(host: str) -> None:
    config = config_from_settings({"cluster": {"host": host}})
    assert with_start_key(config) == (config, None)


def test_limits_of_tenants_are_settings_like_others() -> None:
    limits = [{"name": "acme", "weight": "2", "max_requests_per_minute": 10}]
    config = config_from_settings({"router": {"tenants": {"limits": limits}}})
    assert config.router.tenants.limits[0].max_requests_per_minute == 10
    with pytest.raises(InvalidConfig, match=r"router\.tenants\.limits\[0\]\.colour"):
        config_from_settings({"router": {"tenants": {"limits": [{"name": "a", "colour": 1}]}}})
    with pytest.raises(InvalidConfig, match=r"weight must be above 0"):
        config_from_settings({"router": {"tenants": {"limits": [{"name": "a", "weight": 0}]}}})


def test_a_budget_of_gpus_has_room_for_what_the_pools_need_at_least() -> None:
    scaling = {"max_gpus": 7.0, "min_prefill_workers": 1, "min_decode_workers": 1}
    settings = {"autoscaling": scaling, "cluster": {"worker_num_gpus": 4.0}}
    with pytest.raises(InvalidConfig, match="max_gpus is room for 1 workers, and the pools need 2"):
        config_from_settings(settings)
    config = config_from_settings(settings | {"autoscaling": scaling | {"min_prefill_workers": 0}})
    assert config.autoscaling.budget(config.cluster.worker_num_gpus) == 1
