"""A heartbeat beside the work: ends this process when it hangs, or when another rank has failed, hangs or is gone.

A collective cannot tell a long generation from a dead rank, and a rank that waits in one cannot be told anything. So
each rank has a thread that says through a store of its own what the rank is doing, and looks at what others say.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightrl.distributed import all_objects, rank, world_size
from lightrl.phases import Phases
from lightrl.processes import host_id, is_alive

_POLL, _STORE_SECONDS, _END_SECONDS, _UNWIND_SECONDS = 0.5, 10.0, 5.0, 8.0
_SETTLE_SECONDS = 3.0
_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
_STACK_LINES, _TOLD = 16, 6000


@dataclass(frozen=True, slots=True)
class Failure:
    """The first that went wrong."""

    rank: int
    kind: str
    """``"raised"``, ``"late"``, ``"gone"`` or ``"ended"``."""
    text: str
    """What became of the rank."""

    def __str__(self) -> str:
        return f"rank {self.rank} {self.text}"


class Watch:
    """Watches over the ranks of a run, from :meth:`start` to :meth:`stop`.

    Args:
        phases: of this rank's main thread.
        address: host that rank 0 runs on.
        silence: seconds without a heartbeat after which a rank counts as gone.
        last_words: called before the process is ended, with a few seconds' time.
    """

    def __init__(self, phases: Phases, address: str, silence: float, last_words: Callable[[], None]) -> None:
        self.phases, self.silence, self.last_words = phases, silence, last_words
        self.step = 0
        self.rank, self.ranks = rank(), world_size()
        self._store = _make_store(address) if self.ranks > 1 else None
        self._host, self._parent, self._beats = host_id(), os.getppid(), 0
        self._seen: dict[int, tuple[int, float]] = {}
        self._turns = 0
        self._last_beats: dict[int, dict[str, Any] | None] = {}
        self._stopping, self._raised = threading.Event(), threading.Event()
        self._must_end: tuple[float, str] | None = None
        self._first: Failure | None = None
        self._thread = threading.Thread(target=self._run, name="lightrl-watch", daemon=True)

    def start(self) -> None:
        """Begin."""
        self.phases.start()
        self._thread.start()
        if self.rank:
            threading.Thread(target=self._mind_store, name="lightrl-watch-store", daemon=True).start()

    def raised(self, error: BaseException) -> None:
        """Tell the others that this rank's main thread goes down with ``error``; note on it what failed before."""
        if self._store is None or isinstance(error, SystemExit) or self._raised.is_set():
            return
        self._raised.set()
        first = self._first_cause(error)
        if (first.rank, first.kind) != (self.rank, "raised"):
            error.add_note(f"[rank {self.rank}] the run ended because {first}")

    def _first_cause(self, error: BaseException) -> Failure:
        if self._first is not None:  # the store, which said it, may have ended since
            return self._first
        lines = "".join(traceback.format_exception(error))[-_TOLD:].rstrip()
        own = Failure(self.rank, "raised", f"failed first, with\n{lines}")
        deadline = time.monotonic() + (_SETTLE_SECONDS if _is_of_collective(error) else 0)
        try:
            while (found := self._failure() or self._peer_gone()) is None and time.monotonic() < deadline:
                time.sleep(_POLL / 5)
            return self._report(found or own)
        except RuntimeError as lost:
            return _store_lost(lost)

    def end_within(self, seconds: float, reason: str) -> None:
        """End the process after ``seconds``, if it has not ended by itself."""
        self._must_end = (time.monotonic() + seconds, reason)

    def stop(self) -> None:
        """End the watch: what follows is not a part of the run any more."""
        self._leave(_END_SECONDS)
        self._stopping.set()
        self._thread.join(_STORE_SECONDS)

    # -- on the watch's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.wait(_POLL):
            try:
                failure = self._turn()
                self._turns += 1
            except RuntimeError as error:  # DistError is one
                failure = _store_lost(error)
            if self._stopping.is_set():
                return
            if failure is not None:
                self._first = failure
                self._end(failure)
                return

    def _turn(self) -> Failure | None:
        if self._must_end and time.monotonic() > self._must_end[0]:
            return self._report(Failure(self.rank, "ended", self._must_end[1]))
        late = self.phases.late()
        if self._store is None:
            return Failure(self.rank, "late", f"is {late}") if late else None
        self._publish()
        if found := self._failure():
            return found
        if late:
            return self._report(self._waited_for(late))
        if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != self._parent:
            return self._report(Failure(self.rank, "gone", "lost the torchrun agent that started it"))
        if self.rank and self._store.check(["done/0"]):
            self._stopping.set()  # its store may end any moment
            return None
        gone = self._peer_gone()
        return self._report(gone) if gone else None

    def _peer_gone(self) -> Failure | None:
        """Rank 0 looks after the others, and they after rank 0."""
        assert self._store is not None
        for peer in range(1, self.ranks) if self.rank == 0 else (0,):
            if not self._store.check([f"done/{peer}"]) and (how := self._missing(peer)):
                return Failure(peer, "gone", how)
        return None

    def _mind_store(self) -> None:
        """Notice a rank 0 that is frozen: whoever asks its store then waits without end."""
        turns, quiet = -1, 0.0
        while not self._stopping.wait(_POLL):
            # Turns of this thread, not seconds: where the interpreter stands still, so does the count.
            quiet, turns = (quiet + _POLL if turns == self._turns else 0.0), self._turns
            if quiet > max(self.silence, _STORE_SECONDS):
                self._store = None
                who = _put_down(self._last_beats.get(0), self._host)
                self._first = Failure(0, "gone", f"{who}has answered nothing for {quiet:.0f} s")
                self._end(self._first)
                return

    def _publish(self) -> None:
        assert self._store is not None
        now = self.phases.now
        self._beats += 1
        beat = {"beat": self._beats, "number": now.number, "phase": now.name, "seconds": now.seconds}
        beat |= {"step": self.step, "pid": os.getpid(), "host": self._host, "waits": self._waits()}
        self._store.set(f"beat/{self.rank}", json.dumps(beat))

    def _beat(self, peer: int) -> dict[str, Any] | None:
        assert self._store is not None
        key = f"beat/{peer}"
        self._last_beats[peer] = json.loads(self._store.get(key)) if self._store.check([key]) else None
        return self._last_beats[peer]

    def _missing(self, peer: int) -> str | None:
        """Say how a rank is missing, if it is; one that is only silent is killed where that can be done."""
        beat = self._beat(peer)
        number = beat["beat"] if beat else 0
        if self._seen.get(peer, (-1, 0.0))[0] != number:
            self._seen[peer] = number, time.monotonic()
        here = beat is not None and beat["host"] == self._host
        what = f"in phase {beat['phase']!r} of step {beat['step']}" if beat else "before its first heartbeat"
        if here and beat is not None and not is_alive(beat["pid"]):
            return f"(process {beat['pid']}) ended without a word, {what}: killed, perhaps for its memory"
        if time.monotonic() - self._seen[peer][1] < self.silence:
            return None
        return f"{_put_down(beat, self._host)}has given no sign of life for {self.silence:.0f} s, {what}"

    def _waited_for(self, late: str) -> Failure:
        """Name the rank that has come least far: the others only wait for it."""
        beats = {r: b for r in range(self.ranks) if (b := self._beat(r))}
        slowest = min(beats, key=lambda r: (beats[r]["number"], beats[r]["waits"], r != self.rank))
        table = [f"  rank {r}: {b['phase']!r} for {b['seconds']:.0f} s, step {b['step']}" for r, b in beats.items()]
        elsewhere = f"in phase {beats[slowest]['phase']!r} while rank {self.rank} is {late}"
        told = late if slowest == self.rank else elsewhere
        return Failure(slowest, "late", "\n".join([f"hangs: it is {told}", *table]))

    def _report(self, failure: Failure) -> Failure:
        """Say what failed, unless something has before; return what was first."""
        if self._store is None:
            return failure
        first = self._store.compare_set("failure", "", json.dumps(asdict(failure)))
        return Failure(**json.loads(first))

    def _failure(self) -> Failure | None:
        assert self._store is not None
        return Failure(**json.loads(self._store.get("failure"))) if self._store.check(["failure"]) else None

    def _leave(self, seconds: float) -> None:
        """Say that this rank is done; rank 0 waits for the others, whose store ends with its process."""
        with suppress(RuntimeError):
            if self._store is not None:
                self._store.set(f"done/{self.rank}", "")
                deadline = time.monotonic() + seconds
                while self.rank == 0 and not self._all_gone() and time.monotonic() < deadline:
                    time.sleep(_POLL / 5)

    def _all_gone(self) -> bool:
        assert self._store is not None
        return all(self._store.check([f"done/{r}"]) or self._missing(r) for r in range(1, self.ranks))

    # -- the end ------------------------------------------------------------------------------------------------------

    def _end(self, failure: Failure) -> None:
        own = failure.kind == "raised" and failure.rank == self.rank
        if not own and not self._raised.is_set():
            _say(f"[rank {self.rank}] this run ends: {failure}")
            if failure.rank == self.rank and failure.kind == "late":
                _say(f"[rank {self.rank}] where it hangs:\n{self._stack()}")
        if self._raised.wait(_END_SECONDS if failure.kind == "raised" else 0):
            self._unwind()
        if self._stopping.is_set():
            return
        words = threading.Thread(target=self.last_words, daemon=True)
        words.start()
        words.join(_END_SECONDS / 2)
        self._leave(_END_SECONDS / 2)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def _unwind(self) -> None:
        """Let the main thread, which goes down by itself, do so; return if it does not get there."""
        deadline = time.monotonic() + _UNWIND_SECONDS
        while not self._stopping.wait(_POLL):
            self._turns += 1  # it waits for the main thread, not for the store
            if time.monotonic() > deadline and (self.phases.now.name != "save" or self.phases.late()):
                return

    def _waits(self) -> bool:
        """Whether the main thread is in a collective, and so most likely waits for another rank."""
        frame = sys._current_frames().get(self.phases.thread)
        while frame is not None:
            if frame.f_code.co_filename.endswith(_COLLECTIVES):
                return True
            frame = frame.f_back
        return False

    def _stack(self) -> str:
        frame = sys._current_frames().get(self.phases.thread)
        return "\n".join("".join(traceback.format_stack(frame)).splitlines()[-_STACK_LINES:]) if frame else ""


def _make_store(address: str) -> Any:
    """Return a store that rank 0's process keeps, apart from the one that collectives are set up through."""
    store: Any = dist.TCPStore  # type: ignore[attr-defined]
    how: Any = {"wait_for_workers": False, "timeout": timedelta(seconds=_STORE_SECONDS)}
    server = store(address, 0, is_master=True, **how) if rank() == 0 else None
    port = all_objects(server.port if server is not None else None)[0]
    return server or store(address, port, is_master=False, **how)


def _put_down(beat: dict[str, Any] | None, host: str) -> str:
    """Kill the process of a heartbeat, if it is on this host: it would never end. Return what to call it."""
    if beat is None:
        return ""
    if beat["host"] == host:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(beat["pid"], signal.SIGKILL)
    return f"(process {beat['pid']}) "


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _store_lost(error: Exception) -> Failure:
    return Failure(0, "gone", f"(the one with the store) has ended: the store does not answer ({type(error).__name__})")


def _is_of_collective(error: BaseException) -> bool:
    """Whether an error may be but the echo of what befell another rank."""
    words = str(error).lower()
    return isinstance(error, dist.DistError) or any(w in words for w in ("gloo", "nccl", "connection", "peer"))
