"""Metrics of a running server."""

import urllib.request


def read_metrics(address: str, timeout_s: float) -> list:
    """Read the samples of a server's ``/metrics``.

    Raises:
        OSError: the server does not answer.
        ValueError: the answer is not in Prometheus's format.
    """
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"{address}/metrics", timeout=timeout_s) as answer:
        text = answer.read().decode()
    return [s for family in text_string_to_metric_families(text) for s in family.samples]
