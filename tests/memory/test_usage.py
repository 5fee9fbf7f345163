"""Predicted memory against the compiled program's `memory_analysis()`."""

import pytest
from support import peak_memory
from support.train_steps import hand_written, known_misses, small_models
from support.train_steps.step import MESHES, STYLES

STEPS = small_models.STEPS | hand_written.STEPS
HALF = {
    "gpt, 16 bits": small_models.gpt_step(dtype="bfloat16"),
    "gpt, 16 bits, scanned": small_models.gpt_step(dtype="bfloat16", scan=True),
    "gpt, 16 bits, scanned, remat": small_models.gpt_step(dtype="bfloat16", scan=True, remat=True),
    "gpt, remat": small_models.gpt_step(remat=True, layers=4),
}

WITHIN = 0.1


@peak_memory.newest_jax_only
@pytest.mark.parametrize("name", ["experts", "lstm", "gpt, 16 bits, scanned, remat", "gpt, remat"])
def test_prediction_is_near(name):
    peak = peak_memory.peak_of_step((STEPS | HALF)[name]("weights", MESHES[-1]), MESHES[-1])
    assert abs(peak.ratio - 1) <= WITHIN, peak


@peak_memory.newest_jax_only
@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(MESHES)))
@pytest.mark.parametrize("name", STEPS | HALF)
def test_every_prediction_is_near(name, number):
    for style in STYLES:
        peak = peak_memory.peak_of_step((STEPS | HALF)[name](style, MESHES[number]), MESHES[number])
        bound, why = known_misses.PEAKS.get((name, number, style), (WITHIN, ""))
        assert abs(peak.ratio - 1) <= bound, (peak, style, why)


@peak_memory.newest_jax_only
@pytest.mark.parametrize("wrap", ["plain", "remat"])
def test_a_barrier_keeps_rematerialised_ops_out_of_the_forward_pass(wrap):
    make = small_models.gpt_step(layers=4, remat=wrap == "remat")
    peak = peak_memory.peak_of_step(make("batch", {"data": 8}), {"data": 8})
    assert abs(peak.ratio - 1) <= WITHIN, peak
