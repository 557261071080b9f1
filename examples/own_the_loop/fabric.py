"""The loop in Lightning Fabric: ``python -m examples.own_the_loop.fabric``.

Fabric starts the processes, seeds, accumulates, clips and logs; module, optimizer and their sharding are the manager's.
"""

import random

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from vllm import SamplingParams

from examples.own_the_loop.data import chat_prompts, reward
from examples.tiny.task import write_task
from lightrl import WeightManager, clipped_policy_loss, get_logprobs, parse_vllm_outputs


def main(steps: int = 20, out: str = "runs/own_the_loop", accelerator: str = "auto") -> list[float]:
    fabric = Fabric(accelerator=accelerator, devices=1, loggers=CSVLogger(out))
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    task, shuffle = write_task(out), random.Random(0)
    manager = WeightManager(task.model_dir, lr=1e-3, device=fabric.device)
    data, rewards = chat_prompts(task), []
    for step in range(steps):
        prompts, truths = zip(*shuffle.sample(data, 16), strict=True)
        with manager.generation_mode(max_model_len=32) as llm:
            outputs = llm.generate(list(prompts), SamplingParams(n=8, logprobs=1, max_tokens=4), use_tqdm=False)
        batches = parse_vllm_outputs(outputs, group_size=8, reward_fn=reward, ground_truths=truths)
        advantages = torch.cat([batch.compute_advantages(scale=True) for batch in batches])
        rollouts = [r for batch in batches for r in batch]
        with manager.training_mode() as (model, optimizer):
            optimizer.zero_grad()
            for rollout in rollouts:
                logprobs = get_logprobs(model(rollout.token_ids).logits, rollout.token_ids)
                loss = clipped_policy_loss(logprobs, rollout.old_logprobs, rollout.advantage)
                fabric.backward(loss / len(rollouts))
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
        rewards.append(sum(r.reward for r in rollouts) / len(rollouts))
        fabric.log_dict({"reward/mean": rewards[-1], "advantage/max": advantages.max()}, step=step)
        fabric.print(f"step {step}: reward {rewards[-1]:.3f}")
    fabric.logger.finalize("success")
    return rewards


if __name__ == "__main__":
    main()
