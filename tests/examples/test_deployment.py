"""Promise: dashboard and alerts ask for metrics that a server has, all of ours among them, and the
files for containers and Kubernetes fit what is supported and what is in the folder."""

import json
import re
from collections.abc import Iterator

import prometheus_client
import pytest
import yaml

from tests.models import ROOT
from vllm_triforce.config import TriForceConfig
from vllm_triforce.config.keys import is_supported
from vllm_triforce.metrics.carrier import TriForcePrometheus
from vllm_triforce.metrics.counters import COUNTERS

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


def test_compose_mounts_existing_files_and_volumes():
    services = read("compose.yaml")["services"]
    assert set(services) == {"vllm", "prometheus", "grafana"}
    for service in services.values():
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            assert not source.startswith("./") or (FOLDER / source).exists(), mount
    build = services["vllm"]["build"]
    assert (FOLDER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()
    scraped = read("prometheus.yml")["scrape_configs"]
    assert scraped[0]["static_configs"][0]["targets"] == ["vllm:8000"]
    assert scraped[0]["job_name"] == "vllm"  # the alerts' job
    (rules,) = read("prometheus.yml")["rule_files"]
    assert f"./{rules}:/etc/prometheus/{rules}:ro" in services["prometheus"]["volumes"]


def test_provisioning_finds_the_dashboard():
    (source,) = read("grafana/provisioning/datasources/prometheus.yml")["datasources"]
    (default,) = [v for v in DASHBOARD["templating"]["list"] if v["type"] == "datasource"]
    assert default["current"]["value"] == source["uid"]
    (provider,) = read("grafana/provisioning/dashboards/triforce.yml")["providers"]
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"


def manifests() -> dict[str, dict]:
    """Read kubernetes.yaml, by kind."""
    parts = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))
    assert all(part["apiVersion"] and part["metadata"]["name"] == "vllm-triforce" for part in parts)
    by_kind = {part["kind"]: part for part in parts}
    assert list(by_kind) == ["PersistentVolumeClaim", "Deployment", "Service"]
    return by_kind


def test_manifests_fit_together():
    by_kind = manifests()
    deployment, service = by_kind["Deployment"]["spec"], by_kind["Service"]["spec"]
    monitor = read("podmonitor.yaml")
    template = deployment["template"]
    labels, pod = template["metadata"]["labels"], template["spec"]
    selectors = (deployment["selector"]["matchLabels"], service["selector"])
    for selector in (*selectors, monitor["spec"]["selector"]["matchLabels"]):
        assert selector.items() <= labels.items()
    (container,) = pod["containers"]
    (port,) = container["ports"]
    assert port["containerPort"] == 8000  # vLLM's default: no --port is given
    assert "--port" not in container["args"]
    assert [p["targetPort"] for p in service["ports"]] == [port["name"]]
    (scraped,) = monitor["spec"]["podMetricsEndpoints"]
    annotations = template["metadata"]["annotations"]
    assert scraped["port"] == port["name"] and annotations["prometheus.io/port"] == "8000"
    assert scraped["path"] == annotations["prometheus.io/path"] == "/metrics"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": port["name"]}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert volumes.keys() == mounts.keys() and mounts["shm"] == "/dev/shm"
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    assert volumes["cache"]["persistentVolumeClaim"]["claimName"] == "vllm-triforce"
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    for name in ("HF_HOME", "VLLM_CACHE_ROOT"):
        assert variables[name].startswith(f"{mounts['cache']}/")


def test_the_alert_knows_the_job_of_each_scrape_target():
    (alert,) = (alert for alert in alerts() if alert["alert"] == "VllmDown")
    jobs = re.search(r'job=~"([^"]+)"', alert["expr"])[1]
    monitor = read("podmonitor.yaml")["spec"]
    labels = manifests()["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for job in ("vllm", labels[monitor["jobLabel"]]):
        assert re.fullmatch(jobs, job)


def test_keys_and_image_are_supported():
    service = read("compose.yaml")["services"]["vllm"]
    stack = read("production-stack.yaml")
    (model,) = stack["servingEngineSpec"]["modelSpec"]
    (container,) = manifests()["Deployment"]["spec"]["template"]["spec"]["containers"]
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
