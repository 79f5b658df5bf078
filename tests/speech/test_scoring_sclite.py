"""Our alignments, counts and tests against NIST's programs, where they are installed (Debian: `apt install sctk`)."""

import os
import random
import subprocess
from pathlib import Path

import nist_tools
import pytest
from nist_tools import marked_text, program, read_alignments, run_sc_stats, run_sclite, with_recognition_errors

from speech.scoring import (
    PairingRules,
    ScoringRules,
    align,
    align_texts,
    count_operations,
    load_pairs,
    matched_pairs,
    score_sets,
    write_trn,
)
from speech.scoring.glm import parse_glm

ALL = ScoringRules(alternatives=True, optional=True, fragments=True, ignore_case=True)
FRAGMENTS = ["ab", "abc", "ab-", "a-", "-c", "-bc", "-", "bc", "AB", "-ab-", "(ab-)", "(abc)", "(-bc)", "(a-)"]


def aligned(folder: Path, refs: dict[str, str], hyps: dict[str, str], *options: str) -> dict[str, list]:
    """Alignments of every utterance as sclite makes them."""
    write_trn(folder / "ref.trn", refs)
    write_trn(folder / "hyp.trn", hyps)
    return read_alignments(run_sclite(folder / "ref.trn", [folder / "hyp.trn"], *options))


@pytest.mark.parametrize("seed", [0, 1])
def test_random_utterances_agree_with_sclite(tmp_path, seed):
    rng = random.Random(seed)
    refs: dict[str, str] = {}
    hyps: dict[str, str] = {}
    for number in range(4000):
        vocabulary = [f"w{index}" for index in range(rng.choice([2, 3, 4, 8, 30, 200]))]
        words = rng.choices(vocabulary, k=rng.choice([0, 1, 2, 3, 5, 8, 12, 20, 40]))
        refs[f"u{number}"] = " ".join(words)
        hyps[f"u{number}"] = " ".join(with_recognition_errors(rng, words, vocabulary))
    theirs = aligned(tmp_path, refs, hyps, "-s")
    assert theirs.keys() == refs.keys()
    for id_, steps in theirs.items():
        ref, hyp = refs[id_].split(), hyps[id_].split()
        assert align(ref, hyp) == steps, (ref, hyp)
        operations = [operation for operation, _, _ in steps]
        assert count_operations(ref, hyp) == tuple(operations.count(name) for name in ("cor", "sub", "ins", "del"))


def random_texts(kind: str, count: int, seed: int) -> dict[str, tuple[str, str]]:
    rng = random.Random(f"{kind}{seed}")
    texts = {}
    for number in range(count):
        letters = list("abcdefgh"[: rng.choice([2, 3, 5])])
        if kind == "fragments":
            pair = tuple(marked_text(rng, FRAGMENTS, choices=0.1, optional=0, depth=1) for _ in "rh")
        else:
            optional = 0.0 if kind == "alternatives" else 0.2
            hyp = {"choices": 0.25, "nulls": 0.4} if kind == "both sides" else {"choices": 0.0}
            pair = marked_text(rng, letters, optional=optional), marked_text(rng, letters, optional=optional, **hyp)
        texts[f"u{number}"] = pair
    return texts


def check_marked(tmp_path, kind, count, seed):
    texts = random_texts(kind, count, seed)
    rules = ScoringRules(True, kind != "alternatives", kind == "fragments", ignore_case=True)
    options = ["-D"] * rules.optional + ["-F"] * rules.fragments
    refs, hyps = ({id_: pair[side] for id_, pair in texts.items()} for side in (0, 1))
    theirs = aligned(tmp_path, refs, hyps, *options)
    assert theirs.keys() == texts.keys()
    for id_, steps in theirs.items():
        assert align_texts(*texts[id_], rules) == steps, texts[id_]


