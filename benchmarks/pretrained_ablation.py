"""What of a pretrained Whisper is worth training: one change at a time to the recipe of Mini LibriSpeech.

    python -m benchmarks.pretrained_ablation [--rows NAME …] [--config configs/mini_librispeech_whisper.yaml]

Needs STARLING_SHARED_DATA and WHISPER_BASE, as the recipe says. A row is a pipeline up to the stage `score`; what rows
share is done once, and an interrupted benchmark continues. Prints the WER of each row and the time of its training and
decoding, and JSON.
"""

import argparse
import json
from pathlib import Path

from benchmarks.pipelines import ROOT, run_pipeline

CONFIG = ROOT / "configs" / "mini_librispeech_whisper.yaml"
TRAINED = ("features", "align", "train")
BOOKS = "{kind: ngram, unit: token, order: 3, cutoffs: [0, 0, 1], text: [$STARLING_SHARED_DATA/text/books-1.txt.bz2]}"
PLAIN = "restore=null"
CTC = [
    PLAIN,
    "recognizer={kind: ctc}",
    "tokens={kind: bpe, vocab_size: 256}",
    "train.objective={kind: ctc}",
    'train.freeze=[{names: ["subsampling.*", "layers.*", "norm.*"], until: 0}]',
    "train.optimizer.lr=0.003",
    "train.epochs=3",
    "model.silence=encoder",
    "decode={kind: greedy}",
]
HALF_AN_HOUR = ["data.sources.0.limit=138", "train.epochs=3"]


def learners(strategy: str, nodes: int, per_node: int = 1) -> list[str]:
    """Settings of several learners, which share the batch of one: an update takes as many utterances."""
    count = nodes * per_node
    fields = {"strategy": strategy, "nodes": nodes, "learners_per_node": per_node, "threads": 1}
    fields |= {"batch_seconds": 480 // count, "max_batch": 16 // count}
    return HALF_AN_HOUR + [f"train.{field}={value}" for field, value in fields.items()]


ROWS: dict[str, list[str]] = {
    "as published, greedy": [PLAIN, "train.epochs=0", "decode.beam=1"],
    "as published": [PLAIN, "train.epochs=0"],
    "encoder frozen, CTC": CTC,
    "decoder": [],
    "decoder, greedy": ["decode.beam=1"],
    "decoder, LoRA": ["train.lora={rank: 32, alpha: 64, modules: [decoder.*]}", "train.optimizer.lr=0.0005"],
    "decoder, half an hour": HALF_AN_HOUR,
    "half an hour, adpsgd-2": learners("adpsgd", 2),
    "half an hour, adpsgd-4": [*learners("adpsgd", 4), "storage.shard_seconds=300"],  # each node needs a shard
    "half an hour, h-adpsgd 2x2": learners("h-adpsgd", 2, 2),
    "decoder, plain": [PLAIN],
    "decoder, plain, 3-gram": [PLAIN, f"lm={BOOKS}", "decode.lm_weight=0.2"],
    "decoder, plain, no silence": [PLAIN, "model.silence=none"],
    "all, plain, no silence": [PLAIN, "model.silence=none", "train.freeze=[]", "train.optimizer.lr=1.0e-5"],
}
"""Settings of each row; `plain` rows learn to write as the transcripts are written."""


def main() -> None:
    """Run the rows and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=CONFIG, help="the recipe")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="NAME", help=", ".join(ROWS))
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="of all rows that do not set the field",
    )
    args = parser.parse_args()
    rows = []
    for name in args.rows:
        own = {setting.partition("=")[0] for setting in ROWS[name]}
        common = [setting for setting in args.set if setting.partition("=")[0] not in own]
        summary = run_pipeline(args.config, common + ROWS[name])
        seconds = {stage["name"]: stage["seconds"] for stage in summary["stages"] if not stage["cached"]}
        training, decoding = sum(seconds.get(stage, 0.0) for stage in TRAINED), seconds.get("decode", 0.0)
        (scores,) = summary["sets"].values()
        rows.append({"row": name, "train_s": training, "decode_s": decoding, **scores})
        times = f"training {training / 60:5.1f} min, decoding {decoding / 60:4.1f} min"
        print(f"{name:32} WER {100 * scores['wer']:6.2f} %  {times}", flush=True)
    print(json.dumps({"benchmark": "what of a pretrained model is trained", "config": args.config.name, "rows": rows}))


if __name__ == "__main__":
    main()
