"""The energy of a reverberation's tail was one sum, which torch shares among threads if the tail is long: the last bits
of simulated rooms above 16 kHz depended on `train.threads`.
"""

import pytest
import torch

from speech.features.augment.rooms import decay_response


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("rt60", [1.1, 1.7, 2.0])
def test_response_is_the_same_for_any_number_of_threads(threads, rt60):
    responses = []
    for count in (1, 2, 3, 4):
        threads(count)
        responses.append(decay_response(rt60, 3.0, 48_000, torch.Generator().manual_seed(1)))
    assert all(torch.equal(response, responses[0]) for response in responses)
