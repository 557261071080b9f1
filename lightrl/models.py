"""The model half of RLModule: what is loaded, what of it is trained, the reference, and what a checkpoint holds."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightrl.arguments import check_count
from lightrl.checkpoints import check_checkpoint, read_shards
from lightrl.lora import bind_lora, is_adapter, lora_arguments
from lightrl.optim import OPTIMIZERS
from lightrl.packing import MicroBatch
from lightrl.policy import (
    check_model_path,
    compile_layers,
    load_policy,
    load_tokenizer,
    recompute_activations,
    train_only,
    without_dropout,
)
from lightrl.quantized import QUANTIZATIONS, import_bitsandbytes, loading_arguments
from lightrl.reference import AdapterReference, CopyReference
from lightrl.step import StepModule

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_REFERENCE, _SKIPPED = "lightrl_reference", "lightrl_skipped_steps"


class ModelsModule(StepModule):
    """Loads the policy and what belongs to it (see :class:`lightrl.RLModule` for the arguments)."""

    model: str | PreTrainedModel

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        packed: bool | None,
        share_prefix: bool,
        lora: Any,
        trainable: str | list[str] | None,
        quantize: str | None,
        gradient_checkpointing: bool,
        torch_compile: bool,
        optimizer: str,
        kl_coef: float,
        reference_device: str | None,
        ref_refresh_every: int,
        trust_remote_code: bool,
    ) -> None:
        super().__init__(packed, share_prefix)
        model = str(model) if isinstance(model, Path) else model
        object.__setattr__(self, "model", model)  # not a submodule: as such it would be saved beside the policy
        if isinstance(model, str):
            check_model_path(model)
        self.lora = lora_arguments(lora)
        self.trainable = [trainable] if isinstance(trainable, str) else trainable
        self.quantize, self.optimizer_name = quantize, optimizer
        self.gradient_checkpointing, self.torch_compile = gradient_checkpointing, torch_compile
        self.kl_coef, self.reference_device, self.ref_refresh_every = kl_coef, reference_device, ref_refresh_every
        self.trust_remote_code = trust_remote_code
        self._reference_version, self._configured = 0, False
        self._wants_reference = kl_coef > 0
        self._check_models()
        self._check_reference()
        self.register_load_state_dict_post_hook(_forgive_missing_base)  # type: ignore[no-untyped-call]

    def _check_models(self) -> None:
        choices = {
            "quantize": (self.quantize, (None, *QUANTIZATIONS)),
            "optimizer": (self.optimizer_name, tuple(OPTIMIZERS)),
            "reference_device": (self.reference_device, (None, "cpu")),
        }
        for name, (value, allowed) in choices.items():
            if value not in allowed:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(map(str, allowed))}")
        if self.lora is not None and self.trainable is not None:
            raise ValueError(f"trainable={self.trainable} with lora: adapters are all that is trained. Leave one out")
        if self.lora is None and self.quantize:
            raise ValueError(f"quantize={self.quantize!r} without lora: 4-bit weights cannot be trained. Give lora")
        if self.quantize:
            import_bitsandbytes(f"quantize={self.quantize!r}")
            if not isinstance(self.model, str):
                raise ValueError(f"quantize={self.quantize!r} needs a folder or hub name to load, not a model")
        if OPTIMIZERS[self.optimizer_name].needs_bitsandbytes:
            import_bitsandbytes(f"optimizer={self.optimizer_name!r}")

    def _check_reference(self) -> None:
        check_count("ref_refresh_every", self.ref_refresh_every)
        if (self.ref_refresh_every or self.reference_device) and self.kl_coef == 0:
            raise ValueError(
                f"ref_refresh_every={self.ref_refresh_every}, reference_device={self.reference_device!r}: without "
                "kl_coef there is no reference. Set kl_coef, or leave them out"
            )
        if self.lora is not None and self.reference_device:
            raise ValueError(
                f"reference_device={self.reference_device!r} with lora: the reference is the policy with its adapters "
                "off and takes no memory. Leave it out"
            )

    # -- models -------------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Load the policy, bind adapters, and make the reference where one is wanted; the strategy shards."""
        if self._configured:
            return
        self._configured = True
        if not hasattr(self, "policy"):
            self.policy = self.fresh_model() if isinstance(self.model, str) else without_dropout(self.model)
        if self.lora is not None:
            bind_lora(self.policy, self.lora)
            if self._wants_reference:
                self._reference.append(AdapterReference(self.policy))
        elif self._wants_reference:
            self._reference.append(CopyReference(self.policy, self.fresh_model()))
        if self.trainable is not None:
            train_only(self.policy, self.trainable)
        self.prepare(self.policy)

    def fresh_model(self) -> PreTrainedModel:
        """Return the initial model once more; of a model given as an object only while that is not yet prepared."""
        if isinstance(self.model, str):
            args = loading_arguments(self.quantize)
            return load_policy(self.model, trust_remote_code=self.trust_remote_code, **args)
        return without_dropout(copy.deepcopy(self.model))

    def prepare(self, model: PreTrainedModel) -> None:
        """Have a model that is to be trained recompute activations and compile its layers, as the arguments say."""
        if self.gradient_checkpointing:
            recompute_activations(model)
        if self.torch_compile:
            compile_layers(model)

    def companions(self) -> list[nn.Module]:
        """Return the modules that are trained beside the policy: the strategy shards each of them too."""
        return []

    def parameter_groups(self) -> list[tuple[Iterable[nn.Parameter], float]]:
        """Return which parameters the optimizer gets at which peak learning rate; frozen ones are left out of it."""
        return [(self.policy.parameters(), self.lr)]

    def require_reference(self) -> None:
        """Have :meth:`configure_model` make a reference also where ``kl_coef`` is 0: somebody measures to it.

        Raises:
            ValueError: the model is configured already, without one.
        """
        if self._configured and not self.has_reference:
            raise ValueError(
                "the module was set up without a reference, and its weights are no longer the initial ones: ask for "
                "the reference at the first run, or make the module anew"
            )
        self._wants_reference = True

    @property
    def has_reference(self) -> bool:
        """Whether rollouts get the logprobs of a reference."""
        return bool(self._reference)

    @property
    def reference(self) -> PreTrainedModel | None:
        """The frozen copy of the initial policy; None where there is none, or where it is the policy's own base."""
        found = self._reference[0] if self._reference else None
        return found.frozen if isinstance(found, CopyReference) else None

    def refresh_reference(self) -> None:
        """Make the reference what the policy is now, if it is ``ref_refresh_every`` steps since it last was."""
        every = self.ref_refresh_every
        if self._reference and every and self.global_step // every > self._reference_version // every:
            self._reference[0].refresh()
            self._reference_version = self.global_step

    def reference_logprobs(self, micro: MicroBatch) -> Tensor:
        """Return the reference's logprobs, float32 [N], of a micro-batch's completion tokens."""
        with self._reference[0].model() as model:
            return self.policy_forward(model, micro, with_entropy=False)[0]

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        name: Any = self.model if isinstance(self.model, str) else self.model.config.name_or_path
        return load_tokenizer(name, trust_remote_code=self.trust_remote_code)

    def forward(self, micro: MicroBatch) -> Tensor:
        """Return the policy's logprobs, float32 [N], of a micro-batch's completion tokens."""
        return self.policy_forward(self.policy, micro, with_entropy=False)[0]

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return what is saved: with LoRA only the adapters of the policy, whose base is loaded from ``model``."""
        state = super().state_dict(*args, **kwargs)
        for name in [n for n in state if self._is_base(n.removeprefix(kwargs.get("prefix", "")))]:
            del state[name]
        return state

    def _is_base(self, name: str) -> bool:
        return self.lora is not None and name.startswith("policy.") and not is_adapter(name)

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a module with a checkpoint's hyperparameters and weights; also of one that several ranks saved."""
        if isinstance(checkpoint_path, (str, Path)):
            check_checkpoint(checkpoint_path)
        if isinstance(checkpoint_path, (str, Path)) and Path(checkpoint_path).is_dir():
            whole = io.BytesIO()
            torch.save(read_shards(Path(checkpoint_path)), whole)
            whole.seek(0)
            checkpoint_path = whole
        return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)

    @contextmanager
    def base_left_out(self, path: str | Path, weights_only: bool | None = None) -> Iterator[None]:
        """Have Lightning load a checkpoint inside the block although the base of a LoRA is not in it.

        Raises:
            RuntimeError: an adapter is not in it either.
        """
        strict = self.strict_loading
        if self.lora is not None and strict:
            if Path(path).is_file():  # of a folder of shards, what is asked for has to be there in any case
                saved = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)["state_dict"]
                if missing := sorted(set(self.state_dict()) - set(saved)):
                    raise RuntimeError(f"{path} lacks {', '.join(missing[:8])}: was it saved with another lora?")
            self.strict_loading = False
        try:
            yield
        finally:
            self.strict_loading = strict

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save a reference that was refreshed: unlike the initial one it cannot be loaded from ``model``."""
        checkpoint[_SKIPPED] = self._skipped
        if self._reference_version:
            checkpoint[_REFERENCE] = {"version": self._reference_version, "weights": self._reference[0].state()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go back to the reference of that time, and say which new settings the optimizer's state has overruled."""
        trainer = self._trainer
        saved = checkpoint.get("hyper_parameters", {}) if trainer is not None and trainer.state.fn == "fit" else {}
        for name in ("lr", "betas", "weight_decay"):
            if name in saved and name in self.hparams and saved[name] != self.hparams[name]:
                rank_zero_warn(
                    f"{name}={self.hparams[name]} has no effect: the checkpoint's optimizer goes on with {saved[name]}."
                    f" To change it, begin anew from the weights: load_from_checkpoint(path, {name}=...)"
                )
        self._skipped = checkpoint.get(_SKIPPED, 0)
        if self._reference and _REFERENCE in checkpoint:
            self._reference_version = checkpoint[_REFERENCE]["version"]
            with torch.no_grad():
                self._reference[0].load(checkpoint[_REFERENCE]["weights"])


def _forgive_missing_base(module: nn.Module, incompatible: Any) -> None:
    assert isinstance(module, ModelsModule)
    incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if not module._is_base(name)]
