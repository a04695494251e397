"""The manifests fit Kubernetes' own schemas, and what is inside the RayService fits ours.

KubeRay's and the Prometheus operator's own kinds have no schema in a package: of those the parts that are
Kubernetes' (pod templates) and ours (the settings) are checked, and that names agree.
"""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest
import yaml

from cluster.config import config_from_settings
from tests.integration.deploy.manifests import kubernetes_objects, pod_groups, ray_service

_OWN_KINDS = ("RayService", "PodMonitor")


def _validate(thing: dict[str, Any]) -> None:
    kubernetes_validate.validate(thing, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize(
    "thing", list(kubernetes_objects()), ids=lambda item: f"{item['kind']}-{item['metadata']['name']}"
)
def test_each_object_fits_its_schema(thing: dict[str, Any]) -> None:
    assert thing["metadata"]["namespace"] == "baton"
    if thing["kind"] not in _OWN_KINDS:
        _validate(thing)


def test_a_wrong_object_does_not() -> None:
    policy = next(item for item in kubernetes_objects() if item["kind"] == "NetworkPolicy")
    policy["spec"]["podSelektor"] = policy["spec"].pop("podSelector")
    with pytest.raises(kubernetes_validate.ValidationError):
        _validate(policy)


@pytest.mark.parametrize("name", ["head", "prefill", "decode"])
def test_the_pods_of_each_group_fit_the_schema_and_run_as_nobody_special(name: str) -> None:
    template = pod_groups()[name]["template"]
    metadata = {"name": name, **template["metadata"]}
    _validate({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})
    assert template["spec"]["securityContext"]["runAsNonRoot"]
    for container in template["spec"]["containers"]:
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        assert container["resources"]["limits"]["memory"]


def test_the_settings_are_ours_and_its_pools_ask_for_what_the_groups_offer() -> None:
    serve = yaml.safe_load(ray_service()["spec"]["serveConfigV2"])
    (application,) = serve["applications"]
    assert application["import_path"] == "cluster.declared_app:application"
    config = config_from_settings(application["args"])
    groups = pod_groups()
    for resource, group in (
        (config.cluster.prefill_resource, "prefill"),
        (config.cluster.decode_resource, "decode"),
    ):
        assert resource is not None
        assert f'\\"{resource}\\": 1' in groups[group]["rayStartParams"]["resources"]
    limits = groups["decode"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert float(limits["nvidia.com/gpu"]) >= config.cluster.worker_num_gpus
    grace_s = groups["decode"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > config.cluster.drain_timeout_s + 10


def test_what_is_scraped_is_a_port_of_the_pods() -> None:
    ports = {
        port["name"]
        for group in pod_groups().values()
        for port in group["template"]["spec"]["containers"][0]["ports"]
    }
    monitors = [item for item in kubernetes_objects() if item["kind"] == "PodMonitor"]
    asked = {endpoint["port"] for item in monitors for endpoint in item["spec"]["podMetricsEndpoints"]}
    assert asked <= ports


def test_the_operator_reaches_the_port_that_it_deploys_the_application_by() -> None:
    """KubeRay sends serveConfigV2 to the head's dashboard port from a pod of its own."""
    host = pod_groups()["head"]["rayStartParams"].get("dashboard-host", "0.0.0.0")
    assert host == "0.0.0.0"
    policy = next(item for item in kubernetes_objects() if item["kind"] == "NetworkPolicy")
    openings = [rule for rule in policy["spec"]["ingress"] if 8265 in _ports(rule)]
    assert [rule["from"][0]["namespaceSelector"]["matchLabels"] for rule in openings] == [
        {"kubernetes.io/metadata.name": "kuberay"}
    ]


def _ports(rule: dict[str, Any]) -> list[int]:
    return [item["port"] for item in rule.get("ports", ())]
