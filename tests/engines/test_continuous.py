"""The engine that servers step: what it refuses leaves it as it was."""

import pytest

from lightrl.engines import compat
from lightrl.engines.continuous import ContinuousEngine
from lightrl.engines.messages import EngineSpec, Request
from lightrl.engines.vllm import name_architecture
from tests.helpers.fits import cleaned_up
from tests.helpers.tiny import VOCAB, tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_requests_that_cannot_be_served_are_value_errors_and_the_engine_goes_on() -> None:
    model = tiny_model()
    name_architecture(model)
    compat.import_vllm()
    with cleaned_up(), compat.process_kept():
        engine = ContinuousEngine(EngineSpec(model.config.to_dict(), "float32", 32))
        try:
            for request, said in [
                (Request("a", [], 4), "empty"),
                (Request("b", [5] * 40, 4), "maximum context length is 32"),
                (Request("c", [5], 0), "max_tokens must be at least 1"),
                (Request("d", [5], 4, temperature=-1.0), "temperature must be non-negative"),
                (Request("e", [5, VOCAB], 4), f"token id {VOCAB} is outside the vocabulary of {VOCAB}"),
                (Request("f", [-1], 4), "token id -1 is outside"),
            ]:
                with pytest.raises(ValueError, match=said):
                    engine.submit(request)
                assert not engine.busy
            with pytest.raises(ValueError, match="outside the vocabulary"):
                engine.score([[5, 6], [7, VOCAB]])
            assert [len(s) for s in engine.score([[5, 6, 7], [8, 9]])] == [2, 1]
            assert not engine.busy
            engine.submit(Request("g", [5], 4))
            outputs = []
            while engine.busy:
                outputs += engine.step()
            assert [o.id for o in outputs] == ["g"]
        finally:
            engine.close()
