"""Streams over a WebSocket: 16-bit PCM in, partial and final results out as JSON.

The client sends binary messages with samples (mono, little-endian), and `{"type": "end"}` after the last one. The
server sends `ready`, then `partial` and `final` results, `done` after the last one, and `error` if it ends the stream.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
from fastapi import WebSocket
from starlette.websockets import WebSocketDisconnect

from recognition.serving.formats import word_content
from recognition.serving.gate import PROTOCOL, client_of
from recognition.serving.limits import ApiError, error_content
from recognition.serving.models import LoadedModel
from recognition.serving.queue import QueueClosedError, RecognitionLateError
from recognition.serving.service import SpeechService
from recognition.streaming import STREAM_LIMITS, Samples, SpeechStream, StreamConfig, StreamResult, open_stream
from recognition.transcriber import SpokenPiece, Transcript
from speech.audio import RATES_HZ, AudioError
from speech.decoding import DecodeError

log = logging.getLogger(__name__)
ROUTE = "/stream"
_LATE_S = 60.0
"""Time for recognizing a segment, waiting included."""
_PENDING_S = 10.0
"""Audio that waits for recognition before the client has to wait."""
_MARGIN_S = 5.0
"""Audio that a stream hears before it sees that a segment has ended."""
_SCALE = 32768.0
_SWITCHES = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_CLOSES = {400: 1008, 503: 1013}
_ENDS = {
    "": (1000, ""),
    "stopping": (1012, "the server ends"),
    "idle": (1008, "no audio arrived for too long"),
    "too_long": (1008, "the stream is longer than is accepted"),
}
"""Code of WebSocket's close and a sentence, by the reason why a stream ends."""


async def serve_stream(service: SpeechService, websocket: WebSocket) -> None:
    """Serve a stream until either side ends it.

    Args:
        service: The server's parts.
        websocket: Not accepted yet.

    Raises:
        ApiError: The stream is refused.
    """
    with ExitStack() as stack:
        stack.enter_context(service.admission.client(client_of(websocket.scope)))
        stack.enter_context(service.admission.stream())
        model = stack.enter_context(service.switch.use())
        if service.stopping.is_set():
            raise ApiError(503, "the server ends", "stopping")
        session = StreamSession(service, websocket, model)
        await websocket.accept(PROTOCOL if PROTOCOL in websocket.scope.get("subprotocols", ()) else None)
        await session.run()


def _number(query: Mapping[str, str], name: str, usual: float, low: float, high: float) -> float:
    """A parameter of the address.

    Raises:
        ApiError: It is not a number between two others.
    """
    value = math.nan
    with suppress(ValueError):
        value = float(query.get(name, usual))
    if low <= value <= high:
        return value
    text = f"{name} is {query[name][:50]!r}: give a number from {low:g} to {high:g}"
    raise ApiError(400, text, "invalid_value", name)


def _switch(query: Mapping[str, str], name: str, usual: bool) -> bool:
    """A parameter of the address that is on or off.

    Raises:
        ApiError: It is neither.
    """
    value = query.get(name, str(usual)).lower()
    if value in _SWITCHES:
        return _SWITCHES[value]
    raise ApiError(400, f"{name} is {query[name][:50]!r}: give true or false", "invalid_value", name)


def _check_names(query: Mapping[str, str]) -> None:
    """Refuse parameters that are not known: samples at another rate than was meant would be heard as other sounds.

    Raises:
        ApiError: There is one.
    """
    known = {"language", "model", "sample_rate", "words", *map(_in_ms, STREAM_LIMITS)}
    for name in query:
        if name not in known:
            text = f"{name[:50]!r} is no parameter of a stream: those are {', '.join(sorted(known))}"
            raise ApiError(400, text, "unknown_parameter", name[:50])


def _in_ms(name: str) -> str:
    """The address's parameter for a field in seconds."""
    return f"{name.removesuffix('_s')}_ms"


def _stream_config(query: Mapping[str, str]) -> StreamConfig:
    """How the parameters of the address, in milliseconds, cut a stream.

    Raises:
        ApiError: One is wrong.
    """
    seconds: dict[str, float] = {}
    for name, (low, high) in STREAM_LIMITS.items():
        usual_ms = 1000 * getattr(StreamConfig, name)
        seconds[name] = _number(query, _in_ms(name), usual_ms, 1000 * low, 1000 * high) / 1000
    return StreamConfig(**seconds)


