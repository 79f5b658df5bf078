"""Load on a server: `python -m benchmarks.serving COMMAND --config configs/fsdd_streaming.yaml [--model MODEL]`.

The server has one core, the clients have the others (taskset). Clients speak clips of the configuration's test set at
their own speed, joined to utterances of some seconds, each over a WebSocket of its own: 16-bit PCM, ten messages a
second. All latencies count from when a sample is spoken, whether or not it could be sent then.

- `streams`: how many streams the core holds, by doubling and bisection. A number is held if p99 of the last result's
  delay after the end of an utterance is at most --limit-s, and no utterance is lost. For each number tried: delays of
  the first result with words (from the start of the utterance, so with what has to be said before there is a word)
  and of the last one, at p50, p95 and p99; the share of the core; memory.
- `files`: seconds of audio per second through POST /v1/audio/transcriptions, at several numbers of connections.
- `soak`: 80 % of the streams that are held, and a file now and then, for minutes: memory, open files, what is lost.
- `clients`: the same good clients alone, and beside each kind of bad ones (benchmarks.serving_bad_clients): their
  delays, what is lost, and utterances with other words than before.

Rivals take turns with `starling serve`, number by number, and are suspended while another server is measured:

    --sherpa-onnx DIR        sherpa-onnx's own server in C++, with the model that `starling export` has written to DIR;
                             --sherpa-programs names the folder of sherpa-onnx-*-websocket-server (pip package
                             sherpa-onnx-bin)
    --rival KIND=COMMAND     any server that speaks like sherpa-onnx's (sherpa-streams, sherpa-files) or like OpenAI's
                             API (openai, or openai:MODEL), with {port} in its command
"""

import argparse
import asyncio
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from threading import Event, Thread

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import BenchmarkError
from benchmarks.serving_bad_clients import BEGUN
from benchmarks.serving_bad_clients import KINDS as BAD_KINDS
from benchmarks.serving_clients import Clip, Sent, Spoken, Talk, mean_seconds, send_files, talk, uploads
from benchmarks.serving_servers import Contender, Server, own_server, running, sherpa_rival, split_cores
from benchmarks.silence import clip_arguments, find_model, load_clips, pause
from flows.names import new_run_id
from recognition.bundle import load_spec
from recognition.serving.connections import allow_files
from tasks.config.pipeline import load_config
from tasks.orchestration.stage_tasks import run_plainly
from tasks.stages.base import Run
from training.processes.children import Child, bind_to_parent, stop

QUANTILES = (50, 95, 99)
_PAUSE_S = 0.2
"""Between clips that are joined."""
_LATE_CLIENT_S = 0.05
"""Clients that are so late themselves do not measure the server."""
_SOAK_SHARE = 0.8
_BAD_AFTER_S = 1.0
"""After the good clients' warm-up, so that their delays show what happens when the bad ones come."""


@dataclass
class Delays:
    """Delays in seconds at `QUANTILES`; NaN without any."""

    p50: float = math.nan
    p95: float = math.nan
    p99: float = math.nan

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Delays":
        """Quantiles by nearest rank: each is a delay that was measured."""
        if not len(seconds):
            return cls()
        return cls(*map(float, np.percentile(seconds, QUANTILES, method="inverted_cdf")))

    def __str__(self) -> str:
        return " / ".join(f"{1000 * value:.0f}" for value in (self.p50, self.p95, self.p99))


@dataclass
class StreamRow:
    """One number of streams at one server."""

    server: str
    streams: int
    utterances: int
    lost: int
    first: Delays
    last: Delays
    changed: int
    """Utterances with other words than when the server heard the clip first, in the row before or in this one."""
    core: float
    """Share of the core that the server used."""
    resident_mb: float
    client_late_s: float
    """How late the clients themselves were, p99."""
    beside: str = ""
    """Which bad clients there were."""
    files: int = 0
    """Sent beside the streams."""
    files_lost: int = 0
    answer: Delays = field(default_factory=Delays)
    """To a file."""

    HEAD = (
        "| server | streams | utterances | lost | other words | first result, ms | last result, ms | files | lost | "
        "answer, ms | core | MB |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
    )

    def __str__(self) -> str:
        late = f" (clients {1000 * self.client_late_s:.0f} ms late)" if self.client_late_s > _LATE_CLIENT_S else ""
        beside = f", beside {self.beside}" if self.beside else ""
        return (
            f"| {self.server}{beside} | {self.streams} | {self.utterances} | {self.lost} | {self.changed} | "
            f"{self.first} | {self.last} | {self.files} | {self.files_lost} | {self.answer if self.files else ''} | "
            f"{100 * self.core:.0f} %{late} | {self.resident_mb:.0f} |"
        )


