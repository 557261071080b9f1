"""What tests of an engine's socket share."""

from collections.abc import Iterator

import pytest

from lightrl.engines import secure
from tests.helpers.served import HANDSHAKE_SECONDS, Served


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(secure, "_HANDSHAKE_MS", int(1000 * HANDSHAKE_SECONDS))
    served = Served()
    yield served
    served.close()
    assert not served.thread.is_alive()
    assert served.engine.closed
