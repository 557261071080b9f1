"""Completions that are not whole yet: what there is of them goes into a checkpoint and is gone on from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightrl.engines.messages import Output, float_tensor
from lightrl.engines.session import Request as Turn
from lightrl.rng import derive_seed
from lightrl.types import Completion


@dataclass(slots=True)
class Part:
    """What there is of one completion."""

    completion: Completion
    ended: bool


class Parts:
    """Of each group that is under way, by the number of its ticket: what there is of its completions, by place."""

    def __init__(self) -> None:
        self._parts: dict[int, dict[int, Part]] = {}

    def of(self, number: int) -> dict[int, Part]:
        """Return the parts of a group."""
        return self._parts.setdefault(number, {})

    def forget(self, number: int) -> None:
        """A group is whole, or is to be sampled from the start."""
        self._parts.pop(number, None)

    def oldest(self, number: int) -> int | None:
        """Return the oldest policy version among a group's tokens; None where it has none."""
        versions = [int(p.completion.policy_versions.min()) for p in self.of(number).values() if p.completion.token_ids]
        return min(versions, default=None)

    def rest(self, number: int, turns: list[Turn]) -> list[Turn]:
        """Return what is left to sample of a group's completions."""
        left = []
        for turn in turns:
            part = self.of(number).get(turn.key)
            if part is None:
                left.append(turn)
            elif not part.ended:
                ids = part.completion.token_ids
                if len(ids) >= turn.max_tokens:  # the run goes on with a smaller budget
                    del self.of(number)[turn.key]
                    left.append(turn)
                    continue
                # Another seed: the same one would draw again what it drew for the tokens that are there.
                seed = derive_seed(turn.seed, len(ids))
                budget = turn.max_tokens - len(ids)
                left.append(replace(turn, prompt_ids=turn.prompt_ids + ids, max_tokens=budget, seed=seed))
        return left

    def add(self, output: Output, *, ended: bool) -> None:
        """Note what an engine sampled for the request ``"NUMBER.PLACE.SERIAL"``."""
        number, place, _ = map(int, output.id.split("."))
        self.of(number)[place] = Part(self._joined(number, place, output), ended)

    def _joined(self, number: int, place: int, output: Output) -> Completion:
        part, more = self.of(number).get(place), completion(output)
        if part is None:
            return more
        before = part.completion
        return Completion(
            before.token_ids + more.token_ids,
            torch.cat([before.logprobs, more.logprobs]),
            torch.cat([before.policy_versions, more.policy_versions]),
            more.truncated,
        )

    def state(self, numbers: set[int], running: Sequence[Output]) -> list[dict[str, Any]]:
        """Return the parts of groups ``numbers``, with what runs at this moment, as plain builtins and tensors."""
        now = Parts()
        now._parts = {n: dict(parts) for n, parts in self._parts.items() if n in numbers}
        for output in running:
            number, place, _ = map(int, output.id.split("."))
            known = now.of(number).get(place) if number in numbers else None
            if number in numbers and output.token_ids and not (known and known.ended):
                now.add(output, ended=False)
        return [_to_state(n, place, part) for n, parts in now._parts.items() for place, part in parts.items()]

    def restore(self, state: list[dict[str, Any]]) -> None:
        """Go on from what :meth:`state` returned."""
        for entry in state:
            found = Completion(entry["token_ids"], entry["logprobs"], entry["policy_versions"], entry["truncated"])
            self.of(entry["number"])[entry["place"]] = Part(found, entry["ended"])


def _to_state(number: int, place: int, part: Part) -> dict[str, Any]:
    c = part.completion
    state = {"number": number, "place": place, "ended": part.ended, "token_ids": c.token_ids, "truncated": c.truncated}
    return state | {"logprobs": c.logprobs, "policy_versions": c.policy_versions}


def completion(output: Output) -> Completion:
    """Return what an engine process sent as what every engine returns."""
    versions, counts = zip(*output.versions, strict=True) if output.versions else ((), ())
    spans = torch.repeat_interleave(torch.tensor(versions, dtype=torch.int64), torch.tensor(counts, dtype=torch.int64))
    return Completion(output.token_ids, float_tensor(output.logprobs), spans, output.truncated)
