"""Prompts in, optimizer steps' worth of rollouts out."""

from __future__ import annotations

import warnings
from operator import is_not
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightrl.arguments import check_at_least_one, check_choice, check_numbers
from lightrl.distributed import all_objects, world_size
from lightrl.environments.base import EnvironmentFactory, Episodes, make_episodes
from lightrl.loaders import SizedLoader
from lightrl.policy import context_length, load_config
from lightrl.prompts import Curriculum, load_rows, tokenize_prompts, weighted_sources
from lightrl.rewards import RewardSum
from lightrl.rewards.base import RewardSpec, import_callable
from lightrl.strategies.base import RolloutStrategy
from lightrl.stream import RolloutStream, for_validation
from lightrl.types import Prompt, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RolloutDataModule(LightningDataModule):
    """Samples completions of prompts, scores them and hands out optimizer steps.

    Args:
        train_prompts: parquet or JSON-lines file, ``"datasets:NAME:SPLIT"``, ``"gym:TASK"``, ``datasets.Dataset``, or
            list; with a column ``prompt`` (text or chat messages) and, for the reward, ``reward_model``
            (``{"ground_truth": ...}``), ``ground_truth`` or ``answer``. Several: a mapping of source to weight, or a
            list of (source, weight). None: only validate.
        reward: ``reward(completion, ground_truth, **columns) -> float``, its import path, a list, or a mapping of name
            to reward or (reward, weight). None: the environment's own.
        group_size: completions of each prompt.
        prompts_per_step: prompts of one rollout batch, over all ranks.
        max_completion_tokens: longest completion, its stop token included.
        max_prompt_tokens: longest prompt; None: what the model's context leaves.
        val_prompts: like ``train_prompts``.
        val_batch_size: validation prompts generated at once on each rank; None: all.
        val_group_size: completions of each validation prompt.
        val_temperature: 0 takes the likeliest token.
        temperature: of training samples.
        epochs_per_rollout: passes over a rollout batch, reshuffled each time.
        minibatches_per_rollout: optimizer steps a pass.
        max_tokens_per_micro_batch: tokens, prompts included, that go through the model at once (a shared one once).
        on_long_prompt: ``"raise"`` or ``"drop"`` (with a warning that counts them).
        on_reward_error: ``"raise"``, or ``"exclude"`` the rollout from its group and from training.
        reward_timeout: seconds that one call of a reward may take.
        system_prompt: put before chats that have none.
        template_kwargs: arguments of the chat template, such as ``{"enable_thinking": False}``.
        shuffle: visit prompts in a new random order each epoch.
        seed: of order and sampling; None: torch's, as ``seed_everything`` set it.
        deterministic: a seed for each completion, so that what is sampled does not depend on how prompts are batched
            (slower).
        tokenizer: None: the model's.
        environment: makes the environment of an episode from its prompt (a class, say, or its import path), or
            :class:`~lightrl.environments.Episodes` with limits; ``max_completion_tokens`` is then the budget of a whole
            episode. None: a rollout is one completion.
        curriculum: function, or its import path, that orders the prompts of each epoch in place of ``shuffle``; see
            :data:`~lightrl.prompts.Curriculum`.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        train_prompts: Any,
        reward: RewardSpec | None = None,
        group_size: int = 8,
        prompts_per_step: int = 64,
        max_completion_tokens: int = 1024,
        max_prompt_tokens: int | None = None,
        val_prompts: Any = None,
        val_batch_size: int | None = None,
        val_group_size: int = 1,
        val_temperature: float = 0.0,
        temperature: float = 1.0,
        epochs_per_rollout: int = 1,
        minibatches_per_rollout: int = 1,
        max_tokens_per_micro_batch: int = 16384,
        on_long_prompt: Literal["raise", "drop"] = "raise",
        on_reward_error: Literal["raise", "exclude"] = "raise",
        reward_timeout: float = 60.0,
        system_prompt: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
        shuffle: bool = True,
        seed: int | None = None,
        deterministic: bool = False,
        tokenizer: PreTrainedTokenizerBase | None = None,
        environment: str | Episodes | EnvironmentFactory | None = None,
        curriculum: str | Curriculum | None = None,
    ) -> None:
        super().__init__()
        self.train_prompts, self.val_prompts = train_prompts, val_prompts
        self.group_size, self.prompts_per_step = group_size, prompts_per_step
        self.max_completion_tokens, self.max_prompt_tokens = max_completion_tokens, max_prompt_tokens
        self.val_batch_size, self.val_group_size, self.val_temperature = val_batch_size, val_group_size, val_temperature
        self.temperature = Sampling(1, temperature=temperature).for_training().temperature
        self.epochs_per_rollout, self.minibatches_per_rollout = epochs_per_rollout, minibatches_per_rollout
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.on_long_prompt, self.system_prompt, self.template_kwargs = on_long_prompt, system_prompt, template_kwargs
        self._check_arguments()
        self.episodes = make_episodes(environment)
        if reward is None and self.episodes is None:
            raise ValueError("reward=None: give a reward function, or an environment that rewards")
        self.rewards = None if reward is None else RewardSum(reward, timeout=reward_timeout, on_error=on_reward_error)
        self.curriculum: Any = import_callable(curriculum, "curriculum") if isinstance(curriculum, str) else curriculum
        self.shuffle, self.seed, self.deterministic = shuffle, seed, deterministic
        self.tokenizer = self._own_tokenizer = tokenizer
        self._made_with: tuple[Any, ...] = ()
        self._made_of: tuple[Any, ...] = ()
        self.max_sequence_tokens: int | None = None
        """Longest prompt + completion in tokens, known after ``setup``: what the engine has to be able to hold."""
        self._train: list[Prompt] = []
        self._val: list[Prompt] = []
        self.sources: list[tuple[int, float]] = []  # prompts and weight of each training source
        self._stream: RolloutStream | None = None

    def _check_arguments(self) -> None:
        check_at_least_one(group_size=self.group_size, prompts_per_step=self.prompts_per_step)
        check_at_least_one(val_group_size=self.val_group_size, val_batch_size=self.val_batch_size)
        check_at_least_one(epochs_per_rollout=self.epochs_per_rollout)
        check_at_least_one(minibatches_per_rollout=self.minibatches_per_rollout)
        check_at_least_one(max_completion_tokens=self.max_completion_tokens)
        check_at_least_one(max_tokens_per_micro_batch=self.max_tokens_per_micro_batch)
        check_numbers(val_temperature=self.val_temperature)
        check_choice("on_long_prompt", self.on_long_prompt, ("raise", "drop"))
        rollouts = self.prompts_per_step * self.group_size
        if self.minibatches_per_rollout > rollouts:
            raise ValueError(
                f"minibatches_per_rollout={self.minibatches_per_rollout} is more than the {rollouts} rollouts of a "
                "step (prompts_per_step x group_size)"
            )

    # -- set-up -------------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Read and tokenise what ``stage`` needs, before any model is loaded; a new ``fit`` begins at the first prompt.

        Raises:
            ValueError: the data, or its fit to model and ranks, is at fault.
        """
        module: Any = self._the_trainer.lightning_module
        self._check_fit(module, stage)
        budget = self.max_completion_tokens
        val_budget = for_validation(self.trainer, Sampling(budget)).max_completion_tokens
        limit, val_limit = self._prompt_limit(module, budget), self._prompt_limit(module, val_budget)
        self.tokenizer = self._own_tokenizer or module.tokenizer
        made_with, made_of = (self.tokenizer, limit, val_limit), (self.train_prompts, self.val_prompts)
        if made_with != self._made_with or any(map(is_not, made_of, self._made_of)):  # other words, other prompts
            self._made_with, self._made_of, self._train, self._val = made_with, made_of, [], []
        if self.episodes is not None:
            self.episodes.setup(self.tokenizer)
        if stage == "fit":
            self._train = self._train or self._tokenize_training(limit)
            self._check_training()
        if self.val_prompts is not None:
            self._val = self._val or self._tokenize(self.val_prompts, val_limit)
        longest, longest_val = (max((len(p.token_ids) for p in ps), default=0) for ps in (self._train, self._val))
        self.max_sequence_tokens = max(longest + budget, longest_val + val_budget)
        if stage == "fit" and longest + self.max_completion_tokens > self.max_tokens_per_micro_batch:
            raise ValueError(
                f"max_tokens_per_micro_batch={self.max_tokens_per_micro_batch} cannot hold the longest prompt and "
                f"completion, {longest} + {self.max_completion_tokens} tokens: raise it or lower max_completion_tokens"
            )
        if stage == "fit" or self._stream is None:
            seed = torch.initial_seed() % 2**31 if self.seed is None else self.seed
            self._stream = RolloutStream(self, self._train, all_objects(seed)[0])

    @property
    def _the_trainer(self) -> Trainer:
        assert self.trainer is not None
        return self.trainer

    def _check_fit(self, module: Any, stage: str) -> None:
        if not isinstance(self._the_trainer.strategy, RolloutStrategy):
            name = type(self._the_trainer.strategy).__name__
            raise ValueError(
                f"{name} cannot generate: use Trainer(strategy='colocated_vllm'), 'async_vllm' or 'colocated_hf'"
            )
        if stage != "fit":
            if self.val_prompts is None:
                raise ValueError(f"val_prompts is None: {getattr(stage, 'value', stage)} needs prompts")
            return
        if (accumulate := self._the_trainer.accumulate_grad_batches) != 1:
            raise ValueError(
                f"accumulate_grad_batches={accumulate}: one batch is already one whole optimizer step. Its size is "
                "prompts_per_step; how much of it is on the device at once is max_tokens_per_micro_batch"
            )
        if self.train_prompts is None:
            raise ValueError("train_prompts is None: fit needs prompts to train on")
        if self.group_size < module.min_group_size:
            raise ValueError(
                f"group_size={self.group_size}: {type(module).__name__} compares the completions of one prompt and "
                f"needs at least {module.min_group_size}"
            )

    def _check_training(self) -> None:
        if len(self._train) < self.prompts_per_step:
            raise ValueError(
                f"prompts_per_step={self.prompts_per_step} is more than the {len(self._train)} training prompts: lower "
                "it or bring more prompts"
            )
        if self.prompts_per_step % world_size():
            raise ValueError(
                f"prompts_per_step={self.prompts_per_step} does not divide over {world_size()} ranks: use a multiple"
            )

    def _prompt_limit(self, module: Any, max_completion_tokens: int) -> int | None:
        own = getattr(module.model, "config", None)  # that of a model which was given as an object
        config = own or load_config(module.model, trust_remote_code=module.trust_remote_code)
        if (context := context_length(config)) is None:
            return self.max_prompt_tokens
        left = context - max_completion_tokens
        if left < 1:
            raise ValueError(
                f"max_completion_tokens={max_completion_tokens} leaves no room for a prompt in the "
                f"model's context of {context} tokens"
            )
        return left if self.max_prompt_tokens is None else min(left, self.max_prompt_tokens)

    def _tokenize_training(self, limit: int | None) -> list[Prompt]:
        pairs = weighted_sources(self.train_prompts)
        if len(pairs) > 1 and self.curriculum is not None:
            raise ValueError(f"a curriculum decides the order alone: join the {len(pairs)} weighted sources")
        parts = [self._tokenize(source, limit) for source, _ in pairs]
        self.sources = [(len(part), weight) for part, (_, weight) in zip(parts, pairs, strict=True)]
        return [prompt for part in parts for prompt in part]

    @property
    def chat_arguments(self) -> dict[str, Any]:
        """Arguments of the chat template, the environment's tools among them."""
        tools = self.episodes.tools if self.episodes is not None else None
        return (self.template_kwargs or {}) | ({"tools": tools} if tools else {})

    def _tokenize(self, prompts: Any, limit: int | None) -> list[Prompt]:
        assert self.tokenizer is not None
        found = tokenize_prompts(
            load_rows(prompts),
            self.tokenizer,
            max_prompt_tokens=limit,
            on_long_prompt=self.on_long_prompt,
            system_prompt=self.system_prompt,
            template_kwargs=self.chat_arguments,
        )
        if self.rewards is not None and (names := self.rewards.in_vain(found)):
            rank_zero_warn(
                f"no prompt has a ground truth: {', '.join(map(repr, names))} gets None. Its column is ground_truth, "
                f"answer or reward_model; there are {sorted(found[0].columns)}"
            )
        return found

    # -- loaders ------------------------------------------------------------------------------------------------------

    def train_dataloader(self) -> SizedLoader:
        """One item is one optimizer step; prompts that do not fill a step are carried over into the next epoch."""
        stream = self._require_stream()
        rollout_batches = len(self._train) // self.prompts_per_step
        return SizedLoader(rollout_batches * stream.steps_per_rollout, lambda _: stream.next_step())

    def val_dataloader(self) -> SizedLoader | list[Any]:
        """One item is a scored :class:`RolloutBatch`; every prompt is scored once, on one rank."""
        if not self._val:
            warnings.filterwarnings("ignore", message="Total length of `list` across ranks is zero", module="lightning")
            return []
        stream, share = self._require_stream(), -(-len(self._val) // world_size())
        size = self.val_batch_size or share
        return SizedLoader(-(-share // size), lambda i: stream.validation_batch(self._val, i, size))

    def predict_dataloader(self) -> SizedLoader | list[Any]:
        """Rollouts of the validation prompts."""
        return self.val_dataloader()

    def _require_stream(self) -> RolloutStream:
        assert self._stream is not None, "setup has not run"
        return self._stream

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the exact position in the stream of rollouts: order, cursor, seed, rollouts not used up."""
        return self._stream.state_dict() if self._stream else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken."""
        if self._stream:
            # Lightning asks the loader for its position; here the datamodule has it.
            warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")
            self._stream.load_state_dict(state_dict)

    def teardown(self, stage: str) -> None:
        """End the threads and processes that rewards run on."""
        if self.rewards is not None:
            self.rewards.close()
