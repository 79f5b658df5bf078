"""Decoding into words with the language model of the stage lm: what is decoded, tuned, registered and compared."""

import json
from pathlib import Path

import mlflow
import pytest
from support import copy_finished, give_mlflow, load_beside, tiny_document
from typer.testing import CliRunner

from flows.search import SearchDisplay, run_search
from recognition.bundle import check_files, own_decoder
from speech.decoding import WordsConfig
from speech.lm.kenlm import arpa_words
from tasks import STAGES
from tasks.config.pipeline import ConfigError, parse_config
from tasks.dataset.tables import read_table
from tasks.search.study import Studies
from tasks.stages import decode, lm, lm_network, tuning
from tasks.stages.base import Run, StageError, stages_of
from tasks.stages.bundles import fetch_bundle
from tasks.stages.decode import DECODE, decode_piece, decode_with
from tasks.stages.decoder_files import decoder_of
from tasks.stages.evaluation import use_model
from tasks.stages.lm import LM
from tasks.stages.preflight import run_preflight
from tasks.stages.register import REGISTER
from tasks.stages.rescoring import RESCORING
from tasks.stages.score import SCORE, score_rows
from tasks.stages.train import TRAIN
from tasks.tracking import significance
from tasks.tracking.runs import client

tones = load_beside(__file__, "../training/tones.py")
BIGRAM = {"order": 2, "smoothing": "witten-bell"}
WORDS = {"kind": "words", "beam": 8}


@pytest.fixture
def continued(finished, tmp_path, monkeypatch):
    """Makes runs that continue from the finished run's training, in a separate data folder."""
    monkeypatch.setenv("STARLING_HOME", str(copy_finished(tmp_path / "home")))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def variant(upto="train", **fields):
        run = Run(parse_config(tiny_document(**fields)), "r")
        names = STAGES[: STAGES.index(upto) + 1]
        run.results = {name: result for name, result in finished.results.items() if name in names}
        return run

    return variant


def words_run(continued, **fields):
    """A run that has estimated its language model."""
    run = continued(**{"lm": BIGRAM, "decode": WORDS} | fields)
    LM.execute(run)
    return run


def hypotheses(result):
    return {row["id"]: row["hyp"] for row in read_table(result.output, "test.parquet")}


def test_words_are_decoded_with_the_stages_language_model(continued):
    run = words_run(continued)
    texts = hypotheses(DECODE.execute(run))
    files = {name: run.result("lm").store.local_path(name) for name in ("lm.arpa", "words.txt")}
    assert {word for text in texts.values() for word in text.split()} <= set(arpa_words(str(files["lm.arpa"])))
    explicit = continued(decode=WORDS | {"lm": str(files["lm.arpa"]), "words": str(files["words.txt"])})
    assert hypotheses(DECODE.execute(explicit)) == texts
    assert texts != hypotheses(DECODE.execute(words_run(continued, decode=WORDS | {"lm_weight": 0, "word_score": 9})))


def test_configured_files_take_precedence_over_the_stage(continued, tmp_path):
    (tmp_path / "few.txt").write_text("turn\nlights\n")
    run = words_run(continued, decode=WORDS | {"words": str(tmp_path / "few.txt")})
    cfg = decoder_of(run)
    assert (Path(cfg.lm).name, cfg.words) == ("lm.arpa", str(tmp_path / "few.txt"))
    result = DECODE.execute(run)
    assert {word for text in hypotheses(result).values() for word in text.split()} <= {"turn", "lights"}


def test_stage_rescoring_ranks_like_the_same_file_configured(continued):
    run = words_run(continued, rescoring={"order": 3, "smoothing": "witten-bell"})
    made = RESCORING.execute(run)
    assert set(made.record["sha256"]) == {"lm.arpa", "words.txt"}
    result = DECODE.execute(run)
    assert Path(decoder_of(run).rescore_lm).read_bytes() == made.output.read("lm.arpa")
    named = words_run(continued, decode=WORDS | {"rescore_lm": str(made.store.local_path("lm.arpa"))})
    assert hypotheses(DECODE.execute(named)) == hypotheses(result)
    assert DECODE.output(words_run(continued)).key != result.key
    other = words_run(continued, rescoring={"order": 1, "smoothing": "witten-bell"})
    RESCORING.execute(other)
    assert DECODE.output(other).key != result.key
    metrics = lm.figures(made.record, "rescoring")
    assert metrics["rescoring.ngrams.3"] > 0
    assert metrics["rescoring.words"] == made.counts["words"]


