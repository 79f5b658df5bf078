"""Figures of a server, in the format of Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

CONTENT_TYPE: str = CONTENT_TYPE_LATEST
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class ServeMetrics:
    """The figures; each server has its own."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        self.requests = Counter("starling_requests", "Requests by route and status", ("route", "status"), registry=own)
        self.seconds = Histogram(
            "starling_request_seconds", "Time from a request to its answer", ("route",), registry=own, buckets=_SECONDS
        )
        self.rejected = Counter(
            "starling_rejected", "Refused requests and streams by reason", ("reason",), registry=own
        )
        self.audio = Counter("starling_audio_seconds", "Recognized audio", ("route",), registry=own)
        self.confidence = Histogram(
            "starling_confidence",
            "Confidence of recognized files and segments",
            ("route",),
            registry=own,
            buckets=tuple(tenth / 10 for tenth in range(1, 11)),
        )
        self.batch_files = Histogram(
            "starling_batch_recordings", "Recordings in a batch", registry=own, buckets=(1, 2, 4, 8, 16, 32, 64)
        )
        self.batch_seconds = Histogram(
            "starling_batch_seconds", "Time that a batch takes", registry=own, buckets=_SECONDS
        )
        self.waiting = Gauge("starling_files_waiting", "Files that are recognized or wait", registry=own)
        self.streams = Gauge("starling_streams", "Open streams", registry=own)
        self.connections = Gauge("starling_connections", "Open connections", registry=own)
        self.dropped = Counter(
            "starling_connections_dropped", "Connections closed without an answer", ("reason",), registry=own
        )
        self.model = Gauge("starling_model", "1 for the version in use", ("model", "version"), registry=own)
        self.replaced = Counter("starling_model_replaced", "New versions in use", registry=own)
        self.failures = Counter(
            "starling_model_failures", "Versions that could not be loaded, and looks at the registry that failed",
            registry=own,
        )  # fmt: skip

    def batch(self, recordings: int, seconds: float) -> None:
        """Count a batch.

        Args:
            recordings: In it.
            seconds: That it took.
        """
        self.batch_files.observe(recordings)
        self.batch_seconds.observe(seconds)

    def recognized(self, route: str, seconds: float, confidence: float) -> None:
        """Count a file or segment.

        Args:
            route: Where it came from.
            seconds: Its length.
            confidence: Of the recognizer.
        """
        self.audio.labels(route).inc(seconds)
        self.confidence.labels(route).observe(confidence)

    def text(self) -> bytes:
        """All figures."""
        return generate_latest(self.registry)
