"""Does a model compute on a packed row what it computes on padded ones? Asked once, of the model itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightrl.distributed import all_objects
from lightrl.packing import MicroBatch, pack
from lightrl.rng import forked_rng
from lightrl.types import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lightrl.policy import PolicyForward

EXACT, ROUGH = 5e-3, 5e-2
"""Mean relative difference of logits that is put down to rounding, in float32 (perhaps TF32) and in 16 bits."""


def packs_right(model: PreTrainedModel, padded: PolicyForward, packed: PolicyForward) -> bool:
    """Compare the two ways on three short sequences, without gradient; warn and return False where they differ.

    What a class says of itself is not enough: some drop the arguments that say where sequences end, others change
    attention scores in a way that no packed kernel knows. Windows longer than these sequences are not seen. All ranks
    call it together, a sharded model's forwards being collectives, and come to the same end.
    """
    fault = next((f for f in all_objects(_fault(model, padded, packed)) if f), None)
    if fault is not None:
        name = type(model).__name__.removeprefix("FSDP")
        rank_zero_warn(
            f"{name} does not take packed rows ({fault}): its sequences are padded, and time goes into the padding. "
            "RLModule(..., packed=False) does the same without this warning."
        )
    return fault is None


def _fault(model: PreTrainedModel, padded: PolicyForward, packed: PolicyForward) -> str | None:
    rollouts = _sequences(model.config.get_text_config().vocab_size)
    device = next(model.parameters()).device
    right = _logits(padded, model, pack(rollouts, temperature=1.0).to(device))
    try:
        found = _logits(packed, model, pack(rollouts, temperature=1.0, share_prefix=packed.share_prefix).to(device))
    except Exception as error:  # whatever a model does with arguments that it does not know
        return f"{type(error).__name__}: {error}"
    exact = right.dtype == torch.float32 and all(p.dtype == torch.float32 for p in model.parameters())
    right, found = right.float(), found.float()
    spread = (right - right.mean(-1, keepdim=True)).norm(dim=-1)
    difference = float(((found - right).norm(dim=-1) / spread).mean())
    return None if difference <= (EXACT if exact else ROUGH) else f"logits differ by {difference:.1%} from padded ones"


@torch.no_grad()
def _logits(way: PolicyForward, model: PreTrainedModel, micro: MicroBatch) -> Tensor:
    with forked_rng(0):  # a router may draw noise: the same in both ways, and none of the trainer's
        return way.logits(model, micro)


def _sequences(vocab_size: int) -> list[Rollout]:
    """Two that share a prompt and one of another group, spread over the vocabulary."""
    ids = [(7919 * i + 11) % vocab_size for i in range(24)]
    spans = [(ids[:5], ids[5:10], 0), (ids[:5], ids[10:18], 0), (ids[18:20], ids[20:], 1)]
    return [Rollout(prompt, c, torch.zeros(len(c)), group_id=group) for prompt, c, group in spans]
