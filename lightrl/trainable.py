"""A model that is trained and its optimizer, for loops of one's own: no Trainer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightrl.distributed import group_is_up, rank, world_size
from lightrl.fsdp import PRECISIONS, check_learning_rate, engine_dtype, shard_model
from lightrl.optim import OPTIMIZERS, make_optimizer
from lightrl.policy import PolicyForward, load_policy, load_tokenizer, without_dropout
from lightrl.sharding import full_tensor, reshard, sharded_like, write_full
from lightrl.weights.source import plain_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Turn:
    """Whose turn it is on the device: hooks of model, optimizer and engine ask it before they work."""

    now: Literal["trainer", "change", "engine"] = "trainer"

    def require(self, *whose: str, what: str, fix: str) -> None:
        """Raise RuntimeError unless it is the turn of one of ``whose``."""
        if self.now not in whose:
            raise RuntimeError(f"{what} while it is the {self.now}'s turn on the device: {fix}")


class Trainable:
    """Loads a model, shards it (FSDP2) over the ranks of the default process group where there is one, and trains it.

    The model may be called as ever, and with the ids of one sequence without a batch dimension.

    Args:
        model: folder or hub name of a causal language model, or one of transformers' models, which is trained in place.
        lr: learning rate.
        betas: AdamW's.
        weight_decay: AdamW's, on matrices only.
        optimizer: one of :data:`lightrl.optim.OPTIMIZERS`.
        precision: ``"32-true"``, ``"bf16-mixed"`` (FSDP2's: float32 weights, bfloat16 arithmetic; needs a process
            group) or ``"bf16-true"``.
        device: None: this rank's GPU, or the CPU.
        tokenizer: folder or hub name; None: the model's own, if it has one.
        trust_remote_code: run code that comes with the model.

    Raises:
        ValueError: there is no such model, or an argument is out of range.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        lr: float = 1e-6,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        optimizer: str = "adamw",
        precision: str = "32-true",
        device: str | torch.device | None = None,
        tokenizer: str | Path | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        _check(model, lr, optimizer, precision)
        self.device = torch.device(device) if device is not None else own_device()
        self.dtype = engine_dtype(precision)
        """Of an engine's weights."""
        self.trust_remote_code = trust_remote_code
        policy: Any = model
        if isinstance(model, str | Path):
            policy = load_policy(model, trust_remote_code=trust_remote_code)
        self.policy: PreTrainedModel = without_dropout(policy)
        self.tokenizer_name = _tokenizer_name(tokenizer or policy.config.name_or_path, trust_remote_code)
        self.policy_forward = PolicyForward()
        self.shapes = plain_shapes(policy)
        self._place(precision)
        self._turn = Turn()
        self.policy.register_forward_pre_hook(_model_hook(self._turn, self.device), prepend=True, with_kwargs=True)
        self.optimizer = make_optimizer(
            [(self.policy.parameters(), lr)], name=optimizer, betas=betas, weight_decay=weight_decay
        )
        self.optimizer.register_step_pre_hook(_optimizer_hook(self._turn))

    def _place(self, precision: str) -> None:
        if group_is_up():
            mesh = init_device_mesh(self.device.type, (world_size(),))
            shard_model(self.policy, mesh, precision, self.device)
        else:
            module: nn.Module = self.policy
            module.to(self.device, torch.bfloat16 if precision == "bf16-true" else None)

    @property
    def model(self) -> PreTrainedModel:
        """The trained module."""
        return self.policy

    # -- saving -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return ``model`` and ``optimizer`` as torch's own ``state_dict`` of a single process, on the CPU.

        Every rank gets all of it (a collective).
        """
        self._turn.require("trainer", what="the state was asked for", fix="call as_trainable() first")
        reshard(self.policy)
        optimizer = self.optimizer.state_dict()
        whole = {i: {k: _whole(v) for k, v in state.items()} for i, state in optimizer["state"].items()}
        return {"model": self._weights(), "optimizer": optimizer | {"state": whole}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to what :meth:`state_dict` returned, on however many ranks; every rank needs all of it.

        Raises:
            ValueError: it is of another model or optimizer; nothing has changed then.
        """
        self._turn.require("trainer", what="a state was loaded", fix="call as_trainable() first")
        reshard(self.policy)
        mine, given = self.policy.state_dict(), state["model"]
        wrong = [
            n for n in sorted({*mine, *given}) if n not in mine or n not in given or mine[n].shape != given[n].shape
        ]
        if wrong:
            raise ValueError(f"the state is of another model: {', '.join(wrong[:8])} are missing or of another shape")
        self.optimizer.load_state_dict(self._sharded(state["optimizer"]))
        for name, tensor in mine.items():
            write_full(tensor, given[name])

    def save_pretrained(self, folder: str | Path) -> None:
        """Write model, and tokenizer if there is one, as transformers and vLLM load them (a collective)."""
        reshard(self.policy)
        weights = self._weights()
        if rank() == 0:
            self.policy.save_pretrained(folder, state_dict=weights)
            if self.tokenizer_name is not None:
                load_tokenizer(self.tokenizer_name, trust_remote_code=self.trust_remote_code).save_pretrained(folder)

    def _weights(self) -> dict[str, Tensor]:
        return {name: _whole(tensor) for name, tensor in self.policy.state_dict().items()}

    def _sharded(self, state: dict[str, Any]) -> dict[str, Any]:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]

        def like(i: int, value: Any) -> Any:
            parameter = parameters[i] if i < len(parameters) else None
            same = isinstance(value, Tensor) and parameter is not None and value.shape == parameter.shape
            return sharded_like(parameter, value) if same and parameter is not None else value

        return state | {"state": {i: {k: like(i, v) for k, v in s.items()} for i, s in state["state"].items()}}