def test_stage_rescoring_trains_a_network_that_ranks_hypotheses(continued, monkeypatch):
    monkeypatch.setattr(lm_network, "run_training", lambda job, *_: tones.train_here(job))
    short = {"epochs": 1, "device": "cpu", "threads": 1, "membership": {"beat_s": 0.05}}
    run = words_run(continued, rescoring={"kind": "lstm", "dim": 8}, lm_train=short)
    made = RESCORING.execute(run)
    DECODE.execute(run)
    assert Path(decoder_of(run).rescore_lm).read_bytes() == made.output.read("lm.safetensors")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"decode": {"kind": "greedy"}}, "decode.kind greedy cannot: use decode.kind words, graph, attention"),
        ({"decode": WORDS | {"rescore_lm": "x.arpa"}}, "each give a second language model: remove one"),
        ({"rescoring": {"unit": "character"}}, "and rescoring.kind ngram with unit character is none"),
        ({"rescoring": {"kind": "class"}}, "rescoring.kind class with unit word is none: use rescoring.kind ngram"),
        ({"decode": {"kind": "graph", "graph": "g", "words": "w"}}, "rescoring: decode: .*name it in graph_lm"),
        ({"lm_train": {"epochs": 1}}, "lm_train trains language models that are networks"),
    ],
)
def test_unusable_second_language_model_is_refused(given, message):
    document = tiny_document(**{"decode": WORDS, "rescoring": BIGRAM} | given)
    if document["decode"]["kind"] == "graph":
        document["train"] |= {"objective": {"kind": "frame_cross_entropy", "alignments": "aligned"}}
    else:
        document["lm"] = BIGRAM
    with pytest.raises(ConfigError, match=message):
        parse_config(document)


def test_workers_fetch_the_language_model(continued, monkeypatch):
    """A worker on another machine has no path of this one: the piece names the stage's output."""
    run = words_run(continued)
    here = hypotheses(DECODE.execute(run))
    pieces = []

    def in_workers(runner, name, given, label):
        for piece in given:
            pieces.append(json.loads(json.dumps(piece)))
            yield decode_piece(pieces[-1])

    monkeypatch.setattr(decode, "map_pieces", in_workers)
    other = words_run(continued, runner={"kind": "processes", "workers": 1})
    other.force_from = "decode"
    assert hypotheses(DECODE.execute(other)) == here
    assert pieces
    assert not any(piece["decode"]["lm"] for piece in pieces)


def test_new_language_model_repeats_decoding_but_not_training(continued, tmp_path):
    def keys(**fields):
        run = words_run(continued, **fields)
        by_stage = {"train": TRAIN.output(run).key, "lm": run.result("lm").key}
        for stage in (DECODE, SCORE):
            by_stage[stage.name] = stage.execute(run).key
        return by_stage | {"register": REGISTER.output(run).key}

    first, second = keys(), keys(lm=BIGRAM | {"order": 1})
    assert first["train"] == second["train"]
    assert all(first[name] != second[name] for name in ("lm", "decode", "score", "register"))
    # another address of the stage with the same words and probabilities: no later stage changes
    same = keys(lm=BIGRAM | {"text": {"protected_length": 9}})
    assert same["lm"] != first["lm"]
    assert {name: key for name, key in same.items() if name != "lm"} == {k: v for k, v in first.items() if k != "lm"}
    greedy = [DECODE.output(words_run(continued, decode="greedy", lm=lm)).key for lm in (BIGRAM, BIGRAM | {"order": 1})]
    assert len(set(greedy)) == 1


GRID = {"lm_weight": [0.0, 3.0], "word_score": [-2.0, 2.0]}


