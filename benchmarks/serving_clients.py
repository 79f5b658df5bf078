"""Clients of `benchmarks.serving`: speakers who send audio as fast as it is spoken, and senders of files.

Each server's own protocol is a class, so that the same clients speak to all servers.
"""

import asyncio
import http.client
import io
import json
import time
import wave
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import cycle, islice
from threading import Event, Thread

import numpy as np
from typing_extensions import override
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as connect_stream
from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection as SyncConnection
from websockets.sync.client import connect

PIECE_S = 0.1
"""Audio of a message, in seconds."""
_LOOK_S = 0.02
"""Time between two looks at how late the clients themselves are."""


@dataclass(frozen=True)
class Clip:
    """An utterance as 16-bit PCM of one channel."""

    pcm: bytes
    rate: int

    @property
    def seconds(self) -> float:
        """Its length."""
        return len(self.pcm) / 2 / self.rate

    @cached_property
    def wav(self) -> bytes:
        """It as a WAV file."""
        file = io.BytesIO()
        with wave.open(file, "wb") as writer:
            writer.setparams((1, 2, self.rate, 0, "NONE", ""))
            writer.writeframes(self.pcm)
        return file.getvalue()

    @cached_property
    def floats(self) -> bytes:
        """Its samples in ±1, as float32."""
        return (np.frombuffer(self.pcm, "<i2").astype("<f4") / 32768).tobytes()


def mean_seconds(clips: Sequence[Clip]) -> float:
    """Mean length of utterances."""
    return sum(clip.seconds for clip in clips) / len(clips)


@dataclass
class Spoken:
    """What became of one utterance of a stream."""

    clip: int
    begin: float
    """On the clock of the event loop, as all times."""
    first_s: float | None = None
    """From the start of the utterance to the first result with words."""
    final_s: float | None = None
    """From the end of the utterance to the last result."""
    segments: dict[int, str] = field(default_factory=dict)
    lost: str = ""
    """Why there is no last result; empty if there is."""

    @property
    def text(self) -> str:
        """All words."""
        return " ".join(" ".join(self.segments.values()).split())

    def hear(self, segment: int, text: str, now: float) -> None:
        """Note a result of a segment."""
        self.segments[segment] = text
        if text.strip() and self.first_s is None:
            self.first_s = now - self.begin


class StreamProtocol(ABC):
    """How a server is spoken to."""

    end: str
    """The message after the last samples."""

    @abstractmethod
    def address(self, port: int, rate: int) -> str:
        """Where a stream is opened."""

    @abstractmethod
    def samples(self, clip: Clip) -> tuple[bytes, int]:
        """The samples as they are sent, and bytes of each."""

    @abstractmethod
    def hear(self, message: str, spoken: Spoken, now: float) -> bool:
        """Note what a message says; returns whether it is the last one."""


class OwnStreams(StreamProtocol):
    """`starling serve`, see docs/serving.md.

    Args:
        chunk_ms: Audio between two partial results; 0: as usual.
    """

    end = json.dumps({"type": "end"})

    def __init__(self, chunk_ms: float = 0.0) -> None:
        self._query = f"&partial_ms={chunk_ms:g}" if chunk_ms else ""

    @override
    def address(self, port: int, rate: int) -> str:
        return f"ws://127.0.0.1:{port}/stream?sample_rate={rate}{self._query}"

    @override
    def samples(self, clip: Clip) -> tuple[bytes, int]:
        return clip.pcm, 2

    @override
    def hear(self, message: str, spoken: Spoken, now: float) -> bool:
        content = json.loads(message)
        if content["type"] in ("partial", "final"):
            spoken.hear(content["segment"], content["text"], now)
        if content["type"] == "error":
            spoken.lost = content["error"]["code"]
        return content["type"] in ("done", "error")


class SherpaStreams(StreamProtocol):
    """The streaming servers of sherpa-onnx, that in C++ and that in Python: samples are float32."""

    end = "Done"

    @override
    def address(self, port: int, rate: int) -> str:
        return f"ws://127.0.0.1:{port}"

    @override
    def samples(self, clip: Clip) -> tuple[bytes, int]:
        return clip.floats, 4

    @override
    def hear(self, message: str, spoken: Spoken, now: float) -> bool:
        if message == "Done!":
            return True
        content = json.loads(message)
        spoken.hear(content["segment"], content["text"], now)
        return False


