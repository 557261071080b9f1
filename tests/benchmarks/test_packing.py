"""The verdicts of the benchmarks of packing, prefix sharing and cuts."""

from benchmarks import gradient_cuts, packing, prefix


def test_prefix_needs_both_speed_and_the_same_gradient() -> None:
    seconds = {"not shared": 5.0, "shared": 2.0}
    assert prefix.judge(seconds, 1e-6, 4608).ok
    assert prefix.judge(seconds, 1e-6, 4608).figure.startswith("2.50x")
    assert not prefix.judge(seconds | {"shared": 2.01}, 1e-6, 4608).ok
    assert not prefix.judge(seconds, 2e-5, 4608).ok


def test_packing_is_judged_by_the_padding_of_its_draw() -> None:
    assert packing.judge({"padded": 1.8, "packed": 1.0}, 1e-7, 100, 190, 200).ok
    assert not packing.judge({"padded": 1.79, "packed": 1.0}, 1e-7, 100, 190, 200).ok
    assert not packing.judge({"padded": 1.8, "packed": 1.0}, 2e-5, 100, 190, 200).ok


def test_the_worst_cut_counts() -> None:
    good = {"plain": dict.fromkeys(gradient_cuts.AGGREGATIONS, 1e-7)}
    assert gradient_cuts.judge({1: good, 2: good}).ok
    bad = gradient_cuts.judge({1: good, 2: {"plain": good["plain"] | {"constant": 2e-5}}})
    assert not bad.ok
    assert bad.figure == "2.0e-05 relative error"
