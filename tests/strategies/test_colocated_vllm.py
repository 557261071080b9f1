"""The straight line with the real vLLM on one rank: the engine holds the policy, whatever happens to either."""

import gc
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import GPT2Config, GPT2LMHeadModel

from lightrl import RLModule
from lightrl.engines import compat
from lightrl.engines.base import WeightSyncError
from lightrl.engines.fingerprint import Fingerprint
from lightrl.engines.vllm import OUTPUT
from lightrl.strategies import ColocatedVLLMStrategy
from lightrl.weights import source
from lightrl.weights.source import PolicyWeights
from tests.helpers.fits import (
    BAR,
    Witness,
    cleaned_up,
    fit,
    ids_of,
    quiet_trainer,
    sampling,
    tiny_data,
    with_engine,
)
from tests.helpers.tiny import tiny_model, tiny_prompts, tiny_tokenizer

pytestmark = pytest.mark.vllm

PROMPTS = [[5, 9, 17], [4], [6, 7, 8, 9, 10, 11]]
FAR = 0.01
"""A difference of logprobs that rounding cannot make."""


# -- invariants 1 and 2: what generates is the policy ------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_engine_logprobs_are_the_trainers_after_every_push(tied: bool) -> None:
    witness = Witness()
    fit(tiny_model(tied=tied), callbacks=[witness], max_steps=5)
    assert witness.pushes == [0, 1, 2, 3, 4]
    assert max(witness.gaps) < BAR
    assert min(witness.stale_gaps) > FAR  # an engine one push behind would have shown


def test_rollouts_come_from_the_policy_that_is_trained_on_them() -> None:
    witness = Witness()
    data = tiny_data(val_prompts=tiny_prompts(3))
    fit(tiny_model(), data=data, callbacks=[witness], max_steps=5, val_check_interval=1, num_sanity_val_steps=1)
    assert witness.versions == [(i, i) for i in range(5)]
    assert max(witness.gaps) < BAR


class Unsized:
    """A loader whose end Lightning cannot see coming, so that it fetches one item ahead."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def test_an_unsized_loader_would_fall_behind_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    witness, data = Witness(), tiny_data(tiny_prompts(16))
    monkeypatch.setattr(data, "train_dataloader", lambda: Unsized(type(data).train_dataloader(data)))
    fit(tiny_model(), data=data, callbacks=[witness], max_steps=3)
    assert witness.versions == [(0, 0), (0, 1), (1, 2)]


def test_sync_every_second_step() -> None:
    witness = Witness()
    strategy = ColocatedVLLMStrategy(sync_every=2, sleep=False)
    fit(tiny_model(), strategy, callbacks=[witness], max_steps=5)
    assert witness.pushes == [0, 2, 4]
    assert witness.versions == [(0, 0), (0, 1), (2, 2), (2, 3), (4, 4)]
    assert max(witness.gaps) < BAR


def test_gpt2_whose_matrices_lie_transposed_in_its_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    config = GPT2Config(vocab_size=32, n_embd=128, n_layer=2, n_head=2, n_positions=128, eos_token_id=2, bos_token_id=2)
    fit(GPT2LMHeadModel(config), max_steps=2)  # every push is verified
    monkeypatch.setattr(Fingerprint, "watch", tampering("transformer.h.1.attn.c_proj.weight", lambda t: t.flip(0)))
    with pytest.raises(WeightSyncError, match=r"transformer\.h\.1\.attn\.c_proj"):
        fit(GPT2LMHeadModel(config), max_steps=1)


class HookedModule(RLModule):
    synced: list[Any] = []

    def on_weights_synced(self, policy_version: int, seconds: float) -> None:
        self.synced.append((policy_version, seconds))


def test_callbacks_and_module_hear_of_every_push() -> None:
    witness, module = Witness(), HookedModule(tiny_model(), lr=0.02)
    trainer = quiet_trainer(callbacks=[witness, Callback()], max_steps=3)
    trainer.fit(module, tiny_data())
    assert [call[:3] for call in witness.synced] == [(trainer, module, i) for i in range(3)]
    assert module.synced == [call[2:] for call in witness.synced]
    assert all(0 < seconds < 60 for _, seconds in module.synced)
    assert trainer.callback_metrics["time/weight_sync"] == pytest.approx(module.synced[-1][1])


# -- invariant 2: a tensor that did not arrive is named ----------------------------------------------------------------

FAULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "perturbed": lambda t: t + 1e-3 * t.abs().max(),
    "one entry": lambda t: t.clone().view(-1).index_fill_(0, torch.tensor([t.numel() // 2]), 1.0).view_as(t),
    "upside down": lambda t: t.flip(0),
    "one small step": lambda t: t + 1e-6 * torch.randn(t.shape, generator=torch.Generator().manual_seed(0)).sign(),
}
TAMPERED = [
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.1.self_attn.k_proj.weight",
    "model.layers.0.self_attn.v_proj.weight",
    "model.layers.1.self_attn.o_proj.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.layers.1.input_layernorm.weight",
    "model.layers.0.self_attn.q_norm.weight",
    "model.norm.weight",
    "lm_head.weight",
]


def tampering(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``Fingerprint.watch``, after which the engine gets another tensor than the one that was looked at."""
    watch = Fingerprint.watch

    def watched(self: Fingerprint, weights: Any) -> Any:
        for found, tensor in watch(self, weights):
            yield found, change(tensor) if found == name else tensor

    return watched


