"""Configurations with features that are adapted to speakers: what they need, and what contradicts them."""

import pytest
from support import tiny_document

from speech.features import FmllrConfig, build_features
from tasks.config.pipeline import ConfigError, parse_config
from tasks.stages.base import stages_of

OBJECTIVE = {"objective": "frame_cross_entropy", "augment": {"enabled": False}}


def document(**fields):
    decode = {"kind": "graph", "graph": "g.fst", "words": "w.txt"}
    return tiny_document(
        **({"features": "fmllr", "align": {}, "decode": decode, "train": OBJECTIVE, "model": "tdnn"} | fields)
    )


def test_adaptation_stage_follows_the_alignment():
    config = parse_config(document())
    assert stages_of(config)[2:5] == ("features", "align", "adapt")
    assert "adapt" not in stages_of(parse_config(tiny_document()))
    assert "adapt" not in stages_of(parse_config(document(recognizer="gmm", align={"recognize": {"arpa": "x"}})))
    assert build_features(config.features, 8000).dim == config.align.lda_dim


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"align": None}, r"there is no section align: set align: \{stage: sat\}"),
        ({"align": {"stage": "lda"}}, r"align\.stage is lda: set align: \{stage: sat\}"),
        ({"align": {"lda_dim": 30}}, r"align\.lda_dim is 30: set features\.dim to 30"),
        ({"features": {"kind": "fmllr", "hop_ms": 5.0}}, r"align\.features\.hop_ms is 10: set features\.hop_ms to 10"),
        ({"train": {"objective": "ctc"}, "decode": "greedy"}, r"set train\.objective to frame_cross_entropy"),
        (
            {"train": OBJECTIVE | {"objective": {"kind": "frame_cross_entropy", "alignments": "there"}}},
            r"remove train\.objective\.alignments",
        ),
        (
            {"train": OBJECTIVE | {"augment": {"speed_factors": [0.9, 1.1]}}},
            r"features\.kind fmllr leaves no waveforms .* speed_factors: leave it out$",
        ),
        ({"align": {"features": {"kind": "fmllr"}}}, r"align.*kind fmllr is made from these features"),
    ],
)
def test_missing_requirements_are_named(fields, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(document(**fields))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("num_mels", 40, "num_mels belongs to the features of the GMM-HMM: set it in align.features"),
        ("preemphasis", 0.5, "preemphasis belongs"),
        ("trim_db", 30.0, "trim_db needs the level of frames"),
        ("cmvn_gate_db", 20.0, "cmvn_gate_db needs the level of frames"),
        ("stored", True, "adapted features are always stored: remove it"),
        ("cmvn", "speaker", "normalized by speaker already: use global"),
    ],
)
def test_options_of_other_feature_kinds_are_refused(option, value, message):
    with pytest.raises(ValueError, match=message):
        FmllrConfig(**{option: value})


def test_segments_are_cut_from_adapted_features():
    config = parse_config(document(train=OBJECTIVE | {"segments": {"frames": 21}}))
    assert config.train.segments.frames == 21
