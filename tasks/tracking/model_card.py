"""Description of a registered version: tags, metadata in the model's file, and the model card."""

import json
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path, PurePath
from typing import Any

from configurable.wording import counted
from recognition.initial_weights import summary_text
from storage.corpora.catalog import CATALOG
from storage.index import ShardIndex
from storage.stages import digest_json
from tasks.config.decoding import uses_stage
from tasks.dataset.sources import SourceConfig
from tasks.dataset.speakers import set_rows
from tasks.figures import percent, speakers_text
from tasks.scores import interval
from tasks.stages.base import Run
from tasks.stages.decoder_files import decoder_of
from tasks.stages.lm import LM
from tasks.stages.run_sets import scored_sets, set_digest
from tasks.stages.score import SCORE
from tasks.stages.shard import SHARD
from tasks.stages.trained_model import TrainingFigures, trained_model
from tasks.tracking.provenance import provenance
from tasks.tracking.runs import client

CARD_LENGTH = 4900
"""Maximum length of a card; MLflow stores 5,000 characters of a description."""
STATED = ("licence", "trained_on")
"""Fields of a pretrained model's configuration that its card has, too."""
_UNKNOWN = "not stated"
_CORPORA = 8
"""Corpora of a test set that a card tells apart."""
_SYNTHETIC = "synthesized here by eSpeak NG; no human recording"


def licence_of(source: SourceConfig) -> str:
    """Licence of a source: as configured, else the catalogue's if all corpora of its layout agree, else unknown."""
    if source.licence:
        return source.licence
    if source.kind == "synthetic":
        return _SYNTHETIC
    named = CATALOG.get(source.corpus)
    licences = {named.licence} if named else {entry.licence for entry in CATALOG.values() if entry.kind == source.kind}
    return licences.pop() if len(licences) == 1 else _UNKNOWN


def corpora(sources: Iterable[SourceConfig]) -> list[dict[str, str]]:
    """Name, layout, language and licence of each corpus, without duplicates."""
    entries: dict[str, dict[str, str]] = {}
    for source in sources:
        entry = {
            "corpus": source.corpus_name,
            "kind": source.kind,
            "language": source.language,
            "licence": licence_of(source),
        }
        entries.setdefault(digest_json(entry), entry)
    return list(entries.values())


def tests_of(run: Run) -> dict[str, str]:
    """Digest of each test set: of its utterances and references, independent of how they are stored."""
    digests: dict[str, str] = {}
    for name in scored_sets(run):
        index = ShardIndex.read(run.result("shard").store.child(name))
        columns = (index.column("id"), index.column("text"), index.column("duration"))
        rows = sorted((str(who), str(text), round(float(s), 3)) for who, text, s in zip(*columns, strict=True))
        digests[name] = digest_json(rows)[:16]
    return digests


def contents(run: Run) -> dict[str, Any]:
    """The description of a version, as JSON values."""
    config, trained, decode = run.config, trained_model(run), decoder_of(run)
    return {
        "name": config.model_name,
        "run": run.run_id,
        "model_digest": trained.digest,
        "code": {name: str(value) for name, value in provenance().items()},  # torch's version is a subclass of str
        "datasets": {
            name: {"digest": set_digest(run, name), "utterances": entry["utterances"], "seconds": entry["seconds"]}
            for name, entry in SHARD.record(run)["sets"].items()
        },
        "corpora": corpora(config.data.sources),
        "pretrained": pretrained(run),
        "initial": initial(run),
        "tests": tests_of(run),
        "scores": SCORE.record(run)["sets"],
        "voices": voices(run),
        "corpus_scores": corpus_scores(run),
        "sample_rate": config.data.sample_rate,
        "normalizer": config.data.normalizer.model_dump(mode="json"),
        **trained.parts(),
        "decode": decode.with_files(lambda path: PurePath(path).name).model_dump(mode="json"),
        "language_model": language_model(run),
        "bytes": {
            "weights": trained.weights_bytes,
            **{field: Path(path).stat().st_size for field, path in decode.files().items()},
        },
        "training": trained.figures(),
        "flow_run": run.flow_run_url,
    }


def voices(run: Run) -> dict[str, str]:
    """By test set, how many speakers it has, and how many of them the training set has, too."""
    rows = {row["set"]: row for row in set_rows(run.result("prepare").record)}
    return {name: _voices_text(rows[name]) if name in rows else "unknown" for name in scored_sets(run)}


