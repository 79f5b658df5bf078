"""A batch that did not fit in the GPU's memory ended decoding.

GPU memory is simulated by a model that rejects batches of more than a given number of utterances.
"""

import pytest
import torch

from devices.portions import TooLargeError
from recognition import inference
from recognition.systems.acoustic import FrameRecognizer
from speech.decoding import GreedyConfig


@pytest.fixture
def decode(corpus, tmp_path, tones):
    spec = corpus.spec("conformer", model=tones.bare("conformer"))

    def run(most, error=None):
        """Hypotheses by utterance with memory for `most` utterances, and the batch sizes that were tried."""
        model, sizes = spec.build_model().eval(), []
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        forward = model.forward

        def limited(feats, frames):
            sizes.append(len(feats))
            if len(feats) > most:
                raise error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return forward(feats, frames)

        model.forward = limited
        recognizer = FrameRecognizer(spec, model, GreedyConfig())
        dataset = inference.open_set(corpus.url("valid"), spec.sample_rate, tmp_path / "cache")
        decoded = inference.decode_set(recognizer, dataset, batch_seconds=1000)
        return [(entry.id, entry.ref, entry.hyp) for entry in decoded.values()], sizes

    return run


def test_oversized_batch_is_decoded_in_portions(decode):
    whole, sizes = decode(100)
    assert sizes == [len(whole)] == [12]
    portions, sizes = decode(4)
    assert portions == whole
    assert sizes == [12, 6, 3, 3, 3, 3]


def test_utterance_that_does_not_fit_alone_is_reported(decode, corpus):
    with pytest.raises(TooLargeError, match="does not fit") as error:
        decode(0)
    assert any(f"({sample.id})" in str(error.value) for sample in corpus.valid)


def test_other_errors_are_not_treated_as_out_of_memory(decode):
    with pytest.raises(RuntimeError, match="shapes"):
        decode(3, RuntimeError("shapes do not fit"))
