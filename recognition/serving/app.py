"""The application: transcriptions as OpenAI's API defines them, the list of models, health, figures and a page."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import soundfile
from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from recognition.serving import formats
from recognition.serving.gate import CODE_HEADER, Gate, authorized, client_of
from recognition.serving.limits import ApiError, Upload, error_content
from recognition.serving.metrics import CONTENT_TYPE
from recognition.serving.models import LoadedModel
from recognition.serving.queue import QueueClosedError, RecognitionLateError, RecordingTooLongError
from recognition.serving.service import SpeechService
from recognition.serving.streams import serve_stream
from recognition.transcriber import Transcript
from speech.audio import NO_END, AudioError, decode_audio

ROUTE = "/v1/audio/transcriptions"
_LOOK_S = 0.5
"""Seconds between two looks whether a waiting client is still there."""
_LONGEST_REASON = 200
"""Characters of the reason for which a form cannot be read."""
_TAIL = 16
"""Bytes that are kept of the end of a form."""
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline' blob:; connect-src 'self' ws: wss:; worker-src blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def create_app(service: SpeechService) -> ASGIApp:
    """The application.

    Args:
        service: The server's parts.
    """
    app = FastAPI(title="Starling", docs_url=None, redoc_url=None, openapi_url=None)
    page = files("recognition.serving").joinpath("page.html").read_text(encoding="utf-8")

    @app.post(ROUTE)
    async def transcribe(request: Request) -> Response:
        return await _transcription(service, request)

    @app.websocket("/stream")
    async def stream(websocket: WebSocket) -> None:
        await serve_stream(service, websocket)

    @app.get("/stream")
    async def no_websocket() -> None:
        raise ApiError(426, "open /stream as a WebSocket", "no_websocket", headers={"Upgrade": "websocket"})

    @app.websocket("/{path:path}")
    async def no_stream(_: WebSocket) -> None:
        raise ApiError(404, "there is no stream at this path: open /stream", "not_found")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model(service)

    @app.get("/healthz")
    async def health(request: Request) -> Response:
        return _health(service, full=authorized(request.scope, service.token))

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.figures(), media_type=CONTENT_TYPE)

    @app.get("/")
    async def index() -> Response:
        return HTMLResponse(page, headers=_PAGE_HEADERS)

    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _failed)
    return Gate(app, service)


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    if request.scope["type"] == "websocket":  # the gate answers, since a stream's handshake takes no response from here
        raise error
    return JSONResponse(error.content(), error.status, {**error.headers, CODE_HEADER: error.code})


def _failed(_: Request, error: Exception) -> Response:
    """The answer to a request that met a bug; the gate logs the error."""
    answer = ApiError(500, "the server failed; its log says why", "server_error")
    return JSONResponse(answer.content(), 500, {CODE_HEADER: type(error).__name__})


def _http_error(_: Request, error: Exception) -> Response:
    """What the framework refuses: an unknown path, or a method that a path does not have."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "bad_request")
    text = {404: "there is no such path", 405: "the path does not have this method"}.get(
        error.status_code, error.detail
    )
    headers = {**(error.headers or {}), CODE_HEADER: code}
    return JSONResponse({"error": error_content(error.status_code, text, code)}, error.status_code, headers)


def _model(service: SpeechService) -> dict[str, Any]:
    current = service.switch.current
    return {
        "id": service.switch.name,
        "object": "model",
        "created": current.loaded_at,
        "owned_by": "starling",
        "version": current.version,
    }


def _health(service: SpeechService, full: bool) -> Response:
    """Health: 200 while requests are answered, even if a newer model cannot be; 503 while the server ends."""
    switch, stopping = service.switch, service.stopping.is_set()
    content: dict[str, Any] = {"status": "stopping" if stopping else "degraded" if switch.problem else "ok"}
    if full:
        content |= {"model": switch.name, "version": switch.current.version, "problem": switch.problem}
        content |= {"collects": service.collector is not None}
        content |= {"files_waiting": service.admission.files, "streams": service.admission.streams}
    return JSONResponse(content, 503 if stopping else 200)


