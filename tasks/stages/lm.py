"""Stage lm: a language model of the training transcripts and other text, its words, and their pronunciations.

The stage runs only if the configuration has the section `lm`. Text that shares word sequences with the test and
validation transcripts is left out, as `speech.lm.sources` describes; the record counts it.
"""

import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NotRequired, cast

from configurable.addresses import address_content
from recognition.bundle import SPEC, load_spec
from speech.lexicon import GraphemesConfig, build_lexicon
from speech.lm import WORDS, LmConfig, NetworkConfig, Sources, arpa_of, estimate, estimated_words, text_digests, unit_of
from speech.lm.network import MODEL
from speech.tokens import Tokenizer
from storage.stages import StageOutput, digest_json
from tasks.config.home import work_folder
from tasks.config.pipeline import PipelineConfig, worker_count
from tasks.dataset.manifest import scratch_folder
from tasks.dataset.sets import VALID, is_trained
from tasks.dataset.splits import TRAIN
from tasks.dataset.words import set_transcripts
from tasks.stages import progress, train
from tasks.stages.base import Artifact, Inputs, Run, Stage, StageResult
from tasks.stages.decoder_files import FilesRecord, publish_files, with_digests
from tasks.stages.folds import is_tested, train_folder
from tasks.stages.lm_network import engine_trainer, network_content
from tasks.stages.prepare import PREPARE
from tasks.stages.shard import SHARD, set_texts

LEXICON = "lexicon.txt"
_WITHOUT_LANGUAGE = ("english", "basic", "none")
"""Kinds of normalizers that treat all languages alike."""


def language_model(run: Run) -> LmConfig:
    """The section `lm`; the stage runs only with it."""
    assert run.config.lm is not None
    return run.config.lm


def protected_sets(run: Run) -> list[str]:
    """The sets whose transcripts must not be in the text: all that this run does not train on."""
    names = sorted(SHARD.record(run)["sets"])
    return [name for name in names if not is_trained(name) or is_tested(name, run.config.data)]


def coming_words(config: PipelineConfig, prepared: StageOutput) -> list[str]:
    """Words of the language model that the stage will make, as far as the transcripts tell before they are sharded.

    Utterances whose audio turns out to be damaged are still among them. None without a section `lm`, or for models of
    characters and tokens.

    Args:
        config: The configuration.
        prepared: Output of the stage prepare.

    Raises:
        LmError: There is no text.
    """
    if config.lm is None or unit_of(config.lm) != "word":
        return []

    def held_out(name: str) -> bool:
        return not is_trained(name) or is_tested(name, config.data)

    sources = Sources(
        transcripts=set_transcripts(prepared, lambda name: not held_out(name)),
        protected=set_transcripts(prepared, held_out),
        normalizer=config.data.normalizer,
        language=_language(prepared.record() or {}),
    )
    with tempfile.TemporaryDirectory() as folder:
        return estimated_words(sources, config.lm, Path(folder), worker_count(config.storage.workers))


def _language(prepared: Mapping[str, Any]) -> str:
    """The language of the text: that of most transcripts, as the stage prepare records them."""
    languages: Mapping[str, Any] = prepared.get("text", {})
    return max(sorted(languages), key=lambda language: int(languages[language]["utterances"]), default="")


def _set_digests(run: Run) -> dict[str, str]:
    record, folder = SHARD.record(run), train_folder(run.config.data)
    digests = {name: record["sets"][name]["digest"] for name in protected_sets(run)}
    trained = record["sets"] if folder == TRAIN else record["unions"]
    return digests | {TRAIN: trained[folder]["digest"]}


def _has_lexicon(run: Run) -> bool:
    """Whether the configuration names a source of pronunciations."""
    return run.config.lexicon != GraphemesConfig()


def _inputs(run: Run) -> Inputs:
    cfg = language_model(run)
    config: dict[str, Any] = network_content(run) | {
        # what the text files contain counts, not where they are; blocks do not affect the model
        "lm": address_content(cfg, without=("text.paths",)),
        "normalizer": address_content(run.config.data.normalizer),
    }
    if _has_lexicon(run):
        config["lexicon"] = address_content(with_digests(run.config.lexicon, "lexicon"))
    inputs = _set_digests(run)
    if cfg.text.paths:
        inputs["text"] = digest_json(text_digests(cfg.text))
        if run.config.data.normalizer.kind not in _WITHOUT_LANGUAGE:
            config["language"] = _language(PREPARE.record(run))
    if unit_of(cfg) == "token":
        inputs["model"] = train.TRAIN.record(run)["digest"]
    return config, inputs


def _tokenizer(run: Run) -> Tokenizer | None:
    """The acoustic model's tokenizer, if the language model predicts tokens."""
    if unit_of(language_model(run)) != "token":
        return None
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / SPEC).write_bytes(run.result("train").output.read(f"model/{SPEC}"))
        return load_spec(Path(folder)).build_tokenizer()