def search(first: int, most: int, precision: float = 0.1) -> Generator[int, bool, int]:
    """Find the largest number that is held: yields numbers to try, is sent whether each was held, returns the largest.

    Args:
        first: Number to begin with; doubled until one is not held.
        most: Largest number to try.
        precision: Relative distance between the largest held and the smallest not held at which it ends.
    """
    held, failed, number = 0, most + 1, min(first, most)
    while failed - held > max(1, int(precision * held)):
        if (yield number):
            held = number
        else:
            failed = number
        number = min(2 * held, most) if failed > most else (held + failed) // 2
    return held


class Bench:
    """What all commands share.

    Args:
        clips: What is said.
        options: Of the command line.
    """

    def __init__(self, clips: Sequence[Clip], options: argparse.Namespace) -> None:
        self.clips, self.options = clips, options
        self._words: dict[tuple[str, int], str] = {}
        """What a server said first to a clip, by the server's name and the clip's number."""

    def streams(
        self,
        server: Server,
        number: int,
        *,
        beside: str = "",
        file_every_s: float = 0.0,
        source: Callable[[int], str] = lambda number: "127.0.0.1",
    ) -> StreamRow:
        """Measure a number of streams.

        Args:
            server: At work.
            number: How many.
            beside: Which bad clients there are.
            file_every_s: How often a file is sent; 0: never.
            source: Address that a stream connects from, by its number.
        """
        protocol = server.contender.streams
        if protocol is None:
            raise ValueError(f"{server.name} has no streams: compare it with the command `files`")
        used, begin = server.cpu_s, time.perf_counter()
        patience_s = max(10.0, 5 * self.options.limit_s)
        with uploads(lambda: server.file_client(source(number)), self.clips, file_every_s) as sent:
            heard = asyncio.run(
                talk(protocol, server.port, self.clips, number, self.options.seconds, patience_s, source)
            )
        core = (server.cpu_s - used) / (time.perf_counter() - begin)
        server.check()
        row = self._row(server, number, heard, sent)
        row.core, row.beside = core, beside
        print(row, flush=True)
        return row

    def _row(self, server: Server, number: int, heard: Talk, sent: Sequence[Sent]) -> StreamRow:
        lost = [spoken.lost for spoken in (*heard.warm_up, *heard.spoken) if spoken.lost]
        files_lost = [file.lost for file in sent if file.lost]
        for reason, times in Counter([*lost, *files_lost]).items():
            print(f"lost: {reason}, {times} times", file=sys.stderr)
        kept: list[Spoken] = [spoken for spoken in heard.spoken if not spoken.lost]
        took_s = [file.took_s for file in sent if not file.lost]
        return StreamRow(
            server.name, number, len(kept), len(lost),
            Delays.of([spoken.first_s for spoken in kept if spoken.first_s is not None]),
            Delays.of([spoken.final_s for spoken in kept if spoken.final_s is not None]),
            sum(spoken.text != self._words.setdefault((server.name, spoken.clip), spoken.text) for spoken in kept),
            0.0, server.resident_mb, Delays.of(heard.lag_s).p99,
            files=len(sent), files_lost=len(files_lost), answer=Delays.of(took_s),
        )  # fmt: skip

    def held(self, row: StreamRow) -> bool:
        """Whether a number of streams is held."""
        return not row.lost and row.utterances > 0 and row.last.p99 <= self.options.limit_s

    def agreement(self, server: Server, other: Server) -> str:
        """How many clips two servers heard with the same words."""
        heard, others = (
            {clip: text for (name, clip), text in self._words.items() if name == who.name} for who in (server, other)
        )
        both = heard.keys() & others.keys()
        same = sum(heard[clip] == others[clip] for clip in both)
        return f"{server.name} and {other.name}: the same words in {same} of {len(both)} utterances"


def most_streams(bench: Bench, servers: Sequence[Server]) -> tuple[list[StreamRow], dict[str, int]]:
    """Find the streams that each server holds; the servers take turns."""
    options = bench.options
    rows: list[StreamRow] = []
    found: dict[str, int] = {}
    searches = {server.name: search(options.first, options.most) for server in servers}
    numbers: dict[str, int] = {}
    for server in servers:
        numbers[server.name] = next(searches[server.name])
    while len(found) < len(servers):
        for server in servers:
            if server.name in found:
                continue
            with server.at_work():
                rows.append(bench.streams(server, numbers[server.name]))
            try:
                numbers[server.name] = searches[server.name].send(bench.held(rows[-1]))
            except StopIteration as end:
                found[server.name] = end.value
    return rows, found


# --- files


@dataclass
class FileRow:
    """One number of connections at one server."""

    server: str
    connections: int
    files: int
    lost: int
    rate: float
    """Seconds of audio per second."""
    took: Delays
    resident_mb: float

    HEAD = "| server | connections | files | lost | audio s per s | answer, ms | MB |\n|---|---|---|---|---|---|---|"

    def __str__(self) -> str:
        return (
            f"| {self.server} | {self.connections} | {self.files} | {self.lost} | {self.rate:.1f} | {self.took} | "
            f"{self.resident_mb:.0f} |"
        )


