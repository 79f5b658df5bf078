"""`speakers: [Theo], set: test` where the data say `theo` selected nothing; training speakers became the test set."""

import csv
import json

import pytest
from support import small_corpus, tiny_document, write_table, write_tone

from storage.corpora import CorpusError, open_corpus
from tasks.config.pipeline import ConfigError, parse_config
from tasks.dataset.sets import SplitError
from tasks.dataset.sources import SourceConfig
from tasks.orchestration.stage_tasks import run_plainly
from tasks.stages.base import Run, StageError
from tasks.stages.config_check import find_problems
from tasks.stages.prepare import PREPARE
from tasks.stages.quarantined import QuarantineError
from tasks.stages.sources import open_source, select
from training.learner.sampling import SamplingError


@pytest.fixture
def table(tmp_path):
    """Speakers s0 to s5, three utterances each."""
    return str(small_corpus(tmp_path / "corpus", speakers=6))


def run_of(*sources, **fields):
    document = tiny_document(**fields)
    document["data"] |= {"sources": [{"kind": "table", **source} for source in sources]}
    return Run(parse_config(document), "names")


def test_unknown_speaker_of_a_source_is_an_error_with_the_nearest_name(home, table):
    run = run_of({"path": table, "exclude_speakers": ["s1"]}, {"path": table, "speakers": ["S1"], "set": "test"})
    message = f"data.sources.1.speakers: {table} has no utterance of a speaker 'S1'; did you mean 's1'?"
    assert find_problems(run.config) == [message]
    with pytest.raises(ConfigError) as caught:
        PREPARE.execute(run)
    assert str(caught.value) == message


def test_one_unknown_speaker_of_several_is_an_error(home, table):
    named = {"path": table, "speakers": ["s0", "s9", "s1"], "exclude_speakers": ["t0"]}
    first, second = find_problems(run_of(named).config)
    names = "s0, s1, s2, s3, s4, s5"
    assert first == f"data.sources.0.speakers: {table} has no utterance of a speaker 's9'; there are: {names}"
    assert second.startswith(f"data.sources.0.exclude_speakers: {table} has no utterance of a speaker 't0'")
    with pytest.raises(ConfigError, match=r"speakers: .*'s9'.*exclude_speakers: .*'t0'"):
        PREPARE.execute(run_of(named))


def test_speakers_behind_the_limit_are_known_and_add_no_problems(table, tmp_path):
    with open(table, "a", encoding="utf-8") as file:
        file.write("lost,lost.wav,text,s5,\n")
    source = SourceConfig(kind="table", path=table, speakers=("s0", "s5"), limit=2)
    reader = open_source(source)
    assert [u.id for u in select(0, source, reader)] == ["s0-0", "s0-1"]
    assert reader.problems == []
    with pytest.raises(ConfigError, match="'S5'; did you mean 's5'"):
        list(select(0, replace_speakers(source, "s0", "S5"), open_source(source)))


def replace_speakers(source, *names):
    return source.model_copy(update={"speakers": names})


def test_named_speakers_of_a_corpus_without_any_are_an_error(home, tmp_path):
    path = str(write_table(tmp_path, [("a", write_tone(tmp_path / "a.wav"), "text", "")]))
    (problem,) = find_problems(run_of({"path": path, "speakers": ["ann"]}).config)
    assert problem.startswith(f"data.sources.0.speakers: the utterances of {path} have no speakers: ")
    assert "columns: {speaker: NAME}" in problem


def test_unknown_voices_of_synthetic_speech_are_an_error():
    document = tiny_document()
    document["data"]["sources"][0]["speakers"] = ["F1"]
    (problem,) = find_problems(parse_config(document))
    assert problem == "data.sources.0.speakers: synthetic has no utterance of a speaker 'F1'; did you mean 'f1'?"


