"""A function called with more shapes than are cached keeps no more than these: executables, graphs, traces."""

import gc
import weakref
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from sharding import P
from sharding.jit import executable_cache

OURS = ("Assignment", "Completion", "Engine", "Executable", "Graph", "PlacedArguments", "Traced", "_FastPath")
OF_JAX = ("LoadedExecutable", "MeshExecutable")


def new_function():
    return sharding.jit(lambda x, w: jnp.tanh(x @ w), in_shardings=(P("data"), P(None, "tensor")))


def call(f, rows):
    w = np.ones((8, 8), "float32")
    np.testing.assert_allclose(f(np.ones((2 * rows, 8), "float32"), w), np.tanh(np.full((2 * rows, 8), 8.0)), rtol=1e-5)


def objects():
    """The number of live objects of each kind."""
    gc.collect()
    return Counter(type(one).__name__ for one in gc.get_objects())


def resident_bytes():
    with open("/proc/self/statm") as file:
        return 4096 * int(file.read().split()[1])


def test_what_is_evicted_is_freed(monkeypatch):
    monkeypatch.setattr(executable_cache, "MAX_EXECUTABLES", 3)
    f = new_function()
    with sharding.mesh(data=2, tensor=4):
        call(f, 1)
        (first,) = f._cache.executables.values()
        kept = [first, first.completion, first.completion.assignment, first.completion.assignment.graph]
        kept += [first.traced.jaxpr, first.flat_jit]
        dead = [weakref.ref(one) for one in kept]
        del first, kept
        for rows in range(2, 6):
            call(f, rows)
        before = objects()
        for rows in range(6, 12):
            call(f, rows)
        after = objects()
    assert [ref() for ref in dead] == [None] * len(dead)
    assert len(f._cache.executables) == 3
    assert {kind: after[kind] - before[kind] for kind in (*OURS, *OF_JAX)} == dict.fromkeys((*OURS, *OF_JAX), 0)


def test_a_function_that_is_deleted_frees_all():
    before = objects()
    f = new_function()
    with sharding.mesh(data=2, tensor=4):
        call(f, 1)
        call(f, 2)
    del f
    after = objects()
    assert {kind: after[kind] - before[kind] for kind in OURS if after[kind] > before[kind]} == {}


def test_a_moved_argument_is_freed_with_its_source():
    f = new_function()
    with sharding.mesh(data=2, tensor=4):
        x, w = jnp.ones((4, 8)), jnp.ones((8, 8))
        f(x, w)
        (executable,) = f._cache.executables.values()
        moved = [weakref.ref(copy) for _, copy in executable.placed_arguments._moved.values()]
        assert moved
        del x, w
        gc.collect()
    assert [ref() for ref in moved] == [None] * len(moved)


@pytest.mark.slow
def test_a_thousand_shapes():
    f = new_function()
    counts, resident = [], [resident_bytes()]
    with sharding.mesh(data=2, tensor=4):
        for rows in range(1, 1001):
            call(f, rows)
            if rows % 250 == 0:
                counts.append(objects())
                resident.append(resident_bytes())
    assert len(f._cache.executables) == executable_cache.MAX_EXECUTABLES
    for kind in (*OURS, *OF_JAX):
        limit = executable_cache.MAX_EXECUTABLES + 10
        assert counts[-1][kind] - counts[1][kind] <= 2, (kind, [count[kind] for count in counts])
        assert counts[-1][kind] <= max(limit, counts[0][kind] + 10), kind
    grown = [after - before for before, after in zip(resident, resident[1:], strict=False)]
    assert grown[-1] < 0.5 * grown[0], grown
