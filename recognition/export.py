"""Exports a bundle as ONNX files, for recognition without torch: on a server, a phone, in a browser.

There are two layouts. `sherpa-onnx` is read by sherpa-onnx, which computes the features and searches, on most platforms
and from a dozen languages; its features are log-mel energies with Kaldi's window. `plain` is for onnxruntime, with the
computation of the features as a graph of its own; it holds any model whose features one recording determines. What is
between features and network (normalization, trimming of silence, deltas) is in the network's graph in both.

Models that stream can be written for streams, too: files that read a chunk after another, with the state between them.

Neither has the bundle's lexicon and language model: their searches are those of sherpa-onnx and of the script that is
copied beside a plain model.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from configurable.extras import install_remedy
from configurable.files import TEMP_PREFIX, file_sha256
from recognition.bundle import BundleSpec, bundle_digest, load_bundle, load_spec
from recognition.system import SystemConfig
from recognition.systems.ctc import CtcSystem
from recognition.systems.transducer import TransducerSystem
from speech.decoding import TransducerDecodeConfig
from speech.features import FbankConfig, LogMelConfig, SherpaLogMelConfig
from speech.features.config import FilterBankConfig
from speech.models import BlstmConfig, StatelessPredictorConfig
from speech.models.pretrained import PretrainedConfig
from speech.tokens import SPACE_SYMBOL, Tokenizer, WordTokenizer

if TYPE_CHECKING:
    from recognition.onnx_graphs import Chunks, Graph
    from speech.frontend import FrontEnd

Layout = Literal["sherpa-onnx", "plain"]
DESCRIPTION, TOKENS, SCRIPT, README, CARD = "model.json", "tokens.txt", "recognize.py", "README.md", "MODEL_CARD.md"
_FORMAT = 1
_PACKAGES = ("onnx", "onnxruntime")
_SCRIPTS: dict[Layout, str] = {"sherpa-onnx": "with_sherpa_onnx", "plain": "with_onnxruntime"}
_EVERYWHERE = {"low_freq": 20.0, "high_freq": -400.0, "normalize_samples": True, "snip_edges": False}
"""Features of sherpa-onnx that all its interfaces compute; that in Python has these options."""
_HIDDEN = {"SIL", "<unk>", "<blk>", "<eps>"}
"""Tokens that sherpa-onnx takes for others, or leaves out."""


def export_bundle(
    bundle: Path,
    target: Path,
    layout: Layout | None = None,
    int8: bool = True,
    about: Mapping[str, Any] | None = None,
    card: str = "",
    chunk_ms: float = 0.0,
) -> dict[str, Any]:
    """Write a bundle's model as ONNX files, with their tokens, a description and a script that recognizes with them.

    Args:
        bundle: The bundle's folder.
        target: Folder to write; it appears whole, or not at all.
        layout: For what the files are; by default `sherpa-onnx` if it can run the model, else `plain`.
        int8: Whether to write files with weights in int8, too.
        about: What to add to the description, such as the model's name.
        card: The model card, as Markdown.
        chunk_ms: Audio of a chunk in milliseconds, rounded to output frames, for files that recognize speech as it
            comes; 0: they read whole recordings.

    Returns:
        The description, as `model.json` has it.

    Raises:
        ValueError: The bundle is damaged or cannot be exported, the folder is not empty, or a package is missing.
    """
    check_target(target)
    check_exportable(load_spec(bundle), stream=chunk_ms > 0)
    spec, network = load_bundle(bundle)
    layout = _chosen(spec, layout)
    chunks = _chunks(spec, layout, chunk_ms) if chunk_ms else None
    from recognition.onnx_graphs import HeardFeatures, features_graph

    frontend = spec.build_frontend()
    graphs = spec.system.graphs(spec, network, HeardFeatures(frontend), chunks)
    others = [features_graph(frontend.extract)] if layout == "plain" else []
    with _new_folder(target) as folder:
        write_tokens(spec.build_tokenizer(), folder / TOKENS)
        files = _write_graphs(folder, spec, graphs, others, int8)
        described = _described(bundle, spec, layout, [graph.name for graph in graphs], files) | dict(about or {})
        if chunks is not None:
            described["stream"] = _stream_options(spec, chunks, frontend)
        _write_texts(folder, described, card)
    return described


def check_exportable(spec: BundleSpec, stream: bool = False) -> None:
    """See that a model can be exported in one of the layouts.

    Args:
        spec: Its description.
        stream: Whether it is to recognize speech as it comes.

    Raises:
        ValueError: It cannot; the message says why, and what works instead.
    """
    features, system = spec.features, spec.system
    instead = "use it with `starling transcribe` or MLflow"
    if isinstance(spec.model, PretrainedConfig):
        raise ValueError(
            f"the encoder is a pretrained one ({spec.model.kind}), whose code for padding has no form in ONNX: "
            f"{instead}, or train a conformer, blstm or tdnn (section model)"
        )
    if type(system).graphs is SystemConfig.graphs:
        system.graphs(spec, None, None)  # type: ignore[arg-type]  # says why there are none
    if features.adapted:
        raise ValueError(
            f"features {features.kind} are adapted to speakers by a GMM-HMM, which has no form in ONNX: {instead}"
        )
    if features.kind == "whisper_logmel":
        raise ValueError(
            "features whisper_logmel are computed in another way from 30 s of audio on, which a graph cannot: "
            f"{instead}, or train with features of another kind"
        )
    if system.writes:
        raise ValueError(f"Whisper's decoder network and its tokens are not exported: {instead}")
    if stream:
        _check_stream(spec)
    elif isinstance(spec.model, BlstmConfig) and spec.model.chunk:
        raise ValueError(
            "a blstm with model.chunk is computed chunk by chunk, and a graph has a fixed number of them: export it "
            "with --stream"
        )


def _check_stream(spec: BundleSpec) -> None:
    """See that a model that can be exported can be exported for streams."""
    features, system = spec.features, spec.system
    if not isinstance(system, CtcSystem | TransducerSystem):
        raise ValueError(
            f"a recognizer of kind {system.kind} searches whole utterances: export it without --stream, or train one "
            "of kind ctc or transducer"
        )
    if not spec.network.streams:
        raise ValueError(f"model {spec.network.kind} {spec.network.streaming_remedy}, or export it without --stream")
    if reason := features.whole_utterance:
        raise ValueError(f"speech cannot be recognized as it comes: {reason}")
    if features.cmvn == "sliding" or features.frame_factor > 1:
        raise ValueError(
            "exported streams read each frame by itself: deltas, splicing and a sliding window of normalization have "
            "no place in their state. Use it with `starling transcribe --stream`, or train with features.cmvn=global, "
            "features.delta_order=0 and without splicing"
        )


def _chunks(spec: BundleSpec, layout: Layout, chunk_ms: float) -> Chunks:
    from recognition.onnx_graphs import Chunks

    factor = spec.network.subsampling * spec.features.stride
    return Chunks(layout, max(1, round(chunk_ms / spec.frame_ms)), spec.network.ahead, factor)


def _stream_options(spec: BundleSpec, chunks: Chunks, frontend: FrontEnd) -> dict[str, Any]:
    """What a reader of the files must know to give them the windows of a stream."""
    bank = frontend.extract
    return {
        "chunk_ms": chunks.frames * spec.frame_ms,
        "latency_ms": chunks.window * spec.features.hop_ms,
        "window": chunks.window,
        "shift": chunks.shift,
        "frame_length": bank.frame_length,
        "hop_length": bank.hop_length,
        "lead": spec.features.lead(bank),
        "tail_s": round((chunks.window + 2) * spec.features.hop_ms / 1000 + bank.frame_length / spec.sample_rate, 3),
    }


def sherpa_obstacle(spec: BundleSpec) -> str:
    """Why sherpa-onnx cannot run a model; empty if it can."""
    features, system = spec.features, spec.system
    if not isinstance(system, CtcSystem | TransducerSystem):
        return f"it has no models of kind {system.kind} with such a network"
    if isinstance(system, TransducerSystem) and not isinstance(system.predictor, StatelessPredictorConfig):
        return f"its transducers have stateless predictors, and this one's is {system.predictor.kind}"
    if not _is_logmel(features):
        return f"it does not compute features of kind {features.kind} as this model reads them"
    assert isinstance(features, FilterBankConfig)
    fixed = {"frame_ms": 25.0, "hop_ms": 10.0, "preemphasis": 0.97, "scale": "mel", "level_db": 0.0}
    other = [f"{name} {getattr(features, name)}" for name, value in fixed.items() if getattr(features, name) != value]
    if other:
        return f"its features have other values than features.{', features.'.join(other)}"
    tokenizer = spec.build_tokenizer()
    if hidden := sorted(_HIDDEN.intersection(_written(tokenizer))):
        return f"it does not write the token {hidden[0]}"
    return ""


def _is_logmel(features: Any) -> bool:
    """Whether features are logarithms of filters' energies, and nothing else."""
    if isinstance(features, FbankConfig):
        return features.log_energies and not features.use_energy
    return isinstance(features, LogMelConfig | SherpaLogMelConfig)


