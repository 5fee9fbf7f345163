"""The fast path of dispatch: taken when a call repeats the previous one, and never otherwise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import sharding
from sharding import P, ShardingError, annotate

X = np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8)


@pytest.fixture(autouse=True)
def mesh():
    with sharding.mesh(data=2, tensor=4) as m:
        yield m


@pytest.fixture
def completions(monkeypatch):
    """The calls that missed the fast path and computed a cache key."""
    seen = []
    slow_path = sharding.jit.__globals__["Jitted"]._executable

    def spied(self, call, mesh):
        seen.append(call)
        return slow_path(self, call, mesh)

    monkeypatch.setattr(sharding.jit.__globals__["Jitted"], "_executable", spied)
    return seen


def place(x, *entries):
    return jax.device_put(np.array(x), NamedSharding(sharding.mesh(data=2, tensor=4).mesh, P(*entries)))


@sharding.jit
def step(state, batch):
    return jax.tree.map(lambda x: x * 2 + annotate(batch, P("data")).sum(), state)


def test_loop_over_its_own_results_takes_the_fast_path(completions):
    state, batch = step({"w": X, "n": jnp.float32(1)}, X), X + 1
    state = step(state, batch)
    completions.clear()
    for i in range(3):
        batch = [X + i, place(X + i, "data"), X - i][i]
        total = np.asarray(batch).sum()
        expected = jax.tree.map(lambda x, t=total: np.asarray(x) * 2 + t, state)
        state = step(state, batch)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state, expected)
    assert completions == []  # wherever the batch comes from


def test_state_with_a_random_key_takes_the_fast_path(completions):
    @sharding.jit
    def draw(key, x):
        key, now = jax.random.split(key)
        return key, x + jax.random.normal(now, x.shape)

    key, x = draw(*draw(jax.random.key(0), place(X, "data")))
    completions.clear()
    assert np.isfinite(draw(key, x)[1]).all()
    assert completions == []


@pytest.mark.parametrize(
    "other",
    [
        lambda: place(X[:4], "data"),
        lambda: place(X.astype(np.int32), "data"),
        lambda: place(X, "data", "tensor"),
        lambda: place(X, "tensor"),
        lambda: jnp.asarray(X),
        lambda: X,
        lambda: 2.0,
    ],
    ids=["shape", "dtype", "more axes", "other axis", "replicated", "numpy", "number"],
)
def test_other_arguments_give_correct_results(other):
    f = sharding.jit(lambda x: x * 3)
    for _ in range(3):
        f(place(X, "data"))
    out = f(other())
    np.testing.assert_array_equal(out, np.asarray(other()) * 3)
    assert out.dtype == jnp.asarray(other()).dtype
    np.testing.assert_array_equal(f(place(X, "data")), X * 3)


def test_array_on_one_device_is_still_an_error():
    f = sharding.jit(lambda x: x * 3)
    for _ in range(2):
        f(place(X, "data"))
    with pytest.raises(ShardingError, match="device"):
        f(jax.device_put(X, jax.devices()[3]))


def test_weak_and_strong_types_are_distinguished():
    f = sharding.jit(lambda x: x + jnp.ones((), jnp.bfloat16))
    strong, weak = place(np.float32(2)), jax.device_put(jax.jit(lambda: 2.0)(), place(np.float32(2)).sharding)
    assert weak.weak_type
    for x, dtype in [(strong, jnp.float32), (weak, jnp.bfloat16), (strong, jnp.float32)] * 2:
        assert f(x).dtype == dtype


def test_transformations_after_a_loop_see_tracers():
    f = sharding.jit(lambda x: jnp.sin(x) * 2)
    x = place(X, "data")
    for _ in range(3):
        f(x)
    np.testing.assert_allclose(jax.grad(lambda x: f(x).sum())(x), np.cos(X) * 2, rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(f)(x), np.sin(X) * 2, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(f)(x), np.sin(X) * 2, rtol=1e-5)
    assert f.lower(x).as_text()


def test_another_mesh_or_configuration_leaves_the_fast_path(mesh):
    f = sharding.jit(lambda x: x @ x, in_shardings=P("data"))
    x = place(X, "data")
    for _ in range(2):
        f(x)
    with sharding.mesh(data=8):
        assert f(X).sharding.mesh.shape == {"data": 8}
    with jax.default_matmul_precision("highest"):
        f(x)
    with sharding.mesh(data=4, tensor=2), pytest.raises(ShardingError, match="mesh"):
        f(x)
    np.testing.assert_allclose(f(x), X @ X, rtol=1e-4, atol=1e-5)


def test_donated_array_passed_again_is_an_error_after_a_loop_too():
    f = sharding.jit(lambda s, b: s + b.sum(), donate_argnums=0)
    s, b = place(X, "data"), place(X, "data")
    for _ in range(3):
        kept, s = s, f(s, b)
    with pytest.raises(ShardingError, match="was donated to an earlier call and deleted"):
        f(kept, b)
    with pytest.raises(ShardingError, match="was donated to an earlier call and deleted"):
        f(kept, X)
