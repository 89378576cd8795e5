"""Open calls: their number, admission of new ones, and their metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kveik.engine.stream import Door, Stream
from kveik.errors import Overloaded
from kveik.request.request import Request
from kveik.server.body import BodyBudget
from kveik.server.openapi import MEANINGS
from kveik.server.request_fields import UnknownNames

STATUSES = (200, 204, *(status for status in MEANINGS if status != 431), 499)
"""Statuses that a call can end with; the HTTP protocol answers 431 by itself, before there is a call."""


class Traffic:
    """Open calls and their streams. For the event loop's thread only.

    open → draining (new calls are refused with 503, open ones go on) → aborted (their streams end at once).
    """

    def __init__(self, retry_after: int) -> None:
        self.draining = False
        self.calls = 0
        """HTTP calls between their first byte and their last, those on open paths left out."""

        self._retry_after = retry_after
        self._streams: set[Stream] = set()

    @property
    def streams(self) -> int:
        """Number of requests that have not ended, or whose answers are not written yet."""
        return len(self._streams)

    def check_open(self) -> None:
        """Raises `Overloaded` (503) once the server drains."""
        if self.draining:
            raise Overloaded(
                "The server is stopping and accepts no new requests. Try again later.",
                retry_after=self._retry_after,
                status=503,
            )

    def submit(self, door: Door, requests: Sequence[Request]) -> list[Stream]:
        """Submit all requests of one call, or none: the call is checked as a whole before the first is queued.

        Raises:
            BadValue: the queue's capacity is smaller.
            Overloaded: the queue is full, or the server drains.
        """
        self.check_open()
        door.check_queue_capacity(sum(request.sampling.n for request in requests))
        streams: list[Stream] = []
        try:
            for request in requests:
                streams.append(door.submit(request))
        except BaseException:
            # A preempted sequence may have returned to the queue since the check.
            for stream in streams:
                stream.abort()
            raise
        self._streams.update(streams)
        return streams

    def close(self, streams: Iterable[Stream], finished: bool) -> None:
        """Remove the streams of one call; abort them unless they were read to their end."""
        for stream in streams:
            self._streams.discard(stream)
            if not finished:
                stream.abort()

    def abort(self) -> None:
        """End all streams. Their readers see the finish reason 'abort'."""
        for stream in self._streams:
            stream.abort()


class DoorGauges(Collector):
    """Metrics of the server itself. Their only label has few values, so that clients cannot make it grow."""

    def __init__(self, door: Door, traffic: Traffic, bodies: BodyBudget, unknown_names: UnknownNames) -> None:
        self._door = door
        self._unknown_names = unknown_names
        self._traffic = traffic
        self._bodies = bodies
        self.statuses: Counter[int] = Counter(dict.fromkeys(STATUSES, 0))
        """Calls that ended, by status."""

        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def ended(self, status: int) -> None:
        """Count a call on a path that needs a key; 499: the client had disconnected."""
        self.statuses[status] += 1

    def exposition(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Returns the metrics of one scrape."""
        text = "Calls that ended, by status; 499: the client disconnected before its answer began."
        calls = CounterMetricFamily("kveik:http_calls", text, labels=["status"])
        for status, count in sorted(self.statuses.items()):
            calls.add_metric([str(status)], count)
        yield calls
        running, waiting = self._door.occupancy
        yield GaugeMetricFamily("kveik:num_requests_running", "Sequences that are admitted.", value=running)
        text = "Sequences that wait, those in the mailbox included."
        yield GaugeMetricFamily("kveik:num_requests_waiting", text, value=waiting)
        text = "Unknown names in request bodies, which are ignored; the log has each once."
        yield CounterMetricFamily("kveik:http_unknown_fields", text, value=self._unknown_names.count)
        yield GaugeMetricFamily("kveik:http_calls_open", "Calls that have not ended.", value=self._traffic.calls)
        yield GaugeMetricFamily("kveik:http_streams_open", "Requests that the engine works on.", value=self._traffic.streams)
        yield GaugeMetricFamily("kveik:http_body_bytes", "Bytes of request bodies being read.", value=self._bodies.held_bytes)
        yield GaugeMetricFamily("kveik:http_body_bytes_max", "Bound of the bytes being read.", value=self._bodies.total_bytes)
        yield GaugeMetricFamily("kveik:http_draining", "1 while the server stops.", value=self._traffic.draining)
