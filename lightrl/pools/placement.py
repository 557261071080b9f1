"""Which GPUs engines get, and who starts them there."""

from __future__ import annotations

import os
from typing import Literal

import torch

from lightrl.pools.launchers import FixedLauncher, Launcher, LocalLauncher


def make_launcher(
    pool: Literal["local", "ray"] | list[str],
    num_engines: int,
    gpus_each: int,
    trainer_devices: list[int],
    rollout_devices: list[int] | None,
    timeout: float,
) -> Launcher:
    """Return what starts engines.

    Args:
        pool: see :class:`lightrl.strategies.AsyncVLLMStrategy`.
        num_engines: how many.
        gpus_each: of each engine; 0: engines run on CPUs.
        trainer_devices: the GPUs that the trainer uses on this host.
        rollout_devices: the GPUs of engines on this host; None: those that the trainer does not use.
        timeout: seconds that Ray may take to find room for an engine.

    Raises:
        ValueError: there are too few GPUs.
    """
    if pool == "ray":
        from lightrl.pools.ray import RayLauncher

        launcher: Launcher = RayLauncher(num_engines, num_gpus=gpus_each, timeout=timeout)
        return launcher
    if pool != "local":
        return FixedLauncher(list(pool))
    devices = _deal(num_engines, gpus_each, trainer_devices, rollout_devices) if gpus_each else None
    return LocalLauncher(num_engines, devices)


def _deal(num_engines: int, gpus_each: int, used: list[int], wanted: list[int] | None) -> list[list[str]]:
    """Return, for each engine, the GPUs that it sees, by the machine's numbers or their UUIDs."""
    devices = [i for i in range(torch.cuda.device_count()) if i not in used] if wanted is None else wanted
    if len(devices) < num_engines * gpus_each:
        raise ValueError(
            f"{num_engines} engines of tensor_parallel_size={gpus_each} need {num_engines * gpus_each} GPUs; left "
            f"beside the trainer are {devices}. Give the trainer fewer (Trainer(devices=...)), or say "
            "rollout_devices=[...]"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    return [[names[d] for d in devices[i * gpus_each : (i + 1) * gpus_each]] for i in range(num_engines)]
