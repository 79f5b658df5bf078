"""A real server in a thread, with a model that recognizes tones, for tests."""

import asyncio
import json
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import numpy as np
import torch
from support import load_beside
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from recognition.serving.app import create_app
from recognition.serving.collecting import Collector
from recognition.serving.connections import DrainingServer, listen
from recognition.serving.limits import ServeLimits
from recognition.serving.log import RequestLog
from recognition.serving.metrics import ServeMetrics
from recognition.serving.models import LoadedModel, ModelSwitch
from recognition.serving.service import SpeechService
from recognition.transcriber import Transcriber
from speech.audio import encode_flac
from speech.vad import EnergyConfig

tones = load_beside(__file__, "test_transcriber.py")
RATE, WORDS, speak = tones.RATE, tones.WORDS, tones.speak


class LoudestOfSix(tones.LoudestBand):
    """`gate` holds it up, `broken` fails it."""

    def __init__(self):
        super().__init__()
        self.gate, self.broken, self.batches = threading.Event(), False, []
        self.gate.set()

    def forward(self, feats, lengths):
        self.batches.append(len(lengths))
        assert self.gate.wait(240)
        if self.broken:
            raise RuntimeError("the model is broken")
        return super().forward(feats, lengths)


def tone_transcriber(folder):
    """A transcriber that makes no errors; its bundle is written to the folder."""
    tones.write_bundle(folder)
    transcriber = Transcriber(folder, vad=EnergyConfig(), batch_seconds=30.0)
    transcriber.recognizer.model = LoudestOfSix()
    return transcriber


def silence(seconds):
    return np.zeros(int(seconds * RATE), dtype=np.float32)


def flac(wave):
    return encode_flac(torch.from_numpy(wave), RATE)


def pcm(wave):
    return (wave * 32767).astype("<i2").tobytes()


@contextmanager
def running(transcriber, *, version="1", **options):
    """A server of a model called tones.

    Args:
        transcriber: Its model.
        version: The model's.
        **options: As for `serving`.

    Yields:
        As `serving`.
    """
    metrics = ServeMetrics()
    switch = ModelSwitch("tones", LoadedModel(version, transcriber, on_batch=metrics.batch))
    with serving(switch, metrics=metrics, on_end=transcriber.recognizer.model.gate.set, **options) as server:
        yield server


@contextmanager
def serving(switch, *, metrics=None, token=None, log=None, with_text=False, collect=None, on_end=None, **limits):
    """A server on a free port of this machine.

    Args:
        switch: Its model.
        metrics: Its figures.
        token: What clients show.
        log: File of its log.
        with_text: Whether that has text.
        collect: Folder for doubtful utterances, and below which confidence they are.
        on_end: Called before it is ended.
        **limits: Its limits.

    Yields:
        Its `url`, `port`, `service`, `switch` and `server`.
    """
    metrics = metrics or ServeMetrics()
    collector = Collector(collect[0], switch.name, metrics, collect[1]) if collect else None
    service = SpeechService(switch, ServeLimits(**limits), token, RequestLog(log, with_text), metrics, collector)
    server = DrainingServer(create_app(service), service)
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    thread = threading.Thread(target=server.run_on, args=(listener,), daemon=True)
    thread.start()
    try:
        yield SimpleNamespace(
            url=f"http://127.0.0.1:{port}", port=port, service=service, switch=switch, server=server, thread=thread
        )
    finally:
        if on_end is not None:
            on_end()
        server.should_exit = server.force_exit = True
        thread.join(240)
        switch.current.queue.close(240)
        if collector is not None:
            collector.close(240)
        service.log.close()
        assert not thread.is_alive()


def fetch(url, data=None, headers=None, timeout=240):
    """Status, headers and content of an answer; JSON is parsed."""
    request = urllib.request.Request(url, data, headers or {})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            status, about, content = answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        status, about, content = error.code, error.headers, error.read()
    if about.get_content_type() == "application/json":
        content = json.loads(content)
    return status, about, content


def form(audio, name="file", **fields):
    """A form with a file: its body, and its headers."""
    mark = "tones-and-fields"
    parts = []
    for field, values in fields.items():
        for value in values if isinstance(values, list) else [values]:
            parts.append(f'--{mark}\r\nContent-Disposition: form-data; name="{field}"\r\n\r\n{value}\r\n'.encode())
    if audio is not None:
        head = f'--{mark}\r\nContent-Disposition: form-data; name="{name}"; filename="a.flac"\r\n'
        parts.append(f"{head}Content-Type: audio/flac\r\n\r\n".encode() + audio + b"\r\n")
    return b"".join([*parts, f"--{mark}--\r\n".encode()]), {"Content-Type": f"multipart/form-data; boundary={mark}"}


def post(server, audio, headers=None, **fields):
    """The answer to a transcription."""
    body, about = form(audio, **{"model": "tones", **fields})
    return fetch(f"{server.url}/v1/audio/transcriptions", body, about | (headers or {}))


def in_background(call, *given, **named):
    """Call in a thread; `result()` waits for what it returns."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(call(*given, **named)), daemon=True)
    thread.start()

    def result():
        thread.join(240)
        return answers[0]

    return SimpleNamespace(result=result, thread=thread)


def stream(server, query="", **options):
    """A connection for a stream at the model's rate."""
    url = f"ws://127.0.0.1:{server.port}/stream?sample_rate={RATE}{query}"
    return connect(url, open_timeout=240, proxy=None, **options)


def messages(connection):
    """All messages until the connection is closed."""
    heard = []
    with suppress(ConnectionClosed):
        while True:
            heard.append(json.loads(connection.recv(240)))
    return heard


def on_loop(server, call):
    """Run a function in the event loop of a server; what it returns."""
    loop = next(iter(server.server.servers)).get_loop()

    async def run():
        return call()

    return asyncio.run_coroutine_threadsafe(run(), loop).result(240)
