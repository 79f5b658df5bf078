"""Mutation testing: draws mutants, applies them to a copy, and counts how many the tests detect.

    python -m benchmarks.mutants --room training --count 24 --seed 1        # drawn from the room's folders
    python -m benchmarks.mutants --at training/coordinator/leasing.py:48,57       # all mutants of these lines
    python -m benchmarks.mutants --room speech --count 10 --list            # draw only

A mutant is tested with the fast tests that are nearest to its module by imports, nearest first, until one fails. That
test is then run on the unchanged code, and counts only if it passes there. A test that times out counts as a detection.
Survivors are printed as diffs for review: some mutations have no relevant effect.

mutmut 3 is faster for a small module (47 mutants of `configurable/addresses.py` in 42 s), but it takes a function that
tests reach only in a child process for untested: all 15 mutants of `training.processes.exit_reason.run_with_reason`
got no tests, and most of the engine runs in such processes. cosmic-ray 8 runs one given command for every mutant, and
neither of the two selects the tests nearest to a module, draws a sample by folder with a seed, or repeats the test that
failed on the unchanged code.
"""

import argparse
import contextlib
import difflib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from pathlib import Path

from benchmarks.mutations import Mutation, mutations

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("training", "recognition", "speech", "storage", "devices", "configurable", "tasks", "flows")
TEST_S = 60
"""Time-out of a test in seconds; a time-out counts as a detection."""
FLAKES = 2
"""Maximum number of tests to deselect because they fail without the mutant, too."""
NO_START = "(pytest does not start)"


@dataclass
class Verdict:
    """Result of a mutant: the test that detected it, if any, and the test files that were run."""

    mutation: Mutation
    killer: str
    files: list[str]
    seconds: float
    unfinished: bool = False

    @property
    def stratum(self) -> str:
        """The folder for which it was drawn."""
        return stratum(self.mutation.path)


# --- drawing


def stratum(path: str) -> str:
    """The folder of a module, as ROOM/SUBFOLDER."""
    return "/".join(Path(path).parts[:-1][:2])


def modules(rooms: tuple[str, ...] | list[str]) -> list[str]:
    """The modules of some rooms or folders, as paths relative to the checkout."""
    return sorted(str(path.relative_to(ROOT)) for room in rooms for path in (ROOT / room).rglob("*.py"))


def draw(paths: list[str], count: int, seed: int) -> list[Mutation]:
    """Draw mutants, at most one per line; each folder gets a share proportional to its lines, but at least one."""
    rng = random.Random(seed)
    lines: dict[str, dict[tuple[str, int], list[Mutation]]] = defaultdict(lambda: defaultdict(list))
    for path in paths:
        for change in mutations(path, (ROOT / path).read_bytes()):
            lines[stratum(path)][path, change.line].append(change)
    shares = _shares({name: len(places) for name, places in sorted(lines.items())}, count)
    mutants = []
    for name, share in shares.items():
        places = sorted(lines[name])
        rng.shuffle(places)
        drawn = (change for place in places if (change := _one(lines[name][place], rng)) is not None)
        mutants += [change for change, _ in zip(drawn, range(share), strict=False)]
    return mutants


