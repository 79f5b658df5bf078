"""A hybrid recognizer of mini-LibriSpeech: a network trained on GMM alignments, decoded with the GMM's graph.

    python -m benchmarks.hmm_mini_librispeech --arpa lm.arpa --work hmm-work --stages sat
    python -m benchmarks.hybrid_mini_librispeech --arpa lm.arpa --hmm hmm-work --work hybrid-work --json

Trains with frame cross-entropy on the SAT model's alignments and features (LDA, MLLT, fMLLR by speaker), decodes
dev-clean-5 with transforms of the SAT model's own passes. Prints frame accuracy by epoch, WER, and CPU seconds of each
step. What the folder has already is not made again; use OMP_NUM_THREADS=1 for CPU seconds that mean something.
"""

import argparse
import io
import json
import os
import resource
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.hmm_mini_librispeech import ROWS, Recognition, measured, read_cmudict, read_corpus, transcripts, wer
from recognition.bundle import BundleSpec, TiedStates, load_bundle
from recognition.systems.acoustic import AcousticTaskConfig
from speech.alignments import AlignmentInfo, AlignmentTable, write_alignments
from speech.features import CmvnStats, MfccConfig
from speech.hmm.checkpoint import Checkpoint, load_checkpoint
from speech.hmm.decode import DecodeOptions, GraphSearch, decode_plain, speaker_transform
from speech.hmm.decoding_graph import WordTable
from speech.hmm.fst_arrays import FstArrays
from speech.hmm.model import HmmModel, model_digest
from speech.hmm.priors import log_priors, scaled_likelihoods
from speech.hmm.pronunciations import count_pronunciations, graph_options
from speech.hmm.utterances import InMemoryUtterance, by_speaker
from speech.models import ModelChoice
from speech.tokens import TokenConfig, train_tokenizer
from storage.objects import ObjectStore
from storage.shards import Sample, build_index, write_shard
from tasks.config.training import AcousticTrainConfig
from tasks.engine import know_tasks
from training.job import TrainJob
from training.launch.training_process import run_training

DATA = Path(os.environ.get("STARLING_SHARED_DATA", "../shared/data"))
TRAINING = DATA / "LibriSpeech" / "train-clean-5"
FEATURES = MfccConfig(num_mels=40, num_ceps=40, dither=0.0, cmvn="global")
"""Stands for the stored features, which have its width and frame shift."""
MODEL = {"kind": "tdnn", "dim": 384, "layers": 9, "subsampling": 2, "time_stride": 2, "dropout": 0.1}
TRAIN = {
    "objective": {"kind": "frame_cross_entropy"},
    "epochs": 6,
    "batch_seconds": 64.0,
    "max_batch": 32,
    "schedule": {"kind": "cosine", "warmup_epochs": 0.3},
    "optimizer": {"lr": 2e-3},
    "augment": {"enabled": False},
    "device": "cpu",
}


def write_set(url: str, utterances: Iterable[tuple[InMemoryUtterance, Tensor]], per_shard: int = 100) -> None:
    """Write stored features [frames, dim] as shards."""
    samples = [
        Sample(
            utterance.id,
            {"npy": _npy(feats)},
            {
                "duration": len(feats) / 100,
                "num_frames": len(feats),
                "sample_rate": 16000,
                "text": " ".join(utterance.words),
                "speaker": utterance.speaker,
            },
        )
        for utterance, feats in utterances
    ]
    store = ObjectStore(url)
    starts = range(0, len(samples), per_shard)
    parts = [write_shard(store, f"{n:06d}.tar", samples[n : n + per_shard], "npy") for n in starts]
    build_index(parts, {}).write(store)


def _npy(feats: Tensor) -> bytes:
    data = io.BytesIO()
    np.save(data, feats.numpy().astype(np.float32), allow_pickle=False)
    return data.getvalue()