def files(bench: Bench, servers: Sequence[Server]) -> list[FileRow]:
    """Measure the throughput of files; the servers take turns."""
    rows = []
    for connections in (1, *bench.options.connections):  # the first row warms up, and is not kept
        for server in servers:
            with server.at_work():
                sent, took_s = send_files(server.file_client, bench.clips, connections, bench.options.seconds)
            server.check()
            rows.append(file_row(server, connections, sent, took_s, bench.clips))
            if len(rows) > len(servers):
                print(rows[-1], flush=True)
    return rows[len(servers) :]


def file_row(server: Server, connections: int, sent: Sequence[Sent], took_s: float, clips: Sequence[Clip]) -> FileRow:
    """Summarize."""
    kept = [file for file in sent if not file.lost]
    for reason, times in Counter(file.lost for file in sent if file.lost).items():
        print(f"lost: {reason}, {times} times", file=sys.stderr)
    heard = sum(clips[file.clip].seconds for file in kept)
    took = Delays.of([file.took_s for file in kept])
    return FileRow(server.name, connections, len(kept), len(sent) - len(kept), heard / took_s, took, server.resident_mb)


# --- a long time


@dataclass
class Soak:
    """What a server was like during a long time."""

    row: StreamRow
    minutes: float
    resident_mb: list[float]
    """At equal intervals, the first after a tenth of the time."""
    open_files: list[int]

    @property
    def growth(self) -> float:
        """Of memory from the first third to the last one, as a share."""
        third = max(1, len(self.resident_mb) // 3)
        return float(np.mean(self.resident_mb[-third:]) / np.mean(self.resident_mb[:third]) - 1)

    def __str__(self) -> str:
        mb, files = self.resident_mb, self.open_files
        return (
            f"{self.minutes:g} minutes\nmemory: {mb[0]:.1f} MB at the start, {mb[len(mb) // 2]:.1f} in the middle, "
            f"{mb[-1]:.1f} at the end, {100 * self.growth:+.2f} % from the first third to the last\n"
            f"open files: {files[0]} at the start, {max(files)} at most, {files[-1]} at the end"
        )


def soak(bench: Bench, server: Server, streams: int) -> Soak:
    """Keep a server busy for a long time."""
    options, over = bench.options, Event()
    options.seconds = 60 * options.minutes
    resident_mb: list[float] = []
    open_files: list[int] = []

    def look() -> None:
        resident_mb.append(server.resident_mb)
        open_files.append(server.files)

    def watch() -> None:
        over.wait(options.seconds / 10)
        while not over.wait(options.seconds / 60):
            look()

    watching = Thread(target=watch, daemon=True)
    watching.start()
    try:
        row = bench.streams(server, streams, file_every_s=options.file_every_s)
    finally:
        over.set()
        watching.join()
    time.sleep(1.0)  # the last connections are closed
    look()
    return Soak(row, options.minutes, resident_mb, open_files)


# --- bad clients


def beside_bad_clients(bench: Bench, server: Server, streams: int) -> list[StreamRow]:
    """Measure the good clients alone, beside each kind of bad ones, and alone again."""

    def source(number: int) -> str:
        return f"127.0.1.{1 + number % 250}"

    options = bench.options

    def good(beside: str) -> StreamRow:
        return bench.streams(server, streams, beside=beside, file_every_s=options.file_every_s, source=source)

    rows = [good("nobody")]
    for kind in options.kinds:
        count = options.connections_at_once if kind == "many" else options.bad
        words = [sys.executable, "-m", "benchmarks.serving_bad_clients", kind, "--port", str(server.port)]
        words += ["--count", str(count), "--after", str(mean_seconds(bench.clips) + _BAD_AFTER_S)]
        bad = Child(words, server.folder / f"bad-{kind}.log", preexec_fn=bind_to_parent)
        try:
            rows.append(good(f"{count} {kind}"))
            print(f"beside {kind}: {server.files} open files", file=sys.stderr)
            if bad.poll() is not None or BEGUN not in bad.tail():
                raise BenchmarkError(f"not all bad clients have come, give more --seconds: {bad.tail()}")
        finally:
            stop(bad)
    return [*rows, good("nobody, afterwards")]


# --- the command line


def joined(waves: Sequence[Tensor], rate: int, seconds: float) -> list[Clip]:
    """Join clips, with short pauses, to utterances of at least a length in seconds; the last may be shorter."""
    clips: list[Clip] = []
    parts: list[Tensor] = []
    for number, wave in enumerate(waves):
        parts += [wave, pause(_PAUSE_S, -60.0, rate, number)]
        if sum(map(len, parts)) >= seconds * rate or number == len(waves) - 1:
            samples = torch.cat(parts[:-1]).clamp(-1, 1)
            clips.append(Clip((samples.numpy() * 32767).astype("<i2").tobytes(), rate))
            parts = []
    return clips


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = clip_arguments(__doc__, 60, ())
    parser.set_defaults(config=Path("configs/fsdd_streaming.yaml"))
    parser.add_argument("command", choices=("streams", "files", "soak", "clients"))
    parser.add_argument("--seconds", type=float, default=30.0, help="for each number of streams or connections")
    parser.add_argument("--utterance-s", type=float, default=5.0, help="clips are joined until they last so long")
    parser.add_argument("--limit-s", type=float, default=1.0, help="latest last result, p99")
    parser.add_argument("--first", type=int, default=4, help="streams to begin with")
    parser.add_argument("--chunk-ms", type=float, default=0.0, help="of our own streams; default: the server's")
    parser.add_argument("--most", type=int, default=256, help="streams at most")
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 4, 16], help="of `files`")
    parser.add_argument("--streams", type=int, default=0, help="of `soak` and `clients`; default: 80 %% of those held")
    parser.add_argument("--minutes", type=float, default=10.0, help="of `soak`")
    parser.add_argument("--file-every-s", type=float, default=2.0, help="files beside the streams of `soak`, `clients`")
    parser.add_argument("--bad", type=int, default=64, help="bad clients of each kind")
    parser.add_argument("--connections-at-once", type=int, default=10_000, help="of the bad clients `many`")
    parser.add_argument("--kinds", nargs="+", choices=BAD_KINDS, default=list(BAD_KINDS), help="of bad clients")
    parser.add_argument("--sherpa-onnx", type=Path, metavar="DIR", help="a model that `starling export` has written")
    parser.add_argument("--sherpa-programs", type=Path, metavar="DIR", default=Path(sys.prefix) / "bin")
    parser.add_argument("--rival", action="append", default=[], metavar="KIND=COMMAND")
    parser.add_argument("--only-rivals", action="store_true", help="do not measure `starling serve`")
    return parser


