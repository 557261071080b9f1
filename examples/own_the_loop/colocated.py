"""GRPO as a plain PyTorch loop: ``python -m examples.own_the_loop.colocated``."""

import random

import torch
from vllm import SamplingParams

from examples.own_the_loop.data import chat_prompts, reward
from examples.tiny.task import write_task
from lightrl import WeightManager, clipped_policy_loss, get_logprobs, parse_vllm_outputs


def main(steps: int = 20, out: str = "runs/own_the_loop") -> list[float]:
    task, shuffle = write_task(out), random.Random(0)
    manager = WeightManager(task.model_dir, lr=5e-4)
    data, rewards = chat_prompts(task), []
    for step in range(steps):
        prompts, truths = zip(*shuffle.sample(data, 8), strict=True)
        llm = manager.as_vllm(max_model_len=32)
        sampling = SamplingParams(n=8, temperature=1.0, logprobs=1, max_tokens=4)
        outputs = llm.generate(list(prompts), sampling, use_tqdm=False)
        batches = parse_vllm_outputs(outputs, group_size=8, reward_fn=reward, ground_truths=truths)
        for batch in batches:
            batch.compute_advantages()
        rollouts = [r for batch in batches for r in batch]
        rewards.append(sum(r.reward for r in rollouts) / len(rollouts))
        print(f"step {step}: reward {rewards[-1]:.3f}", flush=True)
        model, optimizer = manager.as_trainable()
        for _ in range(4):
            for part in torch.randperm(len(rollouts)).split(8):
                optimizer.zero_grad()
                for rollout in (rollouts[i] for i in part):
                    logprobs = get_logprobs(model(rollout.token_ids).logits, rollout.token_ids)
                    (clipped_policy_loss(logprobs, rollout.old_logprobs, rollout.advantage) / len(part)).backward()
                optimizer.step()
    return rewards


if __name__ == "__main__":
    main()