@pytest.mark.parametrize("kind", ["alternatives", "optional words", "both sides", "fragments"])
def test_marked_utterances_agree_with_sclite(tmp_path, kind):
    check_marked(tmp_path, kind, 200, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("kind", ["alternatives", "optional words", "both sides", "fragments"])
def test_many_marked_utterances_agree_with_sclite(tmp_path, kind, seed):
    check_marked(tmp_path, kind, 4000, seed)


def test_sclite_reads_our_ids(tmp_path):
    refs = {"take 1 (loud)": "a b", "100%": "a"}
    theirs = aligned(tmp_path, refs, {"take 1 (loud)": "a", "100%": ""}, "-s")
    assert theirs == {"take%201%20%28loud%29": align(["a", "b"], ["a"]), "100%25": align(["a"], [])}


def conversations(rng: random.Random) -> tuple[list[str], list[tuple]]:
    """Segments and words of six channels, with gaps, words in them, and stretches that are not scored."""
    words = ["a", "b", "c", "d", "ab-", "(uh)", "um", "it's", "a-b"]
    segments = [f';; LABEL "{id_}" "{id_}" ""' for id_ in ("O", "SW", "CH")]
    heard = []
    for file, channel in [(file, channel) for file in ("en_1", "sw_1", "sw_2") for channel in "AB"]:
        time = rng.random() * 2
        for _ in range(rng.choice([1, 2, 4])):
            start = time + rng.choice([0, 0, 0.5])
            time = start + rng.choice([1, 2, 3.5])
            said = " ".join(rng.choices([*words, "{ a / b c / @ }"], k=rng.choice([0, 1, 3, 6])))
            text = "IGNORE_TIME_SEGMENT_IN_SCORING" if rng.random() < 0.15 else said
            labels = f"<O,{'CH' if file[0] == 'e' else 'SW'}>"
            segments.append(f"{file} {channel} {file}_{channel} {start:.2f} {time:.2f} {labels} {text}")
        begin = 0.0
        for _ in range(rng.choice([0, 1, 3, 10])):
            begin += rng.random()
            heard.append((file, channel, round(begin, 3), round(rng.random() / 2, 3), rng.choice(words)))
    return segments, heard or [("en_1", "A", 0.5, 0.1, "a")]


def write_conversations(folder: Path, seed: int) -> tuple[Path, Path]:
    segments, heard = conversations(random.Random(seed))
    (folder / "ref.stm").write_text("\n".join(segments) + "\n")
    (folder / "hyp.ctm").write_text("".join(" ".join(map(str, word)) + "\n" for word in sorted(heard)))
    return folder / "ref.stm", folder / "hyp.ctm"


GLM = """;; rules as those of hub5
* name "test"
* format = 'NIST1'
* copy_no_hit = 'T'
* case_sensitive = 'F'
[UM] => [(%HESITATION)] / [ ] __ [ ]
[IT'S] => [{IT IS / IT HAS}] / [ ] __ [ ]
;; INPUT_DEPENDENT_APPLICATION = "hyp"
[D] => [X Y] / [ ] __ [ ]
"""


def filtered(path: Path, kind: str, purpose: str, glm: Path) -> Path:
    """A transcript after csrfilt, which needs NIST's rfilter1 on the path."""
    environment = os.environ | {"PATH": f"{os.environ['PATH']}:{nist_tools.FOLDER}"}
    with path.open() as source:
        done = subprocess.run(
            [program("csrfilt.sh"), "-s", "-i", kind, "-t", purpose, "-dh", glm],
            stdin=source,
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
    made = path.with_name(f"filtered{path.suffix}")
    made.write_text(done.stdout)
    return made


def check_times(ref: Path, hyp: Path, ours: PairingRules, theirs: tuple[Path, Path]):
    output = run_sclite(theirs[0], [theirs[1]], "-D", "-F", kinds=("stm", "ctm"))
    pairs = load_pairs(ref, hyp, ALL, ours)
    assert {row.id.lower(): align_texts(row.ref, row.hyp, ALL) for row in pairs.rows} == read_alignments(output)


@pytest.mark.parametrize("seed", range(4))
def test_words_in_segments_agree_with_sclite(tmp_path, seed):
    ref, hyp = write_conversations(tmp_path, seed)
    check_times(ref, hyp, PairingRules(), (ref, hyp))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_many_words_in_segments_agree_with_sclite(tmp_path, seed):
    ref, hyp = write_conversations(tmp_path, seed)
    check_times(ref, hyp, PairingRules(), (ref, hyp))


@pytest.mark.parametrize("seed", [0, *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(300, 330)]])
def test_segments_after_global_mapping_agree_with_sclite(tmp_path, seed):
    ref, hyp = write_conversations(tmp_path, seed)
    glm = tmp_path / "test.glm"
    glm.write_text(GLM)
    rules = PairingRules(glm=parse_glm(GLM.splitlines()), split_hyphens=True)
    check_times(ref, hyp, rules, (filtered(ref, "stm", "ref", glm), filtered(hyp, "ctm", "hyp", glm)))


def rule(rng: random.Random) -> str:
    old = " ".join(rng.choices(["A", "B", "AB", "UH", "UM", "IT'S", "A-B", "C-"], k=rng.choice([1, 1, 2])))
    new = rng.choice(["", "X", "A B", "{IT IS / IT HAS}", "(%HES)", "( X )", "%BC", "(P Q)", "Z-W"])
    contexts = [" / [ ] __ [ ]", " / [ ] __ [ ]", " / [A ] __ [ ]", " / [ ] __ [ B]", " / __ [ ]", " / [ ] __"]
    return f"[{old}] => [{new}]{rng.choice(contexts)}"


@pytest.mark.parametrize("seed", [0, *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 30)]])
def test_rules_change_texts_like_csrfilt(tmp_path, seed):
    rng = random.Random(seed)
    words = ["a", "b", "ab", "a-b", "uh", "um", "it's", "c-", "-d", "(uh)", "(a b)", "{ a / b c }", "b-a-c", "x--y"]
    header = GLM.split("[UM]")[0]
    lines = header.splitlines() + [rule(rng) for _ in range(rng.choice([2, 5, 9]))]
    (tmp_path / "random.glm").write_text("\n".join(lines) + "\n")
    texts = [" ".join(rng.choices(words, k=rng.choice([1, 3, 6, 10]))) for _ in range(40)]
    (tmp_path / "texts.trn").write_text("".join(f"{text} (u{number})\n" for number, text in enumerate(texts)))
    made = filtered(tmp_path / "texts.trn", "trn", "ref", tmp_path / "random.glm").read_text().splitlines()
    change = parse_glm(lines).filter("trn", "ref", ignore_case=False, split_hyphens=True)
    for text, line in zip(texts, made, strict=True):
        assert change(text) == line.rsplit("(", 1)[0].strip(), text


