"""The stage align: what it publishes, on tiny speech."""

import hashlib
import json

import mlflow
import numpy as np
import pytest
from support import environment, load_beside, tiny_document, write_config
from typer.testing import CliRunner

from flows.cli.app import app
from flows.summary import summarize
from recognition.bundle import BundleError, copy_network, load_bundle, load_spec
from recognition.systems.gmm import GmmRecognizer
from recognition.transcriber import Transcriber
from speech.alignments import AlignmentTable
from speech.audio import decode_audio
from speech.hmm import decode as hmm_decode
from speech.hmm.config import AlignConfig
from speech.hmm.model import HmmModel, model_digest
from speech.hmm.pronunciations import load_lexicon
from speech.hmm.train import TrainingProgress
from speech.hypotheses import DecodeError
from speech.vad import EverythingConfig
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.reading import ShardReader
from tasks.config.home import home as home_folder
from tasks.config.home import work_folder
from tasks.config.pipeline import ConfigError, load_config, parse_config
from tasks.dataset.tables import read_table
from tasks.orchestration.stage_tasks import run_plainly
from tasks.stages import decode, progress
from tasks.stages.align import ALIGN, IterationLog, figures
from tasks.stages.base import Run, Stage, StageError, stages_of
from tasks.stages.bundles import complete_bundle
from tasks.stages.decode import DECODE
from tasks.stages.graph import GRAPH
from tasks.stages.register import REGISTER
from tasks.stages.score import SCORE
from tasks.tracking.model_card import contents
from tasks.tracking.promotion import promote_version
from tasks.tracking.runs import client

aligning = load_beside(__file__, "aligning.py")
SIZES, aligned_run, run_texts = aligning.SIZES, aligning.aligned_run, aligning.run_texts


@pytest.fixture(scope="module")
def aligned():
    home, run, notes = aligning.aligned_speech()
    with environment(STARLING_HOME=home, MLFLOW_TRACKING_URI=None):
        yield run, notes


def test_stage_is_part_of_a_pipeline_that_configures_it():
    with_it, without = (parse_config(tiny_document(**f)) for f in ({"align": {}}, {}))
    rest = ("prepare", "shard", "features", "train", "decode", "score", "register", "report")
    assert stages_of(with_it) == (*rest[:3], "align", *rest[3:])
    assert stages_of(without) == rest
    with pytest.raises(ConfigError, match=r"align.*cmvn is global, but Gaussians need features normalized by speaker"):
        parse_config(tiny_document(align={"features": {"kind": "mfcc", "cmvn": "global"}}))


def gmm_run(aligned, folder):
    """A run that decodes with the model of another run."""
    run, _ = aligned
    words = sorted({word for text in run_texts(run) for word in text.split()})
    (folder / "lm.arpa").write_text(aligning.unigrams([*words, "unpronounceable1"]))
    align = SIZES | {"stage": "sat", "recognize": {"arpa": str(folder / "lm.arpa"), "passes": 1}}
    other = Run(parse_config(tiny_document(align=align, recognizer="gmm")), "gmm")
    other.results |= {name: run.results[name] for name in ("prepare", "shard", "align")}
    return other


def test_pipeline_without_a_network_has_no_stage_train(tmp_path):
    align = {"recognize": {"arpa": "x.arpa"}}
    config = parse_config(tiny_document(align=align, recognizer="gmm"))
    before = ("prepare", "shard", "features", "align", "graph", "decode", "score")
    assert stages_of(config) == (*before, "register", "report")
    with pytest.raises(ConfigError, match=r"set align\.recognize\.arpa"):
        parse_config(tiny_document(align={}, recognizer="gmm"))
    write_config(tmp_path / "c.yaml", tiny_document(align=align, recognizer="gmm"))
    assert load_config(tmp_path / "c.yaml").align.recognize.arpa == str(tmp_path / "x.arpa")


