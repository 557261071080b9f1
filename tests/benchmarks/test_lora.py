"""The verdicts of the LoRA benchmarks on figures made up for them."""

from benchmarks import lora, lora_sync


def row(sync: int, **figures: float) -> dict[str, float]:
    return {"sync": sync, "changed": 0, "tensors": 25, "gap": 1e-6, "moved": 0.1, "ms": 30.0} | figures


def test_a_sync_that_changes_the_base_or_misses_the_engine_is_short() -> None:
    rows = [row(i + 1) for i in range(200)]
    assert lora_sync.judge(rows).ok
    assert not lora_sync.judge([*rows[:-1], row(200, changed=1)]).ok
    assert not lora_sync.judge([*rows[:9], row(10, gap=2e-4), *rows[10:]]).ok
    assert not lora_sync.judge(rows[:199]).ok
    assert not lora_sync.judge([row(i + 1, moved=1e-5) for i in range(200)]).ok, "an engine that is never pushed passes"


def test_each_bar_of_the_lora_run_counts() -> None:
    good = {"before": 0.6, "after": 0.9, "share": 0.03, "size": 0.04, "differ": 0}
    assert lora.judge(good).ok
    for wrong in ({"after": 0.6}, {"share": 0.05}, {"size": 0.1}, {"differ": 1}):
        result = lora.judge(good | wrong)
        assert not result.ok
        assert "short" in result.table
