"""The stage lm: a language model of transcripts and text, made once, without the test set."""

import gzip
import json
import os
import signal
import subprocess
import sys

import pytest
from forks import Forkable
from support import ROOT, copy_finished, tiny_document, wait_until

from speech.lm import LmError, NgramConfig, load
from speech.lm.kenlm import arpa_words, read_words
from tasks import STAGES
from tasks.config.pipeline import ConfigError, load_config, parse_config
from tasks.orchestration.stage_tasks import run_plainly
from tasks.stages.base import Run, get_stage, stages_of
from tasks.stages.lm import LM, figures, protected_sets
from tasks.stages.preflight import run_preflight
from tasks.stages.shard import set_texts
from tasks.stages.train import TRAIN

BIGRAM = {"order": 2, "smoothing": "witten-bell"}


@pytest.fixture
def continued(finished, tmp_path, monkeypatch):
    """Makes runs that continue from the finished run's training, in a separate data folder."""
    monkeypatch.setenv("STARLING_HOME", str(copy_finished(tmp_path / "home")))

    def variant(lm, upto="train", **fields):
        run = Run(parse_config(tiny_document(lm=lm, **fields)), "r")
        names = STAGES[: STAGES.index(upto) + 1]
        run.results = {name: result for name, result in finished.results.items() if name in names}
        return run

    return variant