def test_gmm_decodes_the_test_set_and_resumes(aligned, tmp_path, monkeypatch):
    run = gmm_run(aligned, tmp_path)
    assert ALIGN.output(run).key == run.result("align").key  # how it is used does not change the model
    graph = GRAPH.execute(run)
    assert graph.counts["unpronounced"] == 1
    assert graph.counts["words"] == len(graph.store.read("graph-words.txt").split())
    heard: list[tuple[list[int], list[int]]] = []
    adapt_to_speaker, search = hmm_decode.adapt_to_speaker, GmmRecognizer.search

    def recorded(model, first, features, passes, *, speech):
        heard.append(([len(feats) for feats in features], [len(mask) for mask in speech]))
        assert (first.options.beam, first.options.max_active, passes) == (10.0, 2000, 1)
        return adapt_to_speaker(model, first, features, passes, speech=speech)

    def searched(recognizer, encoded):
        assert (recognizer._search.options.beam, recognizer._search.options.max_active) == (12.0, 7000)
        return search(recognizer, encoded)

    with monkeypatch.context() as patch:
        patch.setattr(decode, "publish_hypotheses", failing_on_call(KeyboardInterrupt))
        patch.setattr(hmm_decode, "adapt_to_speaker", recorded)
        patch.setattr(GmmRecognizer, "search", searched)
        with pytest.raises(KeyboardInterrupt):
            DECODE.execute(run)
    assert heard
    assert all(frames == masks for frames, masks in heard)  # adaptation knows which frames are loud, as for networks
    with monkeypatch.context() as patch:  # speakers that are done are not decoded again
        patch.setattr(decode, "decode_set", failing_on_call(AssertionError))
        result = DECODE.execute(run)
    rows = read_table(result.store, "test.parquet")
    index = ShardIndex.read(run.result("shard").store.child("test"))
    assert [row["id"] for row in rows] == list(index.column("id"))
    known = {word for text in run_texts(run) for word in text.split()}
    assert {word for row in rows for word in row["hyp"].split()} <= known
    assert all(0 <= row["confidence"] <= 1 for row in rows)
    assert not [name for name in result.store.list() if name.startswith("work")]
    record = SCORE.execute(run).record
    assert record["sets"]["test"]["wer"] < 0.9