def prepare(options: argparse.Namespace) -> tuple[Path, list[Clip]]:
    """The model's folder and what is said."""
    config = load_config(options.config, options.set)
    run = Run(config, new_run_id(config), "")
    run_plainly(run, "shard")
    folder = find_model(options.model, run).resolve()
    rate = load_spec(folder).sample_rate
    waves, _ = load_clips(run, options.test_set, options.clips, rate)
    return folder, joined(waves, rate, options.utterance_s)


def contenders(options: argparse.Namespace, bundle: Path) -> list[Contender]:
    """The servers to measure."""
    limits = {"per_client": 16} if options.command == "clients" else {}  # good clients have addresses of their own
    own = own_server(bundle, options.streams or options.most, options.chunk_ms, **limits)
    chosen = [] if options.only_rivals else [own]
    if options.sherpa_onnx:
        chosen.append(sherpa_rival(options.sherpa_onnx.resolve(), options.sherpa_programs, options.command == "files"))
    return chosen + [Contender.parse(text) for text in options.rival]


def measure(bench: Bench, servers: Sequence[Server]) -> list[object]:
    """Measure what the command line asks for; prints rows as they come."""
    options = bench.options
    if options.command == "files":
        print(FileRow.HEAD)
        return list(files(bench, servers))
    print(StreamRow.HEAD)
    if options.command == "streams":
        rows, found = most_streams(bench, servers)
        print("\n".join(f"{name} holds {held} streams" for name, held in found.items()))
        for other in servers[1:]:
            print(bench.agreement(servers[0], other))
        return [*rows, {"held": found}]
    results: list[object] = []
    for server in servers:
        number = options.streams or int(_SOAK_SHARE * most_streams(bench, [server])[1][server.name])
        if number < 1:
            raise BenchmarkError(f"{server.name} holds no stream within {options.limit_s} s")
        with server.at_work():
            if options.command == "soak":
                results.append(soak(bench, server, number))
                print(results[-1])
            else:
                results += beside_bad_clients(bench, server, number)
    return results


def main() -> None:
    """Measure and print."""
    options = arguments().parse_args()
    if options.command == "clients":
        allow_files(options.connections_at_once + 1000, "give fewer --connections-at-once")
    with redirect_stdout(sys.stderr):
        bundle, clips = prepare(options)
    core = split_cores()
    with running(contenders(options, bundle), core) as servers:
        results = measure(Bench(clips, options), servers)
    if options.json:
        print(json.dumps({"benchmark": f"serving {options.command}", "rows": [_plain(row) for row in results]}))


def _plain(row: object) -> object:
    return asdict(row) if is_dataclass(row) and not isinstance(row, type) else row


if __name__ == "__main__":
    main()