@dataclass(frozen=True)
class _Wanted:
    """What a client asks for."""

    kind: str
    granularities: frozenset[str]
    language: str

    @classmethod
    def of(cls, form: FormData, service: SpeechService) -> _Wanted:
        """Read the fields of a form.

        Raises:
            ApiError: One is wrong.
        """
        service.check_model(_field(form, "model"))
        kind = _field(form, "response_format") or "json"
        if kind not in formats.FORMATS:
            text = f"response_format is {kind[:50]!r}: give {', '.join(formats.FORMATS)}"
            raise ApiError(400, text, "invalid_value", "response_format")
        name = "timestamp_granularities[]"
        given = [value for key in (name, name[:-2]) for value in form.getlist(key)]
        if unknown := [value for value in given if value not in formats.GRANULARITIES]:
            text = f"{name} is {str(unknown[0])[:50]!r}: give {' or '.join(formats.GRANULARITIES)}"
            raise ApiError(400, text, "invalid_value", name)
        if given and kind != "verbose_json":
            raise ApiError(400, f"{name} needs response_format verbose_json", "invalid_value", name)
        return cls(kind, frozenset(map(str, given or ["segment"])), _field(form, "language"))

    @property
    def words(self) -> bool:
        """Whether the answer has times of words, or of segments, which follow from them."""
        return self.kind in (*formats.TIMED, "verbose_json")

    def check_times(self, model: LoadedModel) -> None:
        """Check that the model knows the times that are asked for.

        Raises:
            ApiError: It does not.
        """
        if not model.words and (self.kind in formats.TIMED or "word" in self.granularities):
            text = "this model does not know when words are: ask for json, text, or verbose_json with segments"
            raise ApiError(400, text, "times_unknown", "response_format")


def _field(form: FormData, name: str) -> str:
    value = form.get(name)
    return value if isinstance(value, str) else ""


async def _transcription(service: SpeechService, request: Request) -> Response:
    admission, begin = service.admission, time.monotonic()
    with admission.client(client_of(request.scope)), admission.upload() as upload:
        if service.stopping.is_set():
            raise ApiError(503, "the server ends", "stopping")
        admission.check_queue()
        wanted, data = await _received(service, request, upload)
        with admission.waiting(), service.switch.use() as model:
            wanted.check_times(model)
            told = model.told(wanted.language)
            await asyncio.to_thread(check_audio, data, service.limits.file_seconds)
            received = time.monotonic()
            words = model.words and (wanted.words or not model.transcriber.times_cost)
            transcript = await _recognized(service, request, model, data, words, told)
    now = time.monotonic()
    service.metrics.audio.labels(ROUTE).inc(transcript.seconds)
    service.recognized(ROUTE, model.version, transcript.pieces, data)
    service.log.write(
        "file",
        client=client_of(request.scope),
        version=model.version,
        bytes=len(data),
        seconds=transcript.seconds,
        words=len(transcript.text.split()),
        confidence=transcript.confidence,
        format=wanted.kind,
        upload_s=received - begin,
        took_s=now - received,
        rate=transcript.seconds / max(1e-3, now - received),
    )
    content = formats.body(wanted.kind, transcript, wanted.granularities, transcript.language or wanted.language)
    return PlainTextResponse(content) if isinstance(content, str) else JSONResponse(content)