def test_weights_are_tuned_on_the_validation_set_alone(continued, tmp_path, monkeypatch):
    urls = []
    open_set = tuning.open_set
    monkeypatch.setattr(tuning, "open_set", lambda url, *more: urls.append(url) or open_set(url, *more))
    run = words_run(continued, tune={"space": GRID})
    result = DECODE.execute(run)
    tuned = result.record["tuning"]
    assert [Path(url).name for url in urls] == ["valid"]
    assert (tuned["set"], tuned["utterances"]) == ("valid", 4)
    assert tuned["configured"] == {"lm_weight": 1.5, "word_score": 0.0}
    assert len(tuned["table"]) == 9  # the configured values are tried, too
    bundle = fetch_bundle(run.result("train").output, tmp_path / "bundle")
    untuned = decoder_of(words_run(continued))
    for row in tuned["table"]:
        cfg = untuned.model_copy(update={name: row[name] for name in GRID})
        rows = [vars(decoded) for decoded in decode_with(run, bundle, "valid", cfg)]
        total = score_rows(rows).total
        assert (row["errors"], row["wer"], row["cer"]) == (total.errors, total.wer, total.cer)
    best = min(tuned["table"], key=lambda row: (row["errors"], row["cer"]))
    assert tuned["wer"] == best["wer"]
    assert decoder_of(run) == untuned.model_copy(update=tuned["chosen"])
    assert hypotheses(result) == {
        decoded.id: decoded.hyp for decoded in decode_with(run, bundle, "test", decoder_of(run))
    }
    assert tuning.figures(result.record) == {
        **{f"decode.{name}": value for name, value in tuned["chosen"].items()}, "decode.tuning_wer": tuned["wer"]
    }  # fmt: skip


def test_tuning_is_part_of_the_address(continued):
    keys = [
        DECODE.output(words_run(continued, tune=tune)).key
        for tune in (
            *(None, {}, {"utterances": 3}, {"space": GRID}, {"space": {"lm_weight": [1.0]}}),
            *({"method": "random"}, {"method": "tpe"}, {"method": "tpe", "trials": 3}),
        )
    ]
    assert len(set(keys)) == len(keys)
    assert DECODE.output(words_run(continued, tune={"grid": GRID})).key in keys  # the former name


def test_a_method_that_draws_values_tries_the_configured_ones_too(continued):
    space = {"lm_weight": {"low": 0.0, "high": 4.0}, "beam": {"low": 2, "high": 8, "integer": True}}
    tune = {"method": "random", "trials": 3, "space": space}
    tuned = DECODE.execute(words_run(continued, tune=tune)).record["tuning"]
    assert len(tuned["table"]) == 4
    assert tuned["table"][3].items() >= tuned["configured"].items() == {"lm_weight": 1.5, "beam": 8}.items()
    assert all(0 <= row["lm_weight"] <= 4 and row["beam"] in range(2, 9) for row in tuned["table"])
    assert tuned["wer"] == min(row["wer"] for row in tuned["table"])


def test_a_search_over_decoding_trains_once_and_finds_what_tuning_finds(continued):
    tuned = DECODE.execute(words_run(continued, tune={"space": GRID})).record["tuning"]
    space = {f"decode.{name}": sorted({row[name] for row in tuned["table"]}) for name in GRID}
    search = {"method": "grid", "minimize": "wer", "space": space}
    config = continued(lm=BIGRAM, decode=WORDS, search=search).config
    executed = []

    def execute(run, until):
        executed.append((run.config.search, run.trial))
        run.results = words_run(continued).results
        return run

    result = run_search(config, "s", "", lambda config: None, execute, SearchDisplay())
    assert executed == [(None, None)]
    assert result["complete"]
    assert (result["spent"], result["largest"]) == (0, 0)
    trials = Studies().open(config.name).trials
    assert [trial.losses[0] for trial in trials] == [row["wer"] for row in tuned["table"]]
    assert [list(trial.values.values()) for trial in trials] == [[row[name] for name in GRID] for row in tuned["table"]]
    assert result["best"]["losses"][0] == tuned["wer"]
    assert run_search(config, "s", "", lambda config: None, execute, SearchDisplay())["best"] == result["best"]
    assert len(executed) == 1, "nothing is left to do, so that no model is needed"


def test_tuning_uses_a_bounded_number_of_utterances(continued):
    run = words_run(continued, tune={"utterances": 2, "space": {"lm_weight": [0.0]}})
    assert DECODE.execute(run).record["tuning"]["utterances"] == 2


def test_scored_sets_are_never_used_for_tuning(continued):
    run = words_run(continued, tune={}, score={"sets": ["valid", "test"]})
    with pytest.raises(StageError, match="tune chooses .* on the validation set, which is scored"):
        DECODE.execute(run)
    with pytest.raises(StageError, match="which is scored"):
        run_preflight(run)


