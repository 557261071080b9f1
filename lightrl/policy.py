"""The policy: any Hugging Face causal language model, loaded, and run on packed rollouts for its token logprobs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightrl.attention import packed_rows, takes_packed_rows
from lightrl.balance import Packer
from lightrl.logprobs import chunked_token_logprobs, entropy, token_logprobs
from lightrl.packing_check import packs_right

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lightrl.packing import MicroBatch


def load_policy(model: str | Path, *, trust_remote_code: bool = False, **loading: Any) -> PreTrainedModel:
    """Load a causal language model in float32 on the CPU, without dropout: a ratio of 1 must be possible.

    Args:
        model: folder or hub name.
        trust_remote_code: run code that comes with the model.
        loading: further arguments of ``from_pretrained``.

    Raises:
        ValueError: there is no such model.
    """
    from transformers import AutoModelForCausalLM

    with _model_errors(model), _quiet_loading():
        policy: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, trust_remote_code=trust_remote_code, **loading
        )
    without_dropout(policy).train()
    return policy


def load_tokenizer(model: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of ``model``; ValueError where there is none."""
    from transformers import AutoTokenizer

    with _model_errors(model):
        return AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)


def load_config(model: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Load the configuration of ``model`` without its weights; ValueError where there is none."""
    from transformers import AutoConfig

    with _model_errors(model):
        return AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)


def context_length(config: Any) -> int | None:
    """Return the most tokens that a model of this configuration reads at once; None where it sets no limit."""
    length: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return length


@contextmanager
def _quiet_loading() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def check_model_path(model: str | Path) -> None:
    """Raise ValueError where ``model`` is plainly a path, as no hub name is, and leads nowhere."""
    with _model_errors(model):
        pass


@contextmanager
def _model_errors(model: str | Path) -> Iterator[None]:
    try:
        if str(model).startswith(("/", ".", "~")) and not Path(model).exists():
            raise OSError("there is no such folder")
        yield
    except (OSError, ValueError) as error:
        raise ValueError(
            f"cannot load {str(model)!r}: {error}\nGive a folder with config.json, tokenizer and safetensors, "
            "or the name of a model on the hub."
        ) from error


def without_dropout(policy: PreTrainedModel) -> PreTrainedModel:
    """Set every dropout rate of ``policy`` to 0 and return it."""
    for module in policy.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():  # models call theirs attn_dropout, residual_dropout, layerdrop, ..
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return policy


def train_only(policy: PreTrainedModel, patterns: list[str]) -> None:
    """Freeze the parameters of ``policy`` in whose names none of ``patterns`` (regular expressions) is found.

    Raises:
        ValueError: a pattern is found in no name.
    """
    names = [name for name, _ in policy.named_parameters()]
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in names):
            raise ValueError(
                f"trainable={pattern!r} is found in no parameter's name: they are {', '.join(names[:8])}, ..."
            )
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(any(re.search(pattern, name) for pattern in patterns))


def plain_class(policy: nn.Module) -> type:
    """Return the class of transformers' that ``policy`` is or derives from; its own where there is none."""
    found = (c for c in type(policy).__mro__ if c.__module__.startswith("transformers."))
    return next(found, type(policy))


def recompute_activations(policy: PreTrainedModel) -> None:
    """Have each decoder layer keep its input alone, and run once more in the backward pass."""
    policy.train()  # transformers recomputes in training mode only
    policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def compile_layers(policy: nn.Module) -> None:
    """Compile the forward of each decoder layer for rows of any length; what shards and recomputes stays outside.

    Generation with a cache, which would want graphs of its own for every shape of it, stays as it was.
    """
    for layer in decoder_layers(policy):
        layer.forward = _compiled_without_cache(layer.forward)


def _compiled_without_cache(plain: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(plain, dynamic=True)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return (compiled if kwargs.get("past_key_values") is None else plain)(*args, **kwargs)

    return forward


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers of ``model``: the blocks that transformers says must not be split.

    Raises:
        ValueError: the model names none and has no list of equal blocks.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [m for m in model.modules() if type(m).__name__ in names]
    if not layers:
        stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len({type(x) for x in m}) == 1]
        layers = max(map(list, stacks), key=len, default=[])
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no decoder layers that lightrl can find (_no_split_modules is empty)"
        )
    return layers


