"""Logprobs and entropy: by hand, against float64, and the public cases of their area."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightrl.fused_logprobs import FusedLogprobs
from lightrl.logprobs import chunked_token_logprobs, entropy, get_logprobs, token_logprobs


def exact(logits, targets, temperature=1.0):
    """Logprobs and entropy in float64."""
    scores = torch.log_softmax(logits.double() / temperature, -1)
    return scores.gather(-1, targets[..., None])[..., 0], -(scores.exp() * scores).sum(-1)


def problem(n=7, d=5, v=11, dtype=torch.float32, seed=0):
    random = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (torch.randn(s, generator=random).to(dtype) for s in ((n, d), (v, d), (v,)))
    return hidden, weight, bias, torch.randint(v, (n,), generator=random)


def test_entropy_by_hand():
    # p = 1/4, 3/4: (ln 4) / 4 + 3 / 4 ln(4 / 3) = 0.56234; a token that cannot be sampled adds nothing.
    logits = torch.tensor([0.0, math.log(3), -math.inf], requires_grad=True)
    value = entropy(logits)
    assert value.item() == pytest.approx(0.56234, abs=1e-5)
    value.backward()
    assert logits.grad.isfinite().all()


def test_b09_temperature_is_inside():
    # p = 1/10, 9/10 at T = 0.5; ln 0.75 at T = 1
    logits, token = torch.tensor([[0.0, math.log(3)]]), torch.tensor([1])
    assert token_logprobs(logits, token, temperature=0.5).item() == pytest.approx(math.log(0.9), abs=1e-6)
    assert token_logprobs(logits, token).item() == pytest.approx(math.log(0.75), abs=1e-6)
    got, _ = chunked_token_logprobs(torch.eye(1), logits.T, token, temperature=0.5)
    assert got.item() == pytest.approx(math.log(0.9), abs=1e-6)
    assert entropy(logits, 0.5).item() == pytest.approx(0.32508, abs=1e-5)  # -0.1 ln 0.1 - 0.9 ln 0.9


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_b09_temperature_zero_is_refused(temperature):
    hidden, weight, _, targets = problem()
    for call in (
        lambda: token_logprobs(hidden @ weight.T, targets, temperature),
        lambda: entropy(hidden @ weight.T, temperature),
        lambda: chunked_token_logprobs(hidden, weight, targets, temperature=temperature),
    ):
        with pytest.raises(ValueError, match=r"temperature=.* must be > 0"):
            call()


@pytest.mark.parametrize("batched", [False, True])
def test_b11_get_logprobs_is_of_token_i_given_those_before_it(batched):
    # The "model": logits after a prefix depend on its length and its last token.
    table = torch.randn(6, 64, 64, generator=torch.Generator().manual_seed(1))
    tokens = torch.tensor([5, 9, 17, 23, 31, 7])
    logits = table[torch.arange(6), tokens]
    by_hand = [torch.log_softmax(table[i - 1, tokens[i - 1]], 0)[tokens[i]] for i in range(1, 6)]
    got = get_logprobs(logits[None] if batched else logits, tokens[None] if batched else tokens)
    torch.testing.assert_close(got, torch.stack(by_hand))
    # The last 3 are those of a completion of 3 tokens, the first of them predicted from the last prompt token.
    torch.testing.assert_close(got[-3:], torch.stack(by_hand)[2:])


@pytest.mark.parametrize("shapes", [((2, 3, 8), (2, 3)), ((4, 8), (3,)), ((8,), (1,))])
def test_get_logprobs_takes_one_sequence(shapes):
    with pytest.raises(ValueError, match="takes one sequence"):
        get_logprobs(torch.zeros(shapes[0]), torch.zeros(shapes[1], dtype=torch.int64))


def test_b13_half_precision_logits_are_upcast():
    logits = (3 * torch.randn(4, 32000, generator=torch.Generator().manual_seed(0))).bfloat16()
    targets = torch.tensor([0, 1, 500, 31999])
    want, want_entropy = exact(logits, targets)
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            got, got_entropy = token_logprobs(logits, targets), entropy(logits)
        assert got.dtype == got_entropy.dtype == torch.float32
        assert (got - want).abs().max() < 1e-5
        assert (got_entropy - want_entropy).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b13_chunked_is_float32_under_autocast(dtype):
    hidden, weight, _, targets = problem(dtype=dtype)
    hidden.requires_grad_()
    plain, _ = chunked_token_logprobs(hidden, weight, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, got_entropy = chunked_token_logprobs(hidden, weight, targets)
        got.sum().backward()
    assert got.dtype == got_entropy.dtype == torch.float32
    assert torch.equal(got, plain)
    # The rest is exact, given the head's own product.
    assert (got - exact(hidden.detach() @ weight.T, targets)[0]).abs().max() < 1e-5
    assert hidden.grad.dtype == dtype


def run(hidden, weight, bias, targets, upstream, *, fused=False, temperature, chunk_size):
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    if fused:  # what runs on GPUs, though not compiled
        logprobs, entropies = FusedLogprobs.apply(*leaves, targets, temperature, chunk_size, True)
    else:
        options = {"temperature": temperature, "chunk_size": chunk_size, "entropy_grad": True}
        logprobs, entropies = chunked_token_logprobs(leaves[0], leaves[1], targets, bias=leaves[2], **options)
    (logprobs @ upstream[0] + entropies @ upstream[1]).backward()
    return logprobs, entropies, [t.grad for t in leaves]


@pytest.mark.parametrize("fused", [False, True])
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 12), st.integers(1, 150), st.sampled_from([0.6, 1.0, 1.7]), st.integers(0, 9))
@example(4, 12, 1, 0.6, 0)  # an entropy of 1e-5
def test_chunked_equals_float64_whatever_the_chunk(fused, n, v, chunk_size, temperature, seed):
    hidden, weight, bias, targets = problem(n=n, v=v, seed=seed)
    upstream = torch.randn((2, n), generator=torch.Generator().manual_seed(seed))
    logprobs, entropies, grads = run(
        hidden, weight, bias, targets, upstream, fused=fused, temperature=temperature, chunk_size=chunk_size
    )
    leaves = [t.double().requires_grad_() for t in (hidden, weight, bias)]
    want, want_entropy = exact(leaves[0] @ leaves[1].T + leaves[2], targets, temperature)
    (want @ upstream[0].double() + want_entropy @ upstream[1].double()).backward()
    torch.testing.assert_close(logprobs.double(), want, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropies.double(), want_entropy, rtol=0, atol=1e-5)
    for got, leaf in zip(grads, leaves, strict=True):
        torch.testing.assert_close(got.double(), leaf.grad, rtol=1e-4, atol=2e-5)


def test_fused_without_gradients_that_nobody_asked_for_and_without_tokens():
    hidden, weight, _, targets = problem()
    hidden.requires_grad_()
    logprobs, entropies = FusedLogprobs.apply(hidden, weight, None, targets, 1.0, 20, False)
    assert not entropies.requires_grad
    (grad,) = torch.autograd.grad(logprobs.sum(), hidden)
    want = torch.autograd.grad(token_logprobs(hidden @ weight.T, targets).sum(), hidden)[0]
    torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-5)
    weight.requires_grad_()
    FusedLogprobs.apply(hidden[:0], weight, None, targets[:0], 1.0, 20, False)[0].sum().backward()
    assert weight.grad.abs().sum() == 0.0


def test_chunked_passes_gradcheck_with_a_frozen_head():
    hidden, weight, _, targets = problem()
    hidden.requires_grad_()
    logprobs, entropies = chunked_token_logprobs(hidden, weight, targets, chunk_size=20)
    assert not entropies.requires_grad
    (grad,) = torch.autograd.grad(logprobs.sum(), hidden, retain_graph=True)
    (again,) = torch.autograd.grad(logprobs.sum(), hidden)
    assert torch.equal(grad, again)
    want = torch.autograd.grad(token_logprobs(hidden @ weight.T, targets).sum(), hidden)[0]
    torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-5)


def test_chunked_without_entropy_and_without_tokens():
    hidden, weight, _, targets = problem()
    logprobs, entropies = chunked_token_logprobs(hidden, weight, targets, with_entropy=False)
    assert entropies.tolist() == [0.0] * 7
    assert torch.equal(logprobs, chunked_token_logprobs(hidden, weight, targets)[0])
    hidden, weight = hidden[:0].requires_grad_(), weight.requires_grad_()
    logprobs, _ = chunked_token_logprobs(hidden, weight, targets[:0])
    logprobs.sum().backward()
    assert logprobs.shape == (0,)
    assert weight.grad.abs().sum() == 0.0


def test_bad_input_is_an_error():
    hidden, weight, _, targets = problem()
    with pytest.raises(ValueError, match="do not match targets"):
        token_logprobs(hidden @ weight.T, targets[:2])
    with pytest.raises(ValueError, match=r"expected hidden \[N, D\]"):
        chunked_token_logprobs(hidden, weight.T, targets)
    with pytest.raises(ValueError, match="chunk_size=0 must be at least 1"):
        chunked_token_logprobs(hidden, weight, targets, chunk_size=0)
