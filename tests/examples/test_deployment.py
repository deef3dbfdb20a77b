"""Promise: dashboard and alerts ask for metrics that a server has, all of ours among them, and keys
and images of the files for containers and Kubernetes are supported."""

import json
import re
from collections.abc import Iterator

import prometheus_client
import pytest
import yaml

from tests.models import ROOT
from vllm_triforce.config import TriForceConfig
from vllm_triforce.config.keys import is_supported
from vllm_triforce.metrics.counters import COUNTERS
from vllm_triforce.vllm_patches.carrier import TriForcePrometheus

FOLDER = ROOT / "examples" / "deployment"
DASHBOARD = json.loads((FOLDER / "grafana" / "dashboards" / "triforce.json").read_text())


def read(name: str) -> dict:
    return yaml.safe_load((FOLDER / name).read_text())


def queries() -> Iterator[tuple[str, set[str]]]:
    """Yield the title of each panel and the metrics of each of its queries."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], set(re.findall(r"\bvllm:\w+", target["expr"]))


def metrics_of_ours() -> set[str]:
    registry = prometheus_client.CollectorRegistry()

    def counter(**arguments):
        return prometheus_client.Counter(**arguments, registry=registry)

    TriForcePrometheus(counter, ["model_name", "engine"], {0: ["model", "0"]})
    return {f"{family.name}_total" for family in registry.collect()}


def metrics_of_vllm() -> set[str]:
    """Read the names in vLLM's Prometheus logger, as they are scraped."""
    import vllm

    source = (ROOT / vllm.__path__[0] / "v1" / "metrics" / "loggers.py").read_text()
    names = set(re.findall(r'"(vllm:\w+)"', source))
    return {name + suffix for name in names for suffix in ("", "_total", "_bucket")}


def alerts() -> list[dict]:
    (group,) = read("alerts.yml")["groups"]
    return group["rules"]


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_an_alert_queries_existing_metrics(alert):
    metrics = set(re.findall(r"\bvllm:\w+", alert["expr"]))
    assert metrics <= metrics_of_ours() | metrics_of_vllm()
    assert metrics or alert["expr"].startswith('up{job=~"vllm|')
    assert alert["expr"].count("(") == alert["expr"].count(")")


def test_alerts_are_on_all_counters_of_health():
    asked = " ".join(alert["expr"] for alert in alerts())
    assert all(
        f"vllm:triforce_{c.metric}_total" in asked
        for c in COUNTERS.values()
        if c.section == "Health"
    )


@pytest.mark.parametrize("title, metrics", list(queries()))
def test_a_panel_queries_existing_metrics(title, metrics):
    assert metrics and metrics <= metrics_of_ours() | metrics_of_vllm(), title


def test_every_metric_of_ours_is_shown():
    shown = {name for _, metrics in queries() for name in metrics}
    left_out = {"vllm:triforce_inner_rounds_total", "vllm:triforce_level2_passes_total"}
    assert metrics_of_ours() - shown == left_out


def test_keys_and_image_are_supported():
    service = read("compose.yaml")["services"]["vllm"]
    stack = read("production-stack.yaml")
    (model,) = stack["servingEngineSpec"]["modelSpec"]
    parts = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    (deployment,) = (part["spec"] for part in parts if part["kind"] == "Deployment")
    (container,) = deployment["template"]["spec"]["containers"]
    for command in (service["command"], model["vllmConfig"]["extraArgs"], container["args"]):
        keys = json.loads(command[command.index("--speculative-config") + 1])
        assert keys.pop("method") == "triforce"
        TriForceConfig.from_speculative_config(keys)
    assert is_supported(model["tag"].removeprefix("v"))
    assert container["image"] == f"{model['repository']}:{model['tag']}"
    dockerfile = (FOLDER / "Dockerfile").read_text()
    assert is_supported(re.search(r"^FROM vllm/vllm-openai:v(\S+)$", dockerfile, re.M)[1])
    for copied in re.findall(r"^COPY (.+) \S+$", dockerfile, re.M):
        assert all((ROOT / name).exists() for name in copied.split())
