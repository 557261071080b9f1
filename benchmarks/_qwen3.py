"""Qwen3's shapes with random weights: what speed on a GPU is measured with."""

from typing import Any

import torch

from lightrl.sharding import shard

VOCAB = 151_936
SHAPES = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}


def qwen3(device: torch.device, dtype: torch.dtype = torch.float32, shape: str = "0.6B") -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB,
        **SHAPES[shape],
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with device:
        return Qwen3ForCausalLM(config).to(dtype)


@torch.no_grad()
def changed(policy: torch.nn.Module, seed: int) -> None:
    """In place, by noise of ``seed``, from 0 up; the noise of the seed before is taken back."""
    for factor, number in ((-0.02, seed - 1), (0.02, seed)):
        generator = torch.Generator(next(policy.parameters()).device).manual_seed(max(number, 0))
        for p in policy.parameters() if number >= 0 else ():
            local = shard(p)
            noise = torch.randn(local.shape, generator=generator, device=local.device, dtype=local.dtype)
            local.add_(noise, alpha=factor)


IDS = [[11 + 7 * i, *range(100, 220)] for i in range(4)]


def gap(found: list[torch.Tensor], policy: Any) -> float:
    """Mean |difference| between an engine's logprobs of ``IDS`` and the policy's in bfloat16."""
    ids = torch.tensor(IDS, device="cuda")
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        logits = policy(ids, use_cache=False).logits[:, :-1].float()
    right = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].cpu()
    return float((torch.stack(found) - right).abs().mean())


def word_tokenizer() -> Any:
    """One word for each token id, so that prompts of a given length can be written as text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1", unk_token="t2")
