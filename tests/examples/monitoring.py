"""The dashboard's panels and queries, for tests."""

import json
import re
from collections.abc import Iterator

import prometheus_client

from tests.models import ROOT

FOLDER = ROOT / "examples" / "monitoring"
# What Grafana fills in, and what stands for it.
_VARIABLES = {"$model": ".*", "$engine": ".*", "$__rate_interval": "1m", "$__range": "30m"}


def dashboard() -> dict:
    return json.loads((FOLDER / "grafana" / "dashboards" / "triforce.json").read_text())


def queries() -> Iterator[tuple[str, str]]:
    """Title of the panel, and the query with variables filled in."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name, value in _VARIABLES.items():
                query = query.replace(name, value)
            yield panel["title"], query


def metrics_in(query: str) -> set[str]:
    return set(re.findall(r"\bvllm:\w+", query))


def metrics_of_ours() -> set[str]:
    """As a server of TriForce names them."""
    from vllm_triforce.metrics.prometheus import TriForcePrometheus

    registry = prometheus_client.CollectorRegistry()

    def counter(**arguments):
        return prometheus_client.Counter(**arguments, registry=registry)

    TriForcePrometheus(counter, ["model_name", "engine"], {0: ["model", "0"]})
    return {f"{family.name}_total" for family in registry.collect()}