async def speak(protocol: StreamProtocol, port: int, clip: Clip, number: int, patience_s: float, source: str) -> Spoken:
    """Speak an utterance at its own speed; the connection is opened when the speaker begins.

    Latencies count from when a sample is spoken, even if it could not be sent then.

    Args:
        protocol: Of the server.
        port: Of the server.
        clip: The utterance.
        number: The utterance's number.
        patience_s: Time for the last result after the end; then the utterance is lost.
        source: Address to connect from.
    """
    loop = asyncio.get_running_loop()
    spoken = Spoken(number, loop.time())
    options = {"compression": None, "max_size": None, "proxy": None, "open_timeout": None, "ping_interval": None}
    try:
        async with asyncio.timeout(clip.seconds + patience_s):
            address = protocol.address(port, clip.rate)
            async with connect_stream(address, local_addr=(source, 0), **options) as connection:
                sending = asyncio.create_task(_send(protocol, connection, clip, spoken.begin))
                try:
                    await _listen(protocol, connection, spoken, spoken.begin + clip.seconds)
                finally:
                    sending.cancel()
                    await asyncio.gather(sending, return_exceptions=True)
    except (OSError, TimeoutError, WebSocketException) as error:
        if spoken.final_s is None:
            spoken.lost = spoken.lost or type(error).__name__
    if spoken.final_s is None:
        spoken.lost = spoken.lost or "closed"
    return spoken


async def _listen(protocol: StreamProtocol, connection: ClientConnection, spoken: Spoken, end: float) -> None:
    """Hear until the last message; `end` is when the utterance ends."""
    loop = asyncio.get_running_loop()
    async for message in connection:
        if protocol.hear(str(message), spoken, loop.time()):
            if not spoken.lost:
                spoken.final_s = loop.time() - end
            return


async def _send(protocol: StreamProtocol, connection: ClientConnection, clip: Clip, begin: float) -> None:
    """Send each piece when it has been spoken."""
    loop = asyncio.get_running_loop()
    data, width = protocol.samples(clip)
    size = width * int(PIECE_S * clip.rate)
    for start in range(0, len(data), size):
        piece = data[start : start + size]
        await asyncio.sleep(begin + (start + len(piece)) / width / clip.rate - loop.time())
        await connection.send(piece)
    await connection.send(protocol.end)


@dataclass
class Talk:
    """What became of all streams in some time."""

    spoken: list[Spoken]
    """Utterances that began after the warm-up, in the order of their ends."""
    warm_up: list[Spoken]
    lag_s: list[float]
    """How late the clients' own event loop was."""


async def talk(
    protocol: StreamProtocol,
    port: int,
    clips: Sequence[Clip],
    streams: int,
    seconds: float,
    patience_s: float,
    source: Callable[[int], str],
) -> Talk:
    """Speak in a number of streams at once, each utterance after the other.

    The streams begin one by one during the mean length of an utterance, which is not counted.

    Args:
        protocol: As for `speak`; likewise the others that are not listed.
        port: Of the server.
        clips: What is said.
        streams: How many.
        seconds: Time in which counted utterances begin.
        patience_s: As for `speak`.
        source: Address that a stream connects from, by its number.
    """
    loop = asyncio.get_running_loop()
    warm_s = mean_seconds(clips)
    start = loop.time() + warm_s
    lag, done = [], Talk([], [], [])

    async def speaker(number: int) -> None:
        await asyncio.sleep(warm_s * number / streams)
        for place in islice(cycle(range(len(clips))), number * 7 % len(clips), None):
            if loop.time() >= start + seconds:
                return
            spoken = await speak(protocol, port, clips[place], place, patience_s, source(number))
            (done.spoken if spoken.begin >= start else done.warm_up).append(spoken)
            if spoken.lost:
                await asyncio.sleep(PIECE_S)  # a server that refuses is not asked without a pause

    async def watch() -> None:
        while True:
            due = loop.time() + _LOOK_S
            await asyncio.sleep(_LOOK_S)
            lag.append(loop.time() - due)

    watching = asyncio.create_task(watch())
    try:
        await asyncio.gather(*(speaker(number) for number in range(streams)))
    finally:
        watching.cancel()
    done.lag_s = lag
    return done


# --- files


