"""Fingerprints of weights on modules that look like vLLM's, sharded over two ranks."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightrl.engines.fingerprint import Fingerprint

HIDDEN, HEAD, HEADS, VOCAB = 8, 4, 2, 10


class Linear(nn.Module):
    """A linear layer whose weight is repacked: only the layer itself knows how to apply it."""

    def __init__(self, rows: int, width: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, width))
        self.packed = torch.zeros(width, rows)
        self.quant_method = self
        if bias:
            self.bias = nn.Parameter(torch.zeros(rows))

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:  # type: ignore[override]
        return x @ self.packed

    def hold(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.packed = weight.T.clone()
        if bias is not None:
            self.bias.data = bias.clone()


class ColumnParallelLinear(Linear):
    def __init__(self, sizes: list[int], tp_size: int, bias: bool = False) -> None:
        super().__init__(sum(sizes), HIDDEN, bias)
        self.output_partition_sizes, self.tp_size = sizes, tp_size


class QKVParallelLinear(ColumnParallelLinear):
    pass


class RowParallelLinear(Linear):
    def __init__(self, width: int, bias: bool = False) -> None:
        super().__init__(HIDDEN, width, bias)
        self.input_size_per_partition = width


class VocabParallelEmbedding(nn.Module):
    def __init__(self, start: int, end: int, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, HIDDEN))
        self.embedding_dim = HIDDEN
        self.shard_indices = SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=end)


class ParallelLMHead(VocabParallelEmbedding):
    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.packed = self.weight.detach().T.clone()
        self.quant_method = self

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:  # type: ignore[override]
        return x @ self.packed


class Engine(nn.Module):
    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def wrong(engine: nn.Module, tp_rank: int, sent: dict[str, Tensor], take: Callable[[], Any]) -> list[str]:
    """What a fingerprint of ``sent`` says after the engine took over what ``take`` gives it."""
    fingerprint = Fingerprint(engine, tp_rank)
    passed_on = list(fingerprint.watch(iter(sent.items())))
    assert [name for name, _ in passed_on] == list(sent)
    assert all(tensor is sent[name] for name, tensor in passed_on)
    with torch.no_grad():
        take()
        return fingerprint.mismatches()


# -- row parallel: columns are divided --------------------------------------------------------------------------------


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_row_parallel_holds_its_columns(tp_rank: int) -> None:
    layer, weight, bias = RowParallelLinear(HIDDEN // 2, bias=True), random(HIDDEN, HIDDEN), random(HIDDEN)
    halves = weight.chunk(2, dim=1)
    sent = {"down.weight": weight, "down.bias": bias}
    engine = Engine(down=layer)
    assert wrong(engine, tp_rank, sent, lambda: layer.hold(halves[tp_rank], bias)) == []
    assert wrong(engine, tp_rank, sent, lambda: layer.hold(halves[1 - tp_rank], bias)) == ["down.weight"]
    assert wrong(engine, tp_rank, sent, lambda: layer.hold(halves[tp_rank], bias + 1e-7)) == ["down.bias"]


# -- column parallel: rows are divided, parts are fused ----------------------------------------------------------------


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_column_parallel_holds_its_rows_of_each_fused_part(tp_rank: int) -> None:
    layer = ColumnParallelLinear([6, 6], tp_size=2)
    gate, up = random(12, HIDDEN, seed=1), random(12, HIDDEN, seed=2)
    sent = {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}
    engine = Engine(mlp=Engine(gate_up_proj=layer))
    own_gate, own_up = gate.chunk(2)[tp_rank], up.chunk(2)[tp_rank]

    def hold(*parts: Tensor) -> Callable[[], None]:
        return lambda: layer.hold(torch.cat(parts))

    assert wrong(engine, tp_rank, sent, hold(own_gate, own_up)) == []
    assert wrong(engine, tp_rank, sent, hold(own_up, own_gate)) == list(sent)
    assert wrong(engine, tp_rank, sent, hold(own_gate, up.chunk(2)[1 - tp_rank])) == ["mlp.up_proj.weight"]
    assert wrong(engine, tp_rank, sent, hold(own_gate + 1e-3, own_up)) == ["mlp.gate_proj.weight"]


def test_an_unfused_column_parallel_layer_is_one_part() -> None:
    layer, weight = ColumnParallelLinear([6], tp_size=2), random(12, HIDDEN)
    sent = {"fc.weight": weight}
    assert wrong(Engine(fc=layer), 1, sent, lambda: layer.hold(weight[6:])) == []
    assert wrong(Engine(fc=layer), 1, sent, lambda: layer.hold(weight[:6])) == ["fc.weight"]


def qkv(kv_heads: int) -> dict[str, Tensor]:
    rows = {"q_proj": HEADS * 2 * HEAD, "k_proj": kv_heads * HEAD, "v_proj": kv_heads * HEAD}
    weights = {f"attn.{name}.weight": random(n, HIDDEN, seed=n + i) for i, (name, n) in enumerate(rows.items())}
    return weights | {f"attn.{name}.bias": random(n, seed=90 + i) for i, (name, n) in enumerate(rows.items())}


@pytest.mark.parametrize(
    ("tp_size", "kv_heads", "key_head"),
    [(2, 2, [0, 1]), (2, 1, [0, 0]), (4, 2, [0, 0, 1, 1]), (4, 1, [0, 0, 0, 0])],
    ids=["divided", "one head on two ranks", "two heads on four ranks", "one head on four ranks"],
)
def test_key_heads_are_divided_or_replicated(tp_size: int, kv_heads: int, key_head: list[int]) -> None:
    sent = qkv(kv_heads)
    queries = HEADS * 2 * HEAD // tp_size
    for tp_rank in range(tp_size):
        layer = QKVParallelLinear([queries, HEAD, HEAD], tp_size, bias=True)

        def own(name: str, head: int, tp_rank: int = tp_rank) -> Tensor:
            tensor = sent[name]
            i, size = (tp_rank, queries) if "q_proj" in name else (head, HEAD)
            return tensor[i * size : (i + 1) * size]

        def hold(head: int, layer: QKVParallelLinear = layer, own: Any = own) -> None:
            names = list(sent)
            layer.hold(torch.cat([own(n, head) for n in names[:3]]), torch.cat([own(n, head) for n in names[3:]]))

        engine, right = Engine(attn=Engine(qkv_proj=layer)), key_head[tp_rank]
        assert wrong(engine, tp_rank, sent, lambda h=right: hold(h)) == []
        if kv_heads > 1:
            other = wrong(engine, tp_rank, sent, lambda h=1 - right: hold(h))
            assert other == [n for n in sent if "q_proj" not in n]


# -- vocabulary shards -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_a_vocabulary_shard_holds_its_rows(tp_rank: int) -> None:
    start, end = [(0, 6), (6, VOCAB)][tp_rank]
    layer, weight = VocabParallelEmbedding(start, end, rows=8), random(VOCAB, HIDDEN)
    sent = {"embed.weight": weight}

    def hold(rows: Tensor) -> None:
        layer.weight[: len(rows)] = rows
        layer.weight[len(rows) :] = float("nan")  # padding of the vocabulary is nobody's business

    assert wrong(Engine(embed=layer), tp_rank, sent, lambda: hold(weight[start:end])) == []
    assert wrong(Engine(embed=layer), tp_rank, sent, lambda: hold(weight[start:end].flip(0))) == ["embed.weight"]


def tied_engine(start: int = 0) -> tuple[Engine, VocabParallelEmbedding, ParallelLMHead]:
    embed, head = VocabParallelEmbedding(start, VOCAB, VOCAB), ParallelLMHead(start, VOCAB, VOCAB)
    head.weight = embed.weight
    return Engine(embed=embed, lm_head=head), embed, head


def test_an_empty_vocabulary_shard_has_nothing_to_compare() -> None:
    engine, _, _ = tied_engine(start=VOCAB)
    assert wrong(engine, 1, {"embed.weight": random(VOCAB, HIDDEN)}, lambda: None) == []


def test_a_tied_head_that_keeps_an_old_copy_is_named() -> None:
    weight = random(VOCAB, HIDDEN)
    engine, embed, head = tied_engine()
    stale = wrong(engine, 0, {"embed.weight": weight}, lambda: embed.weight.copy_(weight))
    assert stale == ["lm_head.weight (tied to embed.weight)"]

    def take() -> None:
        embed.weight.copy_(weight)
        head.packed = weight.T.clone()

    assert wrong(engine, 0, {"embed.weight": weight}, take) == []


def test_a_head_of_its_own_is_no_tied_head() -> None:
    weight, head_weight = random(VOCAB, HIDDEN), random(VOCAB, HIDDEN, seed=1)
    embed, head = VocabParallelEmbedding(0, VOCAB, VOCAB), ParallelLMHead(0, VOCAB, VOCAB)

    def take(packed: Tensor) -> None:
        embed.weight.copy_(weight)
        head.packed = packed.T.clone()

    engine, sent = Engine(embed=embed, lm_head=head), {"embed.weight": weight, "lm_head.weight": head_weight}
    assert wrong(engine, 0, sent, lambda: take(head_weight)) == []
    assert wrong(engine, 0, sent, lambda: take(weight)) == ["lm_head.weight"]


# -- the rest ----------------------------------------------------------------------------------------------------------


def test_a_plain_vector_is_compared_bit_by_bit() -> None:
    norm, weight = nn.LayerNorm(HIDDEN), random(HIDDEN) + 3
    sent = {"norm.weight": weight}
    assert wrong(Engine(norm=norm), 0, sent, lambda: norm.weight.copy_(weight)) == []
    assert wrong(Engine(norm=norm), 0, sent, lambda: norm.weight.copy_(weight * (1 + 1e-6))) == ["norm.weight"]
    assert wrong(Engine(norm=norm), 0, sent, lambda: norm.weight.fill_(float("nan"))) == ["norm.weight"]


def test_a_vector_is_compared_in_the_engines_dtype() -> None:
    norm, weight = nn.LayerNorm(HIDDEN, dtype=torch.bfloat16), random(HIDDEN)
    assert wrong(Engine(norm=norm), 0, {"norm.weight": weight}, lambda: norm.weight.copy_(weight)) == []


def test_a_fingerprint_is_of_what_was_sent_and_not_of_what_the_tensor_became() -> None:
    norm, linear = nn.LayerNorm(HIDDEN), Linear(4, HIDDEN)
    sent = {"norm.weight": random(HIDDEN), "fc.weight": random(4, HIDDEN)}

    def take() -> None:
        for tensor in sent.values():
            tensor.mul_(2)  # an optimizer step in place
        norm.weight.copy_(sent["norm.weight"])
        linear.hold(sent["fc.weight"])

    assert wrong(Engine(norm=norm, fc=linear), 0, sent, take) == ["norm.weight", "fc.weight"]


def test_names_that_the_engine_has_not_are_passed_on_and_left_out() -> None:
    assert wrong(Engine(norm=nn.LayerNorm(HIDDEN)), 0, {"visual.blocks.0.weight": random(2, 2)}, lambda: None) == []


def test_small_rounding_of_a_matrix_is_no_mismatch() -> None:
    linear, weight = Linear(64, HIDDEN), random(64, HIDDEN)
    rounded = weight * (1 + 1e-7 * random(64, HIDDEN, seed=1))
    assert wrong(Engine(fc=linear), 0, {"fc.weight": weight}, lambda: linear.hold(rounded)) == []


def test_a_norm_that_is_not_there_is_a_mismatch_of_nothing_else() -> None:
    first, second = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
    sent = {"a.weight": random(HIDDEN), "b.weight": random(HIDDEN, seed=1)}
    assert wrong(Engine(a=first, b=second), 0, sent, lambda: first.weight.copy_(sent["a.weight"])) == ["b.weight"]
