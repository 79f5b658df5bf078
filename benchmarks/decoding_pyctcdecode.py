"""The peer's side of `benchmarks.decoding`: pyctcdecode, which pins numpy < 2, in an environment of its own.

Not for the command line: `benchmarks.decoding` runs it with another interpreter. It reads a task as JSON from standard
input and prints the result as JSON; it imports nothing of Starling.
"""

import json
import logging
import sys
import time

import numpy as np


def main() -> None:
    """Decode once to warm up, then the wanted number of rounds."""
    task = json.load(sys.stdin)
    logging.disable(logging.WARNING)
    from pyctcdecode import build_ctcdecoder  # type: ignore[import-not-found]

    decoder = build_ctcdecoder(
        task["labels"],
        kenlm_model_path=task["lm"],
        unigrams=task["words"],
        alpha=task["alpha"],
        beta=task["word_score"],
        unk_score_offset=-100.0,
    )
    with np.load(task["posteriors"], allow_pickle=False) as file:
        utterances = [file[name] for name in sorted(file.files)]
    options = {name: task[name] for name in ("beam_width", "beam_prune_logp", "token_min_logp")}
    seconds, texts = [], []
    for _ in range(1 + task["rounds"]):
        started = time.process_time()
        texts = [decoder.decode(scores, **options) for scores in utterances]
        seconds.append(time.process_time() - started)
    print(json.dumps({"seconds": seconds[1:], "texts": texts}))


if __name__ == "__main__":
    main()
