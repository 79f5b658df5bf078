"""What the tests of tasks/ and flows/ share: a tiny configuration, corpora, and one finished run."""

import csv
import fcntl
import functools
import importlib.util
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import soundfile

ROOT = Path(__file__).resolve().parents[1]
VOICES = {"train": ["f1", "f2", "m1", "m2"], "valid": ["f5"], "test": ["f4", "m7"]}


def tiny_document(name="tiny", **fields):
    """A pipeline of a few dozen utterances and a few thousand weights, as YAML would give it."""
    synthesis = {"train": 24, "valid": 4, "test": 12, "rate": [180, 200]}
    synthesis |= {f"{split}_voices": voices for split, voices in VOICES.items()}
    document = {
        "name": name,
        "data": {"sources": [{"kind": "synthetic", "synthesis": synthesis}], "sample_rate": 8000},
        "storage": {"shard_seconds": 20, "workers": 2},
        "features": {"num_mels": 16},
        "model": {"kind": "conformer", "dim": 16, "layers": 1, "heads": 2, "kernel": 5, "channels": 4},
        "train": {
            "epochs": 2,
            "batch_seconds": 20,
            "device": "cpu",
            "threads": 1,
            "log_steps": 1,
            "schedule": {"warmup_epochs": 0.5},
            "augment": {"time_masks": 1, "freq_masks": 1, "freq_mask_bins": 3},
        },
        "register": {"accept_untrained": True, "first_max_wer": 9},  # two epochs do not teach it a word
    }
    return document | fields


@contextmanager
def small_disk(folder, size="1m", options=""):
    """A separate file system of limited size at a folder; the test is skipped if none can be mounted.

    Args:
        folder: Where; made.
        size: Bytes, as tmpfs reads them.
        options: More of mount's.
    """
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}{',' if options else ''}{options}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a small file system can be mounted by root only")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def fill(folder, leave=0):
    """Fill the disk of a folder except for some bytes; deleting the file that it returns frees the space."""
    hog = Path(folder) / "hog"
    with hog.open("wb", buffering=0) as file:
        state = os.statvfs(folder)
        left = max(0, state.f_bavail * state.f_frsize - leave)
        with suppress(OSError):  # others may fill it meanwhile
            while left > 0:
                left -= file.write(bytes(min(left, 1 << 20)))
    return hog


def write_config(path, document):
    """Write a configuration as YAML (of which JSON is a part)."""
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def tiny_bundle(folder, **fields):
    """Write a model of a few weights, not trained; `fields` are more of its spec's."""
    from recognition.bundle import BundleSpec, save_bundle
    from speech.features import LogMelConfig
    from speech.models import BlstmConfig
    from speech.tokens import TokenConfig, train_tokenizer

    tokenizer = train_tokenizer(TokenConfig(), ["a b"]).to_dict()
    spec = BundleSpec(
        sample_rate=8000,
        features=LogMelConfig(num_mels=6, cmvn="none"),
        stats=None,
        **{"model": BlstmConfig(dim=8, layers=1, channels=1), "tokenizer": tokenizer} | fields,
    )
    save_bundle(folder, spec, dict(spec.build_model().state_dict()))


def bundle_with_languages(folder, languages=("de", "en")):
    """Write an attention model of a few weights, not trained, that has tokens of languages."""
    from recognition.systems.attention import AttentionSystem
    from speech.decoding import AttentionDecodeConfig
    from speech.models import TransformerDecoderConfig
    from speech.tokens import TokenConfig, train_tokenizer

    network = TransformerDecoderConfig(**TransformerDecoderConfig.tiny, language="auto")
    tokenizer = train_tokenizer(TokenConfig(), ["a b"]).with_languages(languages)
    system, decode = AttentionSystem(decoder_network=network), AttentionDecodeConfig(beam=1)
    tiny_bundle(folder, system=system, tokenizer=tokenizer.to_dict(), decode=decode)


def frame_recognizer(cfg, tokenizer):
    """A CTC recognizer with a decoder; its network is not trained, and what it searches comes from elsewhere."""
    from recognition.bundle import BundleSpec
    from recognition.systems.acoustic import FrameRecognizer
    from speech.features import LogMelConfig
    from speech.models import BlstmConfig

    spec = BundleSpec(
        sample_rate=8000,
        features=LogMelConfig(num_mels=6, cmvn="none"),
        stats=None,
        tokenizer=tokenizer.to_dict(),
        model=BlstmConfig(dim=8, layers=1, channels=1),
    )
    return FrameRecognizer(spec, spec.build_model(), cfg)


