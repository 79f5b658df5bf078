"""`starling transcribe`: recognize audio files with a registered model or a bundle."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from configurable.files import file_sha256
from flows.cli.common import JsonOption, err, friendly, print_line, say
from flows.cli.configs import complete_path
from flows.cli.streams import STDIN, ChunkOption, check_options, show_streams

if TYPE_CHECKING:
    from flows.cli.transcripts import Sink, UtteranceTable
    from recognition.transcriber import Transcriber


class Format(StrEnum):
    """Output format."""

    text = "text"
    json = "json"
    ctm = "ctm"
    srt = "srt"
    vtt = "vtt"
    table = "table"


class Speakers(StrEnum):
    """Which recordings are of one speaker."""

    file = "file"
    folder = "folder"
    one = "one"


SpeakersOption = Annotated[
    Speakers,
    typer.Option(
        "--speakers",
        help="Whose recordings speaker-adapted models adapt to together: each file is another speaker's, or each "
        "folder, or one speaks in all.",
    ),
]


def _complete_detector(incomplete: str) -> Iterator[str]:
    from speech.vad import DETECTORS

    yield from (kind for kind in DETECTORS if kind.startswith(incomplete))


DetectorOption = Annotated[
    str,
    typer.Option(
        "--vad",
        metavar="KIND",
        help="How speech is found, between which recordings are cut in pauses: silero (the default where it is "
        "installed), energy, or another registered detector; none: by length.",
        autocompletion=_complete_detector,
    ),
]
ModelOption = Annotated[
    str,
    typer.Option(
        "--model", "-m", help="NAME (its champion), NAME@ALIAS, NAME/VERSION, models:/…, or a bundle's folder."
    ),
]
FormatOption = Annotated[
    Format,
    typer.Option(
        "--format",
        "-f",
        help="Plain text, one JSON object, with word times NIST's CTM or subtitles (srt, vtt), or a table of "
        "utterances with confidences, to train on.",
    ),
]
NbestOption = Annotated[
    int,
    typer.Option("--nbest", min=1, help="Hypotheses of each recording: with posteriors (json), or as lines (text)."),
]
LanguageOption = Annotated[
    str,
    typer.Option(
        "--language",
        metavar="CODE",
        help="Language of all recordings, such as de, for models with tokens of languages. Default: found for each "
        "piece.",
    ),
]
HotWordsOption = Annotated[
    Path | None,
    typer.Option(
        "--hot-words",
        metavar="FILE",
        help="Phrases to expect, such as names, one a line; after a tab, a line may have a score of its own.",
        show_default=False,
        autocompletion=complete_path,
    ),
]
HotScoreOption = Annotated[
    float | None,
    typer.Option(
        "--hot-score",
        min=0,
        max=1000,
        help="What each letter of --hot-words adds to the log probability of a text. [default: 0.5]",
        show_default=False,
    ),
]
StreamOption = Annotated[
    bool,
    typer.Option(
        "--stream",
        help="Show results while the audio is read, by a model that recognizes speech as it comes; - is then a WAV "
        "file of 16-bit PCM, or PCM without a header. JSON has a line for each result.",
    ),
]
RateOption = Annotated[
    int,
    typer.Option("--rate", min=0, help="Of PCM without a header with --stream, in Hz.", show_default="the model's"),
]


@friendly
def transcribe(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Audio files, folders of them, or - for standard input.",
            show_default=False,
            autocompletion=complete_path,
        ),
    ],
    model: ModelOption = "models:/starling-demo@champion",
    kind: FormatOption = Format.text,
    output: Annotated[
        str,
        typer.Option("--output", "-o", help="One file, or a folder (ending in /) for one file per recording."),
    ] = "",
    device: Annotated[
        str, typer.Option("--device", help="cpu, cuda, cuda:1, or auto (a GPU if there is one).")
    ] = "cpu",
    vad: DetectorOption = "",
    nbest: NbestOption = 1,
    speakers: SpeakersOption = Speakers.file,
    language: LanguageOption = "",
    hot_words: HotWordsOption = None,
    hot_score: HotScoreOption = None,
    stream: StreamOption = False,
    chunk_ms: ChunkOption = 640,
    rate: RateOption = 0,
    json_output: JsonOption = False,
) -> None:
    """Recognize speech in audio files of any length.

    A file that cannot be read is reported and does not stop the others; the exit status is then 1.
    """
    from flows.cli.transcripts import UtteranceTable, open_sink

    shown = _shown("json" if json_output else kind.value, nbest, files, output)
    check_hot_score(hot_words, hot_score)
    recordings = find_audio(files)
    if stream:
        timed = f"format {kind.value}" if kind not in (Format.text, Format.json) else ""
        given = {timed or "format": timed, "output": output, "vad": vad, "nbest": nbest > 1, "language": language}
        check_options(**given)
        show_streams(recordings, model, _device(device), shown, chunk_ms, rate, hot_words, hot_score)
        return
    with redirect_stdout(sys.stderr):
        transcriber = _transcriber(model, device, vad, nbest, hot_words, hot_score, language)
    if shown == Format.table:
        about: dict[str, Any] = {"vad": vad, "language": language, "hot_score": hot_score}
        about["hot_words"] = hot_words and file_sha256(hot_words)
        sink: Sink = _open_table(Path(output), model, recordings, speakers, transcriber, about)
    else:
        place = Path(output) if output else None
        sink = open_sink(shown, place, model, len(recordings) > 1, folder=output.endswith("/"))
    failed = _transcribe_all(by_voice(recordings, speakers), transcriber, sink, language)
    if isinstance(sink, UtteranceTable):
        _print_table(sink, len(recordings) - failed)
    _end(len(recordings), failed)


def _end(recordings: int, failed: int) -> None:
    """Say how many recordings were recognized, and end with status 1 if not all were."""
    if failed or (recordings > 1 and err.is_terminal):
        err.print(f"{recordings - failed} of {recordings} recognized, {failed} failed", highlight=False)
    if failed:
        raise typer.Exit(1)


def _open_table(
    path: Path,
    model: str,
    recordings: list[tuple[Path, Path]],
    speakers: Speakers,
    transcriber: "Transcriber",
    about: dict[str, Any],
) -> "UtteranceTable":
    """The table of utterances; says what an interrupted command has done of it."""
    from flows.cli.transcripts import UtteranceTable
    from recognition.bundle import bundle_digest

    about = {"model": bundle_digest(transcriber.folder), "speakers": speakers.value, **about}
    names = [
        {Speakers.file: str(place), Speakers.folder: _folder_name(path, place), Speakers.one: "speaker"}[speakers]
        for path, place in recordings
    ]
    table = UtteranceTable(model, path, recordings, names, about)
    if done := sum(table.has(recording) for recording, _ in recordings):
        say(f"{path}: {done:,} of {len(recordings):,} recordings have been transcribed by an interrupted command")
    return table


def _folder_name(path: Path, place: Path) -> str:
    """The folder of a recording, relative to the one that was given; the name of that one for those in it."""
    return str(place.parent) if place.parent.parts else path.resolve().parent.name


def _print_table(table: "UtteranceTable", recordings: int) -> None:
    """How many utterances have which confidence, and how to train on them."""
    total, *others = table.utterances.items()
    shares = ", ".join(f"{count:,} of at least {limit:g}" for limit, count in others)
    print_line(f"{table.path}: {total[1]:,} utterances of {recordings:,} recordings; confidences: {shares}")
    path = table.path.resolve()
    print_line(f"as a source of a configuration: {{kind: table, path: {path}, set: train, min_confidence: 0.9}}")


def _shown(kind: str, nbest: int, files: list[Path], output: str) -> str:
    """The output format.

    Raises:
        ValueError: It has no place for several hypotheses, or a table has no name or no recording to name.
    """
    from flows.cli.transcripts import TIMED

    if kind == Format.table and not output.endswith(".csv"):
        raise ValueError("--format table writes a table that a training can read: give --output NAME.csv")
    if kind == Format.table and STDIN in files:
        raise ValueError("--format table names recordings, and standard input has no name: give files or folders")
    if nbest > 1 and kind in (*TIMED, Format.table):
        raise ValueError(f"--format {kind} shows one hypothesis: give --format json or text with --nbest {nbest}")
    return kind


def _transcriber(
    model: str, device: str, vad: str, nbest: int, hot_words: Path | None, hot_score: float | None, language: str
) -> "Transcriber":
    """The model, ready to use; one that can be told the language, if it is given."""
    from flows.models import fetch_model, model_uri

    check_detector(vad)
    folder = fetch_model(model_uri(model), "--model")
    built = build_transcriber(folder, device, vad, nbest=nbest, hot_words=hot_words or "", hot_score=hot_score)
    if language:
        built.recognizer.check_language(language)
    return built


def build_transcriber(folder: Path, device: str, vad: str, **options: Any) -> "Transcriber":
    """A transcriber from the options of a command.

    Args:
        folder: The bundle.
        device: `auto`, or a device.
        vad: Kind of the detector, which `check_detector` has seen; empty for the usual one.
        **options: More of the transcriber's.

    Raises:
        ValueError: There is no such device.
    """
    from recognition.transcriber import Transcriber
    from speech.vad import DETECTORS

    return Transcriber(folder, device=_device(device), vad=DETECTORS[vad]() if vad else None, **options)


def check_detector(vad: str) -> None:
    """Check that there is a detector of a kind; empty for the usual one.

    Raises:
        ValueError: There is none.
    """
    from speech.vad import DETECTORS

    if vad and vad not in DETECTORS:
        raise ValueError(f"--vad {vad}: there is no such detector; use {' or '.join(DETECTORS)}")


def check_hot_score(hot_words: Path | None, hot_score: float | None) -> None:
    """Check that a score of hot words has some.

    Raises:
        ValueError: It has none.
    """
    if hot_score is not None and hot_words is None:
        raise ValueError("--hot-score is that of the phrases in --hot-words: give both, or neither")


def _device(name: str) -> str:
    """Where networks compute."""
    from devices.choice import pick_device

    return str(pick_device(name, field="--device")) if name in ("auto", "cuda") else name


def by_voice(recordings: list[tuple[Path, Path]], speakers: Speakers) -> list[list[tuple[Path, Path]]]:
    """Recordings in groups of one speaker.

    Args:
        recordings: Paths, as `find_audio` returns them.
        speakers: Which are of one speaker.
    """
    voices: dict[object, list[tuple[Path, Path]]] = {}
    for number, (path, place) in enumerate(recordings):
        voice = {Speakers.file: number, Speakers.folder: path.resolve().parent, Speakers.one: None}[speakers]
        voices.setdefault(voice, []).append((path, place))
    return list(voices.values())


def _transcribe_all(
    voices: list[list[tuple[Path, Path]]], transcriber: "Transcriber", sink: "Sink", language: str
) -> int:
    """Transcribe the recordings of one speaker after another, with a progress bar; returns how many failed."""
    failed, empty = 0, 0
    # formats that are made of times need them; JSON has them where the recognizer knows them
    timed = sink.timed or (sink.words and "word times" in transcriber.spec.system.abilities)
    together = transcriber.recognizer.adapter is not None  # then what is left of a speaker would be adapted otherwise
    finished = [all(sink.has(path) for path, _ in own) for own in voices]
    recordings = [
        (path, place, voice)
        for voice, own in enumerate(voices)
        for path, place in own
        if not (finished[voice] if together else sink.has(path))
    ]
    with sink, _progress(len(recordings)) as (show, tell, tick):
        audio = _opened(recordings, show)
        transcripts = transcriber.stream(audio, words=timed, language=language, on_seconds=tell)
        for (path, place, _), transcript in zip(recordings, transcripts, strict=True):
            sink.add(path, place, transcript)
            tick()
            failed += bool(transcript.error)
            empty += not (transcript.error or transcript.text)
            if transcript.error and sink.tells_errors:
                err.print(f"{path}: {transcript.error}", style="red", markup=False, highlight=False, soft_wrap=True)
    if empty:
        err.print(f"no words were recognized in {empty} of {len(recordings)}", highlight=False)
    return failed


def _opened(
    recordings: list[tuple[Path, Path, int]], show: Callable[[Path], None]
) -> Iterator[tuple[Path | bytes, int]]:
    """Yield each recording with its speaker when it is needed: standard input is not read before its turn."""
    for path, _, voice in recordings:
        show(path)
        yield sys.stdin.buffer.read() if path == STDIN else path, voice


@contextmanager
def _progress(count: int) -> Iterator[tuple[Callable[[Path], None], Callable[[float], None], Callable[[], None]]]:
    """Progress bar on standard error if that is a terminal: files, the current file, seconds of audio done.

    Yields:
        A function to call when a file is read, one to call with further seconds of recognized audio, and one to call
        when a file is done.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}", markup=False), TimeElapsedColumn())
    # transcripts on the same terminal go around the bar
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=count, note="")
        name, seconds = "", 0.0

        def show(path: Path) -> None:
            nonlocal name
            name = path.name
            tell(0.0)

        def tell(more: float) -> None:
            nonlocal seconds
            seconds += more
            bar.update(task, note=f"{name} ({seconds:,.0f} s of audio done)")

        yield show, tell, lambda: bar.advance(task)