def test_bundle_of_the_gmm_recognizes_like_the_stage_with_times(aligned, tmp_path):
    run = gmm_run(aligned, tmp_path)
    for stage in (GRAPH, DECODE):
        stage.execute(run)
    rows = read_table(run.result("decode").store, "test.parquet")
    expected = {row["id"]: (row["hyp"], row["confidence"]) for row in rows}
    bundle = complete_bundle(run, tmp_path / "made")
    bundle = bundle.rename(tmp_path / "gmm")
    assert (load_spec(bundle).system.kind, load_spec(bundle).model) == ("gmm", None)
    store = run.result("shard").store.child("test")
    index = ShardIndex.read(store)
    reader = ShardReader(store, index)
    about = [index.row(row) for row in range(len(index))]
    waves = [decode_audio(reader.payload(row))[0].numpy() for row in range(len(index))]
    transcriber = Transcriber(bundle, vad=EverythingConfig())
    transcripts = transcriber.transcribe(waves, 8000, words=True, speakers=[row["speaker"] for row in about])
    for row, transcript in zip(about, transcripts, strict=True):
        assert (transcript.error, transcript.text) == ("", expected[row["id"]][0])
        assert transcript.confidence == pytest.approx(expected[row["id"]][1], abs=1e-6)
        assert [word.word for word in transcript.words] == transcript.text.split()
        assert all(0 <= word.start < word.start + word.duration <= transcript.seconds for word in transcript.words)
    with pytest.raises(DecodeError, match="of kind gmm has no several hypotheses"):
        Transcriber(bundle, nbest=2)
    for read in (load_bundle, lambda folder: copy_network(folder, tmp_path / "copy")):
        with pytest.raises(BundleError, match="of kind gmm has no network"):
            read(bundle)
    (bundle / "hmm" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(BundleError, match=r"hmm/model\.safetensors is damaged"):
        Transcriber(bundle)


@pytest.fixture(scope="module")
def registered_gmm(aligned, tmp_path_factory):
    """A finished run that has registered a GMM-HMM."""
    run = gmm_run(aligned, tmp_path_factory.mktemp("registered"))
    run_plainly(run, stages=[name for name in stages_of(run.config) if name not in run.results])
    return run


def test_registered_gmm_has_its_figures_card_and_report(registered_gmm):
    run, api = registered_gmm, client()
    record, scores = run.result("register").record, run.result("score").record["sets"]["test"]
    assert record["decision"]["promoted"], record["decision"]["reason"]
    version, tracked = api.get_model_version("tiny", record["version"]), api.get_run(record["mlflow_run"])
    assert "champion" in version.aliases
    assert tracked.info.status == "FINISHED"
    assert {entry.dataset.name.rpartition(": ")[2] for entry in tracked.inputs.dataset_inputs} == {
        "train",
        "valid",
        "test",
    }
    assert tracked.data.metrics["test.wer"] == scores["wer"] == float(version.tags["test.wer"])
    about, aligned_ = contents(run), run.result("align").record
    iterations = len(run.result("align").output.read("iterations.jsonl").splitlines())
    assert about["model"] == {"kind": "gmm", **{name: aligned_["counts"][name] for name in ("states", "gaussians")}}
    assert (about["features"]["kind"], about["decode"]["kind"]) == ("mfcc", "graph")
    assert about["bytes"].keys() == {"weights", "graph", "words"} | about["bytes"].keys() & {"lm"}
    assert f"- training: Viterbi training, one learner, {iterations} epochs, " in version.description
    assert (
        f"A gmm trained with maximum likelihood, {about['training']['parameters']:,} parameters" in version.description
    )
    artifacts = {file.path for file in api.list_artifacts(record["mlflow_run"])}
    assert {"config.yaml", "iterations.jsonl", "learning_curves.png", "report.html", "stages.json"} <= artifacts
    page = run.result("report").output.read("report.html").decode()
    assert f"{iterations} epochs" in page
    assert run.result("report").output.read("learning_curves.png").startswith(b"\x89PNG")
    assert summarize(run)["model_uri"] == record["model_uri"]


def test_registered_gmm_transcribes_and_is_compared_as_champion(registered_gmm):
    run = registered_gmm
    model = mlflow.pyfunc.load_model(run.result("register").record["model_uri"])
    store = run.result("shard").store.child("test")
    reader = ShardReader(store, ShardIndex.read(store))
    texts = model.predict([reader.payload(row) for row in range(4)])
    assert list(texts["error"]) == [""] * 4
    assert sum(bool(text) for text in texts["text"]) >= 2
    run.force_from = "register"  # the next version has the champion's hypotheses
    again = REGISTER.execute(run)
    assert (again.record["version"], again.record["decision"]["promoted"]) == ("2", False)
    assert again.record["decision"]["champion_wer"] == again.record["decision"]["challenger_wer"]
    decision = promote_version("tiny", "2")  # from what the registration has noted
    assert decision["decision"]["champion_wer"] == again.record["decision"]["champion_wer"]


def test_stage_lm_supplies_the_language_model_unless_one_is_named(aligned, tmp_path):
    run = gmm_run(aligned, tmp_path)
    named, made = GRAPH.output(run).key, GRAPH.execute(run)
    text = (tmp_path / "lm.arpa").read_bytes()

    def estimate(_, output):
        output.store.write("3gram.arpa", text)
        return {"files": {"lm": "3gram.arpa"}, "sha256": {"3gram.arpa": hashlib.sha256(text).hexdigest()}}

    align = run.config.align
    search = align.recognize.model_copy(update={"arpa": ""})
    run.config = run.config.model_copy(update={"align": align.model_copy(update={"recognize": search})})
    Stage("lm", 1, lambda _: ({}, {}), estimate).execute(run)
    assert GRAPH.output(run).key == named  # what the file says counts, not where it is
    run.force_from = "graph"
    again = GRAPH.execute(run)
    assert (again.counts, again.record["sha256"]) == (made.counts, made.record["sha256"])


def failing_on_call(error):
    def called(*_, **__):
        raise error

    return called


def test_missing_language_model_is_named(aligned, tmp_path):
    run = gmm_run(aligned, tmp_path)
    (tmp_path / "lm.arpa").write_text("nothing")
    with pytest.raises(StageError, match=r"align\.recognize\.arpa: .*lm\.arpa lists no words"):
        GRAPH.execute(run)
    (tmp_path / "lm.arpa").unlink()
    with pytest.raises(StageError, match=r"align\.recognize\.arpa names .*lm\.arpa, which is not there"):
        GRAPH.execute(run)


def test_stage_output_aligns_any_corpus(aligned, tmp_path):
    run, _ = aligned
    table = next((home_folder() / "corpora").glob("*/metadata.csv"))
    lines = table.read_text().splitlines()
    few = table.with_name("few.csv")
    few.write_text("\n".join(lines[:13]) + "\n")
    folder = run.result("align").store.local_path("align.json").parent
    done = CliRunner().invoke(app, ["align", str(folder), str(few), "-o", str(tmp_path / "out"), "--json"])
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["aligned"] + summary["failed"] == 12
    ctm = [line.split() for line in (tmp_path / "out" / "words.ctm").read_text().splitlines()]
    assert len({row[0] for row in ctm}) == summary["aligned"] == len(list((tmp_path / "out" / "textgrids").iterdir()))
    assert all(float(row[3]) > 0 and 0 <= float(row[5]) <= 1 for row in ctm)
    assert (tmp_path / "out" / "phones.ctm").stat().st_size > (tmp_path / "out" / "words.ctm").stat().st_size
    assert (tmp_path / "out" / "suspicious.csv").read_text().startswith("id,reason,score,confidence,duration")


def test_every_utterance_is_aligned_or_reported(aligned, tmp_path):
    run, _ = aligned
    result = run.result("align")
    failures = result.output.read_json("failures.json")
    for name, count in (("train", 24), ("valid", 4)):
        (tmp_path / f"{name}.parquet").write_bytes(result.output.read(f"alignments/{name}.parquet"))
        table = AlignmentTable.read(tmp_path / f"{name}.parquet")
        index = ShardIndex.read(run.result("shard").store.child(name))
        assert set(table) | set(failures[name]) == set(index.column("id"))
        assert len(table) + len(failures[name]) == count
        entry = result.record["sets"][name]
        assert (entry["aligned"], entry["failed"], entry["digest"]) == (len(table), len(failures[name]), table.digest)
        texts = dict(zip(index.column("id"), index.column("text"), strict=True))
        for utterance in table:
            assert " ".join(word.label for word in table.alignment(utterance).words) == texts[utterance]
    assert result.counts["aligned"] >= 26
    assert result.counts["states"] == table.info.num_pdfs


def test_model_and_lexicon_are_published_without_working_files(aligned, tmp_path):
    run, _ = aligned
    result = run.result("align")
    names = set(result.store.list())
    assert not [name for name in names if name.startswith("work")]
    assert not work_folder("align", result.key).exists()
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(result.store.read(name))
    model = HmmModel.load(tmp_path / "model")
    table = AlignmentTable.read(tmp_path / "alignments" / "train.parquet")
    assert table.info.model == model_digest(tmp_path / "model")
    assert model.unadapted is not None
    lexicon, options = load_lexicon(tmp_path / "lexicon")
    words = {word.label for utterance in table for word in table.alignment(utterance).words}
    assert words <= set(lexicon)
    assert options.silence_probability == pytest.approx(result.record["silence_probability"])
    rows = [json.loads(line) for line in (tmp_path / "iterations.jsonl").read_text().splitlines()]
    assert [(row["stage"], row["iteration"]) for row in rows] == [
        (stage, number) for stage in ("mono", "tri", "lda", "sat") for number in (1, 2, 3)
    ]
    assert result.record["log_likelihood"] == rows[-1]["log_likelihood"]


def test_each_training_ends_with_a_permanent_progress_line(tmp_path):
    sizes = {name: {"iterations": 2} for name in ("mono", "tri")}
    log = IterationLog(AlignConfig.model_validate({"stage": "tri"} | sizes), tmp_path / "work" / "iterations.jsonl")
    lines = []
    with progress.following(lambda *line: lines.append(line)):
        for name, number in (("mono", 1), ("mono", 2), ("tri", 1), ("tri", 2)):
            log(TrainingProgress(name, number, 2, -60.25 + number, 1000 * number, 0, 0, 1.5))
    assert lines == [
        ("align", f"{name} 2/2: log-likelihood -58.25 per frame, 2,000 Gaussians") for name in ("mono", "tri")
    ]


def test_progress_and_metrics_are_reported(aligned):
    from tasks.tracking.runs import client

    run, notes = aligned
    own = [note for note in notes if note[0] == "align"]
    assert any(note[3].startswith("sat 3/3: log-likelihood -") and note[1:3] == (12, 12) for note in own)
    assert any(note[3] == "aligning valid" for note in own)
    record = run.result("align").record
    tracked = client().get_run(record["tracking"]["run"])
    assert tracked.data.metrics["align.log_likelihood"] == pytest.approx(record["log_likelihood"])
    assert tracked.data.metrics["align.train.aligned"] == figures(record)["align.train.aligned"]
    history = client().get_metric_history(tracked.info.run_id, "align.iteration.log_likelihood")
    assert [point.step for point in history] == list(range(1, 13))
    assert tracked.data.params["align.stage"] == "sat"


@pytest.mark.slow
def test_workers_in_other_processes_give_the_same_alignments(home):
    first = aligned_run(home, "mono")
    others = first.config.model_copy(update={"runner": first.config.runner.model_copy(update={"kind": "processes"})})
    digests = []
    for run in (first, Run(others, "p", force_from="align")):
        run.results |= first.results
        digests.append([entry["digest"] for entry in ALIGN.execute(run).record["sets"].values()])
    assert digests[0] == digests[1]
    assert not [name for name in ObjectStore(first.result("align").url).list() if name.startswith("work")]
    assert np.isfinite(first.result("align").record["log_likelihood"])


kills = load_beside(__file__, "kill_stage.py")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_killed_training_continues_after_its_last_iteration(home, kind):
    run = aligned_run(home, "tri", runner={"kind": kind, "workers": 2})
    document = run.config.model_dump(mode="json", by_alias=True)
    kills.killed_in(home, document, "align", "log-likelihood", 4)  # killed in the first iteration of `tri`
    work = next((home / "work").glob("align-*"))
    before = (work / "mono" / "state.json").read_bytes()
    lines = len((work / "iterations.jsonl").read_text().splitlines())
    assert lines == 4
    assert json.loads(before)["finished"]
    notes = []
    with progress.listening(lambda *report: notes.append(report)):
        result = ALIGN.execute(run)
    begun = [note[3].split(":")[0] for note in notes if note[0] == "align" and "log-likelihood" in note[3]]
    assert begun in (["tri 1/3", "tri 2/3", "tri 3/3"], ["tri 2/3", "tri 3/3"])
    assert len(result.output.read("iterations.jsonl").splitlines()) == 6
    whole = Run(run.config, "whole", force_from="align")
    whole.results |= {name: run.results[name] for name in ("prepare", "shard")}
    again = ALIGN.execute(whole).record
    assert {name: entry["digest"] for name, entry in again["sets"].items()} == {
        name: entry["digest"] for name, entry in result.record["sets"].items()
    }