def test_source_that_selects_nothing_is_an_error(home, table):
    everyone = [f"s{n}" for n in range(6)]
    nobody = {"path": table, "exclude_speakers": everyone, "set": "test"}
    (problem,) = find_problems(run_of({"path": table}, nobody).config)
    assert problem.startswith(f"data.sources.1 selects no utterance of {table}: correct exclude_speakers. ")
    with pytest.raises(StageError, match="data.sources.1 selects no utterance"):
        PREPARE.execute(run_of({"path": table}, nobody))


def test_source_whose_utterances_are_all_quarantined_is_an_error(home, table):
    fields = {"data": {"max_quarantined": 0.9, "duplicates": {"overlap": "keep"}}}
    run = run_of({"path": table}, {"path": table, "speakers": ["s0"], "set": "test"}, **fields)
    with pytest.raises(QuarantineError, match=r"data.sources.1: all utterances of .* and with it the set 'test'"):
        PREPARE.execute(run)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_unknown_value_of_where_is_an_error_with_the_nearest_one(tmp_path, suffix):
    rows = [{"audio": str(write_tone(tmp_path / f"{n}.wav")), "text": "a", "part": f"p{n}"} for n in range(3)]
    path = tmp_path / f"table{suffix}"
    if suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("\n".join(str(row).replace("'", '"') for row in rows))
    assert [u.id for u in open_corpus("table", str(path), where={"part": "p1"})] == ["1"]
    with pytest.raises(CorpusError, match=r"where: no row of .* has 'P1' in the column 'part'; did you mean 'p1'\?"):
        list(open_corpus("table", str(path), where={"part": "P1"}))


def test_unknown_subset_of_gigaspeech_is_an_error_with_those_that_there_are(tmp_path):
    segment = {"sid": "a", "begin_time": 0, "end_time": 0.5, "text_tn": "WORD", "subsets": ["{XL}", "{S}"]}
    write_tone(tmp_path / "a.wav")
    (tmp_path / "GigaSpeech.json").write_text(
        json.dumps({"audios": [{"aid": "a", "path": "a.wav", "segments": [segment]}]})
    )
    assert [u.id for u in open_corpus("gigaspeech", str(tmp_path), subset="S")] == ["a"]
    with pytest.raises(CorpusError, match=r"option subset is 'XXL', but .* has only the subsets S, XL$"):
        list(open_corpus("gigaspeech", str(tmp_path), subset="XXL"))


def test_unknown_set_to_score_is_an_error_before_and_after_the_data_are_prepared(home, table):
    sets = [{"path": table, "exclude_speakers": ["s1", "s2"], "set": "train"}]
    sets += [{"path": table, "speakers": [f"s{n}"], "set": name} for n, name in ((1, "valid"), (2, "test"))]
    wrong = {"score": {"sets": ["test", "tset"]}}
    message = "score.sets names 'tset', but the data has only test, train, valid; did you mean 'test'?"
    assert find_problems(run_of(*sets, **wrong).config) == [message]
    assert find_problems(run_of({"path": table}, **wrong).config) == []  # sets that a split will make
    with pytest.raises(StageError, match=message[:-1]):
        run_plainly(run_of({"path": table}, **wrong), until="prepare")


def test_unknown_group_of_sampling_is_an_error_once_the_data_are_prepared(home, table):
    train = {"sampling": {"kind": "weights", "by": "speaker", "weights": {"S1": 1.0}}}
    with pytest.raises(SamplingError, match=r"a weight for 'S1': the values of speaker are .*; did you mean 's1'\?"):
        run_plainly(run_of({"path": table}, train=train), until="prepare")


def test_unknown_column_to_stratify_by_is_an_error_even_if_nothing_is_divided(home, table):
    run = run_of({"path": table, "set": "train"}, data={"stratify": ["domains"]})
    (problem,) = find_problems(run.config)
    assert problem.startswith("data.stratify: utterances have no 'domains', but id, set, ")
    assert problem.endswith("; did you mean 'domain'?")
    with pytest.raises(SplitError) as caught:
        PREPARE.execute(run)
    assert str(caught.value) == problem
