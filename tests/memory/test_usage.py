"""Predicted memory against XLA's own account of the compiled program."""

import peaks
import pytest
from steps import known, models, written
from steps.step import MESHES, STYLES

STEPS = models.STEPS | written.STEPS
HALF = {
    "gpt, 16 bits": models.of_gpt(dtype="bfloat16"),
    "gpt, 16 bits, scanned": models.of_gpt(dtype="bfloat16", scan=True),
    "gpt, 16 bits, scanned, remat": models.of_gpt(dtype="bfloat16", scan=True, remat=True),
    "gpt, remat": models.of_gpt(remat=True, layers=4),
}

WITHIN = 0.1


@peaks.NEWEST
@pytest.mark.parametrize("name", ["experts", "lstm", "gpt, 16 bits, scanned, remat", "gpt, remat"])
def test_prediction_is_near(name):
    peak = peaks.of_step((STEPS | HALF)[name]("weights", MESHES[-1]), MESHES[-1])
    assert abs(peak.ratio - 1) <= WITHIN, peak


@peaks.NEWEST
@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(MESHES)))
@pytest.mark.parametrize("name", STEPS | HALF)
def test_every_prediction_is_near(name, number):
    for style in STYLES:
        peak = peaks.of_step((STEPS | HALF)[name](style, MESHES[number]), MESHES[number])
        bound, why = known.PEAKS.get((name, number, style), (WITHIN, ""))
        assert abs(peak.ratio - 1) <= bound, (peak, style, why)


@peaks.NEWEST
@pytest.mark.parametrize("wrap", ["plain", "remat"])
def test_a_barrier_keeps_what_is_recomputed_out_of_the_forward_pass(wrap):
    make = models.of_gpt(layers=4, remat=wrap == "remat")
    peak = peaks.of_step(make("batch", {"data": 8}), {"data": 8})
    assert abs(peak.ratio - 1) <= WITHIN, peak
