"""PPO: a critic says what each token was worth."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightrl import kl
from lightrl.advantages import gae
from lightrl.critic import HiddenStates, value_head, value_terms, whitened
from lightrl.module import RLModule
from lightrl.packing import MicroBatch, completion_mask
from lightrl.types import Rollout, RolloutBatch


class PPO(RLModule):
    """Proximal policy optimisation with a critic (arXiv:1707.06347; on language models arXiv:2203.02155).

    With values V of the critic before the first update, ``A_t = sum_k (gamma lam)^k delta_{t+k}`` and
    ``delta_t = r_t + gamma V_{t+1} - V_t`` (GAE, arXiv:1506.02438), ``R_t = A_t + V_t``, A then whitened over the
    rollout batch's tokens, ``rho = pi / pi_old``:

    ``L = mean over tokens of -min(rho A, clip(rho, 1 - 0.2, 1 + 0.2) A)
    + value_coef max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2``

    A completion's reward is its last live token's; :meth:`token_rewards` adds rewards of single tokens and, with
    ``kl_in_reward``, each token's KL. RLModule's ``rewards`` and ``estimate`` have no part in it.

    Args:
        model: see :class:`lightrl.RLModule`.
        critic: ``"shared"`` puts the value head on the policy's hidden states; ``"own"`` trains a second model, which
            begins as the policy does (not with LoRA, whose point is to have one).
        critic_lr: peak learning rate of the critic's own parameters; None: ``lr``.
        value_coef: weight of the value loss.
        clip_value: c, or None: values are not clipped.
        gamma: discount.
        lam: 0 trusts the critic, 1 the sampled rewards.
        whiten: divide advantages by their std, and take their mean off.
        kl_in_reward: see :class:`lightrl.RLModule`; here each token answers for its own KL.
        kwargs: RLModule's.

    Raises:
        ValueError: an argument is out of range.
    """

    min_group_size = 1

    def __init__(
        self,
        model: Any,
        critic: Literal["shared", "own"] = "shared",
        critic_lr: float | None = None,
        value_coef: float = 0.5,
        clip_value: float | None = 0.2,
        gamma: float = 1.0,
        lam: float = 0.95,
        whiten: bool = True,
        kl_in_reward: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, kl_in_reward=kl_in_reward, **kwargs)
        if not self.scale_rewards:
            raise ValueError("scale_rewards=False: PPO divides by no group's standard deviation; whiten is its switch")
        if critic not in ("shared", "own"):
            raise ValueError(f"critic={critic!r} must be 'shared' or 'own'")
        if critic == "own" and self.lora is not None:
            raise ValueError("critic='own' with lora: the second model would be trained whole. Use critic='shared'")
        for name, value in {"critic_lr": critic_lr, "value_coef": value_coef, "clip_value": clip_value}.items():
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} must be above 0")
        if not (0 <= gamma <= 1 and 0 <= lam <= 1):
            raise ValueError(f"gamma={gamma} and lam={lam} must be between 0 and 1")
        self.critic, self.critic_lr, self.value_coef, self.clip_value = critic, critic_lr, value_coef, clip_value
        self.gamma, self.lam, self.whiten = gamma, lam, whiten

    def configure_model(self) -> None:
        """Load the policy and its reference, and make the critic."""
        if hasattr(self, "value_head"):
            return
        if self.critic == "own":
            trunk: Any = self.fresh_model().base_model
            self.prepare(trunk)
            self.value_trunk = trunk
        super().configure_model()
        self.value_head = value_head(self.policy)
        self._hidden = HiddenStates(self.policy)

    def companions(self) -> list[nn.Module]:
        """Return the critic's modules."""
        return [self.value_head, self.value_trunk] if self.critic == "own" else [self.value_head]

    def parameter_groups(self) -> list[tuple[Iterable[nn.Parameter], float]]:
        """Return the policy's parameters and the critic's, each with their learning rate."""
        lr = self.lr if self.critic_lr is None else self.critic_lr
        return [*super().parameter_groups(), *((module.parameters(), lr) for module in self.companions())]

    def values(self, micro: MicroBatch) -> Tensor:
        """Return what the critic expects from before each completion token on, float32 [N].

        A shared critic reads the states of the policy's last forward, which has to have been on ``micro``.
        """
        if self.critic == "own":
            trunk: Any = self.value_trunk
            states = self.policy_forward.hidden(trunk, micro)
        else:
            states = self._hidden.take(self.policy_forward.index(self.policy, micro))
        values: Tensor = self.value_head(states)
        return values.squeeze(-1).float()

    def scoring_passes(self, *, reused: bool) -> list[Callable[[MicroBatch], dict[str, Tensor]]]:
        """Return RLModule's passes and the critic's, which shares the policy's forward where it can."""
        passes, remembered = super().scoring_passes(reused=reused), reused and self.recompute_old_logprobs

        def critic(micro: MicroBatch) -> dict[str, Tensor]:
            found = {"scored_logprobs": self(micro)} if remembered or self.critic == "shared" else {}
            found["values"] = self.values(micro)
            return found if remembered else {"values": found["values"]}

        return [critic, *passes[int(remembered) :]]

    def token_rewards(self, rollout: Rollout) -> Tensor:
        """Return the reward of each completion token, float32 [C]."""
        size = len(rollout.completion_ids)
        rewards = torch.zeros(size) if rollout.token_rewards is None else rollout.token_rewards.float().clone()
        live = completion_mask(rollout)
        if rollout.reward is not None and bool(live.any()):
            rewards[int(live.nonzero()[-1])] += rollout.reward
        if self.kl_in_reward and self.kl_coef > 0 and rollout.ref_logprobs is not None:
            rewards -= self.kl_coef * kl.k1(rollout.old_logprobs, rollout.ref_logprobs, loss_mask=live)
        return rewards

    def advantages(self, batch: RolloutBatch) -> None:
        """Set ``advantage`` and ``returns`` [C] on every rollout of ``batch``. All ranks call it together."""
        rollouts, nothing = batch.rollouts, torch.zeros(0)
        sizes = [len(r.completion_ids) for r in rollouts]
        live = torch.cat([nothing.bool(), *(completion_mask(r) & self.trains_on(r) for r in rollouts)])
        advantages, returns = gae(
            torch.cat([nothing, *(self.token_rewards(r) for r in rollouts)]),
            torch.cat([nothing, *(r.values for r in rollouts if r.values is not None)]),
            torch.repeat_interleave(torch.tensor(sizes, dtype=torch.int64)),
            gamma=self.gamma,
            lam=self.lam,
            loss_mask=live,
        )
        if self.whiten:
            advantages = whitened(advantages, live)
        for rollout, advantage, goal in zip(rollouts, advantages.split(sizes), returns.split(sizes), strict=True):
            rollout.advantage, rollout.returns = advantage.clone(), goal.clone()

    def loss(self, batch: MicroBatch, logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor | float]]:
        """Return RLModule's loss and the weighted value loss, and both their metrics."""
        assert batch.values is not None, "score has not run"
        assert batch.returns is not None, "advantages has not run"
        values = self.values(batch)
        loss, metrics = super().loss(batch, logprobs)
        terms, measured = value_terms(
            values, batch.values, batch.returns, clip_value=self.clip_value, loss_mask=batch.loss_mask
        )
        metrics |= {
            "critic/loss": terms.detach(),
            "critic/clip_frac": measured["clip_frac"],
            "critic/value": values.detach(),
            "critic/return": batch.returns,
        }
        return loss + self.value_coef * self.aggregate(terms, batch), metrics