def prepare(work: Path, folder: Path, checkpoint: Checkpoint, train: Sequence[InMemoryUtterance]) -> None:
    """Write features, alignments and the spec of the bundle; every 20th utterance is for validation."""
    model = checkpoint.model
    aligned = checkpoint.aligned.alignments
    feats = [
        (utterance, model.chain(utterance.features, checkpoint.adaptations.get(utterance.speaker)))
        for utterance in train
    ]
    stats = CmvnStats(feats[0][1].shape[1])
    for _, chained in feats:
        stats.add(chained)
    write_set(str(work / "train"), (pair for n, pair in enumerate(feats) if n % 20))
    write_set(str(work / "valid"), (pair for n, pair in enumerate(feats) if not n % 20))
    info = AlignmentInfo(10.0, model.gmm.num_pdfs, model_digest(folder))
    for name, chosen in (("train", lambda n: n % 20), ("valid", lambda n: not n % 20)):
        rows = (
            aligned[utterance.id].alignment(utterance.id, utterance.words, model.tree)
            for n, (utterance, _) in enumerate(feats)
            if chosen(n) and utterance.id in aligned
        )
        write_alignments(work / "alignments" / f"{name}.parquet", info, rows)
    (work / "stats.json").write_text(json.dumps(stats.to_dict()))


def make_job(work: Path, texts: Sequence[str], model: dict[str, object], train: dict[str, object]) -> TrainJob:
    """The training job."""
    table = AlignmentTable.read(work / "alignments" / "train.parquet")
    states = TiedStates(
        model=table.info.model, frame_shift_ms=table.info.frame_shift_ms, log_priors=log_priors(table.counts())
    )
    spec = BundleSpec(
        sample_rate=16000,
        features=FEATURES,
        stats=json.loads((work / "stats.json").read_text()),
        tokenizer=train_tokenizer(TokenConfig(), texts).to_dict(),
        model=TypeAdapter(ModelChoice).validate_python(model),
        states=states,
    )
    recipe = AcousticTrainConfig.model_validate(train)
    urls = {f"{name}_url": str(work / name) for name in ("train", "valid", "alignments")}
    task = AcousticTaskConfig(spec=spec, objective=recipe.objective, augment=recipe.augment, **urls)
    know_tasks()
    return TrainJob(
        run="hybrid-benchmark",
        seed=1,
        train=recipe.engine_part(),
        task=task,
        output_url=str(work / "output"),
        journal=work / "journal.jsonl",
        cache=work / "cache",
    )


def show_epochs(result: Path) -> None:
    """A line for each epoch's validation."""
    for entry in json.loads(result.read_text())["history"]:
        print("  ".join(f"{name} {entry[name]}" for name in ("epoch", "loss", "frame_accuracy")), flush=True)


def children_cpu() -> float:
    """CPU seconds of finished child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_transforms(
    work: Path, model: HmmModel, decoder: GraphSearch, test: Sequence[InMemoryUtterance]
) -> list[Tensor]:
    """fMLLR of each test utterance's speaker, from two decoding passes of the SAT model."""
    path = work / "transforms.safetensors"
    if not path.exists():
        estimated: dict[str, Tensor] = {}
        for speaker, places in by_speaker([utterance.speaker for utterance in test]).items():
            feats = [test[i].features for i in places]
            transform = speaker_transform(model, feats, decode_plain(model, decoder, feats))
            adapted = [model.gmm.log_likelihoods(model.chain(frames, transform)) for frames in feats]
            again = [decoder(likelihoods.numpy()) for likelihoods in adapted]
            estimated[speaker] = speaker_transform(model, feats, again, transform).contiguous()
        save_file(estimated, path)
    transforms = load_file(path)
    return [transforms[utterance.speaker] for utterance in test]


@torch.inference_mode()
def network_scores(work: Path, feats: Sequence[Tensor]) -> list[NDArray[np.float32]]:
    """Posteriors minus priors of each utterance, at the rate of its frames."""
    spec, network = load_bundle(work / "output" / "model")
    frontend = spec.build_frontend()
    assert spec.states is not None
    scores = []
    for frames in feats:
        log_probs, _ = network(*frontend(frames[None], torch.tensor([len(frames)])))
        scores.append(
            scaled_likelihoods(log_probs[0].numpy(), spec.states.log_priors, spec.frame_factor)[: len(frames)]
        )
    return scores


