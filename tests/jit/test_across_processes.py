"""Processes compare their programs before they run one: a different one is an error, not a hang."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import process_threads

import sharding
from sharding import P

X = np.linspace(-1.0, 1.0, 16, dtype=np.float32).reshape(8, 2)


def called(monkeypatch: pytest.MonkeyPatch, programs: list) -> list:
    """What each of several processes gets from its program, called twice, over one mesh."""
    monkeypatch.setattr(jax.sharding.Mesh, "is_multi_process", property(lambda mesh: True))

    def process(index: int):
        with sharding.mesh(data=8):
            step = sharding.jit(programs[index], in_shardings=P("data"))
            return [np.asarray(step(X)) for _ in range(2)]

    return process_threads.run(monkeypatch, process, len(programs))


def same(x):
    return jnp.sin(x) * 2


def test_the_same_program_runs_in_all(monkeypatch: pytest.MonkeyPatch):
    for found in called(monkeypatch, [same] * 3):
        for result in found:
            np.testing.assert_allclose(result, np.sin(X) * 2, rtol=1e-6)


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_another_program_is_an_error_in_all(odd: int, monkeypatch: pytest.MonkeyPatch):
    def other(x):
        return jnp.sin(x) * 3

    other.__name__ = other.__qualname__ = "same"
    found = called(monkeypatch, [other if index == odd else same for index in range(3)])
    for error in found:
        assert isinstance(error, sharding.ShardingError), found
        (line,) = error.found
        assert line.startswith(f"process {odd} differs from process {1 if odd == 0 else 0} in program: line ")
        assert "3.0" in line and "2.0" in line
