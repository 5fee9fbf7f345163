"""A Format in `in_shardings` or `out_shardings` asks for a sharding and a layout in memory, as for `jax.jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType

import sharding
from sharding import P

X = np.arange(64, dtype=np.float32).reshape(8, 8)
COLUMNS, ROWS = Layout((1, 0)), Layout((0, 1))


@pytest.fixture
def mesh():
    with sharding.mesh(data=2, tensor=4) as m:
        yield m


def by_columns(mesh, spec=None):
    return Format(COLUMNS, jax.NamedSharding(mesh, P("data") if spec is None else spec))


def order(x):
    return x.format.layout.major_to_minor


def gram(x):
    return x @ x.T


@pytest.mark.parametrize("placed", ["NumPy", "uncommitted", "other layout", "layout asked for"])
def test_an_argument_is_transferred_to_its_layout(mesh, placed):
    asked = by_columns(mesh)
    x = {
        "NumPy": X,
        "uncommitted": jnp.asarray(X),
        "other layout": jax.device_put(X, Format(ROWS, asked.sharding)),
        "layout asked for": jax.device_put(X, asked),
    }[placed]
    step = sharding.jit(gram, in_shardings=(asked,))
    for _ in range(3):  # by the fast path, too
        np.testing.assert_allclose(step(x), X @ X.T)
    assert step._cache_size() == 1
    compiled = step.lower(x).compile()
    assert compiled.input_formats[0][0].layout.major_to_minor == (1, 0)
    assert step.complete(x).in_shardings == (P("data"),)


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
def test_a_result_has_the_layout_asked_for(axes):
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(axes,) * 2)):
        mesh = jax.sharding.get_mesh()
        step = sharding.jit(lambda x: {"y": x * 2, "z": x + 1}, out_shardings={"y": by_columns(mesh), "z": None})
        found = step(X)
    assert order(found["y"]) == (1, 0) and order(found["z"]) == (0, 1)
    assert found["y"].sharding.spec == P("data", *[None] * (len(found["y"].sharding.spec) - 1))
    np.testing.assert_array_equal(found["y"], 2 * X)


def test_a_training_loop_keeps_its_layout_and_compiles_once(mesh):
    asked = by_columns(mesh)
    step = sharding.jit(lambda w, x: (w - 0.1 * (x @ w), x.sum()), in_shardings=(asked, None), donate_argnums=0)
    alone, w = X, X
    for _ in range(3):
        alone = alone - 0.1 * (X @ alone)
        w, _ = step(w, X)
        assert order(w) == (1, 0)  # as the next call takes it
    np.testing.assert_allclose(w, alone, rtol=1e-5)
    assert step._cache_size() == 1


def test_the_compiler_chooses(mesh):
    auto = Format(Layout.AUTO)
    step = sharding.jit(lambda x: x.T @ x, in_shardings=(auto,), out_shardings=auto)
    chosen = step.lower(jax.ShapeDtypeStruct(X.shape, X.dtype)).compile().input_formats[0][0]
    assert isinstance(chosen.layout, Layout)
    np.testing.assert_allclose(step(X), X.T @ X)
    with pytest.raises(ValueError, match="[Ll]ayout"):  # that of a placed array is known
        step(jax.device_put(X, Format(ROWS if chosen.layout.major_to_minor == (1, 0) else COLUMNS, chosen.sharding)))


def test_a_pytree_prefix_of_formats_and_specs(mesh):
    asked = ({"w": by_columns(mesh, P(None, "tensor")), "b": P("tensor")}, None)
    step = sharding.jit(lambda p, x: x @ p["w"] + p["b"], in_shardings=asked)
    params = {"w": X, "b": X[0]}
    with jax.numpy_rank_promotion("allow"):
        np.testing.assert_allclose(step(params, X), X @ X + X[0])
        assert "{0,1}" in step.lower(params, X).compile().as_text().split("\n")[0]
        assert step.complete(params, X).in_shardings[0] == {"w": P(None, "tensor"), "b": P("tensor")}


def test_inside_another_function(mesh):
    inner = sharding.jit(gram, in_shardings=(by_columns(mesh),), out_shardings=by_columns(mesh))
    f = sharding.jit(lambda x: jnp.sin(inner(x)))
    np.testing.assert_allclose(f(X), np.sin(X @ X.T), rtol=1e-4, atol=1e-4)
    assert "LayoutConstraint" in f.lower(X).as_text() or "layout_constraint" in f.lower(X).as_text()
