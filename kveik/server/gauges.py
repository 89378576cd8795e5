"""What the door itself adds to /metrics: calls by status, and how much it holds right now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kveik.server.body import BodyBudget
from kveik.server.traffic import Traffic


class DoorGauges(Collector):
    """Counts what passes the door. One label with few values, so that no client can make it grow."""

    def __init__(self, traffic: Traffic, bodies: BodyBudget) -> None:
        self._traffic = traffic
        self._bodies = bodies
        self.statuses: Counter[int] = Counter()
        """Calls that ended, by status."""

        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def ended(self, status: int) -> None:
        """A call on a path that is not open ended with this status; 499: its client had left."""
        self.statuses[status] += 1

    def exposition(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """The families of one scrape."""
        text = "Calls that ended, by status; 499: the client left before its answer began."
        calls = CounterMetricFamily("kveik:http_calls", text, labels=["status"])
        for status, count in sorted(self.statuses.items()):
            calls.add_metric([str(status)], count)
        yield calls
        yield GaugeMetricFamily("kveik:http_calls_open", "Calls that have not ended.", value=self._traffic.calls)
        yield GaugeMetricFamily("kveik:http_streams_open", "Requests that the engine works on.", value=self._traffic.streams)
        yield GaugeMetricFamily("kveik:http_body_bytes", "Bytes of request bodies being read.", value=self._bodies.held_bytes)
        yield GaugeMetricFamily("kveik:http_body_bytes_max", "Their bound.", value=self._bodies.total_bytes)
        yield GaugeMetricFamily("kveik:http_draining", "1 while the server stops.", value=self._traffic.draining)
