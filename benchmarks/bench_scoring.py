"""Speed of counting word errors, compared with jiwer on the same 10,000 utterances of 20 words."""

import random

import jiwer

from benchmarks.common import compare, show
from speech.scoring import score_sets

COUNT, WORDS = 10_000, 20


def main() -> None:
    """Run and print."""
    rng = random.Random(0)
    vocabulary = [f"w{i}" for i in range(2000)]
    refs = [" ".join(rng.choices(vocabulary, k=WORDS)) for _ in range(COUNT)]

    def corrupt(text: str) -> str:
        words = [rng.choice(vocabulary) if rng.random() < 0.1 else word for word in text.split()]
        return " ".join(word for word in words if rng.random() > 0.05)

    hyps = [corrupt(ref) for ref in refs]
    rows = [(str(i), ref, hyp, "", "") for i, (ref, hyp) in enumerate(zip(refs, hyps, strict=True))]
    rivals = {
        "starling (sclite's counts and CER)": lambda: score_sets(rows).wer,
        "jiwer (WER only)": lambda: jiwer.wer(refs, hyps),
        "jiwer (WER and CER)": lambda: (jiwer.wer(refs, hyps), jiwer.cer(refs, hyps)),
    }
    show("scoring", compare(rivals), "starling (sclite's counts and CER)", "utterances / s", COUNT)


if __name__ == "__main__":
    main()
