"""Numbers out of range in the files of GMM-HMMs, i-vector extractors, alignments and language models were used.

They gave wrong results, errors of another library at the first utterance, or tables of terabytes.
"""

import json
import re
import shutil
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from recognition.adaptation import SpeakerAdapter
from speech.alignments import Alignment, AlignmentInfo, AlignmentsError, AlignmentTable, Span
from speech.alignments import write_alignments as write_table
from speech.features import FmllrConfig, MfccConfig
from speech.hmm.config import AdaptationConfig
from speech.hmm.decode import GraphSearch
from speech.hmm.decoding_graph import WordTable
from speech.hmm.fst_arrays import arc_records, from_arcs
from speech.hmm.gmm import DiagGmm
from speech.hmm.graphs import GraphOptions
from speech.hmm.ivector import BackgroundModel, IvectorExtractor
from speech.hmm.model import FeatureChain, HmmModel, ModelError
from speech.hmm.pronunciations import load_lexicon, save_lexicon
from speech.hmm.serialization import SerializationError, dump_value, load_value
from speech.hmm.topology import PhoneSet, TransitionModel
from speech.hmm.tree import DecisionTree
from speech.hmm.viterbi import StatePath
from speech.lexicon import Lexicon
from speech.lexicon.base import Pronunciation
from speech.lm.base import LmError
from speech.lm.hidden_classes import MODEL, HiddenClassConfig, HiddenClassEstimator

PHONES = PhoneSet(("SIL", "SPN", "A", "B"))


def model():
    """Phones A and B share a tree of one question, and a state of silence its pdf with spoken noise."""
    roots = np.zeros((5, 5), dtype=np.int32)
    roots[1:3], roots[3:, :3] = -1, 0
    tree = DecisionTree(PHONES, roots, [(1, (3,), -2, -3)], 3)
    transitions = TransitionModel(PHONES, tree.transition_keys())
    gmm = DiagGmm(torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.4, 0.6]]), torch.zeros(3, 2, 6), torch.ones(3, 2, 6))
    return HmmModel(tree, transitions, gmm, FeatureChain(1, torch.ones(6, 12)), deepcopy(gmm))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model().save(folder)
    return folder


def changed(saved, folder, name, index, value):
    """A copy of a model with another number in a tensor, or in the JSON file."""
    shutil.copytree(saved, folder / "model")
    path, description = folder / "model" / "model.safetensors", folder / "model" / "model.json"
    tensors, facts = load_file(path), json.loads(description.read_text())
    if name in tensors:
        tensors[name][index] = value
        save_file(tensors, path)
    else:
        place = facts
        for key in (*name.split("."), *index)[:-1]:
            place = place[key]
        place[(*name.split("."), *index)[-1]] = value
        description.write_text(json.dumps(facts))
    return folder / "model"


def test_intact_model_is_read(saved):
    read = HmmModel.load(saved)
    assert read.num_features == 4
    assert read.tree.pdfs(np.array([[0, 3, 4]])).tolist() == [[1, 1, 1, -1, -1]]


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("gmm.weights", (0, 0), float("nan")),
        ("gmm.weights", (0, 0), -0.5),
        ("gmm.weights", (0, 0), 7.0),
        ("gmm.weights", (1, 0), 0.0),
        ("gmm.means", (0, 0, 0), float("inf")),
        ("gmm.variances", (0, 0, 0), 0.0),
        ("unadapted.variances", (0, 0, 0), -1.0),
        ("unadapted.means", (2, 1, 5), float("nan")),
        ("matrix", (0, 0), float("nan")),
        ("transitions.keys", (0, 0), 0),
        ("transitions.keys", (-1, 0), 5),
        ("transitions.keys", (0, 1), -1),
        ("transitions.keys", (-1, 1), 9),
        ("transitions.keys", (-1, 2), 3),
        ("transitions.log_probs", (0,), float("nan")),
        ("transitions.log_probs", (0,), 0.5),
        ("context", (), 10**9),
        ("context", (), -1),
        ("context", (), 10**30),
        ("tree.num_pdfs", (), 4),
        ("tree.num_pdfs", (), 2),
        ("tree.num_pdfs", (), 10**12),
        ("tree.roots", (3, 0), 1),
        ("tree.roots", (3, 0), -4),
        ("tree.roots", (3, 0), 2**40),
        ("tree.roots", (), [[0]]),
        ("tree.nodes", (0, 0), 4),
        ("tree.nodes", (0, 2), 0),
        ("tree.nodes", (0, 2), -4),
        ("tree.nodes", (0, 3), 1),
        ("tree.phones.noises", (), 5),
        ("tree.phones.noises", (), -1),
        ("tree.phones.names", (), [str(n) for n in range(5000)]),
        ("tree", (), []),
    ],
)
def test_number_out_of_range_in_a_model_is_refused(saved, tmp_path, name, index, value):
    folder = changed(saved, tmp_path, name, index, value)
    with pytest.raises(ModelError, match="holds no acoustic model"):
        HmmModel.load(folder)