def silent_system():
    """A kind of system whose recognizers have no abilities: networks of `ctc`, searched greedily."""
    from recognition.system import SystemConfig
    from recognition.systems import SYSTEMS

    class SilentSystem(SystemConfig):
        kind: str = "silent"
        decoders = ("greedy",)

        def build_network(self, spec):
            return SYSTEMS["ctc"]().build_network(spec)

        def open(self, *given):
            return SYSTEMS["ctc"]().open(*given)

    return SilentSystem


def load_beside(file, name):
    """A module by its path, relative to a test file: tests/ has no packages, and is not on sys.path."""
    path = (Path(file).resolve().parent / name).resolve()
    if path.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[path.stem])
    return sys.modules[path.stem]


@contextmanager
def environment(**values):
    """Environment variables for the block; None removes one."""
    before = {name: os.environ.get(name) for name in values}

    def put(items):
        for name, value in items.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = str(value)

    put(values)
    try:
        yield
    finally:
        put(before)


def slow_nodes(factors):
    """Environment variables that make nodes slower.

    Args:
        factors: By node number: how many times slower.
    """
    path = [str(ROOT / "tests" / "slow_nodes"), os.environ.get("PYTHONPATH", "")]
    named = ",".join(f"{node}:{factor}" for node, factor in factors.items())
    return {"STARLING_SLOW_NODES": named, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def shared_folder():
    """The folder of one pytest run, for all its test processes."""
    return Path(os.environ["STARLING_TESTS_SHARED"])


@contextmanager
def made_once(name):
    """A folder that the test processes of one pytest run share; one process at a time is within the block."""
    folder = shared_folder() / name
    folder.mkdir(exist_ok=True)
    with (folder.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


@functools.cache
def finished():
    """Home folder and result of one complete tiny run without Prefect.

    The first test process makes it. The others copy it, with MLflow's files, and only write the report, which names the
    folder. Each has a separate folder, which its tests may change.
    """
    from tasks.config.pipeline import parse_config
    from tasks.orchestration.stage_tasks import run_plainly
    from tasks.stages.base import Run

    # names of equal length: see `move_home`
    run, home = Run(parse_config(tiny_document()), "tiny-run"), shared_folder() / f"home-{os.getpid():010}"
    with made_once("finished") as made, environment(STARLING_HOME=home, MLFLOW_TRACKING_URI=None):
        if any(made.iterdir()):
            shutil.copytree(made / "home", home)
            move_home(home, Path((made / "path").read_text()))
            run_plainly(run)
        else:
            give_mlflow(home)
            run_plainly(run)
            shutil.copytree(home, made / "home", ignore=shutil.ignore_patterns("locks", "mlflow.db*", "report"))
            copy_database(home / "mlflow" / "mlflow.db", made / "home" / "mlflow" / "mlflow.db")
            (made / "path").write_text(str(home))
    return home, run


def move_home(home, before):
    """Let what names files of a data folder, in MLflow and in work folders, name those of its copy.

    Both paths have the same length, so that databases stay valid.
    """
    old, new = str(before).encode(), str(home).encode()
    assert len(old) == len(new)
    for part in ("mlflow", "work"):
        for file in (home / part).rglob("*"):
            if file.is_file() and old in (content := file.read_bytes()):
                file.write_bytes(content.replace(old, new))


def copy_finished(folder):
    """A data folder with the corpus and the stage outputs of the finished run, but without its MLflow."""
    return copy_outputs(finished()[0], folder)


def copy_outputs(home, folder, *without):
    """Copy a data folder's corpora and stage outputs, except those of some stages."""
    for part in ("corpora", "objects"):
        shutil.copytree(home / part, folder / part, ignore=shutil.ignore_patterns(*without))
    return folder


def copy_database(source, target):
    """Copy an SQLite database, even if another process has it open."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(source)) as made, closing(sqlite3.connect(target)) as own:
        made.backup(own)


@functools.cache
def _empty_mlflow():
    with made_once("mlflow") as folder:
        if not (folder / "made").exists():
            import mlflow

            uri = f"sqlite:///{folder}/mlflow.db"
            mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri).search_experiments()
            (folder / "made").touch()
    return folder / "mlflow.db"


def give_mlflow(home):
    """Give a data folder an MLflow database with nothing in it: MLflow takes seconds to make one."""
    copy_database(_empty_mlflow(), home / "mlflow" / "mlflow.db")


def tone(seconds=0.5, rate=16000, level=0.2, channels=1, seed=0):
    """Audio that is not silent: noise [samples] or [samples, channels]."""
    wave = np.random.default_rng(seed).normal(0, level, (int(seconds * rate), channels)).clip(-1, 1)
    return wave[:, 0] if channels == 1 else wave


def write_tone(path, rate=16000, **options):
    """Write noise as an audio file of whatever format the suffix names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = {".opus": {"format": "OGG", "subtype": "OPUS"}, ".wav": {"subtype": "PCM_16"}}.get(path.suffix, {})
    soundfile.write(path, tone(rate=rate, **options), rate, **kind)
    return path


def write_table(folder, rows, name="metadata.csv"):
    """Write a corpus table; rows are (id, path, text, speaker) with an optional split."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "path", "text", "speaker", "split"])
        writer.writerows([*row, *[""] * (5 - len(row))] for row in rows)
    return folder / name


def small_corpus(folder, speakers=4, each=3, seconds=0.5, rate=16000):
    """A table of noise "recordings", good enough for every stage before training."""
    rows = []
    for s in range(speakers):
        for n in range(each):
            path = write_tone(folder / "audio" / f"s{s}-{n}.wav", seconds=seconds, rate=rate, seed=100 * s + n)
            rows.append((f"s{s}-{n}", path.relative_to(folder), f"word number {n}", f"s{s}"))
    return write_table(folder, rows)


def starling(*words, home, check=True, timeout=600, cwd=ROOT, **env):
    """Run the command line as users do, in a child process."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_"))}
    clean |= {"STARLING_HOME": str(home), "OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "flows.cli.app", *map(str, words)]
    done = subprocess.run(command, cwd=cwd, env=clean | env, capture_output=True, text=True, timeout=timeout)
    if check and done.returncode:
        raise AssertionError(f"starling {words} ended with {done.returncode}:\n{done.stdout}\n{done.stderr[-4000:]}")
    return done


def get_json(url, body=None):
    """Fetch JSON, or post it; a server that is busy for a moment (503) is asked again, as Prefect's own client does."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    for patience in (1, 2, 4, 8):
        try:
            return _fetch_json(request)
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            time.sleep(patience)
    return _fetch_json(request)


def _fetch_json(request):
    with urllib.request.urlopen(request, timeout=240) as reply:
        return json.loads(reply.read() or b"null")


def wait_until(condition, patience_s=240.0, every_s=0.2):
    """The condition's first true value.

    Args:
        condition: Called at short intervals at first, then at longer ones.
        patience_s: Seconds until it has failed; a busy machine may stop a process for some of them.
        every_s: The longest interval.

    Raises:
        TimeoutError: If it does not become true in time.
    """
    deadline, pause_s = time.monotonic() + patience_s, 0.005
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{condition} has not come true in {patience_s} s")
        time.sleep(min(pause_s, every_s))
        pause_s *= 1.5
    return result


def processes_naming(text):
    """Process numbers, other than ours, whose command line or environment names a text (such as a test's folder)."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            named = text.encode() in (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            continue
        if named and not zombie and int(entry.name) != os.getpid():
            pids.append(int(entry.name))
    return sorted(pids)


def open_files(folder):
    """Paths at and below a folder that this process has open; what other threads open elsewhere does not count."""
    paths = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it has been closed meanwhile
            path = os.readlink(descriptor)
            paths += [path] if path.startswith(str(folder)) else []
    return sorted(paths)


def end_processes(pids):
    """Kill what a failed test left."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def write_arpa(path, unigrams, bigrams):
    """Write a bigram model: word to log10 probability and back-off weight, pairs of words to log10 probability."""
    lines = ["", "\\data\\", f"ngram 1={len(unigrams)}", f"ngram 2={len(bigrams)}", "", "\\1-grams:"]
    for word, (probability, backoff) in unigrams.items():
        lines.append("\t".join([str(probability), word, *([] if backoff is None else [str(backoff)])]))
    lines += ["", "\\2-grams:", *(f"{p}\t{' '.join(words)}" for words, p in bigrams.items()), "", "\\end\\", ""]
    path.write_text("\n".join(lines))
    return str(path)
