"""Forced alignments of the tiny spoken language, for training on tied states."""

from pathlib import Path

import numpy as np
import tones
import torch

from recognition.bundle import TiedStates
from speech.alignments import Alignment, AlignmentInfo, AlignmentTable, Span, write_alignments
from speech.audio import decode_audio
from speech.features import build_features
from speech.hmm.priors import log_priors

STATES = 4
OBJECTIVE = {"kind": "frame_cross_entropy"}


def loudest_quarter(sample):
    """States that can be learned: the loudest quarter of each frame's spectrum."""
    wave, _ = decode_audio(sample.members["flac"])
    feats, _ = build_features(tones.FEATURES, tones.RATE)(wave[None], torch.tensor([len(wave)]))
    return (feats[0].argmax(dim=1) * STATES // tones.FEATURES.num_mels).numpy().astype(np.int32)


def aligned(sample):
    states = loudest_quarter(sample)
    return Alignment(sample.id, (), (Span("SIL", 0, len(states)),), pdfs=states)


def align_corpus(corpus, folder: Path):
    """Write the corpus's alignments into a folder, without that of the training set's first utterance."""
    info = AlignmentInfo(10.0, STATES, "ab" * 32)
    write_alignments(folder / "train.parquet", info, map(aligned, corpus.train[1:]))
    write_alignments(folder / "valid.parquet", info, map(aligned, corpus.valid))
    return folder


def state_job(corpus, folder, alignments, kind="tdnn", **changes):
    counts = AlignmentTable.read(alignments / "train.parquet").counts()
    states = TiedStates(model="ab" * 32, frame_shift_ms=10.0, log_priors=log_priors(counts))
    spec = corpus.spec(kind, states=states)
    return corpus.job(folder, **{"spec": spec, "objective": OBJECTIVE, "alignments_url": str(alignments), **changes})
