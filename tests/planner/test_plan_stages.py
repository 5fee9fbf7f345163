"""Versions of a step in pipeline stages: planned beside the step, chosen where links between hosts are slow."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from sharding import hardware, pipeline, planner
from sharding.explain.program_costs import Costs
from sharding.hardware.chip import Wire
from sharding.planner.mesh_search import SearchOptions
from sharding.planner.plan_search import _Search

PER_STAGE, FEATURES, TOKENS = 4, 4096, 8192
STAGES = planner.Stages(count=4, schedule="1f1b", microbatches=8)


def stage(w, x):
    for up, down in zip(w["up"], w["down"], strict=True):
        x = x + jnp.tanh(x @ up) @ down
    return x


def loss(y, target):
    return jnp.mean((y - target) ** 2)


def whole(params, x, target):
    def of(params):
        y = x
        for up, down in zip(params["up"], params["down"], strict=True):
            y = stage({"up": up, "down": down}, y)
        return loss(y, target)

    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(of)(params))


def in_stages(params, x, target):
    schedule = pipeline.schedules.one_f_one_b(stages=STAGES.count, microbatches=STAGES.microbatches)
    microbatches = [a.reshape(STAGES.microbatches, -1, x.shape[-1]) for a in (x, target)]
    _, grads = pipeline.value_and_grad(stage, loss, schedule)(params, *microbatches)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)


def shapes(features=FEATURES, tokens=TOKENS):
    layers = STAGES.count, PER_STAGE
    up, down = (*layers, features, 4 * features), (*layers, 4 * features, features)
    params = {"up": jax.ShapeDtypeStruct(up, "float32"), "down": jax.ShapeDtypeStruct(down, "float32")}
    x = jax.ShapeDtypeStruct((tokens, features), "float32")
    return params, x, x


def planned(network_bytes_per_second, **options):
    devices = hardware.parse("h100:4x2")
    network = Wire(bytes_per_second=network_bytes_per_second, latency_seconds=4e-6)
    devices = dataclasses.replace(devices, chip=dataclasses.replace(devices.chip, network=network))
    version = planner.Staged(step=in_stages, args=shapes(), stages=STAGES)
    return sharding.plan(whole, *shapes(), devices=devices, staged=[version], seconds=40, **options)


@pytest.fixture(scope="module")
def slow():
    return planned(25e9)


def test_stages_are_chosen_where_the_network_is_slow(slow):
    assert slow.stages == STAGES
    assert dict(slow.axes) == {"pipe": 4, "x": 2}
    best_whole = min(one.costs.seconds for one in slow.candidates if one.stages is None)
    assert slow.costs.seconds < best_whole
    assert "4 stages over pipe by 1f1b, 8 microbatches" in str(slow)


@pytest.mark.slow
def test_no_stages_within_a_host():
    version = planner.Staged(step=in_stages, args=shapes(), stages=STAGES)
    plan = sharding.plan(whole, *shapes(), devices="h100:1x8", staged=[version], seconds=40)
    assert plan.stages is None
    assert any(one.stages == STAGES for one in plan.candidates)


def test_a_plan_with_stages_is_saved_and_runs_as_one_device(slow, tmp_path):
    again = planner.Plan.load(slow.save(tmp_path / "plan.json"))
    assert again.stages == STAGES
    assert str(again) == str(slow)
    rng = np.random.default_rng(0)
    args = jax.tree.map(lambda a: jnp.asarray(0.02 * rng.normal(size=a.shape), a.dtype), shapes(64, 64))
    expected = whole(*jax.tree.map(lambda a: a, args))
    with again.mesh():
        found = sharding.jit(in_stages, plan=again)(*args)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_mesh_of_the_users_picks_the_versions_that_suit_it():
    version = planner.Staged(step=in_stages, args=shapes(), stages=STAGES)
    options = {"devices": "h100:1x8", "staged": [version], "seconds": 20}
    assert sharding.plan(whole, *shapes(), mesh={"x": 8}, **options).stages is None
    assert sharding.plan(whole, *shapes(), mesh={"pipe": 4, "x": 2}, **options).axes == {"pipe": 4, "x": 2}


@dataclasses.dataclass(frozen=True)
class OnMesh:
    """A stand-in for the plan of a mesh: the seconds that it wants, and that its last changes reach."""

    wants: float
    reaches: float

    @property
    def costs(self):
        return costs(self.wants)

    def polish(self):
        return self

    def run(self, result):
        return dataclasses.replace(result, costs=costs(min(self.reaches, result.costs.seconds))), {}


@dataclasses.dataclass(frozen=True)
class Found:
    costs: Costs


def costs(seconds):
    return Costs(seconds=seconds, sent_bytes=0, peak_bytes=0, argument_bytes=0, lost_bytes=0)


@pytest.mark.parametrize(("wants", "chosen"), [(0.8, 1), (1.1, 0)])
def test_what_wants_less_gets_its_last_changes_before_the_choice(wants, chosen):
    on = hardware.parse("h100:4x2")
    options = SearchOptions(devices=on, algorithm="auto", limit=math.inf, deadline=math.inf, seed=0)
    search = _Search(options=options, on_progress=lambda text: None)
    annotated: Any = [(OnMesh(1.0, 1.0), Found(costs(1.0))), (OnMesh(wants, 0.9), Found(costs(1.2)))]
    best, result, _ = search.polished(annotated)
    assert best is annotated[chosen][0]
    assert result.costs.seconds == (1.0, 0.9)[chosen]
