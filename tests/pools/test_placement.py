"""Which GPUs engines get."""

import pytest
import torch

from lightrl.pools.launchers import LocalLauncher
from lightrl.pools.placement import make_launcher


@pytest.mark.parametrize("names", [["4", "5", "6"], ["GPU-a", "GPU-b", "GPU-c"]])
def test_engines_get_the_gpus_that_the_trainer_leaves_by_the_names_that_the_process_sees(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(names))
    launcher = make_launcher("local", 2, 1, [0], None, 1.0)
    assert isinstance(launcher, LocalLauncher)
    assert launcher.devices == [[names[1]], [names[2]]]
    assert launcher._environment(1)["CUDA_VISIBLE_DEVICES"] == names[2]
    launcher.close(0.0)