def finish(run):
    for stage in (DECODE, SCORE, REGISTER):
        stage.execute(run)
    return run.result("register").record


def test_registered_model_includes_and_is_compared_with_its_language_model(continued, tmp_path, monkeypatch):
    give_mlflow(tmp_path / "home")
    plain = continued(register={"model": "m", "accept_untrained": True})
    assert finish(plain)["decision"]["reason"] == "became champion: there was none before"
    decoded_with = []
    decode_set = significance.decode_with
    monkeypatch.setattr(
        significance, "decode_with", lambda *given, **more: decoded_with.append(given[3]) or decode_set(*given, **more)
    )
    run = words_run(continued, register={"model": "m"}, tune={"space": {"lm_weight": [0.5, 3.0]}})
    record = finish(run)
    # each hypothesis comes from its own bundle's decoder
    decision = record["decision"]
    assert [cfg.kind for cfg in decoded_with] == ["greedy"]
    assert decision["decoders"] == {"champion": "greedy", "challenger": "words with a language model"}
    assert "decoded by words with a language model, the champion by greedy" in decision["reason"]
    rates = [pipeline.result("score").record["sets"]["test"]["wer"] for pipeline in (plain, run)]
    assert [decision["champion_wer"], decision["challenger_wer"]] == pytest.approx(rates)
    # the bundle has the files and the tuned weight, and needs neither the stage's output nor this package
    folder = Path(mlflow.artifacts.download_artifacts(artifact_uri=record["model_uri"], dst_path=str(tmp_path / "got")))
    bundle = next(folder.rglob("bundle.json")).parent
    assert {"lm.arpa", "words.txt"} < set(check_files(bundle))
    cfg = own_decoder(bundle)
    assert isinstance(cfg, WordsConfig)
    assert cfg.lm_weight == run.result("decode").record["tuning"]["chosen"]["lm_weight"]
    assert cfg.lm == str(bundle / "lm.arpa")
    version = client().get_model_version("m", record["version"])
    sizes = {name: (bundle / name).stat().st_size for name in ("lm.arpa", "words.txt")}
    assert f"lm {sizes['lm.arpa'] / 1e6:,.1f} MB" in version.description
    assert "2-gram of" in version.description
    metrics = client().get_run(record["mlflow_run"]).data.metrics
    assert metrics["lm.valid.perplexity_without_unknown"] > 1
    assert metrics["lm.bytes"] == sum(sizes.values())
    assert metrics["decode.lm_weight"] == cfg.lm_weight
    assert "tuning.json" in {file.path for file in client().list_artifacts(record["mlflow_run"])}
    check_command_line(record["model_uri"], run, tmp_path)
    # a run that evaluates it makes no language model and tunes nothing: the bundle's decoder is used as it is
    other = continued(lm=BIGRAM, decode=WORDS, tune={})
    use_model(other, bundle)
    assert "lm" not in stages_of(other.config)
    DECODE.execute(other)
    assert hypotheses(other.result("decode")) == hypotheses(run.result("decode"))


def check_command_line(uri, run, tmp_path):
    """Check that `starling transcribe` with the registered model gives words of its list, like the stage."""
    from flows.cli.app import app

    row = read_table(run.result("prepare").output, "utterances.parquet")[0]
    done = CliRunner().invoke(app, ["transcribe", "--model", uri, "--vad", "none", "--format", "json", row["audio"]])
    assert done.exit_code == 0, done.output
    words = set(arpa_words(str(run.result("lm").store.local_path("lm.arpa"))))
    (transcript,) = json.loads(done.stdout)["files"]
    assert transcript["seconds"] > 0
    assert set(transcript["text"].split()) <= words


def test_model_that_may_have_seen_the_test_set_is_not_compared():
    def run(**lm):
        return Run(parse_config(tiny_document(decode="words", lm=lm)), "r")

    text = {"paths": ["t.txt"], "allow_test_text": True}
    assert "may have read the test sets" in significance.lm_refusal(run(text=text))
    assert significance.lm_refusal(run()) == ""
    assert significance.lm_refusal(Run(parse_config(tiny_document(lm={"text": text})), "r")) == ""  # decodes without
