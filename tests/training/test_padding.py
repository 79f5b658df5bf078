"""Padding for GPUs changes only the time of a step; this is tested on the CPU."""

import pytest
import torch
from tones import bare

from devices.padding import frame_multiple, rounded_up
from speech.models.networks import attention
from training.learner.compute import Learner, open_set
from training.learner.prefetch import Loader

CPU = torch.device("cpu")


def test_lengths_are_rounded_up_only_on_a_gpu_or_for_a_compiled_model():
    assert frame_multiple(CPU) == 1
    multiple = frame_multiple(torch.device("cuda", 0))
    assert frame_multiple(CPU, compiled=True) == multiple
    lengths = {rounded_up(torch.ones(1, frames, 2), multiple).shape[1] for frames in range(1, 3001)}
    assert len(lengths) == 47
    # behind the strongest subsampling tensor cores still get multiples of eight
    assert all(length % (8 * 8) == 0 for length in lengths)
    feats = torch.ones(2, 5, 3)
    assert rounded_up(feats, 1) is feats
    assert rounded_up(feats, 4)[:, 5:].abs().sum() == 0


@pytest.mark.parametrize("kind", ["blstm", "conformer"])
def test_longer_padding_does_not_change_gradients(corpus, tmp_path, kind):
    job = corpus.job(tmp_path, spec=corpus.spec(kind, model=bare(kind)))
    plain, padded, widths = Learner(job, CPU), Learner(job, CPU), []
    batch = Loader(open_set(job, "train"), plain.task, CPU)(range(5), 1)
    padded.frame_multiple = 64
    forward = padded.model.forward
    padded.model.forward = lambda feats, frames: (widths.append(feats.shape[1]), forward(feats, frames))[1]
    wanted, got = plain.gradient(batch, 3), padded.gradient(batch, 3)
    assert widths[0] % 64 == 0
    assert got.loss == pytest.approx(wanted.loss, rel=1e-5)
    torch.testing.assert_close(padded.flat.grads, plain.flat.grads, rtol=1e-4, atol=1e-4)


def test_network_that_reads_tokens_gets_them_beside_the_padded_features(corpus, tmp_path, monkeypatch):
    """As an attention decoder does."""
    learner, seen = Learner(corpus.job(tmp_path, "conformer"), CPU), []
    batch = Loader(open_set(learner.job, "train"), learner.task, CPU)(range(5), 1)
    learner.frame_multiple = 64
    forward, losses = learner.model.forward, learner.task.losses

    def read_tokens(feats, frames, tokens):
        seen.append((feats.shape[1] % 64, tokens))
        return forward(feats, frames)

    class GivesTokens:
        def __init__(self, network):
            self.network, self.num_frames = network, network.num_frames

        def __call__(self, feats, frames):
            return self.network(feats, frames, batch.tokens)

    learner.model.forward = read_tokens
    monkeypatch.setattr(learner.task, "losses", lambda network, *rest: losses(GivesTokens(network), *rest))
    assert learner.gradient(batch, 3).loss > 0
    assert seen == [(0, batch.tokens)]
    assert learner.flat.grads.any()


def test_attention_heads_are_padded_to_multiples_of_eight_without_effect(monkeypatch):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 9, 36, requires_grad=True).unbind(0)
    mask = (torch.arange(9) < torch.tensor([9, 5]).unsqueeze(1))[:, None, None, :]
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    widths, real = [], torch.nn.functional.scaled_dot_product_attention

    def spy(q, k, v, **fields):
        widths.append(q.shape[-1])
        return real(q, k, v, **fields)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", spy)
    got = attention.attend(q, k, v, mask, multiple=8)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(attention.attend(q, k, v, mask), wanted)
    assert widths == [40, 36]


@pytest.mark.gpu
def test_heads_of_any_width_use_a_fused_kernel_on_a_gpu():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = torch.randn(3, 2, 4, 64, 36, device="cuda", dtype=torch.bfloat16).unbind(0)
    mask = torch.ones(2, 1, 1, 64, dtype=torch.bool, device="cuda")
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
        assert attention.attend(q, k, v, mask).shape == q.shape