@pytest.mark.parametrize("name", ["gmm.means", "gmm.variances", "unadapted.weights", "matrix", "transitions.log_probs"])
def test_tensor_of_another_shape_is_refused(saved, tmp_path, name):
    shutil.copytree(saved, tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    save_file(tensors | {name: tensors[name][1:].contiguous()}, tmp_path / "model" / "model.safetensors")
    with pytest.raises(ModelError, match="holds no acoustic model"):
        HmmModel.load(tmp_path / "model")


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "null", '{"tree": 1}'])
def test_damaged_description_of_a_model_is_refused(saved, tmp_path, text):
    shutil.copytree(saved, tmp_path / "model")
    (tmp_path / "model" / "model.json").write_text(text)
    with pytest.raises(ModelError, match="holds no acoustic model"):
        HmmModel.load(tmp_path / "model")


def test_tree_of_other_states_than_the_transitions_is_refused():
    intact = model()
    few = TransitionModel(PHONES, intact.transitions.keys[:-1])
    with pytest.raises(ValueError, match="lacks a state of the tree"):
        few.states_of(*intact.transitions.keys[-1:].T)


def extractor():
    gmm = DiagGmm(torch.tensor([[0.5, 0.5]]), torch.zeros(1, 2, 6), torch.ones(1, 2, 6))
    return IvectorExtractor.random(BackgroundModel(gmm), rank=3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("variances", torch.zeros(1, 2, 6)),
        ("means", torch.full((1, 2, 6), float("nan"))),
        ("weights", torch.ones(1, 3)),
        ("weights", torch.zeros(1, 2)),
        ("loadings", torch.full((2, 6, 3), float("nan"), dtype=torch.float64)),
        ("loadings", torch.zeros(2, 6, dtype=torch.float64)),
        ("loadings", torch.zeros(2, 5, 3, dtype=torch.float64)),
    ],
)
def test_damaged_extractor_is_refused(tmp_path, name, value):
    path = tmp_path / "ivector.safetensors"
    extractor().save(path)
    assert IvectorExtractor.load(path).rank == 3
    save_file(load_file(path) | {name: value}, path)
    with pytest.raises(ModelError, match="holds no i-vector extractor"):
        IvectorExtractor.load(path)


def search(states):
    arcs = arc_records([states], [1], [0.0], [0])
    return GraphSearch(from_arcs(0, np.zeros(1, dtype=np.float32), np.zeros(1), arcs), WordTable(("A",)))


@pytest.mark.parametrize("wrong", ["graph", "features", "network", "extractor"])
def test_parts_of_different_sizes_do_not_adapt_together(wrong):
    cfg = AdaptationConfig(features=MfccConfig(num_mels=23, num_ceps=5 if wrong == "features" else 4))
    network = FmllrConfig(dim=7 if wrong == "network" else 6)
    vectors = extractor()
    if wrong == "extractor":
        gmm = DiagGmm(torch.ones(1, 1), torch.zeros(1, 1, 5), torch.ones(1, 1, 5))
        vectors = IvectorExtractor.random(BackgroundModel(gmm), rank=3)
    with pytest.raises(ValueError, match="use the files that were made together"):
        SpeakerAdapter(model(), cfg, 8000, search(4 if wrong == "graph" else 3), network, vectors)


def alignment(**changes):
    values = {
        "phones": np.array([1, 3], dtype=np.int16),
        "words": np.array([-1, 0], dtype=np.int16),
        "starts": np.array([0, 2, 5], dtype=np.int32),
        "states": np.zeros(5, dtype=np.int8),
    }
    return StatePath(**values | {name: np.array(value) for name, value in changes.items()})