class StreamSession:
    """One stream.

    Args:
        service: The server's parts.
        websocket: The connection.
        model: What recognizes.

    Raises:
        ApiError: A parameter is wrong.
    """

    def __init__(self, service: SpeechService, websocket: WebSocket, model: LoadedModel) -> None:
        query = websocket.query_params
        _check_names(query)
        service.check_model(query.get("model", ""))
        self._service, self._websocket, self._model = service, websocket, model
        self._language = model.told(query.get("language", ""))
        self._words = _switch(query, "words", True) and model.words
        self._rate = int(_number(query, "sample_rate", 16000, *RATES_HZ))
        cfg, transcriber = _stream_config(query), model.transcriber
        self._stream: SpeechStream = open_stream(
            transcriber.recognizer, self._transcribe, transcriber.vad, self._rate, cfg, model.advance
        )
        longest = cfg.longest_s + _PENDING_S + _MARGIN_S
        self._recent = _RecentAudio(self._rate, longest if service.collector is not None else 0.0)
        self._pending = bytearray()
        self._wanted = 2
        """Bytes with which the stream can do more than keep them."""
        self._bytes, self._segments, self._said = 0, 0, 0
        self._end: str | None = None
        """Why the stream ends; None while it does not."""
        self._changed = asyncio.Condition()

    @property
    def _seconds(self) -> float:
        """Audio received so far."""
        return self._bytes / 2 / self._rate

    def _transcribe(self, wave: Samples, rate: int) -> Transcript:
        """Recognize a segment among the files and segments of others; in a thread of the stream's."""
        answer = self._model.queue.submit(
            wave, rate, words=self._words, language=self._language, within_s=_LATE_S, urgent=True
        )
        return answer.result(2 * _LATE_S)

    async def run(self) -> None:
        """Serve the stream."""
        begin, failure = time.monotonic(), ""
        reading, stopping = asyncio.create_task(self._read()), asyncio.create_task(self._watch())
        try:
            await self._send({"type": "ready", "model": self._service.switch.name, "version": self._model.version,
                              "sample_rate": self._rate})  # fmt: skip
            await self._recognize()
            await self._finish()
        except ApiError as error:
            failure = error.code
            await self._fail(error)
        except (WebSocketDisconnect, ConnectionError, TimeoutError):
            failure = "client_gone"
        finally:
            reading.cancel()
            stopping.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(reading, stopping, return_exceptions=True)
            if failure:
                self._service.metrics.rejected.labels(failure).inc()
            self._service.log.write(
                "stream", client=client_of(self._websocket.scope), version=self._model.version,
                seconds=self._seconds, segments=self._segments, words=self._said,
                took_s=time.monotonic() - begin, end=failure or self._end or "client",
            )  # fmt: skip

    async def _read(self) -> None:
        """Receive until the stream ends; waits while too much is pending, and so does the client then."""
        try:
            while self._end is None:
                async with asyncio.timeout(self._service.limits.idle_s):
                    message = await self._websocket.receive()
                if message["type"] == "websocket.disconnect":
                    await self._ends("gone")
                    return
                if data := message.get("bytes"):
                    await self._add(data)
                elif _is_end(message.get("text") or ""):
                    await self._ends("")
        except TimeoutError:
            await self._ends("idle")

    async def _add(self, data: bytes) -> None:
        async with self._changed:
            self._pending += data
            self._bytes += len(data)
            if self._seconds > self._service.limits.stream_seconds:
                self._end = self._end or "too_long"
            if self._enough:  # not for each message: most only add to what is kept
                self._changed.notify_all()
            most = int(2 * _PENDING_S * self._rate)
            await self._changed.wait_for(lambda: len(self._pending) <= most or self._end is not None)

    async def _watch(self) -> None:
        """End the stream when the server ends."""
        await self._service.stopping.wait()
        await self._ends("stopping")

    async def _ends(self, reason: str) -> None:
        async with self._changed:
            if self._end is None:
                self._end = reason
            self._changed.notify_all()

    async def _recognize(self) -> None:
        """Recognize what has arrived, until the stream ends."""
        while True:
            data = await self._arrived()
            if self._end == "gone":
                raise ConnectionResetError
            if not data:
                return
            self._recent.add(data)
            await self._tell(await self._in_thread(self._stream.accept, _samples(data)))

    @property
    def _enough(self) -> bool:
        """Whether there is something to do for the stream."""
        return len(self._pending) >= self._wanted or self._end is not None

    async def _arrived(self) -> bytes:
        """Whole samples: enough for the stream to do more than keep them, or the last ones."""
        self._wanted = 2 * min(self._stream.wanted, int(_PENDING_S * self._rate) // 2)
        async with self._changed:
            await self._changed.wait_for(lambda: self._enough)
            whole = len(self._pending) // 2 * 2
            data = bytes(self._pending[:whole])
            del self._pending[:whole]
            self._changed.notify_all()
        return data

    async def _finish(self) -> None:
        await self._tell(await self._in_thread(self._stream.finish))
        code, text = _ENDS[self._end or ""]
        if self._end:
            await self._send({"type": "error", "error": error_content(503, text, self._end)})
        await self._send({"type": "done", "seconds": round(self._seconds, 3), "segments": self._segments})
        await self._websocket.close(code, text)

    async def _in_thread(self, call: Callable[..., list[StreamResult]], *given: Samples) -> list[StreamResult]:
        """What the stream gives.

        Raises:
            ApiError: The recognizer fails.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._service.threads, call, *given)
        except (AudioError, DecodeError) as error:
            code = "bad_audio" if isinstance(error, AudioError) else "unusable_scores"
            raise ApiError(400, str(error), code) from error
        except (QueueClosedError, RecognitionLateError, TimeoutError) as error:
            raise ApiError(503, "the server is too busy to recognize the stream in time", "late") from error
        except Exception as error:
            log.exception("a stream failed")
            raise ApiError(500, "the server failed; its log says why", "server_error") from error

    async def _tell(self, results: list[StreamResult]) -> None:
        """Send results."""
        for result in results:
            content: dict[str, Any] = {
                "type": "final" if result.final else "partial",
                "segment": result.segment,
                "text": result.text,
                "start": round(result.start_s, 3),
                "end": round(result.end_s, 3),
                "confidence": round(result.confidence, 4),
            }
            if self._words:
                content["words"] = [word_content(word) for word in result.words]
            await self._send(content)
            if result.final:
                self._segments, self._said = self._segments + 1, self._said + len(result.text.split())
                self._note(result)

    def _note(self, result: StreamResult) -> None:
        """Count, log and perhaps collect a segment."""
        seconds = result.end_s - result.start_s
        piece = SpokenPiece.of(0.0, seconds, result.text, result.confidence, (word.confidence for word in result.words))
        wave = self._recent.cut(result.start_s, result.end_s)
        self._service.metrics.audio.labels(ROUTE).inc(seconds)
        self._service.recognized(ROUTE, self._model.version, [piece], wave, self._rate)

    async def _send(self, content: dict[str, Any]) -> None:
        """Send a message."""
        await self._websocket.send_text(json.dumps(content, ensure_ascii=False))

    async def _fail(self, error: ApiError) -> None:
        """Tell the client, if it is there, that the stream has failed."""
        with suppress(WebSocketDisconnect, OSError, TimeoutError):
            await self._send({"type": "error", **error.content()})
            await self._websocket.close(_CLOSES.get(error.status, 1011), error.code)


def _samples(data: bytes) -> Samples:
    """Samples [num_samples] in ±1 of 16-bit PCM."""
    return np.frombuffer(data, dtype="<i2").astype(np.float32) / _SCALE


class _RecentAudio:
    """The last seconds of a stream, of which segments can be cut.

    Args:
        rate: In Hz.
        seconds: How many, at least; 0 keeps nothing.
    """

    def __init__(self, rate: int, seconds: float) -> None:
        self._rate, self._most = rate, 2 * int(seconds * rate)
        self._data = bytearray()
        self._dropped = 0
        """Bytes of the stream before them."""

    def add(self, data: bytes) -> None:
        """Add 16-bit PCM."""
        if not self._most:
            return
        self._data += data
        if (more := len(self._data) - self._most) > self._most:  # seldom, since it copies what it keeps
            del self._data[:more]
            self._dropped += more

    def cut(self, start_s: float, end_s: float) -> Samples:
        """Samples [num_samples] between two times of the stream, as far as they are kept."""
        first, last = (max(0, 2 * round(time_s * self._rate) - self._dropped) for time_s in (start_s, end_s))
        return _samples(bytes(self._data[first:last]))


def _is_end(text: str) -> bool:
    """Whether a text message ends the stream; others are ignored, so that later versions may have more of them."""
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
        return isinstance(value, dict) and value.get("type") == "end"
    return False
