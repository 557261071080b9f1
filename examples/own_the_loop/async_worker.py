"""The half that trains: ``python -m examples.own_the_loop.async_worker``, beside a running server."""

import torch

from examples.own_the_loop.async_server import ADDRESS
from examples.own_the_loop.data import reward
from examples.tiny.task import write_task
from lightrl import TrainWorker, clipped_policy_loss, get_logprobs


def main(steps: int = 20, address: str = ADDRESS, out: str = "runs/own_the_loop") -> list[float]:
    worker = TrainWorker(write_task(out).model_dir, queue_address=address, lr=5e-4, reward_fn=reward)
    rewards: list[float] = []
    for batches in worker.pull_rollouts():
        for batch in batches:
            batch.compute_advantages()
        rollouts = [r for batch in batches for r in batch]
        rewards.append(sum(r.reward for r in rollouts) / len(rollouts))
        print(f"step {len(rewards) - 1}: reward {rewards[-1]:.3f}", flush=True)
        for _ in range(4):
            for part in torch.randperm(len(rollouts)).split(8):
                worker.optimizer.zero_grad()
                for rollout in (rollouts[i] for i in part):
                    logprobs = get_logprobs(worker.model(rollout.token_ids).logits, rollout.token_ids)
                    (clipped_policy_loss(logprobs, rollout.old_logprobs, rollout.advantage) / len(part)).backward()
                worker.optimizer.step()
        if len(rewards) == steps:
            break
        worker.sync_weights()
    worker.close()
    return rewards


if __name__ == "__main__":
    main()