def _voices_text(row: Mapping[str, Any]) -> str:
    speakers, trained, unnamed = row["speakers"], row["trained_on"], row.get("unnamed", 0)
    if speakers is None or trained is None:
        return "unknown"
    new = "new or unknown" if unnamed else "new"
    heard = new if trained == 0 else "trained on" if trained == speakers else f"{trained:,} of them trained on"
    return f"{speakers_text(speakers, unnamed)}, {heard}"


def pretrained(run: Run) -> dict[str, str] | None:
    """The pretrained model that the training's encoder is from; None if there is none.

    What the configuration states of its licence and training data takes precedence over its own card.
    """
    known: dict[str, str] | None = trained_model(run).result.record.get("pretrained")
    if known is None:
        return None
    given = {name: value for name in STATED if (value := getattr(run.config.model, name, ""))}
    stated = known | given
    name = stated["source"] if stated["revision"] else PurePath(stated["source"]).name
    return stated | {field: stated[field] or _UNKNOWN for field in STATED} | {"source": name}


def corpus_scores(run: Run) -> dict[str, dict[str, dict[str, Any]]]:
    """WER and words by corpus of the test sets that several corpora are in, those with the most words first."""
    groups = SCORE.record(run).get("groups", {})
    by_set = {name: kinds["corpora"] for name, kinds in groups.items() if "corpora" in kinds}
    return {
        name: {
            corpus: {"wer": counts["wer"], "words": counts["ref_words"]}
            for corpus, counts in sorted(members.items(), key=lambda item: -item[1]["ref_words"])[:_CORPORA]
        }
        for name, members in by_set.items()
    }


def initial(run: Run) -> dict[str, Any] | None:
    """The model that the training began with, and what was taken from it; None if it began with random weights."""
    known: dict[str, Any] | None = trained_model(run).result.record.get("initial")
    if known is None:
        return None
    name = str(known["model"])
    shown = name if "://" in name or name.startswith("models:/") else PurePath(name).name
    return {part: value for part, value in known.items() if part != "given"} | {"model": shown}


def begun_text(begun: Mapping[str, Any]) -> str:
    """What `initial` gives, in a line."""
    return f"{begun['model']} (SHA-256 {begun['digest'][:16]}): {summary_text(begun)}"


def language_model(run: Run) -> dict[str, Any] | None:
    """Figures of the language model that the decoder takes from the stage `lm`; None if it takes none."""
    if not uses_stage(run.config.decoder, run.config.lm):
        return None
    lm = LM.record(run)["lm"]
    return {name: lm.get(name) for name in ("kind", "words", "ngrams", "text", "protection", "perplexity")}


def card_tags(about: dict[str, Any]) -> dict[str, str]:
    """Tags of a version from its description: configurations as JSON, licences as text."""
    tags = {f"starling.{part}": json.dumps(about[part], sort_keys=True) for part in ("features", "tokens", "decode")}
    tags |= {f"dataset.{name}": entry["digest"] for name, entry in about["datasets"].items()}
    licences = [f"{entry['corpus']}: {entry['licence']}" for entry in about["corpora"]]
    if begun := about.get("pretrained"):
        licences.append(f"{begun['source']}: {begun['licence']}")
        tags["starling.pretrained"] = json.dumps(begun, sort_keys=True)
    tags["starling.licences"] = "; ".join(licences)
    return tags


def card(about: dict[str, Any], links: dict[str, str]) -> str:
    """The model card as Markdown, short enough for a version's description.

    Args:
        about: Description from `contents`.
        links: URLs by name.
    """
    parts = [_intro(about), scores_table(about), _data(about), _made(about)]
    if links:
        parts.append(" · ".join(f"[{name}]({address})" for name, address in links.items()))
    text = "\n\n".join(parts)
    return text if len(text) <= CARD_LENGTH else text[: CARD_LENGTH - 2].rstrip() + " …"


def model_text(about: dict[str, Any]) -> str:
    """Description of a registered model, whose versions have model cards, as Markdown.

    Args:
        about: Description of one of its versions, from `contents`.
    """
    names = ", ".join(dict.fromkeys(entry["corpus"] for entry in about["corpora"]))
    return (
        f"Speech recognition ({_languages(about)}), trained on {names}. The version in use is "
        f"`models:/{about['name']}@champion`; the description of each version is its model card."
    )


def _languages(about: dict[str, Any]) -> str:
    return ", ".join(sorted({entry["language"] for entry in about["corpora"]}))


