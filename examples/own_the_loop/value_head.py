"""A head of one's own on hidden states, and a loss of one's own: ``python -m examples.own_the_loop.value_head``.

The head learns to say the reward beforehand, from the last hidden state of the prompt; that is the baseline.
"""

import random

import torch
from torch import nn
from vllm import SamplingParams

from examples.own_the_loop.data import chat_prompts, reward
from examples.tiny.task import write_task
from lightrl import WeightManager, get_logprobs, parse_vllm_outputs


def main(steps: int = 20, out: str = "runs/own_the_loop") -> list[float]:
    task, shuffle = write_task(out), random.Random(0)
    manager = WeightManager(task.model_dir, lr=2e-4)
    head = nn.Linear(manager.model.config.hidden_size, 1)
    manager.optimizer.add_param_group({"params": head.parameters(), "lr": 2e-4})
    data, errors = chat_prompts(task), []
    for step in range(steps):
        prompts, truths = zip(*shuffle.sample(data, 16), strict=True)
        with manager.generation_mode(max_model_len=32) as llm:
            outputs = llm.generate(list(prompts), SamplingParams(n=4, logprobs=0, max_tokens=4), use_tqdm=False)
        batches = parse_vllm_outputs(outputs, group_size=4, reward_fn=reward, ground_truths=truths)
        model, optimizer = manager.as_trainable()
        optimizer.zero_grad()
        error = 0.0
        for rollout in (r for batch in batches for r in batch):
            output = model(rollout.token_ids, output_hidden_states=True)
            value = head(output.hidden_states[-1][0, len(rollout.prompt_ids) - 1]).squeeze()
            logprobs = get_logprobs(output.logits, rollout.token_ids)[-len(rollout.completion_ids) :]
            surprise = rollout.reward - value
            loss = surprise.square() - surprise.detach() * logprobs.sum()
            (loss / (16 * 4)).backward()
            error += surprise.item() ** 2 / (16 * 4)
        optimizer.step()
        errors.append(error)
        print(f"step {step}: squared error of the value {error:.3f}", flush=True)
    torch.save({"manager": manager.state_dict(), "head": head.state_dict()}, f"{out}/value_head.pt")
    return errors


if __name__ == "__main__":
    main()
