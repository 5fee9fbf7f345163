"""Arguments that are not sharded as the program takes them are moved once, or the user is told."""

import gc
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import sharding
from sharding import P
from sharding.jit import placed_arguments

W = np.ones((16, 16), np.float32)
X = np.ones((64, 16), np.float32)


def dense(w, x):
    return jnp.tanh(x @ w)


@pytest.fixture
def mesh():
    with sharding.mesh(data=8) as m:
        yield m


@pytest.fixture
def moved(monkeypatch):
    """The shapes of the arrays that are transferred."""
    shapes = []

    def put(xs, shardings):
        shapes.extend(x.shape for x in xs)
        return real(xs, shardings)

    real = jax.device_put
    monkeypatch.setattr(placed_arguments.jax, "device_put", put)
    return shapes


@pytest.fixture
def step():
    return sharding.jit(dense, in_shardings=(None, P(None, "data")))


@pytest.fixture
def x(mesh):
    return jax.device_put(X, NamedSharding(mesh, P(None, "data")))


def test_an_array_that_jax_replicated_is_moved_once(step, x, moved):
    w = jnp.asarray(W)
    results = [np.asarray(step(w, x)) for _ in range(3)]
    assert moved == [(16, 16)]
    for one in results:
        np.testing.assert_allclose(one, dense(W, X), rtol=1e-5)
    assert "was passed replicated as JAX creates arrays" in str(step.complete(w, x).why("w"))
    np.testing.assert_allclose(step(2 * w, x), dense(2 * W, X), rtol=1e-5)  # another array is moved, too
    assert moved == [(16, 16)] * 2


def test_the_copy_is_kept_no_longer_than_its_source(step, x):
    w = jnp.asarray(W)
    step(w, x)
    step(w, x)
    (entry,) = next(iter(step._cache.executables.values())).placed_arguments._moved.values()
    copy = weakref.ref(entry[1])
    del entry, w
    gc.collect()
    assert copy() is None


def test_a_donated_argument_is_not_kept(x):
    step = sharding.jit(lambda w, x: (w + 1, dense(w, x)), in_shardings=(None, P(None, "data")), donate_argnums=0)
    for _ in range(2):
        w = jnp.asarray(W)
        new, _ = step(w, x)
        np.testing.assert_array_equal(new, W + 1)
        assert w.is_deleted()


def test_a_spec_that_names_its_dims_keeps_an_array_replicated(mesh, step, x, moved):
    w = jax.device_put(W, NamedSharding(mesh, P(None, None)))
    moved.clear()
    assert step.complete(w, x).spec("w") == P()
    assert "closed by the argument's sharding" in str(step.complete(w, x).why("w"))
    for _ in range(2):
        np.testing.assert_allclose(step(w, x), dense(W, X), rtol=1e-5)
    assert not moved


@pytest.mark.parametrize("spec", [P(), P(None, None)])
def test_a_replicated_argument_stays_so_where_in_shardings_say_it(x, moved, spec):
    step = sharding.jit(dense, in_shardings=(spec, P(None, "data")))
    w = jnp.asarray(W)
    step(w, x)
    assert step.complete(w, x).spec("w") == P() and not moved


def test_a_large_numpy_array_that_is_transferred_on_every_call_is_warned_of_once(mesh, x):
    w = np.ones((16, 2**14), np.float32)
    step = sharding.jit(dense, in_shardings=(None, P(None, "data")))
    step(w, x)
    with pytest.warns(UserWarning, match=r"dense\(w\): the same NumPy array, 1.05 MB, is transferred") as found:
        step(w, x)
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        w[0] = 2  # it may change, so it is transferred
        np.testing.assert_allclose(step(w, x)[:, :1], dense(w[:, :1], X), rtol=1e-5)
        for _ in range(2):
            step(np.ones_like(w), x)  # a new batch


@pytest.mark.parametrize("donate", [None, 0])
def test_a_numpy_array_that_the_program_does_not_read_is_not_transferred(mesh, x, monkeypatch, donate):
    labels, moved = np.ones((64, 2**14), np.float32), []
    real = placed_arguments.compat.device_put

    def put(xs, shardings):
        moved.extend(a.shape for a in xs)
        return real(xs, shardings)

    monkeypatch.setattr(placed_arguments.compat, "device_put", put)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = sharding.jit(lambda labels, x: x * 2, in_shardings=(P("data"), None), donate_argnums=donate)
        for _ in range(3):
            np.testing.assert_allclose(step(labels, x), X * 2)
    assert not moved and step._cache_size() == 1
    both = sharding.jit(lambda labels, x: x * 2, in_shardings=(P("data"), None), keep_unused=True)
    np.testing.assert_allclose(both(labels, x), X * 2)
    assert moved == [labels.shape]