def find_audio(files: list[Path]) -> list[tuple[Path, Path]]:
    """All given files, and the recordings below given folders; each with a name of its own.

    Recordings in a format that cannot be decoded are listed, too, and are reported as failures, unless the same
    recording is beside them in another format.

    The name is the path relative to the given folder without its suffix; with it, or with the whole path given, if
    several recordings had that name. A folder without audio is listed itself, as a recording that cannot be read.

    Raises:
        ValueError: If there is no audio file at all.
    """
    from configurable.folders import files_below
    from storage.corpora.base import AUDIO_SUFFIXES, RECORDING_SUFFIXES

    recordings: list[tuple[Path, Path]] = []
    any_audio = False
    for path in files:
        inside = []
        if path.is_dir():
            recorded = [p for p in files_below(path) if p.suffix.lower() in RECORDING_SUFFIXES and p.is_file()]
            decodable = {p.with_suffix("") for p in recorded if p.suffix.lower() in AUDIO_SUFFIXES}
            inside = [p for p in recorded if p.suffix.lower() in AUDIO_SUFFIXES or p.with_suffix("") not in decodable]
            recordings += [(p, p.relative_to(path).with_suffix("")) for p in inside]
        if not inside:
            recordings.append((path, Path("stdin" if path == STDIN else path.stem or path.name)))
        any_audio |= bool(inside) or not path.is_dir()
    if not any_audio:
        holds = "holds" if len(files) == 1 else "hold"
        raise ValueError(
            f"{', '.join(map(str, files))} {holds} no audio file: give files, or folders with files that end in "
            f"{', '.join(sorted(AUDIO_SUFFIXES))}"
        )
    return _named_apart(recordings)


def _named_apart(recordings: list[tuple[Path, Path]]) -> list[tuple[Path, Path]]:
    """Recordings whose names differ in every output format."""
    from speech.alignments import distinct_names, scored_name

    def with_suffix(path: Path, name: Path) -> Path:
        return name.with_name(name.name + path.suffix)

    def with_folders(path: Path, _: Path) -> Path:
        return Path(*(part for part in path.parts if part not in (path.anchor, "..")))

    names = [name for _, name in recordings]
    for longer in (with_suffix, with_folders):
        counts = Counter(scored_name(str(name)) for name in names)
        names = [
            longer(path, short) if counts[scored_name(str(name))] > 1 else name
            for (path, short), name in zip(recordings, names, strict=True)
        ]
    paths = [path for path, _ in recordings]
    return list(zip(paths, map(Path, distinct_names(map(str, names))), strict=True))
