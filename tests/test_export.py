"""The exported folder is what an engine and transformers load, with the trained policy's logprobs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrl import RLModule
from lightrl import export as exporting
from lightrl.callbacks import RolloutCheckpoint
from lightrl.export import export, main
from tests.helpers.tiny import by_hand, save_tiny, tiny_model
from tests.helpers.training import quiet_trainer, tiny_data

pytestmark = pytest.mark.slow

VLLM = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

if __name__ == "__main__":
    llm = LLM(sys.argv[1], enforce_eager=True, kv_cache_memory_bytes=2**27, dtype="float32")
    ids = json.loads(sys.argv[2])
    (out,) = llm.generate(TokensPrompt(prompt_token_ids=ids), SamplingParams(max_tokens=1, prompt_logprobs=0))
    print(json.dumps([place[t].logprob for place, t in zip(out.prompt_logprobs[1:], ids[1:])]))
"""
PROMPT, COMPLETION = [5, 9, 17], [4, 8, 11, 2]


def trained(folder: Path, model: Any, **args: Any) -> RLModule:
    module = RLModule(model, **{"lr": 1e-2} | args)
    saving = RolloutCheckpoint(folder, every_n_steps=2, export=True)
    quiet_trainer(max_steps=2, callbacks=[saving], enable_checkpointing=True).fit(module, tiny_data())
    return module


@pytest.mark.parametrize("args", [{}, {"lora": {"r": 4, "init_lora_weights": False}}])
def test_transformers_loads_it_with_the_trained_logprobs(args: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = save_tiny(tmp_path / "model")
    module = trained(tmp_path, model, **args)
    folder = tmp_path / "step=2"
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    right = by_hand(module.policy, PROMPT, COMPLETION)
    torch.testing.assert_close(by_hand(loaded, PROMPT, COMPLETION), right, rtol=0, atol=1e-6)
    assert (by_hand(tiny_model(), PROMPT, COMPLETION) - right).abs().max() > 1e-3
    assert AutoTokenizer.from_pretrained(folder).encode("w5 w9") == [5, 9]
    assert loaded.generation_config.eos_token_id == 2


@pytest.mark.vllm
def test_vllm_loads_it_with_the_trained_logprobs(tmp_path: Path) -> None:
    module = trained(tmp_path, save_tiny(tmp_path / "model"))
    ids = PROMPT + COMPLETION
    command = [sys.executable, "-c", VLLM, str(tmp_path / "step=2"), json.dumps(ids)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.tensor(json.loads(done.stdout.splitlines()[-1]))[-len(COMPLETION) :]
    torch.testing.assert_close(found, by_hand(module.policy, PROMPT, COMPLETION), rtol=0, atol=1e-4)


def test_a_checkpoint_is_exported_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = trained(tmp_path, save_tiny(tmp_path / "model"))
    main([str(tmp_path / "step=2.ckpt"), str(tmp_path / "out"), "--dtype", "bfloat16"])
    assert capsys.readouterr().out.strip() == str(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    weight = module.policy.model.embed_tokens.weight
    assert torch.equal(loaded.model.embed_tokens.weight, weight.full_tensor().to(torch.bfloat16))


@pytest.mark.parametrize(
    ("name", "message"),
    [("gone.ckpt", "gone.ckpt is not there"), ("notes.md", "notes.md is no checkpoint, or not all of one")],
)
def test_what_is_no_checkpoint_is_one_error(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.md").write_text("not a checkpoint")
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / name), str(tmp_path / "out")])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_large_models_are_cut_into_files_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "_SHARD_BYTES", 100_000)
    module = RLModule(save_tiny(tmp_path / "model"))
    module.configure_model()
    export(module, tmp_path / "out")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    names = [name for f in files for name in safe_open(f, "pt").keys()]  # noqa: SIM118
    assert sorted(names) == sorted(n for n, _ in module.policy.named_parameters())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(by_hand(loaded, PROMPT, COMPLETION), by_hand(tiny_model().eval(), PROMPT, COMPLETION))


def test_a_dtype_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype='int8' is no floating-point type"):
        export(RLModule(tiny_model()), tmp_path / "out", dtype="int8")


def test_a_folder_of_other_things_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match="holds something else than a model"):
        export(tmp_path / "a.ckpt", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
