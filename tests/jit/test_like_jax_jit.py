"""What code written for `jax.jit` relies on: its modes, errors, caches and staged programs."""

import asyncio
import gc
import logging
from concurrent.futures import ThreadPoolExecutor

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import sharding
from sharding import P, ShardingError, annotate
from sharding.jit import executable_cache

X = np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8)


@pytest.fixture(autouse=True)
def mesh():
    with sharding.mesh(data=2, tensor=4) as m:
        yield m


def test_without_jit_it_runs_op_by_op():
    seen = []

    @sharding.jit
    def f(x):
        seen.append(x)
        return annotate(x, P("data")) * 2 if x.sum() > 0 else x

    with jax.disable_jit():
        np.testing.assert_array_equal(f(np.abs(X)), np.abs(X) * 2)
    assert type(seen[0]) is np.ndarray


def test_tracing_errors_name_the_users_function_argument_and_line():
    def step(batch, scale, *, key):
        return batch["x"] if key.sum() > 0 else scale

    for args, kwargs in [(({"x": X}, 2), {"key": X}), ((), {"batch": {"x": X}, "scale": 2, "key": X})]:
        with pytest.raises(jax.errors.TracerBoolConversionError, match=r"(?s)step at .*test_like_jax_jit.py.*ment key"):
            sharding.jit(step, static_argnames="scale")(*args, **kwargs)
    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"argument state\['w'\]"):
        sharding.jit(lambda state: 1 if state["w"].sum() else 2)({"w": X})


@pytest.mark.parametrize("calls", [1, 3])
def test_debug_nans_names_the_op(calls):
    @sharding.jit
    def f(x):
        return jax.nn.relu(annotate(x, P("data"))) + jnp.log(x)

    for _ in range(calls - 1):
        f(np.abs(X) + 1)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"nan in float32\[8, 8\] of log at test_like"):
        f(-np.ones_like(X))


@pytest.mark.parametrize("outer", [lambda f: f, jax.jit, sharding.jit], ids=["eager", "jax.jit", "sharding.jit"])
def test_vmap_over_a_mesh_axis(outer):
    step = sharding.jit(lambda x: annotate(jnp.sin(x), P("tensor")) * 2)
    y = outer(lambda x: jax.vmap(step, spmd_axis_name="data")(x))(X)
    assert y.sharding.spec == P("data", "tensor")
    np.testing.assert_allclose(y, np.sin(X) * 2, rtol=1e-5)
    with pytest.raises(ShardingError, match=r"(?s)spmd_axis_name=.*annotated with P\('tensor'"):
        jax.vmap(step, spmd_axis_name="tensor")(X)


