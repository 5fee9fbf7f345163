"""Our pass against Shardy's over whole train steps: how many values agree, and why the others don't."""

import jax
import oracle
import pytest
from steps.models import STEPS as MODELS
from steps.step import MESHES, STYLES

import sharding
from sharding import P
from sharding.graph import Pin
from sharding.spec import from_partition_spec


def agreement(make, style, sizes):
    """How far both passes agree on one step."""
    with sharding.mesh(sizes, devices=8) as mesh:
        step = make(style, sizes)
        program = jax.jit(step.run).trace(*step.args).jaxpr
        return oracle.compare(program, list(pins(step, sizes)), mesh)


def pins(step, sizes):
    for arg, spec in zip(step.args, step.specs, strict=True):
        leaves = jax.tree.leaves(arg)
        each = [spec] * len(leaves) if spec is None or isinstance(spec, P) else jax.tree.leaves(spec, is_leaf=_is_spec)
        for x, p in zip(leaves, each, strict=True):
            yield None if p is None else Pin(spec=from_partition_spec(p, x.shape, sizes, asked="step"), origin="in")


def _is_spec(x):
    return x is None or isinstance(x, P)


def check_models(names, meshes):
    found = {(n, str(m), s): agreement(MODELS[n], s, m) for n in names for m in meshes for s in STYLES}
    counted = sum(a.counted for a in found.values())
    differences = [f"{key}: {line}" for key, a in found.items() for line in a.differences]
    assert counted > 200 * len(names)
    assert not differences, f"{len(differences)} of {counted}:\n" + "\n".join(differences[:20])


@pytest.mark.parametrize("name", ["gpt, scanned, remat", "dlrm"])
def test_models_agree_on_every_value(name):
    check_models([name], MESHES[-1:])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_all_models_agree_on_every_value(name):
    check_models([name], MESHES)
