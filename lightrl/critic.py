"""The value of a state: heads and models that estimate it token by token, and the loss that trains them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightrl.distributed import all_sum
from lightrl.losses import Terms
from lightrl.masked import check_shapes, live_or_nan, select_live

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def value_head(policy: PreTrainedModel) -> nn.Linear:
    """Return a linear layer from the hidden state of ``policy`` to a value, 0 everywhere until it is trained."""
    weight = policy.get_input_embeddings().weight
    head = nn.Linear(policy.config.get_text_config().hidden_size, 1, device=weight.device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


class HiddenStates:
    """Remembers what last went into a model's head: the final hidden states, with gradient where the forward has it.

    Args:
        policy: a causal language model.
    """

    def __init__(self, policy: PreTrainedModel) -> None:
        self._last: Tensor | None = None
        head: Any = policy.get_output_embeddings()
        head.register_forward_pre_hook(self._keep)

    def _keep(self, head: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._last = inputs[0]

    def take(self, index: tuple[Tensor | int, Tensor]) -> Tensor:
        """Return the states [N, D] at (row, column) of the last forward, and let go of the rest."""
        assert self._last is not None, "no forward since the last call"
        states, self._last = self._last[index[0], index[1]], None
        return states


def value_terms(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    clip_value: float | None = None,
    loss_mask: Tensor | None = None,
) -> Terms:
    """Half the squared error of values, clipped as PPO clips its ratio (as in the code of arXiv:1707.06347).

    ``max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2``: past the clip a value that moves on towards the
    return has no gradient.

    Args:
        values: [N], current critic, with gradient.
        old_values: [N], the critic's before the first update on these rollouts.
        returns: [N].
        clip_value: c, > 0; None does not clip.
        loss_mask: bool [N], or None for all live.

    Returns:
        Loss [N]; metric ``clip_frac``, 0 or 1: the clipped error is the larger one.

    Raises:
        ValueError: clip_value is not positive, or shapes differ.
    """
    if clip_value is not None and not clip_value > 0:
        raise ValueError(f"clip_value={clip_value} must be above 0, or no value could ever change; None does not clip")
    check_shapes(values=values, old_values=old_values, returns=returns, loss_mask=loss_mask)
    values, old, goal = select_live(loss_mask, values, old_values.detach(), returns.detach())
    error = (values - goal).square()
    bounded = error if clip_value is None else (old + (values - old).clamp(-clip_value, clip_value) - goal).square()
    return torch.maximum(error, bounded) / 2, {"clip_frac": live_or_nan(loss_mask, bounded > error)}


def whitened(values: Tensor, live: Tensor) -> Tensor:
    """Return live values less their mean, over their std, both over all ranks (a collective); 0 where not live.

    Args:
        values: float [N].
        live: bool [N].
    """
    chosen = values[live].double()
    count, total = all_sum(torch.stack([torch.tensor(float(len(chosen))), chosen.sum()]).double()).unbind()
    centred = chosen - total / count.clamp(min=1.0)
    variance = all_sum(centred.square().sum()) / (count - 1).clamp(min=1.0)
    result = torch.zeros_like(values)
    if variance > 0:
        result[live] = (centred / variance.sqrt()).to(values.dtype)
    return result