def _chosen(spec: BundleSpec, layout: Layout | None) -> Layout:
    obstacle = sherpa_obstacle(spec)
    if layout == "sherpa-onnx" and obstacle:
        raise ValueError(f"sherpa-onnx cannot run this model: {obstacle}. Export it with --layout plain")
    return layout or ("plain" if obstacle else "sherpa-onnx")


def check_target(target: Path) -> None:
    """See that a model can be exported to a folder, before it is fetched.

    Raises:
        ValueError: The folder is not empty, or a package is missing.
    """
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise ValueError(f"exporting to ONNX needs the package {', '.join(missing)}: {install_remedy('export')}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not an empty folder: name another one with --to, or remove it")


# --- files


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A folder whose files the target has at the end of the block; it is removed after an error.

    Raises:
        ValueError: The target cannot be made.
    """
    target = target.resolve()  # where a link leads to
    there = target.is_dir()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=TEMP_PREFIX, dir=None if there else target.parent))
    except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(f"{target} cannot be made ({error.strerror}): name another folder with --to") from error
    try:
        yield folder
        folder.chmod(0o777 & ~_umask())
        check_target(target)  # while the files were written, another process may have made it
        if there:
            _fill(target, folder)
        else:
            folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fill(target: Path, folder: Path) -> None:
    """Move files to an empty folder, the description last.

    The folder is not replaced: it may be a mount, belong to a folder of others, or be where somebody works.
    """
    names = sorted((path.name for path in folder.iterdir()), key=lambda name: name == DESCRIPTION)
    try:
        for name in names:
            shutil.move(folder / name, target / name)
    except BaseException:
        for name in names:
            (target / name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    """This process's umask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _written(tokenizer: Tokenizer) -> list[str]:
    """The tokens as others read them: put together, and a space in place of `▁`, they give a text."""
    if not isinstance(tokenizer, WordTokenizer):
        return tokenizer.symbols
    return [tokenizer.symbols[0], *(SPACE_SYMBOL + word for word in tokenizer.symbols[1:])]