def test_names_of_flax_linen():
    class Dense(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
            return nn.with_logical_constraint(nn.Dense(16, use_bias=False, kernel_init=init)(x), ("batch", "mlp"))

    with sharding.axis_rules({"batch": "data", "mlp": "tensor"}):
        params = sharding.jit(Dense().init)(jax.random.key(0), X)
        step = sharding.jit(Dense().apply)
        assert step.complete(params, X).spec("kernel") == P(None, "tensor")
        assert step(params, X).sharding.spec == P("data", "tensor")


@pytest.mark.parametrize("where", ["in_shardings", "out_shardings", "annotate", "constraint"])
def test_unreduced_axes_are_an_error(where):
    spec = P("data", unreduced={"tensor"})
    programs = {"annotate": annotate, "constraint": jax.lax.with_sharding_constraint}
    options = {where: spec} if where not in programs else {}
    with pytest.raises(ShardingError, match=r"(?s)nreduced.*explicit_axes"):
        sharding.jit(lambda x: programs.get(where, lambda x, _: x)(x, spec) * 2, **options)(X)


def test_lower_and_compile_give_the_program_of_a_call(compiles):
    step = sharding.jit(lambda s, x: jax.tree.map(lambda a: a + annotate(x, P("data")), s), donate_argnums=0)
    s, x = (jax.device_put(np.array(X), NamedSharding(sharding.mesh(data=2, tensor=4).mesh, P("data"))) for _ in "sx")
    before = len(compiles)
    compiled = step.lower({"w": s}, x).compile()
    assert len(compiles) == before + 1
    np.testing.assert_allclose(step({"w": s}, x)["w"], X * 2)
    assert len(compiles) == before + 1
    assert compiled.in_tree == jax.tree.structure((({"w": 0}, 0), {}))
    assert compiled.input_shardings[0][0]["w"].spec == P("data")
    assert s.is_deleted()


def test_a_method_is_bound_in_all_forms():
    class Model:
        def __init__(self, scale):
            self.scale = scale

        @sharding.jit(static_argnums=0)
        def step(self, x):
            """The step."""
            return annotate(x, P("data")) * self.scale

    model = Model(3)
    np.testing.assert_allclose(model.step(X), X * 3)
    assert model.step.complete(X).spec("x") == P("data")
    assert model.step.lower(X).compile()(jax.device_put(X, P("data"))).shape == X.shape
    assert model.step.eval_shape(X).shape == X.shape
    assert model.step.__doc__ == "The step." and model.step.__self__ is model
    np.testing.assert_allclose(Model.step(model, X), X * 3)


def test_options_of_jax():
    step = sharding.jit(lambda x, unused: x * 2, keep_unused=True)
    assert "%arg1" in step.lower(X, X).as_text()
    assert "%arg1" not in sharding.jit(lambda x, unused: x * 2).lower(X, X).as_text()
    ours, theirs = (jit(lambda x: x * 2, inline=True) for jit in (sharding.jit, jax.jit))
    programs = [str(jax.make_jaxpr(lambda x, f=f: f(x))(X)) for f in (ours, theirs)]
    assert ("jit" in programs[0]) == ("jit" in programs[1])  # JAX 0.12 does not inline under a mesh
    with pytest.raises(Exception, match="no_such_option"):
        sharding.jit(lambda x: x * 2, compiler_options={"xla_no_such_option": True})(X)


@pytest.mark.parametrize("clear", [lambda f: f.clear_cache(), lambda f: jax.clear_caches()], ids=["own", "jax"])
def test_caches_are_cleared(clear):
    traces = []

    @sharding.jit
    def f(x):
        traces.append(1)
        return x * 2

    for _ in range(3):
        f(X)
    clear(f)
    np.testing.assert_array_equal(f(X), X * 2)
    assert len(traces) == 2


def test_the_least_recently_used_signature_is_forgotten(monkeypatch):
    monkeypatch.setattr(executable_cache, "MAX_EXECUTABLES", 2)
    traces = []

    @sharding.jit
    def f(x):
        traces.append(x.shape)
        return x * 2

    for n in (8, 16, 8, 24, 8, 8):  # the last but one on the fast path
        np.testing.assert_array_equal(f(np.ones(n, np.float32)), 2 * np.ones(n))
    assert traces == [(8,), (16,), (24,)]
    f(np.ones(16, np.float32))
    assert traces[-1] == (16,)


def test_a_donated_array_is_freed_where_it_was():
    step = sharding.jit(lambda x: x * 2, in_shardings=P("data"), donate_argnums=0)
    for _ in range(3):
        x = jax.device_put(np.array(X), P("tensor"))
        with pytest.raises(ShardingError, match="committed"):
            step(x)
        x = jnp.array(X)
        np.testing.assert_array_equal(step(x), X * 2)
        assert x.is_deleted()


def test_the_collector_and_logging_are_left_alone():
    filters, level = list(logging.getLogger("jax").filters), logging.getLogger("jax").level
    sharding.jit(lambda x: x * 2)(X)
    assert gc.isenabled()
    assert (list(logging.getLogger("jax").filters), logging.getLogger("jax").level) == (filters, level)


@pytest.mark.parametrize("is_gradient", [False, True])
def test_chains_of_thousands_of_ops(is_gradient, tmp_path):
    def chain(x):
        for _ in range(600):
            x = jnp.sin(x) + 1
        return x

    f = jax.grad(lambda x: chain(x).sum()) if is_gradient else chain
    completion = sharding.jit(f, in_shardings=P("data")).complete(X)
    assert completion.out_shardings == P("data")
    assert str(completion.why("out")).count("sin") <= 1200
    assert completion.memory().peak_bytes > 0
    assert "chain" in completion._repr_html_() or is_gradient
    assert completion.report(tmp_path / "report.html").exists()


async def sizes_seen(pause: float, **sizes: int) -> list[dict[str, int]]:
    step, seen = sharding.jit(lambda x: sharding.annotate(x, P(tuple(sizes)[0])) * 2), []
    with sharding.mesh(sizes):
        for _ in range(3):
            await asyncio.sleep(pause)
            seen.append(dict(step(np.ones((8, 8), np.float32)).sharding.mesh.shape))
    return seen


def test_asyncio_tasks_have_meshes_of_their_own():
    async def run():
        tasks = [sizes_seen(0.01, a=8), sizes_seen(0.013, b=2, c=4), sizes_seen(0.004, d=4, e=2)]
        return await asyncio.gather(*tasks)

    before = jax.sharding.get_abstract_mesh()
    assert asyncio.run(run()) == [[{"a": 8}] * 3, [{"b": 2, "c": 4}] * 3, [{"d": 4, "e": 2}] * 3]
    assert jax.sharding.get_abstract_mesh() == before


def test_threads_have_meshes_of_their_own():
    step = sharding.jit(lambda x: x * 2)

    def run(sizes):
        with sharding.mesh(sizes):
            return [dict(step(np.ones((n, 8), np.float32)).sharding.mesh.shape) == sizes for n in range(8, 40, 8)]

    with ThreadPoolExecutor(4) as threads:
        assert all(map(all, threads.map(run, [{"a": 8}, {"b": 2, "c": 4}, {"a": 8}, {"d": 4, "e": 2}])))


def test_a_compiled_program_takes_the_arguments_as_they_were_lowered():
    step = sharding.jit(
        lambda x, scale, n=1: annotate(x, P("data")) * scale["s"] * n, static_argnames="n", donate_argnames="x"
    )
    x = [jax.device_put(X, P("data")) for _ in range(3)]
    scale = {"s": 2.0}
    np.testing.assert_allclose(step.lower(X, scale=scale, n=3).compile()(x[0], scale=scale), 6 * X)
    np.testing.assert_allclose(step.lower(x=X, scale=scale).compile()(scale=scale, x=x[1]), 2 * X)
    np.testing.assert_allclose(step.lower(X, scale).compile()(x[2], scale), 2 * X)
    assert all(one.is_deleted() for one in x)


def test_effects_that_cannot_be_ordered_are_an_error():
    def step(x):
        jax.debug.print("a", ordered=True)
        return x

    with pytest.raises(ShardingError, match=r"(?s)jax.debug.print.*ordered=True on a mesh of 8 devices.*io_callback"):
        sharding.jit(step)(X)


def test_options_of_none_and_float0_arguments():
    step = sharding.jit(lambda x, t: x * 2, static_argnums=None, donate_argnums=None, donate_argnames=None)
    for _ in range(2):
        np.testing.assert_allclose(step(X, np.zeros((), jax.dtypes.float0)), X * 2)
    assert step._cache_size() == 1
