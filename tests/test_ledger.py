"""Out of memory, the error says in which phase, and who holds what."""

from typing import Any

import pytest
import torch

from lightrl import RLModule
from lightrl.engines.hf import HFEngine
from lightrl.ledger import memory_ledger
from tests.helpers.tiny import tiny_model, tiny_prompts
from tests.helpers.training import quiet_trainer, tiny_data

SIZE = sum(p.nbytes for p in tiny_model().parameters()) / 2**30


def test_memory_counts_once_and_on_its_device_only() -> None:
    weight = torch.zeros(2**28, dtype=torch.uint8)  # never touched, so never there
    table = memory_ledger({"a": [weight, weight[:5], None], "b": [weight]}, torch.device("cpu"))
    assert [line.split()[-2] for line in table.splitlines()] == ["0.250", "0.000"]
    assert "0.000 GiB" in memory_ledger({"a": [weight]}, torch.device("meta"))


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA Error: out of memory")]
)
def test_out_of_memory_in_the_swap_names_it_and_prints_the_ledger(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device without memory cannot be had here: the engine raises as one would."""
    trainer, module = quiet_trainer(max_steps=3), RLModule(tiny_model(), kl_coef=0.1)

    def no_memory(engine: HFEngine, weights: Any) -> None:
        if module.global_step == 1:
            raise error

    monkeypatch.setattr(HFEngine, "load_weights", no_memory)
    with pytest.raises(RuntimeError, match="out of memory") as raised:
        trainer.fit(module, tiny_data(tiny_prompts(12)))
    (note,) = raised.value.__notes__
    first, *rows = note.splitlines()
    assert first == "Out of memory in phase 'push', with on cpu:"
    told = {" ".join(row.split()[:-2]): float(row.split()[-2]) for row in rows}
    assert told["weights"] == pytest.approx(SIZE, abs=6e-4)
    assert told["optimizer state"] == pytest.approx(2 * SIZE, abs=6e-4)
    assert told["reference"] == pytest.approx(SIZE, abs=6e-4)
