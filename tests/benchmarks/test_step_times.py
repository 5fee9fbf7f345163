"""Steps that are timed: random arguments, what is passed to the next step, and a program that runs alone."""

import io
import json

import jax
import jax.numpy as jnp
import optax
import pytest

from benchmarks import step_times
from sharding import hardware


def test_arguments_are_random_and_fit_the_optimizer():
    params = {"w": jnp.ones((64, 8), jnp.bfloat16), "is_on": jnp.ones(64, bool), "tokens": jnp.ones(64, int)}
    shapes = jax.eval_shape(lambda: (params, optax.adam(1.0).init({"w": params["w"]}), jax.random.key(0)))
    found = step_times.random_like(shapes, 0)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)
    state = found[1][0]
    assert float(state.nu["w"].min()) >= 0 > float(state.mu["w"].min())
    assert len({*map(float, found[0]["w"].reshape(-1))}) > 100
    assert 0 < int(found[0]["is_on"].sum()) < 64
    assert 0 <= int(found[0]["tokens"].min()) < int(found[0]["tokens"].max()) < 1000


def test_the_new_state_is_found_among_the_results():
    old, new = {"w": jnp.zeros((2, 3))}, {"w": jnp.ones((2, 3))}
    assert step_times.successor((new, jnp.zeros(())), old) is not old
    assert float(step_times.successor((jnp.zeros(()), new), old)["w"].sum()) == 6
    with pytest.raises(ValueError, match="no new state"):
        step_times.successor(jnp.zeros(()), old)


def test_a_program_that_runs_alone(tmp_path, monkeypatch, capsys):
    hardware.save(hardware.chip("cpu"), tmp_path / "machine.json", how={})
    monkeypatch.setattr("sys.stdin", io.StringIO("run\n"))
    step_times.run_alone(step_times.Options(smoke=True, alone="dlrm", calibration=tmp_path / "machine.json"))
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 < row["low"] <= row["seconds"] <= row["high"]
    assert row["estimated_seconds"] > 0 < row["calibrated_seconds"]
    assert 0.8 < row["predicted_peak_bytes"] / row["compiled_peak_bytes"] < 1.25
