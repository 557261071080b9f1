"""Hugging Face ``generate`` on the policy itself: no second copy, no push, no vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightrl.distributed import all_objects, rank, world_size
from lightrl.engines.session import RoundSession
from lightrl.rng import derive_seed, forked_rng
from lightrl.types import Completion, Sampling
from lightrl.weights.source import Weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_IDLE_PROMPT = [0]


class HFEngine:
    """Generates with the policy as it stands.

    Args:
        policy: the trained model, perhaps sharded.
        device: where it is.
    """

    def __init__(self, policy: PreTrainedModel, device: torch.device) -> None:
        self.policy, self.device = policy, device

    def generate(self, prompts: list[list[int]], sampling: Sampling, policy_version: int) -> list[list[Completion]]:
        """See :class:`~lightrl.engines.base.Engine`."""
        n = sampling.num_completions
        rows = [p for p in prompts for _ in range(n)]
        if sampling.prompt_seeds:
            jobs = [
                ([p], derive_seed(s, i)) for p, s in zip(prompts, sampling.prompt_seeds, strict=True) for i in range(n)
            ]
        else:
            jobs = [(rows, derive_seed(sampling.seed, rank()))] if rows else []
        calls = max(all_objects(len(jobs)))  # a sharded policy wants the same forwards on every rank
        done: list[Completion] = []
        for i in range(calls):
            batch, seed = jobs[i] if i < len(jobs) else ([_IDLE_PROMPT], 0)
            completions = self._sample(batch, sampling, seed, policy_version)
            done += completions if i < len(jobs) else []
        return [done[i : i + n] for i in range(0, len(done), n)]

    @contextmanager
    def session(self, sampling: Sampling, policy_version: int) -> Iterator[RoundSession]:
        """See :class:`~lightrl.engines.base.Engine`: Transformers takes no request while others run."""
        yield RoundSession(lambda prompts, s: self.generate(prompts, s, policy_version), sampling)

    def _sample(self, rows: list[list[int]], sampling: Sampling, seed: int, version: int) -> list[Completion]:
        from transformers import GenerationConfig

        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(r)) + r for r in rows], device=self.device)
        mask = torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for r in rows], device=self.device)
        greedy = sampling.temperature == 0
        chosen = (
            {} if greedy else {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        )
        config = GenerationConfig(
            do_sample=not greedy,
            max_new_tokens=sampling.max_completion_tokens,
            eos_token_id=list(sampling.stop_token_ids) or None,
            pad_token_id=0,
            min_p=sampling.min_p or None,
            return_dict_in_generate=True,
            output_scores=True,
            **chosen,
        )
        policy: Any = self.policy
        kept, policy.generation_config = policy.generation_config, config  # or its defaults would be mixed in
        training = policy.training
        policy.eval()  # in training mode gradient checkpointing drops the cache that generation goes by
        try:
            with torch.no_grad(), forked_rng(seed):
                out = policy.generate(
                    input_ids=ids, attention_mask=mask, generation_config=config, synced_gpus=world_size() > 1
                )
        finally:
            policy.generation_config = kept
            policy.train(training)
        scores = torch.stack(out.scores, dim=1).float().log_softmax(-1)
        sampled = out.sequences[:, longest:]
        logprobs = scores.gather(-1, sampled[..., None])[..., 0].cpu()
        stops = set(sampling.stop_token_ids)
        return [_completion(i, lp, stops, version) for i, lp in zip(sampled.tolist(), logprobs, strict=True)]

    @torch.no_grad()
    def score(self, sequences: list[list[int]]) -> list[Tensor]:
        """See :class:`~lightrl.engines.base.Engine`."""
        scored = []
        for ids in sequences:
            logits = self.policy(torch.tensor([ids], device=self.device), use_cache=False).logits[0, :-1]
            targets = torch.tensor(ids[1:], device=self.device)
            scored.append(logits.float().log_softmax(-1).gather(-1, targets[:, None])[:, 0].cpu())
        return scored

    def load_weights(self, weights: Weights) -> None:
        """Nothing to load: the engine is the policy."""

    def sleep(self) -> bool:
        """Nothing to give back: the engine has no memory of its own."""
        return False

    def wake_weights(self) -> None:
        """See :meth:`sleep`."""

    def wake_cache(self) -> None:
        """See :meth:`sleep`."""

    def close(self) -> None:
        """Nothing to release."""


def _completion(ids: list[int], logprobs: Tensor, stops: set[int], version: int) -> Completion:
    end = next((i + 1 for i, token in enumerate(ids) if token in stops), None)
    size = len(ids) if end is None else end
    versions = torch.full((size,), version, dtype=torch.int64)
    return Completion(ids[:size], logprobs[:size].clone(), versions, truncated=end is None)
