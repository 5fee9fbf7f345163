"""Agreement with Shardy on train steps: the share of values that agree, and why the others do not."""

import pytest
from support import shardy_oracle
from support.train_steps import hand_written, small_models
from support.train_steps.step import MESHES, STYLES

import sharding
from sharding.cost import read_compiled

STEPS = small_models.STEPS | hand_written.STEPS

MISSED = "Shardy replicates the first slice of a backward loop although its stacked array is sharded"
LATER = "JAX 0.10.2 calls a loop's body as a function, which Shardy propagates into later; so do we, on every release"
KNOWN = {
    "lstm": (0.96, f"{MISSED}; {LATER}"),
    "u-net": (
        0.997,
        "JAX 0.10.2 counts a kernel's own dims as 1, newer ones as their sizes; so do we, on every release",
    ),
}
"""Step -> (minimum share of values that agree over all meshes and styles, why the others do not)."""


def agreement(name, meshes):
    """Counts the values that either engine shards, over styles and meshes, and lists those that differ."""
    counted, lines = 0, []
    for sizes in meshes:
        for style in STYLES:
            found = shardy_oracle.compare_step(STEPS[name](style, sizes), sizes)
            counted += found.num_sharded
            lines += [f"{sizes}, {style}: {line}" for line in found.differences]
    return counted, lines


@pytest.mark.parametrize("name", ["gpt, scanned, remat", "experts"])
def test_every_value_agrees(name):
    counted, lines = agreement(name, MESHES[-1:])
    assert counted > 200 and not lines, lines


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_every_value_agrees_except_known_differences(name):
    counted, lines = agreement(name, MESHES)
    share, why = KNOWN.get(name, (1.0, "no known difference"))
    assert counted > 800
    assert 1 - len(lines) / counted >= share, f"{len(lines)} of {counted}, {why}:\n" + "\n".join(lines[:20])


def compiled_bytes(step, sizes, engine):
    """Returns the bytes of all collectives of a step compiled with the specs of one engine."""
    with sharding.mesh(sizes):
        jitted = sharding.jit(step.run, in_shardings=step.specs, donate_argnums=0, engine=engine, policy="shardy")
        return read_compiled(jitted.lower(*step.args).compile()).total_bytes


@pytest.mark.slow
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", KNOWN)
def test_known_differences_communicate_no_more_than_shardy(name, sizes):
    step = STEPS[name]("weights", sizes)
    ours, theirs = (compiled_bytes(step, sizes, engine) for engine in ("sharding", "shardy"))
    assert 0 < ours <= theirs
