"""The cluster files of `ray up` fit Ray's own schema, and their groups offer what the settings ask for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cluster.config import config_from_settings
from tests.integration.deploy.manifests import CLUSTERS, DEPLOY, cluster_file

# Ray takes seconds to import, and warns: all is checked in one process of its own
_CHECK = """
import json, sys, yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema
found = {}
for name in sys.argv[1:]:
    content = yaml.safe_load(open(name))
    try:
        if content.get("kind") == "RayService":
            ServeDeploySchema.model_validate(yaml.safe_load(content["spec"]["serveConfigV2"]))
        else:
            validate_config(prepare_config(content))
        found[name] = "valid"
    except Exception as error:
        found[name] = repr(error)
print(json.dumps(found))
"""


def test_they_fit_the_schemas_of_ray_and_serve_which_refuse_what_is_wrong(tmp_path: Path) -> None:
    wrong, service = tmp_path / "wrong.yaml", DEPLOY / "kubernetes" / "rayservice.yaml"
    wrong.write_text(yaml.safe_dump(cluster_file("aws") | {"head_node_type": "nobody"}))
    files = [*(str(DEPLOY / "ray" / f"{name}.yaml") for name in CLUSTERS), str(service)]
    done = subprocess.run(
        [sys.executable, "-c", _CHECK, *files, str(wrong)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert "head_node_type" in found.pop(str(wrong))
    assert found == dict.fromkeys(files, "valid")


def test_groups_offer_what_the_settings_ask_for_on_different_machines() -> None:
    settings = yaml.safe_load((DEPLOY / "ray" / "baton.yaml").read_text())
    cluster = config_from_settings(settings).cluster
    for name, kind in (("aws", "InstanceType"), ("gcp", "machineType")):
        types = cluster_file(name)["available_node_types"]
        assert types["prefill"]["resources"][cluster.prefill_resource] > 0
        assert types["decode"]["resources"][cluster.decode_resource] > 0
        assert len({types[group]["node_config"][kind] for group in ("head", "prefill", "decode")}) == 3


@pytest.mark.parametrize("name", CLUSTERS)
def test_nodes_get_model_tokens_zone_and_the_environment_that_serve_needs(name: str) -> None:
    content = cluster_file(name)
    assert any("baton fetch" in command for command in content["setup_commands"])
    installs = [command for command in content["setup_commands"] if "apt-get install" in command]
    assert all("-dev" in command and "g++" in command for command in installs), "Triton compiles at run time"
    assert bool(installs) == (name != "on-premise")
    assert {"~/baton/token", "~/.ray/auth_token", "~/baton/baton.yaml"} <= set(content["file_mounts"])
    for start in (content["head_start_ray_commands"], content["worker_start_ray_commands"]):
        assert "baton config --environment" in start[-1]
        assert '--labels="zone=' in start[-1]