@pytest.mark.parametrize(
    "change",
    [
        {"phones": [1, 0]},
        {"phones": [1]},
        {"words": [0]},
        {"starts": [0, 2, 2**31 - 1]},
        {"starts": [1, 2, 5]},
        {"starts": [0, 7, 5]},
        {"starts": [0, 0, 5]},
        {"states": [0, 0, 0, 0, -1]},
        {"states": [0] * 6},
    ],
)
def test_alignment_that_contradicts_itself_is_refused(change):
    alignment()
    with pytest.raises(ValueError, match="an alignment of"):
        alignment(**change)


def test_stored_alignment_that_contradicts_itself_is_refused():
    data = dump_value(replace(alignment(), score=1.0))
    tree = re.sub(rb'"start": 2, "shape": \[2\]', rb'"start": 0, "shape": [2]', data)  # the words are the phones
    assert load_value(tree).words.tolist() == [1, 3]
    with pytest.raises(SerializationError):
        load_value(re.sub(rb'"start": 2, "shape": \[2\]', rb'"start": 2, "shape": [1]', data))


TABLE = AlignmentInfo(10.0, 3, "ab" * 32)


@pytest.mark.parametrize(
    ("info", "row", "message"),
    [
        ({"num_pdfs": 10**12}, {}, "impossible"),
        ({"num_pdfs": 0}, {}, "impossible"),
        ({"frame_shift_ms": float("nan")}, {}, "impossible"),
        ({"frame_shift_ms": 0.0}, {}, "impossible"),
        ({}, {"score": float("nan")}, "score that is no number"),
        ({}, {"words": (Span("a", 0, 2, float("nan")),)}, "confidence that is not between"),
        ({}, {"words": (Span("a", 0, 2, 1.5),)}, "confidence that is not between"),
        ({}, {"pdfs": np.array([0, -1])}, "a state that is not among"),
        ({}, {"pdfs": np.array([0, 3])}, "a state that is not among"),
    ],
)
def test_impossible_alignments_are_refused(tmp_path, info, row, message):
    alignment = Alignment("a", (Span("a", 0, 2, 0.5),), (Span("A", 0, 2),), -1.0, np.array([0, 1]))
    write_table(tmp_path / "a.parquet", TABLE, [alignment])
    assert AlignmentTable.read(tmp_path / "a.parquet").pdfs("a").tolist() == [0, 1]
    with pytest.raises(AlignmentsError, match=message):
        write_table(tmp_path / "b.parquet", replace(TABLE, **info), [replace(alignment, **row)])


def test_header_of_alignments_that_is_no_mapping_is_refused(tmp_path):
    alignment = Alignment("a", (), (Span("A", 0, 1),), pdfs=np.array([0]))
    write_table(tmp_path / "a.parquet", TABLE, [alignment])
    table = pq.read_table(tmp_path / "a.parquet")
    for header in (b"[]", b"[" * 100_000, b'{"format": 1, "frame_shift_ms": 10, "num_pdfs": Infinity, "model": ""}'):
        pq.write_table(table.replace_schema_metadata({b"starling.alignments": header}), tmp_path / "a.parquet")
        with pytest.raises(AlignmentsError, match="holds no alignments"):
            AlignmentTable.read(tmp_path / "a.parquet")


@pytest.mark.parametrize("change", [{"silence_probability": 0.0}, {"after": {"A": 1.0}}, {"after": []}])
def test_probability_of_silence_out_of_range_is_refused(tmp_path, change):
    save_lexicon(tmp_path, Lexicon({"A": [Pronunciation(("A",))]}, "<unk>"), GraphOptions())
    load_lexicon(tmp_path)
    path = tmp_path / "silence.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match="holds no lexicon"):
        load_lexicon(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("first", np.full(3, np.nan)),
        ("first", np.ones(2)),
        ("following", np.ones((2, 2))),
        ("following", np.full((2, 3), -1.0)),
        ("words", np.ones((2, 9))),
        ("words", np.full((2, 5), 7.0)),
    ],
)
def test_damaged_hidden_classes_are_refused(tmp_path, name, value):
    from safetensors.numpy import save_file as save_arrays

    arrays = {"first": np.full(3, 1 / 3), "following": np.full((2, 3), 1 / 3), "words": np.full((2, 5), 0.2)}
    estimator = HiddenClassEstimator(HiddenClassConfig(classes=2))
    names = {"starling.words": json.dumps(["<unk>", "<s>", "</s>", "a", "b"])}
    save_arrays(arrays, tmp_path / MODEL, names)
    estimator.load(tmp_path)
    save_arrays(arrays | {name: value}, tmp_path / MODEL, names)
    with pytest.raises(LmError, match="cannot be read"):
        estimator.load(tmp_path)
