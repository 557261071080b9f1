"""The process that an engine works for."""

from __future__ import annotations

import os
import threading
import time

_SECONDS = 0.5


def end_with_parent(pid: int, run_folder: str | None) -> None:
    """End this process within a second of its parent's end, however that came about."""

    def watch() -> None:
        while os.getppid() == pid:
            time.sleep(_SECONDS)
        if run_folder is not None:
            import shutil

            shutil.rmtree(run_folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="lightrl-parent-watch", daemon=True).start()
