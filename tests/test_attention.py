"""Attention over packed rows against each sequence by itself."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightrl.attention import NAME, packed_attention, packed_rows, takes_packed_rows
from lightrl.layout import SequenceLayout
from tests.helpers.tiny import tiny_model

LENGTHS = [3, 1, 40, 7, 17, 3, 25]
LAYER = torch.nn.Identity()


def qkv(heads: int = 4, key_heads: int = 2, total: int = sum(LENGTHS)) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, h, total, 8, generator=g, dtype=torch.float64).requires_grad_()
        for h in (heads, key_heads, key_heads)
    ]


def one_by_one(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Softmax attention written out, sequence by sequence, token by token."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    rows, start = [], 0
    for length in LENGTHS:
        for i in range(length):
            first = start if window is None else max(start, start + i - window + 1)
            seen = slice(first, start + i + 1)
            scores = (k[0, :, seen] * q[0, :, start + i, None]).sum(-1) * scale
            rows.append((scores.softmax(-1)[..., None] * v[0, :, seen]).sum(1))
        start += length
    return torch.stack(rows)[None]


@pytest.mark.parametrize("window", [None, 4, 100])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_packed_equals_each_sequence_by_itself(window: int | None, scale: float | None) -> None:
    inputs = qkv()
    found, nothing = packed_attention(
        LAYER, *inputs, None, layout=SequenceLayout(LENGTHS), scaling=scale, sliding_window=window
    )
    right = one_by_one(*inputs, scale=8**-0.5 if scale is None else scale, window=window)
    assert nothing is None
    torch.testing.assert_close(found, right)
    weight = torch.randn(right.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad((found * weight).sum(), inputs),
        torch.autograd.grad((right * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_another_sequence_reaches_nothing() -> None:
    q, k, v = (x.detach() for x in qkv())
    layout = SequenceLayout(LENGTHS)
    before = packed_attention(LAYER, q, k, v, None, layout=layout)[0]
    k[:, :, 4:44] += 5.0  # the third sequence
    after = packed_attention(LAYER, q, k, v, None, layout=layout)[0]
    changed = (before != after).any(-1).any(-1)[0]
    assert changed[5:44].all()
    assert not changed[:4].any()
    assert not changed[44:].any()


def test_blocks_hold_every_token_once_with_little_padding() -> None:
    layout = SequenceLayout(LENGTHS)
    blocks, inverse = layout.blocks()
    tokens = torch.cat([block.index[block.real] for block in blocks])
    assert tokens[inverse].tolist() == list(range(sum(LENGTHS)))
    assert layout.cu_seqlens.tolist() == [0, 3, 4, 44, 51, 68, 71, 96]
    long = [block.real for block in blocks if block.real.shape[1] > 16]
    assert all(real.float().mean() > 1 / 1.3 - 0.01 for real in long)


@pytest.mark.parametrize("extra", [{"softcap": 30.0}, {"s_aux": torch.zeros(4)}, {"position_bias": torch.zeros(4)}])
def test_what_the_kernels_cannot_do_is_refused(extra: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="Identity.*packed=False"):
        packed_attention(LAYER, *qkv(), None, layout=SequenceLayout(LENGTHS), **extra)  # type: ignore[arg-type]


def test_a_mask_of_the_layers_own_is_refused() -> None:
    with pytest.raises(ValueError, match="Identity.*packed=False"):
        packed_attention(LAYER, *qkv(), torch.zeros(1, 1, 96, 96), layout=SequenceLayout(LENGTHS))


def test_eager_attention_becomes_sdpa_or_is_refused() -> None:
    model = tiny_model(layers=1)
    model.config._attn_implementation = "eager"
    with packed_rows(model):
        assert model.config._attn_implementation == NAME
    assert model.config._attn_implementation == "sdpa"
    model.config._attn_implementation = "eager"
    model._supports_sdpa = False
    assert not takes_packed_rows(model)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has eager attention only.*packed=False"), packed_rows(model):
        pass


def test_packed_rows_leave_the_model_as_it_was_also_after_an_error() -> None:
    model = tiny_model(layers=1)
    before = model.config._attn_implementation
    with packed_rows(model):
        assert model.config._attn_implementation == NAME
    assert model.config._attn_implementation == before
    with pytest.raises(KeyError), packed_rows(model):
        raise KeyError
    assert model.config._attn_implementation == before


def test_models_that_mix_tokens_other_than_by_attention_are_not_packed() -> None:
    model = tiny_model(layers=1)
    assert takes_packed_rows(model)
    model.model.layers[0].mixer = torch.nn.Conv1d(4, 4, 2)
    assert not takes_packed_rows(model)
    model = tiny_model(layers=1)
    model.config.layer_types = ["linear_attention"]
    assert not takes_packed_rows(model)


def test_attention_is_torchs_own_where_there_is_one_sequence() -> None:
    q, k, v = (x.detach() for x in qkv(total=12))
    found = packed_attention(LAYER, q, k, v, None, layout=SequenceLayout([12]))[0]
    right = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(found, right.transpose(1, 2))
