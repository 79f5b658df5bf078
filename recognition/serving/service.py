"""What all parts of a server share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from recognition.serving.collecting import Audio, Collector
from recognition.serving.limits import ApiError, ServeAdmission, ServeLimits
from recognition.serving.log import RequestLog
from recognition.serving.metrics import ServeMetrics
from recognition.serving.models import ModelSwitch
from recognition.transcriber import SpokenPiece

SHORTEST_TOKEN = 16
USUAL_NAME = "whisper-1"
"""What clients of OpenAI's API ask for unless they are told otherwise."""


def check_token(token: str | None) -> None:
    """Check a token.

    Raises:
        ValueError: It is too short, or no header can hold it.
    """
    if token is not None and not (len(token) >= SHORTEST_TOKEN and token.isascii() and token.isprintable()):
        raise ValueError(
            f"the token has fewer than {SHORTEST_TOKEN} characters, or others than those of ASCII: make one with "
            "`openssl rand -hex 32`"
        )


class SpeechService:
    """A server's model, limits, figures and log.

    Args:
        switch: The model.
        limits: What is accepted.
        token: What clients show as bearer token; None: clients of this machine need none, and there are no others.
        log: Of requests.
        metrics: Figures; those of the model's queue are counted there, too.
        collector: Keeps doubtful utterances; None keeps none.

    Raises:
        ValueError: The token is too short.
    """

    def __init__(
        self,
        switch: ModelSwitch,
        limits: ServeLimits | None = None,
        token: str | None = None,
        log: RequestLog | None = None,
        metrics: ServeMetrics | None = None,
        collector: Collector | None = None,
    ) -> None:
        check_token(token)
        self.switch, self.limits, self.token = switch, limits or ServeLimits(), token
        self.log, self.metrics, self.collector = log or RequestLog(), metrics or ServeMetrics(), collector
        self.log.common = {"model": switch.name}
        self.admission = ServeAdmission(self.limits)
        self.stopping = asyncio.Event()
        """Set when the server ends: streams finish, nothing new begins."""
        self.threads = ThreadPoolExecutor(self.limits.streams, thread_name_prefix="stream")
        switch.on_change = self._changed
        figures, admission = self.metrics, self.admission
        figures.waiting.set_function(lambda: admission.files)
        figures.streams.set_function(lambda: admission.streams)
        figures.model.labels(switch.name, switch.current.version).set(1)
        if collector is not None:
            collector.on_problem = lambda text: self.log.write("collect", problem=text)
            self.log.write("collect", note=f"utterances below {collector.below:g} are stored in {collector.folder}")

    def recognized(
        self, route: str, version: str, pieces: Sequence[SpokenPiece], audio: Audio, rate: int | None = None
    ) -> None:
        """Count and log utterances, and collect those that are doubtful.

        Args:
            route: Where they came from.
            version: Of the model that recognized them.
            pieces: They.
            audio: What they are pieces of: an encoded file, or samples [num_samples].
            rate: Of samples, in Hz.
        """
        for piece in pieces:
            self.metrics.recognized(route, piece)
            self.log.write(
                "segment",
                piece.text,
                route=route,
                version=version,
                seconds=piece.seconds,
                words=piece.num_words,
                words_per_second=piece.words_per_second,
                confidence=piece.confidence,
                least_confidence=piece.least,
            )
        if self.collector is not None:
            self.collector.offer(pieces, audio, rate, version)

    def _changed(self, text: str, problem: bool) -> None:
        self.log.write("model", version=self.switch.current.version, **{"problem" if problem else "note": text})

    def check_model(self, name: str) -> None:
        """Check that the model that a client asks for is the one that is served.

        Args:
            name: What it asks for; empty for any.

        Raises:
            ApiError: It is another one.
        """
        if name not in ("", self.switch.name, USUAL_NAME):
            text = f"this server has the model {self.switch.name!r}, and not {name[:100]!r}"
            raise ApiError(404, text, "model_not_found", "model")

    def figures(self) -> bytes:
        """The figures for Prometheus."""
        switch, figures = self.switch, self.metrics
        figures.model.clear()
        figures.model.labels(switch.name, switch.current.version).set(1)
        figures.replaced.inc(switch.replaced - self._counted[0])
        figures.failures.inc(switch.failures - self._counted[1])
        self._counted = (switch.replaced, switch.failures)
        return figures.text()

    _counted = (0, 0)