def write_tokens(tokenizer: Tokenizer, path: Path) -> None:
    """Write a token and its number in each line.

    Raises:
        ValueError: A token is empty or contains white space.
    """
    symbols = _written(tokenizer)
    if bad := [symbol for symbol in symbols if not symbol or re.search(r"\s", symbol)]:
        raise ValueError(f"{path.name} cannot have the token {bad[0]!r}: train with tokens without white space")
    lines = (f"{symbol} {number}\n" for number, symbol in enumerate(symbols))
    path.write_text("".join(lines), encoding="utf-8")


def _write_graphs(
    folder: Path, spec: BundleSpec, graphs: list[Graph], others: list[Graph], int8: bool
) -> dict[str, dict[str, Any]]:
    """Write the files; returns what the description says of them, by name."""
    from recognition.onnx_graphs import difference, quantize, write_graph

    properties: dict[str, str | int] = {
        "subsampling_factor": spec.network.subsampling * spec.features.stride,
        "sample_rate": spec.sample_rate,
        "feature_dim": spec.features.width,
        "version": _FORMAT,
        "model_author": "Starling",
        "comment": "see model.json",
    }
    files: dict[str, dict[str, Any]] = {}
    for graph in (*graphs, *others):
        path = folder / f"{graph.name}.onnx"
        files[path.name] = {"difference": write_graph(graph, path, properties)}
        if int8 and graph not in others:
            smaller = folder / f"{graph.name}.int8.onnx"
            quantize(path, smaller)
            files[smaller.name] = {"difference": difference(graph, smaller, *graph.example(2, 150))}
    for name, facts in files.items():
        facts |= {"bytes": (folder / name).stat().st_size, "sha256": file_sha256(folder / name)}
    return files


def _write_texts(folder: Path, described: dict[str, Any], card: str) -> None:
    """Write the script, the model card, what a person reads, and at last the description."""
    module = import_module(f"recognition.standalone.{_SCRIPTS[described['layout']]}")
    assert module.__file__ is not None
    shutil.copyfile(module.__file__, folder / SCRIPT)
    if card:
        (folder / CARD).write_text(card + "\n", encoding="utf-8")
    (folder / README).write_text(_readme(described, card), encoding="utf-8")
    text = json.dumps(described, indent=2, ensure_ascii=False)
    (folder / DESCRIPTION).write_text(text + "\n", encoding="utf-8")