def graph_of(args: argparse.Namespace, checkpoint: Checkpoint) -> tuple[FstArrays, WordTable]:
    """The SAT model's graph, with probabilities from its alignments, and its words; made once in the work folder."""
    path, table = args.work / "graph.fst", args.work / "words.json"
    if not path.exists() or not table.exists():
        phones = checkpoint.model.tree.phones
        lexicon = read_cmudict(DATA / "lexicon" / "cmudict.dict")
        words = {name: tuple(text.split()) for name, text in transcripts(TRAINING).items()}
        spoken = graph_options(count_pronunciations(checkpoint.aligned.alignments, words, phones), lexicon)
        recognition = Recognition(phones, lexicon, args.arpa, DecodeOptions(), spoken)
        recognition.graph("sat", checkpoint.model).write(path)
        table.write_text(json.dumps(recognition.words.words))
    return FstArrays.read(path), WordTable(tuple(json.loads(table.read_text())))


def arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arpa", type=Path, required=True, help="n-gram, in lower case")
    parser.add_argument("--hmm", type=Path, default=Path("hmm-work"), help="work folder of hmm_mini_librispeech")
    parser.add_argument("--work", type=Path, default=Path("hybrid-work"))
    parser.add_argument("--model", default="{}", help="as JSON: changes to the TDNN, or another kind")
    parser.add_argument("--train", default="{}", help="changes to the section train as JSON")
    parser.add_argument("--beam", type=float, default=12.0)
    parser.add_argument("--scales", type=float, nargs="+", default=[0.1], help="acoustic scales of the network")
    parser.add_argument("--only", choices=("prepare", "train", "decode"), nargs="+", help="these steps only")
    parser.add_argument("--json", action="store_true", help="a line of JSON at the end")
    return parser.parse_args()


def train_network(args: argparse.Namespace, texts: Sequence[str]) -> None:
    """Train, if there is no model yet."""
    if (args.work / "output" / "result.json").exists():
        return
    changes = json.loads(args.model)
    model = changes if changes.get("kind", "tdnn") != "tdnn" else MODEL | changes
    job = make_job(args.work, texts, model, TRAIN | json.loads(args.train))
    with measured("network: train", weights=job.task.spec.build_model().num_parameters()) as row:
        before = children_cpu()
        run_training(job, args.work / "process")
        row["children_cpu_s"] = round(children_cpu() - before, 1)


def main() -> None:
    """Prepare, train, decode, print."""
    args = arguments()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    steps = args.only or ["prepare", "train", "decode"]
    checkpoint = load_checkpoint(args.hmm / "sat")
    assert checkpoint is not None, f"{args.hmm} has no model of stage sat"
    if "prepare" in steps and not (args.work / "stats.json").exists():
        with measured("features and alignments"):
            train = read_corpus(TRAINING)
            folder = args.hmm / "sat" / json.loads((args.hmm / "sat" / "state.json").read_text())["checkpoint"]
            prepare(args.work, folder, checkpoint, train)
            del train
    if "train" in steps:
        train_network(args, list(transcripts(TRAINING).values()))
        show_epochs(args.work / "output" / "result.json")
    if "decode" in steps:
        decode(args, checkpoint)
    if args.json:
        print(json.dumps({"benchmark": "hybrid, mini-LibriSpeech", "argv": sys.argv[1:], "rows": ROWS}))


def decode(args: argparse.Namespace, checkpoint: Checkpoint) -> None:
    """Decode dev-clean-5 and print the WER for each acoustic scale."""
    model = checkpoint.model
    with measured("graph"):
        graph, table = graph_of(args, checkpoint)
    test = read_corpus(DATA / "LibriSpeech" / "dev-clean-5")
    with measured("SAT: two passes for fMLLR"):
        transforms = test_transforms(args.work, model, GraphSearch(graph, table), test)
    feats = [model.chain(utterance.features, transform) for utterance, transform in zip(test, transforms, strict=True)]
    with measured("network: scores"):
        scores = network_scores(args.work, feats)
    for scale in args.scales:
        with measured("network: decode", scale=scale) as row:
            decoder = GraphSearch(graph, table, DecodeOptions(beam=args.beam, acoustic_scale=scale))
            paths = [decoder(posteriors) for posteriors in scores]
            row["wer"] = round(100 * wer(test, paths), 2)
            speakers = by_speaker([utterance.speaker for utterance in test])
            row["by_speaker"] = {
                who: round(100 * wer([test[i] for i in places], [paths[i] for i in places]), 1)
                for who, places in speakers.items()
            }


if __name__ == "__main__":
    main()