async def _received(service: SpeechService, request: Request, upload: Upload) -> tuple[_Wanted, bytes]:
    """The fields and the file of a request.

    Raises:
        ApiError: The form is malformed, too large, too slow, or lacks something.
    """
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise ApiError(415, "send a form: multipart/form-data with the fields file and model", "not_a_form")
    length = request.headers.get("content-length", "")
    upload.check(int(length) if length.isdigit() else 0)
    bounded = _BoundedRequest(request.scope, request.receive)
    bounded.count, bounded.idle_s = upload.add, service.limits.idle_s
    try:
        async with asyncio.timeout(service.limits.upload_s):
            form = await bounded.form(max_files=1, max_fields=64, max_part_size=16384)
    except TimeoutError as error:
        raise ApiError(408, "the file did not arrive in time", "upload_too_slow") from error
    except (ApiError, ConnectionError):
        raise
    except (HTTPException, ValueError, KeyError) as error:
        reason = f": {error.detail[:_LONGEST_REASON]}" if isinstance(error, HTTPException) else ""
        raise ApiError(400, f"the form is malformed{reason}", "malformed_form") from error
    try:
        wanted, file = _Wanted.of(form, service), form.get("file")
        if file is None and not bounded.ended:
            text = "the form has no end: the upload was cut off, or its content-length is too small; send it again"
            raise ApiError(400, text, "malformed_form")
        if not isinstance(file, UploadFile):
            raise ApiError(400, "the form has no file: send the audio in the field file", "missing", "file")
        return wanted, await file.read()
    finally:
        await form.close()


class _BoundedRequest(Request):
    """A request whose body is counted while it arrives, and whose client may not pause for long."""

    count: Callable[[int], object]
    idle_s: float
    _tail = b""

    @property
    def ended(self) -> bool:
        """Whether the last line of the body is the last boundary of a form."""
        return self._tail.rstrip().endswith(b"--")

    async def stream(self) -> AsyncIterator[bytes]:  # type: ignore[override]
        chunks = super().stream()
        while True:
            async with asyncio.timeout(self.idle_s):
                chunk = await anext(chunks, None)
            if chunk is None:
                return
            self.count(len(chunk))
            self._tail = (self._tail + chunk[-_TAIL:])[-_TAIL:]
            yield chunk


def check_audio(data: bytes, most_seconds: float) -> None:
    """Check that a file can be read, and is not too long; reads its beginning only.

    Args:
        data: The file.
        most_seconds: Longest one.

    Raises:
        ApiError: It is not.
    """
    try:
        decode_audio(data, end=0.1)
        info = soundfile.info(io.BytesIO(data))
    except AudioError as error:
        status, code = (400, "empty_audio") if error.reason == "empty" else (415, "unsupported_audio")
        raise ApiError(status, str(error), code, "file") from error
    except (soundfile.SoundFileError, RuntimeError) as error:
        raise ApiError(415, "the file cannot be read as audio", "unsupported_audio", "file") from error
    if info.frames < NO_END and info.frames > most_seconds * info.samplerate:
        raise _too_long(most_seconds)


def _too_long(most_seconds: float) -> ApiError:
    return ApiError(413, f"the recording is longer than {most_seconds:g} s: send it in parts", "audio_too_long", "file")


async def _recognized(
    service: SpeechService, request: Request, model: LoadedModel, data: bytes, words: bool, language: str
) -> Transcript:
    """The transcript of a file, unless the client goes away.

    Raises:
        ApiError: It cannot be recognized, or not in time.
    """
    limits = service.limits
    try:
        answer: Future[Transcript] = model.queue.submit(
            data,
            words=words,
            language=language,
            within_s=limits.request_s,
            most_seconds=limits.file_seconds,
        )
        waiting = asyncio.wrap_future(answer)
        try:
            while not (await asyncio.wait([waiting], timeout=_LOOK_S))[0]:
                if await request.is_disconnected():
                    raise ConnectionResetError
        finally:
            answer.cancel()
        transcript = waiting.result()
    except RecordingTooLongError as error:
        raise _too_long(limits.file_seconds) from error
    except (RecognitionLateError, QueueClosedError) as error:
        raise ApiError(503, str(error), "late", headers={"Retry-After": "5"}) from error
    if transcript.error:
        raise ApiError(400, transcript.error, "unreadable_audio", "file")
    return transcript
