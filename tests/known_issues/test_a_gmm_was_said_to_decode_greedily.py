"""The decision about a GMM-HMM said that it was decoded by greedy search: the section `decode` is none of its own."""

from support import tiny_bundle, tiny_document

from tasks.config.pipeline import parse_config
from tasks.stages.base import Run
from tasks.tracking.significance import _decoders


def test_decoder_of_the_gmm_is_named(tmp_path):
    tiny_bundle(tmp_path)
    run = Run(parse_config(tiny_document(recognizer="gmm", align={}, lm={})), "r")
    assert _decoders(run, tmp_path) == {"champion": "greedy", "challenger": "graph with a language model"}