@pytest.mark.parametrize("seed", [0, 1, 2, *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 80)]])
def test_comparison_of_two_systems_agrees_with_sc_stats(tmp_path, seed):
    rng = random.Random(seed)
    rates = rng.choice([0.1, 0.2, 0.35]), rng.choice([0.1, 0.2, 0.35])
    letters = list("abcdefghij")
    refs = {
        f"s{number % 3}-{number}": marked_text(rng, letters, choices=0, optional=0.1 * (seed % 2), length=length)
        for number, length in enumerate(rng.choices([0, 1, 2, 3, 8, 15], k=40))
    }
    systems = {
        name: {
            id_: " ".join(with_recognition_errors(rng, text.replace("(", "").replace(")", "").split(), letters, rate))
            for id_, text in refs.items()
        }
        for name, rate in zip("ab", rates, strict=True)
    }
    for name, texts in {"ref": refs, **systems}.items():
        write_trn(tmp_path / f"{name}.trn", texts)
    sgml = run_sclite(tmp_path / "ref.trn", [tmp_path / "a.trn", tmp_path / "b.trn"], "-D")
    segments, mean, deviation, z, significant = run_sc_stats(sgml)
    rules = ScoringRules(alternatives=True, optional=True, ignore_case=True)
    reports = [
        score_sets([(id_, refs[id_], hyp, "", "") for id_, hyp in texts.items()], rules) for texts in systems.values()
    ]
    comparison = matched_pairs(*reports)
    assert comparison.segments == segments
    assert (comparison.mean, comparison.deviation, comparison.z) == pytest.approx((mean, deviation, z), abs=0.00051)
    assert (comparison.better is not None) == significant
