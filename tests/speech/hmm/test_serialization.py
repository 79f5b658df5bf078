"""Values of training steps survive the transfer to another process."""

from functools import partial

import numpy as np
import pytest
import torch
from hmm_toys import LEXICON, PHONES, context_tree, corpus, random_model

from speech.hmm import steps
from speech.hmm.graphs import GraphOptions
from speech.hmm.model import FeatureChain
from speech.hmm.serialization import SerializationError, dump_value, load_value, step_parts
from speech.hmm.utterances import Shard


def assert_same(first, second):
    assert type(first) is type(second)
    if isinstance(first, torch.Tensor):
        torch.testing.assert_close(first, second, rtol=0, atol=0)
    elif isinstance(first, np.ndarray):
        assert first.dtype == second.dtype
        np.testing.assert_array_equal(first, second)
    elif isinstance(first, dict):
        assert list(first) == list(second)
        for key in first:
            assert_same(first[key], second[key])
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for a, b in zip(first, second, strict=True):
            assert_same(a, b)
    elif hasattr(first, "__dict__") and type(first).__module__.startswith("speech."):
        for name, value in vars(first).items():
            if not name.startswith("_"):
                assert_same(value, vars(second).get(name, getattr(second, name)))
    else:
        assert first == second


def round_trip(value):
    return load_value(dump_value(value))


def test_plain_values_survive_a_round_trip():
    value = {"a": [1, 2.5, None, True, "x"], ("w", ("P", "Q")): (), "e": np.zeros((0, 3), np.int16), "s": np.float32(2)}
    assert_same(round_trip(value), value | {"s": 2.0})
    assert round_trip(float("-inf")) == float("-inf")


def test_every_step_gives_the_same_result_from_stored_arguments():
    rng = np.random.default_rng(1)
    model, shard = random_model(rng, context_tree(rng), dim=12), Shard(corpus(6))
    graphs = steps.make_graphs(shard, PHONES, LEXICON, GraphOptions(0.4, {("TO", ("T", "AH0")): 0.3}))
    aligned = steps.align(model, shard, graphs, steps.AlignOptions(beam=0.0))
    alignments = aligned.alignments
    assert alignments
    plain = steps.make_graphs(shard, PHONES, LEXICON, context=False)
    transforms = {"s0": torch.eye(12, 13)}
    every = [
        partial(steps.make_graphs, phones=PHONES, lexicon=LEXICON, options=GraphOptions(0.3), context=False),
        partial(steps.align_equally, phones=PHONES, graphs=plain),
        partial(steps.align, model, graphs=graphs, options=steps.AlignOptions(), adaptations=transforms),
        partial(steps.accumulate_shard, model, alignments=alignments, adaptations=transforms, unadapted=True),
        partial(steps.context_statistics, alignments=alignments, chain=model.chain, adaptations={}),
        partial(steps.lda_statistics, alignments=alignments, chain=FeatureChain(1), tree=model.tree),
        partial(steps.mllt_statistics, model, alignments=alignments, every=2),
        partial(steps.fmllr_statistics, model, alignments=alignments, adaptations=transforms),
    ]
    for step in every:
        name, args, keywords = round_trip(step_parts(step))
        result = step(shard)
        again = getattr(steps, name)(*args, shard=Shard(corpus(6)), **keywords)
        assert_same(round_trip(again), result)


def test_unknown_classes_and_invalid_bytes_are_refused():
    with pytest.raises(TypeError, match="class Generator cannot be stored"):
        dump_value(np.random.default_rng())
    for data in (b"", b"{}", dump_value(1)[:-1]):
        with pytest.raises(SerializationError, match="not a stored value"):
            load_value(data)
    with pytest.raises(AssertionError, match="is not a step"):
        step_parts(partial(print, 1))
