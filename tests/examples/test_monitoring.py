"""Promise: the dashboard asks for metrics that a server has, all of ours among them, and the
container files fit what is supported and what is in the folder."""

import re

import pytest
import yaml

from tests.examples.monitoring import FOLDER, dashboard, metrics_in, metrics_of_ours, queries
from tests.models import ROOT
from vllm_triforce.config.supported import is_supported


def metrics_of_vllm() -> set[str]:
    """Names in the source of vLLM's Prometheus logger, as they are scraped."""
    import vllm

    source = (ROOT / vllm.__path__[0] / "v1" / "metrics" / "loggers.py").read_text()
    names = set(re.findall(r'"(vllm:\w+)"', source))
    return {name + suffix for name in names for suffix in ("", "_total", "_bucket")}


@pytest.mark.parametrize("title, query", list(queries()))
def test_a_panel_asks_for_what_is_there(title, query):
    asked = metrics_in(query)
    assert asked
    assert asked <= metrics_of_ours() | metrics_of_vllm(), title


def test_every_metric_of_ours_is_shown():
    asked = {name for _, query in queries() for name in metrics_in(query)}
    left_out = {"vllm:triforce_inner_rounds_total", "vllm:triforce_level2_passes_total"}
    assert metrics_of_ours() - asked == left_out


def test_compose_mounts_what_is_there():
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    assert set(services) == {"vllm", "prometheus", "grafana"}
    for service in services.values():
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            assert not source.startswith("./") or (FOLDER / source).exists(), mount
    build = services["vllm"]["build"]
    assert (FOLDER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()
    scraped = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    assert scraped[0]["static_configs"][0]["targets"] == ["vllm:8000"]


def test_provisioning_finds_the_dashboard():
    grafana = FOLDER / "grafana" / "provisioning"
    (source,) = yaml.safe_load((grafana / "datasources" / "prometheus.yml").read_text())[
        "datasources"
    ]
    (default,) = [v for v in dashboard()["templating"]["list"] if v["type"] == "datasource"]
    assert default["current"]["value"] == source["uid"]
    (provider,) = yaml.safe_load((grafana / "dashboards" / "triforce.yml").read_text())["providers"]
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"


def test_keys_of_the_compose_file_and_the_image_are_supported():
    import json

    from vllm_triforce.config import TriForceConfig

    command = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]["vllm"]["command"]
    keys = json.loads(command[command.index("--speculative-config") + 1])
    assert keys.pop("method") == "triforce"
    TriForceConfig.from_speculative_config(keys)
    dockerfile = (FOLDER / "Dockerfile").read_text()
    assert is_supported(re.search(r"^FROM vllm/vllm-openai:v(\S+)$", dockerfile, re.M)[1])
    for copied in re.findall(r"^COPY (.+) \S+$", dockerfile, re.M):
        assert all((ROOT / name).exists() for name in copied.split())
