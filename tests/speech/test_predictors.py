"""The contract of every predictor: one suite for each kind of `PREDICTORS`."""

import pytest
import torch

from speech.models import PREDICTORS

VOCAB = 9


@pytest.fixture(params=sorted(PREDICTORS))
def kind(request):
    return request.param


def build(kind, **changes):
    torch.manual_seed(0)
    cls = PREDICTORS[kind]
    return cls(**{**cls.tiny, "dropout": 0.0, **changes}).build(VOCAB).eval()


def texts(count=4, length=7):
    tokens = torch.randint(1, VOCAB, (count, length), generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.pad(tokens, (1, 0))


def test_steps_give_what_whole_texts_give(kind):
    predictor, tokens = build(kind), texts()
    expected, memory = predictor(tokens), predictor.nothing(len(tokens))
    assert expected.shape == (*tokens.shape, predictor.width)
    for place in range(tokens.shape[1]):
        vectors, memory = predictor.step(tokens[:, place], memory)
        torch.testing.assert_close(vectors, expected[:, place], atol=1e-6, rtol=1e-5)


def test_token_does_not_depend_on_later_ones_but_its_place_counts(kind):
    predictor, tokens = build(kind), texts()
    expected, changed = predictor(tokens), tokens.clone()
    changed[:, 4:] = changed[:, 4:] % (VOCAB - 1) + 1
    got = predictor(changed)
    torch.testing.assert_close(got[:, :4], expected[:, :4])
    assert not torch.allclose(got[:, 4], expected[:, 4])
    assert not torch.allclose(predictor(tokens[:, [0, 2, 1]])[:, 2], expected[:, 2], atol=1e-4)


def test_memory_of_some_hypotheses_goes_on_from_theirs(kind):
    predictor, tokens = build(kind), texts()
    _, memory = predictor.step(tokens[:, 0], predictor.nothing(4))
    _, memory = predictor.step(tokens[:, 1], memory)
    rows = torch.tensor([2, 0, 2])
    vectors, _ = predictor.step(torch.tensor([3, 4, 5]), tuple(tensor[rows] for tensor in memory))
    for row, token, vector in zip(rows.tolist(), (3, 4, 5), vectors, strict=True):
        text = torch.tensor([[*tokens[row, :2].tolist(), token]])
        torch.testing.assert_close(vector, predictor(text)[0, -1], atol=1e-6, rtol=1e-5)


def test_gradients_reach_all_weights(kind):
    predictor = build(kind).train()
    predictor(texts()).square().sum().backward()
    for name, parameter in predictor.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


def test_dropout_is_active_only_in_training(kind):
    predictor = build(kind, dropout=0.3)
    assert torch.equal(predictor(texts()), predictor(texts()))
    predictor.train()
    assert not torch.equal(predictor(texts()), predictor(texts()))


def test_sizes_are_described_without_memory(kind):
    with torch.device("meta"):
        described = build(kind).state_dict()
    expected = {name: tensor.shape for name, tensor in build(kind).state_dict().items()}
    assert {name: tensor.shape for name, tensor in described.items()} == expected


def test_stateless_predictor_knows_its_context_only():
    predictor = build("stateless", context=3)
    tokens = texts(1)
    changed = tokens.clone()
    changed[0, 3] = changed[0, 3] % (VOCAB - 1) + 1
    same = (predictor(tokens) == predictor(changed)).all(dim=2)[0].tolist()
    assert same == [True, True, True, False, False, False, True, True]