def _shares(sizes: dict[str, int], count: int) -> dict[str, int]:
    """Divide a count in proportion to sizes, at least one each; if there are too few, the largest get one each."""
    if count < len(sizes):
        largest = sorted(sizes, key=lambda name: -sizes[name])[:count]
        return {name: int(name in largest) for name in sizes}
    rest, total = count - len(sizes), sum(sizes.values())
    shares = {name: 1 + rest * size // total for name, size in sizes.items()}
    by_remainder = sorted(sizes, key=lambda name: -(rest * sizes[name] % total))
    for name in by_remainder[: count - sum(shares.values())]:
        shares[name] += 1
    return shares


def _one(changes: list[Mutation], rng: random.Random) -> Mutation | None:
    """Draw one of a line's mutants, with equal probability for each kind."""
    source = (ROOT / changes[0].path).read_bytes()
    kinds = sorted({change.kind for change in changes})
    rng.shuffle(kinds)
    for kind in kinds:
        change = rng.choice([change for change in changes if change.kind == kind])
        if change.is_valid(source):
            return change
    return None


def at_places(places: list[str]) -> list[Mutation]:
    """All mutants of `path:line,line` places."""
    mutants = []
    for place in places:
        path, _, numbers = place.partition(":")
        source = (ROOT / path).read_bytes()
        wanted = {int(number) for number in numbers.split(",")}
        mutants += [change for change in mutations(path, source) if change.line in wanted and change.is_valid(source)]
    return mutants


# --- which tests


NAMED = re.compile(rf"\b(?:{'|'.join(ROOMS)})(?:\.\w+)+")
FROM = re.compile(r"^[ \t]*from ([\w.]+) import (?:\(([^)]*)\)|(.*))", re.MULTILINE)
IMPORT = re.compile(r"^[ \t]*import (.*)", re.MULTILINE)
WORD = re.compile(r"\w+")
"""A module's name, and imports, in a source file: far faster than a syntax tree of each."""


class Related:
    """Finds the test files nearest to a module.

    Tests are sorted by the number of imports between them and the module (naming a module in a string counts as
    importing it, as in `-m training.coordinator.server`), then by room, then by words in common with the module's name.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tests = sorted(str(path.relative_to(root)) for path in (root / "tests").rglob("*.py"))
        sources = [*(name for room in (*ROOMS, "benchmarks") for name in self._below(room)), *self.tests]
        self.by_name = {self._module(path): path for path in sources}
        self.by_name |= {Path(path).stem: path for path in self.tests}  # helpers are imported by their file names
        self.users: dict[str, set[str]] = defaultdict(set)
        for path in sources:
            for used in self._references(path):
                self.users[used].add(path)

    def _below(self, room: str) -> list[str]:
        return sorted(str(path.relative_to(self.root)) for path in (self.root / room).rglob("*.py"))

    @staticmethod
    def _module(path: str) -> str:
        return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def _references(self, path: str) -> set[str]:
        text = (self.root / path).read_text(encoding="utf-8")
        names = set(NAMED.findall(text))
        for module, among_brackets, in_line in FROM.findall(text):
            words = WORD.findall(re.sub(r"#.*| as \w+", "", among_brackets or in_line))
            names |= {module, *(f"{module}.{word}" for word in words)}
        for imported in IMPORT.findall(text):
            names |= {word.strip().partition(" ")[0] for word in imported.partition("#")[0].split(",")}
        return {self.by_name[name] for name in names if name in self.by_name} - {path}

    def files(self, path: str, limit: int) -> list[str]:
        """Test files for a module, nearest first."""
        distance, queue = {path: 0}, deque([path])
        while queue:
            place = queue.popleft()
            for user in self.users[place] - distance.keys():
                distance[user] = distance[place] + 1
                queue.append(user)
        room, words = path.split("/")[0], set(self._module(path).replace("_", ".").split(".")[1:])
        tests = [name for name in self.tests if name in distance and Path(name).name.startswith("test_")]

        def rank(name: str) -> tuple[int, bool, int, str]:
            common = words & set(Path(name).stem.split("_"))
            return distance[name], not name.startswith(f"tests/{room}/"), -len(common), name

        return sorted(tests, key=rank)[:limit]


# --- testing


class Scratch:
    """A copy of the checkout in which mutants are tested."""

    def __init__(self, folder: Path) -> None:
        self.root, self.temporary = folder / "checkout", folder / "tmp"
        self.temporary.mkdir(parents=True)
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0"):
            if name and (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.root / name)
        self.sound: dict[str, bool] = {}

    def pytest(self, words: list[str], limit_s: float) -> tuple[int | None, str]:
        """Run tests; returns the exit status (None on time-out) and the output."""
        options = ["-x", "-q", "-rfE", "--no-header", "--tb=no", "-p", "no:cacheprovider", f"--timeout={TEST_S}"]
        # without byte code: a mutant may have the same size and time as the file that it replaces
        environment = {**os.environ, "PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1", "CI": "1"}
        environment |= {"TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, "-m", "not slow and not gpu", *words],
            cwd=self.root,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            with contextlib.suppress(ProcessLookupError):  # processes that a mutant has left running
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for left in self.temporary.iterdir():
                shutil.rmtree(left, ignore_errors=True)
        return process.returncode, output

    def test(self, change: Mutation, files: list[str], limit_s: float) -> Verdict:
        """Apply a mutant, run tests, and restore the file."""
        path, started, left_out = self.root / change.path, time.monotonic(), list[str]()
        source = path.read_bytes()
        while True:
            path.write_bytes(change.apply(source))
            try:
                words = [word for test in left_out for word in ("--deselect", test)]
                status, output = self.pytest([*files, *words], limit_s) if files else (0, "")
            finally:
                path.write_bytes(source)
            killer = _failed(status, output)
            if not killer or self.is_sound(killer) or len(left_out) == FLAKES:
                break
            left_out.append(killer)
        if killer and not self.is_sound(killer):
            killer = ""
        return Verdict(change, killer, files, time.monotonic() - started, unfinished=status is None)

    def is_sound(self, test: str) -> bool:
        """Whether a test passes on the unchanged code."""
        if test not in self.sound:
            words = ["--collect-only", "tests"] if test == NO_START else [test]
            self.sound[test] = self.pytest(words, 4 * TEST_S)[0] == 0
        return self.sound[test]


def _failed(status: int | None, output: str) -> str:
    """The test that failed, or the file that could not be collected; empty if all passed or timed out."""
    if status in (None, 0, 5):
        return ""
    failure = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", output, re.MULTILINE)
    return failure[1] if failure else NO_START


# --- reporting


def difference(change: Mutation) -> str:
    """A mutant as a diff."""
    source = (ROOT / change.path).read_bytes()
    before, after = (text.decode().splitlines() for text in (source, change.apply(source)))
    return "\n".join(difflib.unified_diff(before, after, change.path, change.path, lineterm="", n=1))


def show(verdicts: list[Verdict]) -> None:
    """Print survivors and rates; the last line is JSON."""
    survivors = [verdict for verdict in verdicts if not verdict.killer]
    for verdict in survivors:
        note = " (time was over)" if verdict.unfinished else ""
        print(f"\nsurvived {len(verdict.files)} test files{note}: {', '.join(verdict.files)}")
        print(difference(verdict.mutation))
    print(f"\n{'folder':28}{'drawn':>7}{'killed':>8}{'rate':>7}")
    drawn = Counter(verdict.stratum for verdict in verdicts)
    killed = Counter(verdict.stratum for verdict in verdicts if verdict.killer)
    for name in sorted(drawn):
        print(f"{name:28}{drawn[name]:>7}{killed[name]:>8}{killed[name] / drawn[name]:>7.0%}")
    total = len(verdicts) - len(survivors)
    print(f"{'all':28}{len(verdicts):>7}{total:>8}{total / max(len(verdicts), 1):>7.0%}")
    rows = [{**vars(verdict.mutation), "killer": verdict.killer} for verdict in verdicts]
    print(json.dumps({"benchmark": "mutants", "drawn": len(verdicts), "killed": total, "rows": rows}, default=_text))


def _text(value: object) -> str:
    assert isinstance(value, bytes)
    return value.decode()


def describe(change: Mutation) -> str:
    """A mutant in one line."""
    old = (ROOT / change.path).read_bytes()[change.start : change.end]
    before, after = (" ".join(text.decode().split())[:60] for text in (old, change.text))
    return f"{change.path}:{change.line}  {change.kind}: {before} → {after}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--room", nargs="+", default=list(ROOMS), help="rooms, or folders of them")
    parser.add_argument("--at", nargs="+", default=[], metavar="PATH:LINE,LINE", help="all mutants of these lines")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", type=int, default=8, help="test files for each mutant")
    parser.add_argument("--tests", nargs="+", default=[], help="these test files, instead of the nearest")
    parser.add_argument("--limit-s", type=float, default=300.0, help="time-out of the tests of one mutant")
    parser.add_argument("--list", action="store_true", help="draw only")
    words = parser.parse_args()
    changes = at_places(words.at) if words.at else draw(modules(words.room), words.count, words.seed)
    if words.list:
        print("\n".join(describe(change) for change in changes))
        return
    related, verdicts = Related(ROOT), []
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        scratch = Scratch(Path(folder))
        for change in changes:
            files = words.tests or related.files(change.path, words.files)
            verdicts.append(scratch.test(change, files, words.limit_s))
            result = f"killed by {verdicts[-1].killer}" if verdicts[-1].killer else "SURVIVED"
            print(f"{describe(change)}\n    {result} ({verdicts[-1].seconds:.0f} s)", flush=True)
    show(verdicts)


if __name__ == "__main__":
    main()
