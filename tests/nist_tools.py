"""NIST's programs (Debian's package sctk) as references: running them, parsing their reports, and random inputs."""

import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = "/usr/lib/sctk/bin"
OPERATIONS = {"C": "cor", "S": "sub", "I": "ins", "D": "del"}


def program(name):
    """Path of one of NIST's programs; skips the test where it is not installed."""
    path = shutil.which(name) or shutil.which(name, path=FOLDER)
    if path is None:
        pytest.skip(f"NIST {name} is not installed (Debian: apt install sctk)")
    return path


def run_sclite(ref: Path, hyps: list[Path], *options: str, kinds=("trn", "trn")) -> str:
    """What sclite says in SGML, or an error message if it refuses the files."""
    command = [program("sclite"), "-r", ref, kinds[0]]
    for hyp in hyps:
        command += ["-h", hyp, kinds[1], hyp.stem]
    command += ["-i", "rm"] if kinds[0] == "trn" else []
    done = subprocess.run([*command, *options, "-o", "sgml", "stdout", "-f", "0"], capture_output=True)
    return done.stdout.decode(errors="replace")


def read_alignments(sgml: str) -> dict[str, list]:
    """Steps of each utterance."""
    paths = re.findall(r'<PATH id="\(([^)]*)\)" .*?>\n(.*?)</PATH>', sgml, re.DOTALL)
    return {id_: [read_step(*step) for step in _STEP.findall(body)] for id_, body in paths}


# words may hold colons and commas, so a step ends before the next one; `nl.sgml` has a field in each line
_STEP = re.compile(r'([CSDI])[,\n](?:"(.*?)")?[,\n](?:"(.*?)")?(?=[,\n][^":]*?(?::[CSDI],|\Z)|:[CSDI],|\n[CSDI]\n)')


def read_step(operation: str, ref: str, hyp: str):
    return OPERATIONS[operation], read_word(ref), read_word(hyp)


def read_word(field: str) -> str | None:
    """A word without its tags, which follow semicolons."""
    return re.sub(r"\\(.)", r"\1", re.split(r"(?<!\\);", field)[0]) or None


def read_prints(text: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Speaker, and numbers of correct, substituted, deleted and inserted words, of each utterance (`-o pra`)."""
    counts, speaker, id_ = {}, "", ""
    for line in text.splitlines():
        if match := re.match(r"Speaker sentences\s+\d+:\s+(\S+)", line):
            speaker = match[1]
        elif match := re.match(r"id: \((.*)\)", line):
            id_ = match[1]
        elif match := re.match(r"Scores: \(#C #S #D #I\) (\d+) (\d+) (\d+) (\d+)", line):
            counts[id_] = speaker, tuple(map(int, match.groups()))
    return counts


def read_speaker_table(text: str) -> dict[str, tuple[float, ...]]:
    """Rows of the tables by speaker, and their sum (`-o rsum`, `-o sum`), without the confidences."""
    table = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) >= 3 and re.fullmatch(r"\d+ +\d+", cells[1]):
            table[re.sub(r"^Sum.*", "sum", cells[0])] = tuple(
                float(cell.rstrip("*")) for cell in f"{cells[1]} {cells[2]}".split()
            )
    return table


def read_label_table(text: str) -> list[tuple[int, float]]:
    """Words and error rate in percent of each label (`-o lur`)."""
    row = next(line for line in text.splitlines() if "Set Sum/Avg" in line)
    return [(int(words), float(rate)) for words, rate in re.findall(r"\[(\d+)\] +([\d.]+)", row)]


def run_sc_stats(sgml: str) -> tuple[int, float, float, float, bool]:
    """Outcome of mapsswe: segments, mean, standard deviation, Z, and whether the difference is significant."""
    done = subprocess.run(
        [program("sc_stats"), "-p", "-t", "mapsswe", "-v", "-n", "-"], input=sgml.encode(), capture_output=True
    )
    return read_mapsswe(done.stdout.decode(errors="replace"))


def read_mapsswe(text: str) -> tuple[int, float, float, float, bool]:
    """Segments, mean, standard deviation, Z, and whether the difference is significant (`sc_stats -t mapsswe -v`)."""
    match = re.search(r"# segs: (\d+)\).*mean: (\S+)\) \(std dev: (\S+)\) \(Z Stat: (\S+)\) \(Stat Diff: (\w+)\)", text)
    assert match, text[-500:]
    return int(match[1]), float(match[2]), float(match[3]), float(match[4]), match[5] == "Yes"


def marked_text(
    rng: random.Random, vocabulary: list[str], *, choices=0.3, nulls=0.3, optional=0.2, depth=2, length=None
):
    """Random words, among them alternatives and words that may be left out."""
    words = []
    for _ in range(rng.choice([0, 1, 2, 3, 4, 6]) if length is None else length):
        draw = rng.random()
        if draw < choices and depth:
            sets = [
                marked_text(rng, vocabulary, choices=choices * 0.4, optional=optional, depth=depth - 1, length=length)
                for length in rng.choices([1, 1, 2, 3], k=rng.choice([2, 2, 3]))
            ]
            if rng.random() < nulls:
                sets[rng.randrange(len(sets))] = "@"
            words.append(f"{{ {' / '.join(sets)} }}")
        elif draw < choices + optional:
            words.append(f"({rng.choice(vocabulary)})")
        else:
            words.append(rng.choice(vocabulary))
    return " ".join(words)


def with_recognition_errors(
    rng: random.Random, words: list[str], vocabulary: list[str], rate: float | None = None
) -> list[str]:
    """A recognizer's errors, or, if no rate is given, sometimes another sentence altogether."""
    if rate is None and rng.random() < 0.4:
        return rng.choices(vocabulary, k=rng.randint(0, len(words) + 4))
    rate, result = rng.random() * 0.6 if rate is None else rate, []
    for word in words:
        draw = rng.random() / max(rate, 1e-9)
        if draw < 0.5:
            result.append(rng.choice(vocabulary))
        elif draw > 0.75:
            result += [word, rng.choice(vocabulary)] if draw < 1 else [word]
    return result