def own_device() -> torch.device:
    """Return this rank's GPU, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
    torch.cuda.set_device(device)
    return device


def _check(model: Any, lr: float, optimizer: str, precision: str) -> None:
    if not isinstance(model, str | Path) and not hasattr(model, "get_output_embeddings"):
        raise ValueError(
            f"{type(model).__name__} is no causal language model of transformers: give one, a folder or a hub name"
        )
    if not lr >= 0:
        raise ValueError(f"lr={lr} must not be negative")
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer={optimizer!r} is not one of {', '.join(OPTIMIZERS)}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r} is not one of {', '.join(PRECISIONS)}")
    if precision == "bf16-mixed" and not group_is_up():
        raise ValueError(
            "precision='bf16-mixed' is FSDP2's and needs a process group, also on one GPU: start the script with "
            "torchrun and call torch.distributed.init_process_group() first"
        )
    check_learning_rate(lr, precision)


def _tokenizer_name(name: str | Path | None, trust_remote_code: bool) -> str | None:
    if not name:
        return None
    try:
        load_tokenizer(name, trust_remote_code=trust_remote_code)
    except ValueError:  # a model alone: vLLM then takes token ids and no text
        return None
    return str(name)


def _model_hook(turn: Turn, device: torch.device) -> Callable[..., Any]:
    def prepare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        turn.require("trainer", "change", what="the model was called", fix="call as_trainable() first")
        ids = args[0] if args else kwargs.get("input_ids")
        if not isinstance(ids, Tensor) or ids.ndim > 1:
            return None
        ids = ids[None].to(device)
        return ((ids, *args[1:]), kwargs) if args else (args, kwargs | {"input_ids": ids})

    return prepare


def _optimizer_hook(turn: Turn) -> Callable[..., None]:
    def check(*_: Any) -> None:
        turn.require("trainer", what="the optimizer was called", fix="call as_trainable() first")

    return check


def _whole(value: Any) -> Any:
    return full_tensor(value.detach()).to("cpu", copy=True) if isinstance(value, Tensor) else value