def text_file(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def test_pipeline_without_section_lm_has_no_stage(finished):
    assert "lm" in STAGES
    assert "lm" not in stages_of(finished.config)
    assert "lm" not in finished.results
    assert set(stages_of(parse_config(tiny_document(lm={})))) == {"lm", *stages_of(parse_config(tiny_document()))}


def test_model_is_estimated_from_training_transcripts(continued):
    run = continued(BIGRAM)
    result = LM.execute(run)
    folder = result.store.local_path("done.json").parent
    model = load(NgramConfig(**BIGRAM), folder)
    transcripts = list(set_texts(run, "train"))
    assert result.counts == {
        "sentences": len(transcripts), "words": len(model.words) - 3, "ngrams": sum(result.record["lm"]["ngrams"])
    }  # fmt: skip
    known = {word for line in transcripts for word in line.split()}
    assert set(read_words(str(folder / "words.txt"))) == known == set(arpa_words(str(folder / "lm.arpa")))
    expected = model.evaluate(line.split() for line in set_texts(run, "valid")).to_dict()
    assert result.record["lm"]["perplexity"] == {"valid": pytest.approx(expected)}
    metrics = figures(result.record)
    assert metrics["lm.valid.perplexity_without_unknown"] == pytest.approx(expected["perplexity_without_unknown"])
    assert metrics["lm.ngrams.2"] == result.record["lm"]["ngrams"][1]
    assert metrics["lm.bytes"] == sum((folder / name).stat().st_size for name in ("lm.arpa", "words.txt"))
    assert "lexicon" not in result.record
    assert not list((folder.parents[2] / "work").glob("lm-*"))
    assert LM.execute(continued(BIGRAM)).cached


def test_text_is_normalized_and_excludes_test_and_validation_lines(continued, tmp_path):
    run = continued(BIGRAM)
    protected = [line for name in protected_sets(run) for line in set_texts(run, name)]
    held_out = max(protected, key=lambda line: len(line.split()))
    length = min(8, len(held_out.split()))
    text = text_file(tmp_path / "t.txt", "Play 2 songs!", f"please {held_out} now", "другое", "open the window")
    lm = BIGRAM | {"text": {"paths": [text], "protected_length": length}, "transcripts": False}
    result = LM.execute(continued(lm))
    about = result.record["lm"]
    assert protected_sets(run) == ["test", "valid"]
    assert about["text"]["lines"] == 4
    assert (about["text"]["protected"], about["text"]["outside-alphabet"], about["text"]["kept"]) == (1, 1, 2)
    assert result.counts["protected"] == 1
    assert figures(result.record)["lm.protected"] == 1
    assert about["protection"]["length"] == length
    assert about["protection"]["sequences"] > 0
    words = set(read_words(str(result.store.local_path("words.txt"))))
    assert words == {"play", "two", "songs", "open", "the", "window"}
    allowed = lm | {"text": lm["text"] | {"allow_test_text": True}}
    free = LM.execute(continued(allowed)).record["lm"]
    assert free["text"]["kept"] == 3
    assert free["protection"] == {"allowed": True}


def test_address_depends_on_content_of_text_not_its_path(continued, tmp_path):
    def key(name, *lines, pack=False, **fields):
        path = tmp_path / name
        text_file(path, *lines)
        if pack:
            path.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
        return LM.output(continued(BIGRAM | {"text": str(path)} | fields)).key

    first = key("a.txt", "open the window")
    assert key("b.txt", "open the window") == first
    assert key("a.txt", "close the window") != first
    assert key("c.gz", "open the window", pack=True) != first
    assert len({first, LM.output(continued(BIGRAM)).key, LM.output(continued({"order": 3})).key}) == 3
    assert LM.output(continued(BIGRAM | {"kind": "ngram", "cutoffs": []})).key == LM.output(continued(BIGRAM)).key


def test_changed_language_model_repeats_no_training(continued):
    runs = [continued(lm) for lm in (None, BIGRAM, {"order": 1, "smoothing": "witten-bell"})]
    assert len({TRAIN.output(run).key for run in runs}) == 1


def test_pronunciations_are_written_if_a_source_is_configured(continued, tmp_path):
    path = text_file(tmp_path / "lexicon.txt", "turn T ER1 N", "the DH AH0", "the DH IY0")
    run = continued(BIGRAM, lexicon={"kind": "file", "path": path, "missing": "unknown"})
    result = LM.execute(run)
    lines = result.store.read("lexicon.txt").decode().splitlines()
    assert {"the DH AH", "the DH IY", "turn T ER N"} <= {line.replace("0", "").replace("1", "") for line in lines}
    assert result.record["lexicon"]["coverage"]["running_words"] > 0
    (tmp_path / "lexicon.txt").write_text("turn T ER1 N\n")
    assert LM.output(run).key != result.key


def test_token_language_model_uses_the_acoustic_models_tokens(continued):
    result = LM.execute(continued(BIGRAM | {"unit": "token"}))
    assert "▁" in set(arpa_words(str(result.store.local_path("lm.arpa"))))
    assert result.record["lm"]["perplexity"]["valid"]["words"] > 0


def test_class_language_model_has_no_arpa_file(continued):
    result = LM.execute(continued({"kind": "class", "classes": 5}))
    assert result.record["files"] == {"words": "words.txt"}
    assert set(result.record["bytes"]) == {"classes.arpa", "classes.tsv", "words.txt"}


def test_missing_text_is_named_before_the_training(continued, tmp_path):
    run = continued({"text": [str(tmp_path / "none.txt")]}, upto="features")
    with pytest.raises(LmError, match=r"there is no file .*none.txt: correct the path, or take it out of lm.text"):
        run_preflight(run)


def test_text_that_is_empty_after_filtering_is_an_error(continued, tmp_path):
    path = text_file(tmp_path / "t.txt", "", "...", "другое")
    with pytest.raises(LmError, match=r"there is no text for a language model: .*'outside-alphabet': 1.*lm.text"):
        LM.execute(continued({"text": [path], "transcripts": False}))
    with pytest.raises(ConfigError, match="lm: transcripts is false and text names no files"):
        parse_config(tiny_document(lm={"transcripts": False}))


def test_paths_are_relative_to_the_configuration(tmp_path, monkeypatch):
    monkeypatch.setenv("BOOKS", "/books")
    document = tiny_document(lm={"text": ["a/*.txt", "$BOOKS/b.gz", "s3://bucket/c.txt"]})
    (tmp_path / "c.yaml").write_text(json.dumps(document))
    paths = load_config(tmp_path / "c.yaml").lm.text.paths
    assert paths == (f"{tmp_path}/a/*.txt", "/books/b.gz", "s3://bucket/c.txt")


_STOPPED = """
import sys, time
from pathlib import Path
from storage.objects import ObjectStore
from tasks.orchestration.stage_tasks import run_plainly
from tasks.config.pipeline import load_config
from tasks.stages.base import Run

write = ObjectStore.write_file

def slow(self, name, path):
    write(self, name, path)
    if name == "lm.arpa":
        Path(sys.argv[2]).touch()
        time.sleep(600)

ObjectStore.write_file = slow
run_plainly(Run(load_config(Path(sys.argv[1])), "killed"), "lm")
"""


def test_killed_stage_leaves_no_record_and_next_run_completes_it(continued, tmp_path):
    run = continued(BIGRAM)
    config, sign = tmp_path / "tiny.yaml", tmp_path / "sign"
    config.write_text(json.dumps(tiny_document(lm=BIGRAM)))
    process = subprocess.Popen([sys.executable, "-c", Forkable(_STOPPED), str(config), str(sign)], cwd=ROOT)
    try:
        wait_until(sign.exists)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    output = LM.output(run)
    assert output.store.exists("lm.arpa")
    assert output.record() is None
    assert list((tmp_path / "home" / "work").glob("lm-*"))  # what the killed process left
    result = LM.execute(run)
    assert not result.cached
    assert output.lacking() == []
    assert not list((tmp_path / "home" / "work").glob("lm-*"))
    assert get_stage("lm").execute(continued(BIGRAM)).cached


def test_text_of_the_tested_fold_is_excluded(home):
    document = tiny_document(lm=BIGRAM)
    document["data"] |= {"folds": 2, "fold": 1}
    run = Run(parse_config(document), "folds")
    run_plainly(run, "shard")
    assert "fold-1" in protected_sets(run)
    assert "fold-2" not in protected_sets(run)
    assert LM.output(run).key != LM.output(_other_fold(run, document)).key


def _other_fold(run, document):
    document["data"]["fold"] = 2
    other = Run(parse_config(document), "folds")
    other.results = run.results
    return other
