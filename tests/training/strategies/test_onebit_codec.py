"""1-bit gradients: nothing is lost, and every value takes one bit."""

import pytest
import torch

from training.strategies.onebit import OneBitCodec, pack, unpack, wire_bytes


@pytest.mark.parametrize("size", [1, 7, 8, 64, 1000])
def test_error_feedback_conserves_the_sum_of_gradients(size):
    generator = torch.Generator().manual_seed(size)
    codec, given, decoded = OneBitCodec(size, 64), torch.zeros(size), torch.zeros(size)
    for _ in range(50):
        grads = torch.randn(size, generator=generator)
        given += grads
        decoded += codec.decode(*codec.encode(grads))
    torch.testing.assert_close(decoded + codec.error, given, rtol=0, atol=1e-4)


def test_each_block_is_decoded_to_the_mean_of_its_sign():
    codec = OneBitCodec(8, 8)
    bits, levels = codec.encode(torch.tensor([1.0, 3.0, -2.0, -4.0, 2.0, 0.0, -3.0, 4.0]))
    assert bits.tolist() == [[0b10110011]]
    assert codec.decode(bits, levels).tolist() == [2.0, 2.0, -3.0, -3.0, 2.0, 2.0, -3.0, 2.0]


def test_padding_does_not_affect_the_levels():
    codec = OneBitCodec(2, 8)
    bits, levels = codec.encode(torch.tensor([4.0, -2.0]))
    assert levels.tolist() == [[-2.0, 4.0]]
    assert codec.decode(bits, levels).tolist() == [4.0, -2.0]


def test_bits_survive_packing():
    flags = torch.rand(3, 64, generator=torch.Generator().manual_seed(1)) > 0.5
    packed = pack(flags)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, 8)
    assert torch.equal(unpack(packed), flags)


def test_wire_bytes_are_those_of_the_encoded_tensors():
    codec = OneBitCodec(4096, 512)
    bits, levels = codec.encode(torch.randn(4096))
    assert wire_bytes(4.0 * 4096, 512) == bits.numel() + 4 * levels.numel()