def _described(
    bundle: Path, spec: BundleSpec, layout: Layout, graphs: list[str], files: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    versions = {name: metadata.version(name) for name in ("torch", *_PACKAGES)}
    described = {
        "format": _FORMAT,
        "layout": layout,
        "system": spec.system.kind,
        "graphs": graphs,
        "files": files,
        "sample_rate": spec.sample_rate,
        "frame_ms": spec.frame_ms,
        "tokens": spec.build_tokenizer().size,
        "features": spec.features.model_dump(mode="json"),
        "model": spec.network.model_dump(mode="json"),
        "decoder_of_bundle": spec.decode.kind,
        "has_language_model": bool(spec.decode.files()),
        "bundle_sha256": bundle_digest(bundle),
        "versions": versions | {"python": sys.version.split()[0]},
    }
    return described | ({"sherpa_onnx": _sherpa_options(spec)} if layout == "sherpa-onnx" else {})


def _sherpa_options(spec: BundleSpec) -> dict[str, Any]:
    """What sherpa-onnx must be told, and whether all its interfaces can be told so."""
    features = spec.features
    assert isinstance(features, FilterBankConfig)
    own = isinstance(features, SherpaLogMelConfig)
    options = {
        "sampling_rate": spec.sample_rate,
        "feature_dim": features.width,
        "low_freq": features.low_freq,
        "high_freq": features.high_freq,
        "normalize_samples": own,
        "snip_edges": not own,
    }
    search: dict[str, Any] = {"decoding_method": "greedy_search"}
    beam = spec.decode.beam if isinstance(spec.decode, TransducerDecodeConfig) else 1
    if beam > 1:
        search = {"decoding_method": "modified_beam_search", "max_active_paths": beam}
    everywhere = all(options[name] == value for name, value in _EVERYWHERE.items())
    return {"features": options, "search": search, "all_interfaces": everywhere}


# --- what a person reads


def _readme(described: dict[str, Any], card: str) -> str:
    name = described.get("name", "A speech recognizer")
    rows = [f"| `{file}` | {facts['bytes'] / 1e6:.1f} MB |" for file, facts in described["files"].items()]
    features, extra = described["features"], {"sherpa-onnx": _for_sherpa, "plain": _for_onnxruntime}
    bands = f", {features['num_mels']} bands" if "num_mels" in features else ""
    parts = [
        f"# {name}",
        f"A model of kind {described['system']} ({described['model']['kind']}), exported by Starling for "
        f"{'sherpa-onnx' if described['layout'] == 'sherpa-onnx' else 'onnxruntime'}. It hears mono audio at "
        f"{described['sample_rate']:,} Hz: {features['kind']} features{bands}; their normalization is in the network's "
        f"file. It knows {described['tokens']} tokens.",
        "\n".join(["| file | size |", "|---|---|", *rows]),
        extra[described["layout"]](described),
        _search_text(described),
        f"Licence and data: see [{CARD}]({CARD})."
        if card
        else "Licence and data are not stated: the model was exported from a folder, which has no model card.",
        f"`{DESCRIPTION}` has all settings, versions and checksums.",
    ]
    return "\n\n".join(parts) + "\n"


def _for_sherpa(described: dict[str, Any]) -> str:
    options, rate = described["sherpa_onnx"], f"{described['sample_rate']:,} Hz"
    lines = ["```bash", "pip install sherpa-onnx numpy", "python recognize.py FILE.wav", "```", ""]
    if options["all_interfaces"]:
        kind = "Zipformer CTC model" if described["system"] == "ctc" else "transducer"
        which = "online" if "stream" in described else "offline"
        lines.append(
            f"All interfaces of sherpa-onnx compute these features: give its {which} recognizer the files as a {kind}, "
            f"with feature dimension {options['features']['feature_dim']} and a sample rate of {rate}."
        )
    else:
        wanted = ", ".join(f"`{name}={options['features'][name]}`" for name in _EVERYWHERE)
        lines.append(
            f"The features need {wanted}, which `recognize.py` gives to the Python interface of sherpa-onnx. Its other "
            "interfaces have no such options: they compute other features, and more words are wrong. A model for them "
            "is trained with `features: {kind: sherpa_logmel}`."
        )
    return "\n".join(lines)


def _for_onnxruntime(described: dict[str, Any]) -> str:
    graphs = ", ".join(f"`{name}.onnx`" for name in described["graphs"])
    return "\n".join(
        [
            "```bash",
            "pip install onnxruntime numpy",
            "python recognize.py FILE.wav",
            "```",
            "",
            f"`features.onnx` computes features from samples in ±1, and {graphs} read them. `recognize.py` shows how.",
        ]
    )


def _search_text(described: dict[str, Any]) -> str:
    search = described["sherpa_onnx"]["search"] if "sherpa_onnx" in described else {"decoding_method": "greedy_search"}
    own = f"Starling decodes this model with `{described['decoder_of_bundle']}`"
    own += " and a language model, which is not exported" if described["has_language_model"] else ""
    if "stream" in described:
        stream = described["stream"]
        how = (
            f"Speech is recognized as it comes, in chunks of {stream['chunk_ms']:g} ms, each when "
            f"{stream['latency_ms']:g} ms from its start have been heard. `recognize.py` reads files in this way. They "
            "need silence at the end, which it adds: what does not fill a chunk is not recognized."
        )
    else:
        how = "A file is recognized as one utterance: cut recordings of more than a minute in pauses before."
    method = search["decoding_method"]
    return f"Here the search is `{method}`. {own}: error rates of the model card hold for that. {how}"
