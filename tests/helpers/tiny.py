"""A model, a tokenizer and rollouts small enough for any test."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from lightrl.types import Prompt, Rollout, RolloutBatch, RolloutGroup

VOCAB = 32
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Configuration of a model of any family, smaller still."""


def tiny_model(seed: int = 0, *, tied: bool = True, layers: int = 2, kv_heads: int = 1) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=kv_heads,
        head_dim=64,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<unk>", "<eos>", *(f"w{i}" for i in range(3, VOCAB))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>", model_max_length=128
    )


def save_tiny(folder: Path, **model_args: Any) -> Path:
    tiny_model(**model_args).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_prompts(n: int = 8) -> list[dict[str, str]]:
    """Prompts of one to three words, all different."""
    return [{"prompt": " ".join(f"w{3 + (i + j) % 29}" for j in range(1 + i % 3)), "answer": str(i)} for i in range(n)]


def random_rollouts(n: int, seed: int = 0, *, model: Any = None, longest: int = 9, members: int = 1) -> list[Rollout]:
    """Rollouts of ragged lengths with random tokens and advantages; old logprobs far enough off to clip some ratios.

    ``members`` in a row have the same prompt.
    """
    g = torch.Generator().manual_seed(seed)
    rollouts = []
    for i in range(n):
        p, c = (int(x) for x in torch.randint(1, longest, (2,), generator=g))
        prompt = torch.randint(3, VOCAB, (p,), generator=g).tolist()
        if i % members:
            prompt = rollouts[-1].prompt_ids
        completion = torch.randint(2, VOCAB, (c,), generator=g).tolist()
        rollout = Rollout(prompt, completion, torch.zeros(c), reward=float(i % 2), group_id=i // max(2, members))
        rollout.advantage = float(torch.randn((), generator=g))
        if model is not None:
            noise = 0.3 * torch.randn(c, generator=g)
            rollout.rollout_logprobs = by_hand(model, prompt, completion)
            rollout.scored_logprobs = rollout.rollout_logprobs + noise
        rollouts.append(rollout)
    return rollouts


@torch.no_grad()
def by_hand(model: Any, prompt: list[int], completion: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Logprob of each completion token, one plain forward of the whole prefix for each."""
    found = []
    for j, token in enumerate(completion):
        logits = model(torch.tensor([prompt + completion[:j]])).logits[0, -1]
        found.append((logits.double() / temperature).log_softmax(-1)[token])
    return torch.stack(found).float()


def batch_of(rollouts: list[Rollout], temperature: float = 1.0) -> RolloutBatch:
    groups = [[r for r in rollouts if r.group_id == g] for g in sorted({r.group_id for r in rollouts})]
    return RolloutBatch([RolloutGroup(Prompt([1]), g) for g in groups], temperature=temperature)


def row(i: int) -> str:
    """A prompt of two words, another for each i below 261."""
    return f"w{3 + i // 9} w{3 + i % 9}"
