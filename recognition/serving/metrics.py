"""Figures of a server, in the format of Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from recognition.transcriber import SpokenPiece

CONTENT_TYPE: str = CONTENT_TYPE_LATEST
_LENGTHS = (0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 15.0, 20.0, 30.0)
_RATES = (0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.5)
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
        self.audio = Counter(
            "starling_audio_seconds", "Audio of recognized files and streams", ("route",), registry=own
        )
        self.words = Counter("starling_words", "Recognized words", ("route",), registry=own)
        self.confidence = Histogram(
            "starling_confidence",
            "Confidence of recognized utterances",
            ("route",),
            registry=own,
            buckets=tuple(tenth / 10 for tenth in range(1, 11)),
        )
        self.lengths = Histogram(
            "starling_utterance_seconds", "Length of recognized utterances", ("route",), registry=own, buckets=_LENGTHS
        )
        self.rates = Histogram(
            "starling_words_per_second", "Words per second of utterances", ("route",), registry=own, buckets=_RATES
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
        self.collected = Counter("starling_collected", "Doubtful utterances that were stored", registry=own)
        self.not_collected = Counter(
            "starling_not_collected", "Doubtful utterances that were not stored, by reason", ("reason",), registry=own
        )
        self.collected_bytes = Gauge(
            "starling_collected_bytes", "Size of the folder of doubtful utterances", registry=own
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

    def recognized(self, route: str, piece: SpokenPiece) -> None:
        """Count an utterance.

        Args:
            route: Where it came from.
            piece: It.
        """
        self.words.labels(route).inc(piece.num_words)
        self.confidence.labels(route).observe(piece.confidence)
        self.lengths.labels(route).observe(piece.seconds)
        self.rates.labels(route).observe(piece.words_per_second)

    def text(self) -> bytes:
        """All figures."""
        return generate_latest(self.registry)