def error_of(push: Callable[[], Any]) -> str:
    try:
        push()
    except WeightSyncError as error:
        return str(error)
    return "no error"


def pushing(strategy: Any) -> None:
    strategy.mark_weights_dirty()
    strategy.generate(PROMPTS, sampling())


@pytest.fixture(scope="module")
def tampered_with() -> dict[tuple[str, str], str]:
    """What a push says when one tensor is changed on its way: one engine with an untied head takes all the blows."""
    errors: dict[tuple[str, str], str] = {}

    def body(strategy: Any) -> None:
        for name in TAMPERED:
            for fault, change in FAULTS.items():
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(Fingerprint, "watch", tampering(name, change))
                    errors[name, fault] = error_of(lambda: pushing(strategy))
        errors["nothing", "in the end"] = error_of(lambda: pushing(strategy))

    with cleaned_up():
        with_engine(noisy_norms(tiny_model(tied=False)), body)
    return errors


def noisy_norms(model: Any) -> Any:
    """Norm weights all 1 would hide a changed order."""
    with torch.no_grad():
        for i, (name, p) in enumerate(model.named_parameters()):
            if "norm" in name:
                p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    return model


@pytest.mark.parametrize("name", TAMPERED)
def test_a_tensor_changed_on_its_way_is_named(tampered_with: dict[tuple[str, str], str], name: str) -> None:
    for fault in FAULTS:
        assert tampered_with[name, fault].endswith(f"does not hold what was sent as {name}"), fault


def test_an_untouched_push_after_bad_ones_is_clean(tampered_with: dict[tuple[str, str], str]) -> None:
    assert tampered_with["nothing", "in the end"] == "no error"


def test_a_stale_tied_head_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "repack_tied_head", lambda model: None)
    with pytest.raises(WeightSyncError, match=r"sent as lm_head\.weight \(tied to model\.embed_tokens\.weight\)$"):
        fit(tiny_model(tied=True), max_steps=2)


def test_an_engine_that_computes_another_model_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = source.iter_weights

    def wrong_policy(model: Any, *how: Any) -> Any:
        return ((name, 2 * tensor if name == "model.norm.weight" else tensor) for name, tensor in right(model, *how))

    monkeypatch.setattr(source, "iter_weights", wrong_policy)
    with pytest.raises(WeightSyncError, match="engine and trainer disagree: mean"):
        fit(tiny_model(), max_steps=1)


# -- the prefix cache --------------------------------------------------------------------------------------------------

LONG_PROMPT = [{"prompt": " ".join(f"w{3 + i % 29}" for i in range(100))}]
SMALL_BLOCKS = {"block_size": 32, "enable_prefix_caching": True}


