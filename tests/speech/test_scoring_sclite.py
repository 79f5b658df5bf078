"""Our alignments and counts against NIST sclite itself, where it is installed (Debian: `apt install sctk`)."""

import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from speech.scoring import align, count_operations, write_trn

OPERATIONS = {"C": "cor", "S": "sub", "I": "ins", "D": "del"}


@pytest.fixture(scope="module")
def sclite():
    found = shutil.which("sclite") or shutil.which("sclite", path="/usr/lib/sctk/bin")
    if found is None:
        pytest.skip("NIST sclite is not installed (Debian: apt install sctk)")
    return found


def run_sclite(program: str, folder: Path, refs: dict[str, str], hyps: dict[str, str]) -> dict[str, list]:
    """Alignments of every utterance as sclite makes them."""
    write_trn(folder / "ref.trn", refs)
    write_trn(folder / "hyp.trn", hyps)
    command = [program, "-r", folder / "ref.trn", "trn", "-h", folder / "hyp.trn", "trn", "-i", "rm", "-s"]
    output = subprocess.run([*command, "-o", "sgml", "stdout"], capture_output=True, text=True, check=True).stdout
    paths = re.findall(r'<PATH id="\(([^)]*)\)"[^>]*>\n(.*?)</PATH>', output, re.DOTALL)
    return {id_: [read_step(step) for step in body.split(":") if step.strip()] for id_, body in paths}


def read_step(step: str):
    operation, ref, hyp = step.strip().split(",")
    return OPERATIONS[operation], ref.strip('"') or None, hyp.strip('"') or None


def disturbed(rng: random.Random, words: list[str], vocabulary: list[str]) -> list[str]:
    """A recognizer's errors, or another sentence altogether."""
    if rng.random() < 0.4:
        return rng.choices(vocabulary, k=rng.randint(0, len(words) + 4))
    rate, result = rng.random() * 0.6, []
    for word in words:
        draw = rng.random() / max(rate, 1e-9)
        if draw < 0.5:
            result.append(rng.choice(vocabulary))
        elif draw > 0.75:
            result += [word, rng.choice(vocabulary)] if draw < 1 else [word]
    return result


@pytest.mark.parametrize("seed", [0, 1])
def test_random_utterances(sclite, tmp_path, seed):
    rng = random.Random(seed)
    refs: dict[str, str] = {}
    hyps: dict[str, str] = {}
    for number in range(4000):
        vocabulary = [f"w{index}" for index in range(rng.choice([2, 3, 4, 8, 30, 200]))]
        words = rng.choices(vocabulary, k=rng.choice([0, 1, 2, 3, 5, 8, 12, 20, 40]))
        refs[f"u{number}"] = " ".join(words)
        hyps[f"u{number}"] = " ".join(disturbed(rng, words, vocabulary))
    theirs = run_sclite(sclite, tmp_path, refs, hyps)
    assert theirs.keys() == refs.keys()
    for id_, steps in theirs.items():
        ref, hyp = refs[id_].split(), hyps[id_].split()
        assert align(ref, hyp) == steps, (ref, hyp)
        operations = [operation for operation, _, _ in steps]
        assert count_operations(ref, hyp) == tuple(operations.count(name) for name in ("cor", "sub", "ins", "del"))


def test_sclite_reads_our_ids(sclite, tmp_path):
    refs = {"take 1 (loud)": "a b", "100%": "a"}
    theirs = run_sclite(sclite, tmp_path, refs, {"take 1 (loud)": "a", "100%": ""})
    assert theirs == {"take%201%20%28loud%29": align(["a", "b"], ["a"]), "100%25": align(["a"], [])}