class LmRecord(FilesRecord):
    """A language model's files, and what is known of them."""

    lm: dict[str, Any]
    """The estimator's figures: perplexity, sizes, lines of the text by what became of them."""
    lexicon: NotRequired[dict[str, Any]]
    """Where the pronunciations come from, if it has some."""


def _work(run: Run, output: StageOutput) -> LmRecord:
    cfg = language_model(run)
    tokenizer = _tokenizer(run)
    # named after the output, whose lock one process holds at a time: remains of a killed process are removed
    with (
        scratch_folder(work_folder("lm", output.key)) as folder,
        engine_trainer(run, output, tokenizer) as trainer,
    ):
        progress.report(output.stage, 0, 2, "estimating")
        held_out = {VALID: set_texts(run, VALID)} if VALID in SHARD.record(run)["sets"] else {}
        sources = Sources(
            transcripts=set_texts(run, TRAIN),
            protected=chain.from_iterable(set_texts(run, name) for name in protected_sets(run)),
            held_out=held_out,
            normalizer=run.config.data.normalizer,
            language=_language(PREPARE.record(run)),
            tokenizer=tokenizer,
            train=trainer,
        )
        about = _finite(estimate(sources, cfg, folder, worker_count(run.config.storage.workers)))
        files, lexicon = {"words": WORDS}, None
        if arpa := arpa_of(cfg):
            files["lm"] = arpa
        if isinstance(cfg, NetworkConfig):
            files["network"] = MODEL
        if _has_lexicon(run):
            progress.report(output.stage, 1, 2, "lexicon")
            lexicon = _write_lexicon(run, folder)
            files["lexicon"] = LEXICON
        published = publish_files(output, sorted(path for path in folder.iterdir() if path.is_file()))
    record: LmRecord = {
        "counts": _counts(about),
        "lm": about,
        "files": files,
        "sha256": published["sha256"],
        "bytes": published["bytes"],
    }
    if lexicon is not None:
        record["lexicon"] = lexicon
    return record


def _counts(about: dict[str, Any]) -> dict[str, int]:
    text = about["text"]
    counts = {"sentences": text["kept"], "words": about["words"]}
    sizes = {"ngrams": sum(about["ngrams"])} if "ngrams" in about else {}
    if not sizes and "parameters" in about:
        sizes = {"parameters": about["parameters"]}
    return counts | sizes | ({"protected": text["protected"]} if text.get("protected") else {})


def _write_lexicon(run: Run, folder: Path) -> dict[str, Any]:
    """Write pronunciations of the words of the model and of the transcripts; returns the lexicon's record."""
    counts: Counter[str] = Counter()
    for line in set_texts(run, TRAIN):
        counts.update(line.split())
    for word in (folder / WORDS).read_text(encoding="utf-8").splitlines():
        counts.setdefault(word, 0)
    built = build_lexicon(run.config.lexicon, counts)
    built.lexicon.write(folder / LEXICON)
    return built.record()


def _finite(value: Any) -> Any:
    """The value with None for numbers that JSON does not have, such as the perplexity of no words."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def figures(record: LmRecord, stage: str = "lm") -> dict[str, float]:
    """Metrics of a record: perplexity and unknown words on the validation set, sizes, protected lines.

    Args:
        record: The record.
        stage: The stage that made it, with which the metrics' names begin.
    """
    return {f"{stage}.{name}": value for name, value in _figures(record)}


def _figures(record: LmRecord) -> Iterator[tuple[str, float]]:
    about = record["lm"]
    for name, perplexity in about["perplexity"].items():
        for figure in ("perplexity_with_unknown", "perplexity_without_unknown", "unknown_rate"):
            if perplexity[figure] is not None:
                yield f"{name}.{figure}", float(perplexity[figure])
    for order, count in enumerate(about.get("ngrams", ()), start=1):
        yield f"ngrams.{order}", float(count)
    if "parameters" in about:
        yield "parameters", float(about["parameters"])
    yield "words", float(about["words"])
    yield "bytes", float(sum(record["bytes"].values()))
    yield "sentences", float(about["text"]["kept"])
    yield "protected", float(about["text"].get("protected", 0))


def lm_artifacts(run: Run, result: StageResult) -> Iterator[Artifact]:
    """A table with the figures of the language model, and the lines of its text by what became of them."""
    record = cast("LmRecord", result.record)
    lines = {f"text: {name}": value for name, value in record["lm"]["text"].items()}
    shown = figures(record, result.name) | lines
    yield Artifact([{"figure": name, "value": _number(value)} for name, value in shown.items()], result.markdown)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:.6g}"


LM = Stage(
    "lm",
    3,
    _inputs,
    _work,
    artifacts=lm_artifacts,
    figures=figures,
    reads="transcripts, text",
    writes="`lm.arpa` or the model's other files, `words.txt`, `lexicon.txt`",
    only="with a section `lm`",
)