class Calls(Callback):
    """The order of calls that reach vLLM."""

    NAMES = {"collective_rpc": "load", "reset_prefix_cache": "reset"}

    def __init__(self) -> None:
        self.made: list[str] = []

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        engine = trainer.strategy._engine
        for name, shown in self.NAMES.items():
            setattr(engine.llm, name, self._noting(shown, getattr(engine.llm, name)))
        engine._run = self._noting("generate", engine._run)

    def _noting(self, shown: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.made.append(shown)
            return call(*args, **kwargs)

        return noted


def fit_on_one_long_prompt(*callbacks: Callback) -> None:
    strategy = ColocatedVLLMStrategy(engine_args=SMALL_BLOCKS, sleep=False)  # vLLM's own sleep would clear it too
    data = tiny_data(LONG_PROMPT, prompts_per_step=1)
    fit(tiny_model(), strategy, data=data, callbacks=callbacks, max_steps=3)


def test_b34_prefix_cache_is_reset_after_every_push() -> None:
    calls, witness = Calls(), Witness()
    fit_on_one_long_prompt(calls, witness)
    push = ["load", "reset", "generate"]
    assert calls.made == [*push, "generate", *push, *push]  # the first is looked at by its logprobs too
    assert max(witness.gaps) < BAR


class CacheStays(Callback):
    def __init__(self, answer: bool) -> None:
        self.answer = answer

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        trainer.strategy._engine.llm.reset_prefix_cache = lambda: self.answer


def test_b34_a_cache_that_stays_would_show() -> None:
    witness = Witness()
    fit_on_one_long_prompt(witness, CacheStays(True))
    assert witness.gaps[0] < BAR
    assert min(witness.gaps[1:]) > FAR


def test_b34_a_cache_that_cannot_be_reset_is_an_error() -> None:
    with pytest.raises(WeightSyncError, match="prefix cache"):
        fit_on_one_long_prompt(CacheStays(False))


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps from ``tiny_model()``."""
    folder = tmp_path_factory.mktemp("checkpoint")
    saver = ModelCheckpoint(folder, save_last=True, every_n_train_steps=1)
    with cleaned_up():
        fit(tiny_model(), callbacks=[saver], max_steps=3, enable_checkpointing=True)
    return folder / "last.ckpt"


def logprobs_with(checkpoint: Path, witness: Witness) -> None:
    """Check that the first weights the engine ever got are the checkpoint's and not the initial model's."""
    saved = torch.load(checkpoint, weights_only=False)["state_dict"]
    pushed = witness.policies[witness.pushes[0]]
    held = dict(pushed.named_parameters())
    assert all(torch.equal(saved[f"policy.{name}"], p) for name, p in held.items())
    assert not torch.equal(held["model.norm.weight"], tiny_model().model.norm.weight)
    assert witness.gaps[0] < BAR


def test_b37_a_resumed_run_generates_with_the_checkpoints_weights(checkpoint: Path) -> None:
    witness = Witness()
    trainer = quiet_trainer(callbacks=[witness], max_steps=5)
    trainer.fit(RLModule(tiny_model(), lr=0.02), tiny_data(), ckpt_path=checkpoint)
    assert witness.versions == [(3, 3), (4, 4)]
    logprobs_with(checkpoint, witness)


@pytest.mark.parametrize("verb", ["validate", "predict"])
def test_b37_validate_and_predict_use_the_checkpoints_weights(checkpoint: Path, verb: str) -> None:
    witness = Witness()
    data = tiny_data(val_prompts=tiny_prompts(3), val_temperature=1.0)
    getattr(quiet_trainer(callbacks=[witness]), verb)(RLModule(tiny_model()), data, ckpt_path=checkpoint)
    logprobs_with(checkpoint, witness)


# -- invariant 3: ids are never made from text ------------------------------------------------------------------------


def forgetful_tokenizer() -> Any:
    """Decodes ids to text that encodes to other ids: special ones vanish, and w4 reads like w3."""
    tokenizer = tiny_tokenizer()
    decode = tokenizer.batch_decode
    tokenizer.batch_decode = lambda ids, **kw: [text.replace("w4", "w3") for text in decode(ids, **kw)]
    return tokenizer


class Sampled(Callback):
    """What vLLM itself says it was given and returned, next to what is trained on."""

    def __init__(self) -> None:
        self.engine: list[tuple[list[int], list[int]]] = []
        self.trained: list[tuple[list[int], list[int]]] = []

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        engine = trainer.strategy._engine
        run = engine._run

        def noted(prompts: Any, params: Any, seed: int) -> Any:
            outputs = run(prompts, params, seed)
            if params[0].prompt_logprobs is None:
                self.engine += [(o.prompt_token_ids, list(c.token_ids)) for o in outputs for c in o.outputs]
            return outputs

        engine._run = noted

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        for micro in batch.micro:
            for i, spans in enumerate(micro.sequences()):
                row = torch.cat([micro.input_ids[span] for span in spans])
                completion = micro.targets[micro.sequence_ids == i].tolist()
                assert row[-len(completion) :].tolist() == completion
                self.trained.append((row[: -len(completion)].tolist(), completion))


def test_trained_ids_are_the_sampled_ids() -> None:
    sampled, tokenizer = Sampled(), forgetful_tokenizer()
    data = tiny_data(tokenizer=tokenizer, group_size=8, max_tokens_per_micro_batch=40)
    fit(tiny_model(), data=data, callbacks=[sampled], max_steps=2)
    assert sorted(sampled.trained) == sorted(sampled.engine)
    assert {tuple(p) for p, _ in sampled.trained} <= {tuple(p.token_ids) for p in data._train}
    texts = tokenizer.batch_decode([c for _, c in sampled.engine], skip_special_tokens=True)
    again = [tokenizer.encode(text) for text in texts]
    assert sum(a != c for a, (_, c) in zip(again, sampled.engine, strict=True)) > 10  # else nothing was shown


# -- invariant 5: the sampling temperature is on both sides -----------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_b09_trainer_and_engine_agree_at_any_temperature(temperature: float) -> None:
    witness = Witness(temperature)
    _, trainer = fit(tiny_model(), data=tiny_data(temperature=temperature), callbacks=[witness], max_steps=2)
    assert max(witness.gaps) < BAR
    assert 0 <= trainer.callback_metrics["kl/mismatch"] < 1e-8
    assert trainer.callback_metrics["train/clip_frac"] == 0


def test_a_bfloat16_run_agrees_within_its_noise() -> None:
    witness = Witness()
    _, trainer = fit(tiny_model(), callbacks=[witness], max_steps=2, precision="bf16-mixed")
    assert witness.pushes == [0, 1]
    assert 0 < trainer.callback_metrics["kl/mismatch"] < 1e-3


# -- sampling ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def samples() -> dict[str, Any]:
    """Completions (ids only) of several calls of one engine."""
    made: dict[str, Any] = {}

    def body(strategy: Any) -> None:
        def sample(prompts: Any, **args: Any) -> Any:
            return ids_of(strategy.generate(prompts, sampling(num_completions=4, max_completion_tokens=16, **args)))

        made["step 1"] = sample([PROMPTS[0]] * 2, seed=1)
        made["step 2"] = sample([PROMPTS[0]] * 2, seed=2)
        made["step 1 again"] = sample([PROMPTS[0]] * 2, seed=1)
        made["seeded"] = sample(PROMPTS, seed=1, prompt_seeds=(7, 8, 9))
        made["seeded, backwards"] = sample(PROMPTS[::-1], seed=3, prompt_seeds=(9, 8, 7))
        made["seeded, alone"] = [sample([p], prompt_seeds=(s,))[0] for p, s in zip(PROMPTS, (7, 8, 9), strict=True)]
        made["unseeded"] = sample(PROMPTS, seed=1)
        made["unseeded, alone"] = [sample([p], seed=1)[0] for p in PROMPTS]
        made["no prompts"] = sample([], seed=1)
        engine = strategy._engine
        with pytest.raises(ValueError, match="(?i)length|long"):
            sample([PROMPTS[0], [5] * 10_000])
        made["left by a refused batch"] = engine.llm.llm_engine.get_num_unfinished_requests()
        made["vLLM's own"] = engine._run([PROMPTS[0]], [compat.sampling_params(n=3, max_tokens=5, **OUTPUT)], 0)

    with cleaned_up():
        with_engine(tiny_model(), body)
    return made


def all_differ(groups: list[list[list[int]]]) -> bool:
    flat = [tuple(ids) for group in groups for ids in group]
    return len(set(flat)) == len(flat)


def test_b32_samples_of_a_prompt_differ(samples: dict[str, Any]) -> None:
    assert all_differ(samples["step 1"])
    assert all_differ(samples["seeded"])


def test_b32_steps_differ_and_equal_seeds_repeat(samples: dict[str, Any]) -> None:
    assert all_differ(samples["step 1"] + samples["step 2"])
    assert samples["step 1"] == samples["step 1 again"]


def test_seeded_completions_do_not_depend_on_the_batch(samples: dict[str, Any]) -> None:
    assert samples["seeded"] == samples["seeded, backwards"][::-1] == samples["seeded, alone"]
    assert samples["unseeded"] != samples["unseeded, alone"]  # without seeds of their own they do


def test_a_batch_with_a_request_that_is_refused_leaves_none(samples: dict[str, Any]) -> None:
    assert samples["left by a refused batch"] == 0


def test_of_logprobs_only_the_sampled_tokens_are_kept(samples: dict[str, Any]) -> None:
    for sample in samples["vLLM's own"][0].outputs:
        assert len(sample.logprobs.logprobs) == len(sample.token_ids) > 0
        assert not sample.logprobs.token_ids


def test_a_rank_without_prompts_gets_no_completions(samples: dict[str, Any]) -> None:
    assert samples["no prompts"] == []


# -- invariant 8: the process is the trainer's ------------------------------------------------------------------------


def process_state() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": np.random.get_state()[1].tolist(),
        "python": random.getstate(),
        "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads,
        "process group": dist.group.WORLD,
        "default dtype": torch.get_default_dtype(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "gradients": torch.is_grad_enabled(),
        "frozen objects": gc.get_freeze_count(),
    }


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def run_engine(check: Callable[[str], None]) -> None:
    from lightrl.engines.vllm import VLLMEngine

    model = tiny_model()
    engine = VLLMEngine(model, local_rank=0, device=torch.device("cpu"), dtype=torch.float32, max_model_len=64)
    check("built")
    engine.load_weights(PolicyWeights(model, torch.float32))
    engine.generate(PROMPTS, sampling(), 0)
    check("generated")
    engine.generate(PROMPTS, sampling(prompt_seeds=(1, 2, 3)), 0)
    check("generated with seeds")
    engine.score(PROMPTS)
    check("scored")
    engine.sleep()
    engine.wake_weights()
    engine.wake_cache()
    check("slept")
    engine.close()
    engine.close()
    del engine
    gc.collect()
    check("closed")


def test_b32_an_engine_leaves_the_process_as_it_was(process_group: None) -> None:
    before = process_state()

    def check(when: str) -> None:
        after = process_state()
        assert {k: after[k] for k in after if after[k] != before[k]} == {}, when

    run_engine(check)


# -- the end -----------------------------------------------------------------------------------------------------------


def living_engines() -> list[Any]:
    gc.collect()
    return [o for o in gc.get_objects() if type(o).__name__ in ("LLM", "LLMEngine", "EngineCore")]


def test_an_engine_ends_with_its_run_and_another_may_follow() -> None:
    from vllm.distributed import parallel_state

    folders: list[str] = []
    starter = Callback()
    starter.on_fit_start = lambda trainer, module: folders.append(trainer.strategy._engine._config.name)
    module, trainer = fit(tiny_model(), callbacks=[starter], max_steps=1)
    assert trainer.strategy._engine is None
    assert parallel_state._WORLD is None
    assert living_engines() == []
    trainer.validate(module, tiny_data(val_prompts=tiny_prompts(3)), verbose=False)  # the same Trainer once more
    assert living_engines() == []
    assert [Path(folder).exists() for folder in folders] == [False]


def test_a_failed_run_leaves_no_engine() -> None:
    def broken(completion: str, ground_truth: Any) -> float:
        raise KeyError("boom")

    with pytest.raises(Exception, match="boom"):
        fit(tiny_model(), data=tiny_data(reward=broken), max_steps=1)
    assert living_engines() == []