def exported_card(uri: str) -> tuple[dict[str, str], str]:
    """What a registered version takes along when it leaves the registry.

    Args:
        uri: `models:/NAME@ALIAS` or `models:/NAME/VERSION`; of a bundle's folder, nothing is known.

    Returns:
        Its name, its address and licences, as far as they are known; and the model card as Markdown, or an empty text.
    """
    about = {"starling": metadata.version("starling")}
    if not uri.startswith("models:/"):
        return about | {"name": Path(uri).resolve().name}, ""
    name, _, version = uri.removeprefix("models:/").partition("/")
    name, _, alias = name.partition("@")
    api = client()
    found = api.get_model_version_by_alias(name, alias) if alias else api.get_model_version(name, version)
    about |= {"name": name, "registered": f"models:/{name}/{found.version}"}
    about |= {"licences": licences} if (licences := found.tags.get("starling.licences")) else {}
    return about, found.description or ""


def _intro(about: dict[str, Any]) -> str:
    kind, training = about["model"]["kind"], about["training"]
    size = f"{training['parameters']:,} parameters" if training["parameters"] else "size unknown"
    # MLflow's list of versions shows the first words of the first line, as plain text
    scores = next(iter(about["scores"].items()), None)
    wer = f"WER {percent(scores[1]['wer'])} on {scores[0]}. " if scores else ""
    return (
        f"{wer}Speech recognition ({_languages(about)}): audio in, text out. "
        f"A {kind} trained with {training['objective']}, {size}, at {about['sample_rate']:,} Hz."
    )


def scores_table(about: Mapping[str, Any]) -> str:
    """Word error rates of the test sets with their intervals and voices, as Markdown.

    Args:
        about: Description from `contents`.
    """
    rows: list[str] = []
    for name, s in about["scores"].items():
        cells = [name, percent(s["wer"]), interval(s), interval(s, "wer_speaker"), about["voices"][name]]
        rows.append(f"| {' | '.join(cells)} | {s['words']:,} |")
        for corpus, part in about["corpus_scores"].get(name, {}).items():
            rows.append(f"| {name}, {corpus or 'unnamed'} | {percent(part['wer'])} | | | | {part['words']:,} |")
    heads = ["test set", "WER", "95 % interval over utterances", "over speakers", "speakers", "words"]
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *rows])


def _data(about: dict[str, Any]) -> str:
    lines = [f"- {e['corpus']} ({e['kind']}, {e['language']}). Licence: {e['licence']}." for e in about["corpora"]]
    if begun := about.get("pretrained"):
        version = f"revision {begun['revision']}" if begun["revision"] else f"SHA-256 {begun['sha256'][:16]}"
        lines.append(
            f"- Pretrained encoder: {begun['source']} ({begun['architecture']}), {version}. "
            f"Licence: {begun['licence']}. Trained on: {begun['trained_on']}."
        )
    sets = ", ".join(
        f"{name} {counted(entry['utterances'], 'utterance')}, {entry['seconds'] / 3600:.2f} h"
        for name, entry in about["datasets"].items()
    )
    return "\n".join(["**Data**", "", *lines, f"- {sets}"])


def compute_text(training: TrainingFigures) -> str:
    """Device of a training, and its precision unless it is fp32 or unknown."""
    precision = training.get("precision") or "fp32"
    return f"{training['device']}" if precision == "fp32" else f"{training['device']} ({precision})"


def learners_text(nodes: int, per_node: int) -> str:
    """Number of learners of a training, and of its nodes if there are several learners."""
    if nodes == per_node == 1:
        return "one learner"
    return f"{counted(nodes, 'node')} of {counted(per_node, 'learner')}"


def _made(about: dict[str, Any]) -> str:
    training, code, decode = about["training"], about["code"], about["decode"]
    tokens, features = about["tokens"], about["features"]
    bands = f", {features['num_mels']} bands" if "num_mels" in features else ""
    learners = learners_text(training["nodes"], training["learners_per_node"])
    beam = f", beam {decode['beam']}" if "beam" in decode else ""
    lm = about.get("language_model")
    order = f"{len(lm['ngrams'])}-gram" if lm and lm["ngrams"] else "language model"
    model = f", {order} of {counted(lm['words'], 'word')}" if lm else ""
    sizes = ", ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in about["bytes"].items())
    return "\n".join(
        [
            "**How it was made**",
            "",
            f"- features: {features['kind']}{bands}, normalization {features['cmvn']}",
            f"- tokens: {tokens['kind']}; decoding: {decode['kind']}{beam}{model}",
            *([f"- began with: {begun_text(about['initial'])}"] if about["initial"] else []),
            f"- training: {training['strategy']}, {learners}, {counted(training['epoch'], 'epoch')}, "
            f"{counted(training['step'], 'step')} on {compute_text(training)}",
            f"- size: {sizes}",
            f"- run: `{about['run']}`; code: {code['version']}, commit `{code['commit']}`; torch {code['torch']}",
        ]
    )
