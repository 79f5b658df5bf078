"""Clients of `benchmarks.serving` that misbehave: `python -m benchmarks.serving_bad_clients KIND --port PORT`.

They are a process of their own, so that they do not hold up the good clients' event loop. Kinds:

- slow: headers, uploads and streams of a byte or a few samples now and then, and streams whose results are not read;
- silent: connections, requests and streams without a word;
- half-closed: clients that end their side in the middle, and wait;
- garbage: bytes at random, before and after a WebSocket is opened, and files that are no audio;
- many: connections that are all opened at once, say nothing and stay; those that are closed are opened again. The
  process needs as many open files (`ulimit -n`).
"""

import argparse
import asyncio
import base64
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

SOURCE = "127.0.0.2"
"""Their address, which is not that of the good clients: limits of a client are those of an address."""
BEGUN = "all have come"
_PAUSE_S = 0.3
"""Between two bytes of slow clients."""
_AGAIN_S, _MANY_AGAIN_S = 0.2, 60
"""Before a client comes again; of very many, some come each second."""
_POST = "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: localhost\r\n"
_FORM = f"{_POST}Content-Type: multipart/form-data; boundary=x\r\nContent-Length: "
_PART = '--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
_TLS = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"

counts: Counter[str] = Counter()


class Connection:
    """A TCP connection without any protocol."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> "Connection":
        counts["opened"] += 1
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port, local_addr=(SOURCE, 0))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.transport.abort()

    async def send(self, data: bytes) -> None:
        """Send bytes; waits while the server does not read."""
        self.writer.write(data)
        await self.writer.drain()

    async def trickle(self, data: bytes) -> None:
        """Send bytes, one now and then, until the server closes the connection."""
        while True:
            for byte in data:
                await self.send(bytes([byte]))
                await asyncio.sleep(_PAUSE_S)

    async def rest(self) -> bytes:
        """What the server says until it closes the connection."""
        return await self.reader.read(-1)

    async def open_stream(self) -> None:
        """Become a WebSocket; nothing checks that the server agrees."""
        key = base64.b64encode(os.urandom(16)).decode()
        head = "GET /stream HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        await self.send(f"{head}Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode())
        await self.reader.readuntil(b"\r\n\r\n")

    async def say(self, data: bytes) -> None:
        """Send a binary message of a WebSocket, of 126 to 65535 bytes."""
        await self.send(b"\x82" + bytes([0x80 | 126]) + len(data).to_bytes(2, "big") + bytes(4) + data)


async def slow_headers(link: Connection) -> None:
    """Headers that never end."""
    await link.send(b"GET / HTTP/1.1\r\n")
    await link.trickle(b"X: y\r\n")


async def slow_upload(link: Connection) -> None:
    """A file that comes byte by byte."""
    await link.send(f"{_FORM}1000000\r\n\r\n{_PART}".encode())
    await link.trickle(b"-")


async def slow_stream(link: Connection) -> None:
    """A stream that gets 10 ms of audio now and then."""
    await link.open_stream()
    while True:
        await link.say(bytes(320))
        await asyncio.sleep(_PAUSE_S)


async def deaf_stream(link: Connection) -> None:
    """A stream whose results are not read."""
    await link.open_stream()
    link.writer.transport.pause_reading()  # type: ignore[attr-defined]
    while True:
        await link.say(random.randbytes(3200))
        await asyncio.sleep(0.1)


async def silent(link: Connection) -> None:
    """Not a byte."""
    await link.rest()


async def silent_request(link: Connection) -> None:
    """A request without its body."""
    await link.send(f"{_FORM}1000\r\n\r\n".encode())
    await link.rest()


async def silent_stream(link: Connection) -> None:
    """A stream without audio."""
    await link.open_stream()
    await link.rest()


def half_closed(start: Callable[[Connection], Awaitable[None]]) -> Callable[[Connection], Awaitable[None]]:
    """A client that ends its side after a start, and waits."""

    async def behave(link: Connection) -> None:
        await start(link)
        link.writer.write_eof()
        await link.rest()

    return behave


def sends(*data: bytes) -> Callable[[Connection], Awaitable[None]]:
    """A client that sends bytes and waits for the end."""

    async def behave(link: Connection) -> None:
        for part in data:
            await link.send(part)
        await link.rest()

    return behave


async def _nothing(_: Connection) -> None:
    pass


async def _half_form(link: Connection) -> None:
    await link.send(f"{_FORM}1000\r\n\r\n{_PART}".encode())


async def _spoken(link: Connection) -> None:
    await link.open_stream()
    await link.say(bytes(32000))


async def garbage_stream(link: Connection) -> None:
    """A WebSocket with bytes at random instead of messages."""
    await link.open_stream()
    await link.send(random.randbytes(5000))
    await link.rest()


async def noise_stream(link: Connection) -> None:
    """A stream of noise, in messages that do not end with a sample, at its own speed for a second."""
    await link.open_stream()
    for _ in range(10):
        await link.say(random.randbytes(3201))
        await asyncio.sleep(0.1)


def _file(content: bytes) -> bytes:
    body = _PART.encode() + content + b"\r\n--x--\r\n"
    return f"{_FORM}{len(body)}\r\nConnection: close\r\n\r\n".encode() + body


KINDS: dict[str, Sequence[Callable[[Connection], Awaitable[None]]]] = {
    "slow": (slow_headers, slow_upload, slow_stream, deaf_stream),
    "silent": (silent, silent_request, silent_stream),
    "half-closed": tuple(map(half_closed, (_nothing, _half_form, Connection.open_stream, _spoken))),
    "garbage": (
        *map(sends, (_TLS, b"garbage\r\n\r\n", random.randbytes(100_000))),
        *(sends(_file(content)) for content in (random.randbytes(50_000), b"RIFF" + bytes(40))),
        garbage_stream,
        noise_stream,
    ),
    "many": (silent,),
}


async def misbehave(kind: str, port: int, count: int, on_begin: Callable[[], object] = lambda: None) -> None:
    """Keep a number of bad clients, until this is cancelled; who is turned away comes again.

    Args:
        kind: Of `KINDS`.
        port: Of the server.
        count: How many.
        on_begin: Called when all of them have come once.
    """
    left = count

    async def client(number: int) -> None:
        nonlocal left
        behaviour, new = KINDS[kind][number % len(KINDS[kind])], True
        while True:
            try:
                async with Connection(port) as link:
                    if new:
                        new, left = False, left - 1
                        if not left:
                            on_begin()
                    await behaviour(link)
                counts["ended"] += 1
            except (OSError, EOFError, asyncio.LimitOverrunError) as error:
                counts[type(error).__name__] += 1
            await asyncio.sleep(number % _MANY_AGAIN_S if kind == "many" else _AGAIN_S)

    await asyncio.gather(*(client(number) for number in range(count)))


def main() -> None:
    """Misbehave until SIGTERM or the time is over; prints when all clients have come, and at the end counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--port", type=int, required=True, help="of the server, on 127.0.0.1")
    parser.add_argument("--count", type=int, default=64, help="clients")
    parser.add_argument("--after", type=float, default=0.0, metavar="SECONDS", help="before they come")
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which they go")
    options = parser.parse_args()

    async def run() -> None:
        await asyncio.sleep(options.after)
        with suppress(TimeoutError):
            bad = misbehave(options.kind, options.port, options.count, lambda: print(BEGUN, flush=True))
            await asyncio.wait_for(bad, options.seconds)

    asyncio.run(run())
    print(dict(counts))


if __name__ == "__main__":
    main()