class FileClient(ABC):
    """A connection that sends one file after the other; it is opened when it is needed.

    Args:
        port: Of the server.
        model: Name of the model, if the server asks for one.
        source: Address to connect from.
    """

    def __init__(self, port: int, model: str = "", source: str | None = None) -> None:
        self.port, self.model, self.source = port, model, (source, 0) if source else None

    @abstractmethod
    def recognize(self, clip: Clip) -> str:
        """The words of a file."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""


class OpenAiFiles(FileClient):
    """`POST /v1/audio/transcriptions`, as `starling serve` and others have it."""

    def __init__(self, port: int, model: str = "", source: str | None = None) -> None:
        super().__init__(port, model, source)
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600, source_address=self.source)

    @override
    def recognize(self, clip: Clip) -> str:
        mark = "end-of-a-part"
        head = f'--{mark}\r\nContent-Disposition: form-data; name="model"\r\n\r\n{self.model}\r\n--{mark}\r\n'
        head += 'Content-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
        body = head.encode() + clip.wav + f"\r\n--{mark}--\r\n".encode()
        about = {"Content-Type": f"multipart/form-data; boundary={mark}"}
        self._connection.request("POST", "/v1/audio/transcriptions", body, about)
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise OSError(f"{answer.status}: {content[:200]!r}")
        return str(json.loads(content)["text"])

    @override
    def close(self) -> None:
        self._connection.close()


class SherpaFiles(FileClient):
    """sherpa-onnx's server for files, which are sent as samples in ±1."""

    _connection: SyncConnection | None = None

    @override
    def recognize(self, clip: Clip) -> str:
        if self._connection is None:
            address = f"ws://127.0.0.1:{self.port}"
            self._connection = connect(address, compression=None, max_size=None, proxy=None, source_address=self.source)
        head = np.array([clip.rate, len(clip.floats)], "<i4").tobytes()
        self._connection.send(head + clip.floats)
        return str(json.loads(self._connection.recv(600))["text"])

    @override
    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


@dataclass
class Sent:
    """What became of one file."""

    clip: int
    took_s: float
    text: str = ""
    lost: str = ""
    """Why there is no text; empty if there is."""


def ask(client: FileClient, clip: Clip, number: int) -> Sent:
    """Send a file and wait for the answer; after an error the connection is closed.

    Args:
        client: The connection.
        clip: The file.
        number: Its number.
    """
    begin = time.perf_counter()
    try:
        text = client.recognize(clip)
        return Sent(number, time.perf_counter() - begin, " ".join(text.split()))
    except (OSError, http.client.HTTPException, WebSocketException, ValueError) as error:
        client.close()
        time.sleep(PIECE_S)  # a server that refuses is not asked without a pause
        return Sent(number, time.perf_counter() - begin, lost=str(error) or type(error).__name__)


def send_files(
    open_client: Callable[[], FileClient], clips: Sequence[Clip], connections: int, seconds: float
) -> tuple[list[Sent], float]:
    """Send files over a number of connections, each after the answer to the one before.

    Args:
        open_client: Makes a connection.
        clips: The files, in turns.
        connections: Number of connections.
        seconds: Time in which files are sent.

    Returns:
        What became of each file, and the seconds until the last answer.
    """
    begin = time.perf_counter()

    def send(number: int) -> list[Sent]:
        sent = []
        with closing(open_client()) as client:
            for place in islice(cycle(range(len(clips))), number * 7 % len(clips), None):
                if time.perf_counter() - begin >= seconds:
                    break
                sent.append(ask(client, clips[place], place))
        return sent

    with ThreadPoolExecutor(connections) as pool:
        sent = [file for files in pool.map(send, range(connections)) for file in files]
    return sent, time.perf_counter() - begin


@contextmanager
def uploads(open_client: Callable[[], FileClient], clips: Sequence[Clip], every_s: float) -> Iterator[list[Sent]]:
    """Send a file now and then while the block runs, each over a new connection.

    Args:
        open_client: Makes a connection.
        clips: The files, in turns.
        every_s: Pause between two; 0: no file.

    Yields:
        What became of each file; complete after the block.
    """
    sent: list[Sent] = []
    over = Event()

    def send() -> None:
        for number, clip in cycle(enumerate(clips)):
            if over.wait(every_s):
                return
            with closing(open_client()) as client:
                sent.append(ask(client, clip, number))

    thread = Thread(target=send, daemon=True)
    if every_s:
        thread.start()
    try:
        yield sent
    finally:
        over.set()
        if every_s:
            thread.join(600.0)