class PolicyForward:
    """Runs a model on a micro-batch and returns the logprob of each completion token.

    The head works on the completion's positions only and never holds full-vocabulary float32 logits. Models that change
    logits after the head (soft-capping, scaling) are noticed at their first forward and take the plain path; so do
    those whose head is more than one matrix (an adapter on it).

    Args:
        packed: lay sequences end to end or pad them; None: pack where the model says that its attention allows it and a
            trial at the first use agrees (:func:`lightrl.packing_check.packs_right`).
        share_prefix: a prefix that rollouts share passes through the model once, where they are packed.
    """

    def __init__(self, packed: bool | None = None, share_prefix: bool = True) -> None:
        self.packed, self.share_prefix = packed, share_prefix
        self._head_is_last = True

    def __call__(
        self, model: PreTrainedModel, micro: MicroBatch, *, entropy_grad: bool = False, with_entropy: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return (logprobs [N], entropy [N]) in float32 at the sampling temperature.

        The entropy has gradient only where ``entropy_grad`` asks for it, and is zeros without ``with_entropy``.
        """
        if self._head_is_last:
            result = self._fused(model, micro, entropy_grad=entropy_grad, with_entropy=with_entropy)
            if result is not None:
                return result
            self._head_is_last = False
        logits = self.logits(model, micro)
        logprobs = token_logprobs(logits, micro.targets, micro.temperature)
        if not with_entropy:
            return logprobs, torch.zeros_like(logprobs)
        return logprobs, entropy(logits if entropy_grad else logits.detach(), micro.temperature)

    def logits(self, model: PreTrainedModel, micro: MicroBatch) -> Tensor:
        """Return the logits of each completion token, [N, V], as the model gives them."""
        return _at(self._run(model, micro).logits, self.index(model, micro))

    def _fused(self, model: PreTrainedModel, micro: MicroBatch, **entropy: bool) -> tuple[Tensor, Tensor] | None:
        head: Any = model.get_output_embeddings()
        if not _is_one_product(head):
            return None
        index = self.index(model, micro)
        found: list[Tensor] = []

        def logprobs_instead(hidden: Tensor) -> Tensor:
            # Here, inside the root's forward, FSDP2 has the (perhaps tied) weight gathered.
            found.extend(
                chunked_token_logprobs(
                    _at(hidden, index),
                    head.weight,
                    micro.targets,
                    bias=head.bias,
                    temperature=micro.temperature,
                    **entropy,
                )
            )
            return found[0]

        head.forward = logprobs_instead
        try:
            out = self._run(model, micro)
        finally:
            del head.forward
        return (found[0], found[1]) if found and out.logits is found[0] else None

    def hidden(self, trunk: PreTrainedModel, micro: MicroBatch) -> Tensor:
        """Return the final hidden state, [N, D], of a model without head at what predicts each completion token."""
        return _at(self._run(trunk, micro).last_hidden_state, self.index(trunk, micro))

    def _run(self, model: PreTrainedModel, micro: MicroBatch) -> Any:
        if self._is_packed(model):
            layout = micro.layout()
            with packed_rows(model):
                return model(
                    input_ids=micro.input_ids[None],
                    position_ids=micro.position_ids[None],
                    layout=layout,
                    spans=layout.spans,
                    use_cache=False,
                )
        if max(micro.prefixes) >= 0:
            raise ValueError("padded rows cannot share a prefix: pack(..., share_prefix=False)")
        row, column = _rows(micro)
        shape = (len(micro.lengths), max(micro.lengths))
        ids = micro.input_ids.new_zeros(shape)
        mask = torch.zeros_like(ids)
        ids[row, column] = micro.input_ids
        mask[row, column] = 1
        return model(input_ids=ids, attention_mask=mask, use_cache=False)

    def index(self, model: PreTrainedModel, micro: MicroBatch) -> tuple[Tensor | int, Tensor]:
        """Return row and column, in what the model puts out, of the position that predicts each completion token."""
        if self._is_packed(model):
            return 0, micro.logit_index
        row, column = _rows(micro)
        return row[micro.logit_index], column[micro.logit_index]

    def packer(self, model: PreTrainedModel) -> Packer:
        """Return what cuts rollouts into micro-batches as this forward takes them."""
        hidden_size: int = model.config.get_text_config().hidden_size
        return Packer(share_prefix=self.share_prefix and self._is_packed(model), hidden_size=hidden_size)

    def _is_packed(self, model: PreTrainedModel) -> bool:
        if self.packed is None:
            self.packed = takes_packed_rows(model) and packs_right(
                model, PolicyForward(False), PolicyForward(True, self.share_prefix)
            )
        return self.packed


def _is_one_product(head: nn.Module) -> bool:
    """Whether ``weight`` and ``bias`` say all that the head does; an adapter on it (LoRA's, say) adds to them."""
    whole_copy_trained = hasattr(head, "modules_to_save")  # PEFT's wrapper shows the copy's weight as its own
    return whole_copy_trained or type(head).forward is nn.Linear.forward


def _rows(micro: MicroBatch) -> tuple[Tensor, Tensor]:
    device = micro.input_ids.device
    sizes = torch.tensor(micro.lengths, device=device)
    return torch.repeat_interleave(torch.arange(len(micro.lengths), device=device), sizes), micro.position_ids


def _at(rows: Tensor, index: tuple[Tensor | int, Tensor]) -> Tensor:
    return rows[index[0], index[1]]
