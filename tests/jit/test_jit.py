"""`sharding.jit`: the results of one device, and the semantics of `jax.jit`, on any mesh."""

import functools
import logging
import re
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding

import sharding
from sharding import P, ShardingError, annotate

U = P.UNCONSTRAINED
X = np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8)
W = np.cos(np.arange(64, dtype=np.float32)).reshape(8, 8) / 3
RTOL = {"float32": 1e-5, "bfloat16": 2e-2}
"""Relative to the norm of each array; on a mesh sums are accumulated in another order."""


@pytest.fixture(autouse=True)
def mesh():
    with sharding.mesh(data=2, tensor=4) as m:
        yield m


def place(x, *entries):
    return jax.device_put(np.array(x), NamedSharding(sharding.mesh(data=2, tensor=4).mesh, P(*entries)))


def shape(*dims, dtype=jnp.float32, **kw):
    return jax.ShapeDtypeStruct(dims, dtype, **kw)


def assert_close(ours, theirs, dtype="float32", times=1.0):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= times * RTOL[dtype] * np.linalg.norm(b) + 1e-30


def specs(tree):
    return jax.tree.map(lambda x: x.sharding.spec, tree)


class Traces:
    """A function that counts its traces."""

    def __init__(self, f):
        self.f, self.count, self.__name__ = f, 0, "step"
        functools.update_wrapper(self, f)

    def __call__(self, *args, **kwargs):
        self.count += 1
        return self.f(*args, **kwargs)


def mlp(w, x):
    return jnp.tanh(annotate(x @ w, P("data", "tensor"))) @ w


@jax.custom_vjp
def doubled_gradient(x):
    return jnp.sin(x)


doubled_gradient.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (2 * g * jnp.cos(x),))


@jax.custom_jvp
def tripled_tangent(x):
    return jnp.sin(x)


tripled_tangent.defjvp(lambda p, t: (jnp.sin(p[0]), 3 * t[0] * jnp.cos(p[0])))


def scan(w, x):
    return jax.lax.scan(lambda c, _: (mlp(w, c), c.sum(axis=1)), x, None, length=3)[1].sum(axis=0)


def while_loop(w, x):
    return jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, mlp(w, s[1])), (0, x))[1]


def cond(w, x):
    return jax.lax.cond(x[0, 1] > 0, lambda x: mlp(w, x), lambda x: x * 2, annotate(x, P("tensor")))


def dropout(w, x):
    key = jax.random.key(7)
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), mlp(w, x), jnp.zeros_like(x))


def attention(w, x):
    x = annotate(x, P("data", None))
    weight = jax.nn.softmax((x @ w) @ (x @ w.T).T)
    return annotate(weight, P(None, "tensor")) @ x


def gather_and_sort(w, x):
    rows = annotate(w, P("tensor"))[jnp.array([1, 5, 2, 0, 7, 7, 3, 4])]
    return jnp.sort(rows + jnp.cumsum(annotate(x, P("data")), axis=0), axis=1)


PROGRAMS = {
    "mlp": mlp,
    "remat": jax.checkpoint(mlp),
    "nested jit": jax.jit(mlp),
    "custom_vjp": lambda w, x: mlp(w, doubled_gradient(x)),
    "custom_jvp": lambda w, x: mlp(w, tripled_tangent(x)),
    "scan": scan,
    "cond": cond,
    "dropout": dropout,
    "attention": attention,
    "gather and sort": gather_and_sort,
}
programs = pytest.mark.parametrize("f", PROGRAMS.values(), ids=PROGRAMS)


def squared(f):
    return lambda w, x: (f(w, x).astype(jnp.float32) ** 2).sum()


@programs
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_and_gradients_are_those_of_one_device(f, dtype):
    w, x = W.astype(jnp.dtype(dtype)), X.astype(jnp.dtype(dtype))
    run = lambda w, x: (f(w, x), jax.grad(squared(f), argnums=(0, 1))(w, x))  # noqa: E731
    assert_close(sharding.jit(run)(w, x), jax.jit(run)(w, x), dtype)


@pytest.mark.parametrize("shape", [{"data": 8}, {"a": 2, "b": 2, "tensor": 2}, {"data": 1}, {"data": 4, "tensor": 1}])
def test_values_are_those_of_one_device_on_any_mesh(shape):
    axes = list(shape)
    num_devices = int(np.prod(list(shape.values())))

    def f(w, x):
        return jnp.tanh(annotate(x @ w, P(axes[0], tuple(axes[1:]) or None))) @ w

    with sharding.mesh(shape, devices=jax.devices()[:num_devices]):
        assert_close(sharding.jit(f)(W, X), jax.jit(f)(W, X))


def test_while_loop_gives_the_values_of_one_device():
    assert_close(sharding.jit(while_loop)(W, X), jax.jit(while_loop)(W, X))


@programs
def test_gradient_of_a_sharded_function(f):
    g = jax.value_and_grad(sharding.jit(squared(f)), argnums=(0, 1))
    assert_close(g(W, X), jax.value_and_grad(squared(f), argnums=(0, 1))(W, X))


TRANSFORMS = {
    "vmap": lambda f: jax.vmap(lambda x: f(W, x), in_axes=1)(np.stack([X, W], axis=1)),
    "jit": lambda f: jax.jit(lambda w, x: 2 * f(w, x))(W, X),
    "jvp of grad": lambda f: jax.jvp(jax.grad(lambda w: (f(w, X) ** 2).sum()), (W,), (X,)),
    "hessian": lambda f: jax.hessian(lambda x: f(W, x)[0, 0])(X),
    "linearize": lambda f: jax.linearize(lambda x: f(W, x), X)[1](W),
    "remat": lambda f: jax.grad(jax.checkpoint(lambda w: f(w, X).sum()))(W),
    "scan": lambda f: jax.lax.scan(lambda c, _: (f(W, c), None), X, None, length=2)[0],
    "map": lambda f: jax.lax.map(lambda x: f(W, x), np.stack([X, W])),
    "collective": lambda f: jax.vmap(lambda x: jax.lax.psum(f(W, x), "i"), axis_name="i")(np.stack([X, W])),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_every_transformation_over_a_sharded_function(transform):
    assert_close(transform(sharding.jit(mlp)), transform(mlp), times=10)


def outer_spec(inner, **kw):
    return sharding.jit(lambda x: inner(x) + 1).complete(X, **kw).spec("out")


@pytest.mark.parametrize(
    "inner",
    [
        sharding.jit(lambda x: x * 2, in_shardings=P("data", "tensor")),
        sharding.jit(lambda x: x * 2, out_shardings=P("data", "tensor")),
        sharding.jit(lambda x: annotate(x * 2, P("data", "tensor"))),
        sharding.jit(lambda x: x, in_shardings=P("data", "tensor")),
    ],
    ids=["in_shardings", "out_shardings", "annotate", "identity"],
)
def test_annotations_inside_reach_the_outer_completion(inner):
    assert outer_spec(inner) == P("data", "tensor")


def test_inferred_shardings_inside_do_not_constrain_the_outer_completion():
    inner = sharding.jit(lambda x: annotate(x, P("data", U)) * 2)
    outer = sharding.jit(lambda x: inner(x) + annotate(x * 3, P(U, "tensor")))
    assert outer.complete(X).spec("out") == P("data", "tensor")


def test_shardings_of_a_nested_jax_jit_are_annotations(mesh):
    assert outer_spec(jax.jit(lambda x: x * 2, in_shardings=NamedSharding(mesh, P("data")))) == P("data")
    assert outer_spec(jax.jit(lambda x: x * 2, out_shardings=NamedSharding(mesh, P("data")))) == P("data")


def times(y):
    return sharding.jit(lambda x: annotate(x, P("data")) * y)


def over_two_calls(y):
    f = times(y)
    return (f(X) + f(2 * X)).sum()


CLOSURES = {
    "jit": (lambda: jax.jit(lambda y: times(y)(X))(W), X * W),
    "sharding.jit": (lambda: sharding.jit(lambda y: times(y)(X))(W), X * W),
    "grad": (lambda: jax.grad(over_two_calls)(W), 3 * X),
    "vmap": (lambda: jax.vmap(lambda y: times(y)(X))(W[0]), X[None] * W[0][:, None, None]),
    "scan": (lambda: jax.lax.scan(lambda c, y: (times(y)(c), None), X, W[0])[0], X * np.prod(W[0])),
}


@pytest.mark.parametrize("run, expected", CLOSURES.values(), ids=CLOSURES)
def test_function_that_closes_over_traced_values(run, expected):
    assert_close(run(), expected)


def test_shard_map_goes_inside(mesh):
    def body(f):
        return jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})

    step = sharding.jit(lambda x: annotate(body(lambda x: annotate(x * 2, P(None, "tensor")))(x), P("data")))
    assert_close(step(X), 2 * X)
    with pytest.raises(ShardingError, match=r"(?s)body of a shard_map over 'data'.*sharding.annotate inside"):
        jax.jit(body(sharding.jit(lambda x: x * 2)))(X)


def test_constants_passed_in_traced_code():
    step = sharding.jit(lambda x: annotate(x, P("data")) * 2)
    assert_close(jax.jit(lambda y: y + step(X))(W), W + 2 * X)
    auto = jax.make_mesh((4, 2), ("data", "b"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(auto):
        assert_close(jax.jit(lambda y: y + step(X))(W), W + 2 * X)


def test_static_arguments_by_number_and_name():
    def f(n, x, mode="double"):
        return n * x * (2 if mode == "double" else 3)

    for step in (
        sharding.jit(f, static_argnums=(0, 2)),
        sharding.jit(f, static_argnames=["mode", "n"]),
        sharding.jit(f, static_argnums=(-3, -1)),
    ):
        assert_close(step(2, X), 4 * X)
        assert_close(step(2, X, "triple"), 6 * X)
        assert_close(step(2, X, mode="triple"), 6 * X)
        assert_close(step(x=X, n=3), 6 * X)
        assert step.complete(2, X).spec("x") == P()


def test_static_values_that_are_equal_but_of_other_type_are_not_mixed_up():
    step = sharding.jit(lambda x, n: x + n, static_argnames="n")
    x = np.ones(2, np.int32)
    assert [step(x, n).dtype for n in (1, 1.0, True)] == [jnp.int32, jnp.float32, jnp.int32]


def test_static_argument_that_has_no_hash_is_an_error():
    with pytest.raises(ShardingError, match=r"(?s)\(sizes\)\n.*\[1, 2\], of type list.*a hashable static argument"):
        sharding.jit(lambda x, sizes: x, static_argnames="sizes")(X, [1, 2])


def test_keywords_and_defaults():
    step = sharding.jit(lambda x, scale=2.0, shift=0.0: x * scale + shift)
    assert_close(step(X), 2 * X)
    assert_close(step(X, shift=1.0), 2 * X + 1)
    assert_close(step(shift=1.0, x=X), 2 * X + 1)


def test_variadic_arguments():
    step = sharding.jit(lambda x, *rest: x + sum(rest), in_shardings=(P("data"), None, None))
    assert_close(step(X, X, W), 2 * X + W)
    assert step.complete(X, X, W).spec("rest/1") == P("data")


def test_keyword_only_arguments():
    def f(x, bias=1.0, *, scale=2.0, kind="plus", **others):
        return x * scale + (bias if kind == "plus" else -bias) + sum(others.values())

    step = sharding.jit(f, static_argnames="kind", in_shardings=(P("data"), None))
    for _ in range(3):  # also on the fast path
        assert_close(step(X, 0.5), 2 * X + 0.5)
        assert_close(step(X, scale=3.0, kind="minus"), 3 * X - 1)
        assert_close(step(x=X, w=X, v=X, bias=0.0), 4 * X)
        assert_close(step(X, w=X, bias=0.0), 3 * X)
    assert step.complete(X, scale=jnp.ones((8, 8))).spec("scale") == P("data")
    assert step.lower(X, 0.5, scale=2.0).compile()(X, 0.5, scale=2.0).shape == X.shape
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        step(scale=1.0)


def test_a_parameter_left_at_its_default_is_a_python_value():
    def f(x, training=True, y=0.0):
        return x + y if training else x

    assert_close(sharding.jit(f, in_shardings=(P("data"), None, None))(X, y=2.0), X + 2)


def test_missing_and_surplus_arguments_are_pythons_errors():
    step = sharding.jit(lambda x: x)
    with pytest.raises(TypeError, match="missing"):
        step()
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        step(X, y=X)


def test_decorator_forms():
    @sharding.jit
    def plain(x):
        """What it does."""
        return x * 2

    @sharding.jit(donate_argnums=0)
    def with_options(x):
        return x * 2

    assert (plain.__name__, plain.__doc__) == ("plain", "What it does.")
    x = place(X, "data")
    assert_close(plain(X), 2 * X)
    assert_close(with_options(x), 2 * X)
    assert x.is_deleted()


def test_methods_and_callables():
    class Model:
        scale = 3.0

        @sharding.jit(static_argnums=0)
        def method(self, x):
            return x * self.scale

        @staticmethod
        @sharding.jit
        def static(x):
            return x * 4

        def __call__(self, x):
            return x * 5

    model = Model()
    assert_close(model.method(X), 3 * X)
    assert_close(Model.static(X), 4 * X)
    assert_close(sharding.jit(model)(X), 5 * X)
    assert_close(sharding.jit(model.method)(X), 3 * X)
    assert_close(sharding.jit(functools.partial(lambda k, x: k * x, 6))(X), 6 * X)
    assert_close(sharding.jit(jnp.sin)(X), np.sin(X))
    assert Model.method.complete(model, X).spec("x") == P()


def test_exceptions_of_the_function_come_out_as_they_are():
    class Mine(Exception):
        pass

    def f(x):
        raise Mine("no")

    with pytest.raises(Mine, match="^no"):
        sharding.jit(f)(X)
    with pytest.raises(TypeError, match="contracting dim"):
        sharding.jit(lambda x: x @ np.ones(3))(X)


@pytest.mark.parametrize("donate", [{"donate_argnums": 0}, {"donate_argnames": "state"}])
def test_donated_buffers_are_deleted(donate):
    state, batch = {"w": place(X, "data"), "b": place(W)}, place(X, "data")
    step = sharding.jit(lambda state, batch: (jax.tree.map(jnp.sin, state), batch.sum()), **donate)
    out, _ = step(state, batch)
    assert state["w"].is_deleted()
    assert state["b"].is_deleted()
    assert not batch.is_deleted()
    assert_close(out, {"w": np.sin(X), "b": np.sin(W)})


def test_state_fits_the_next_call_without_a_second_compilation(compiles):
    @Traces
    def step(state, batch):
        grads = annotate(batch.T @ batch, P(None, "data"))  # sharded differently from the argument
        return {"w": state["w"] - grads, "n": state["n"] + 1}, grads.sum()

    jitted = sharding.jit(step, in_shardings=({"w": P("tensor"), "n": None}, P("data")), donate_argnums=0)
    state = {"w": X, "n": np.int32(0)}
    compiles.clear()
    for _ in range(3):
        state, _ = jitted(state, X)
        assert specs(state) == {"w": P("tensor"), "n": P()}
    assert (step.count, len(compiles)) == (1, 1)
    assert int(state["n"]) == 3


def test_nested_outputs_reuse_the_shardings_of_several_donated_arguments():
    @Traces
    def step(params, moments, batch):
        update = annotate(params["k"] * 2 + batch, P(None, "data"))
        return {"loss": batch.sum(), "new": [[{"k": update}], (moments[0] + update, moments[1] + 1)]}

    jitted = sharding.jit(step, in_shardings=(P("data"), (P("tensor"), None), None), donate_argnums=(0, 1))
    params, moments = {"k": X}, (X, np.float32(0))
    for _ in range(3):
        out = jitted(params, moments, X)
        (params,), moments = out["new"]
        assert specs((params, moments)) == ({"k": P("data")}, (P("tensor"), P()))
    assert step.count == 1


def test_out_shardings_take_precedence_over_a_donated_argument():
    step = sharding.jit(lambda x: x * 2, in_shardings=P("data"), out_shardings=P(None, "data"), donate_argnums=0)
    assert step(X).sharding.spec == P(None, "data")


class Counter(nnx.Variable):
    pass


ADAM = optax.adam(0.1)
"""One object: it is part of the optimizer's tree."""


class Net(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(W)
        self.calls = Counter(np.int32(0))

    def __call__(self, x):
        self.calls[...] += 1
        return jnp.tanh(x @ self.w[...])


def fit(net, opt, x):
    def loss(net):
        return (annotate(net(x), P("data", U)) ** 2).mean()

    value, grads = nnx.value_and_grad(loss)(net)
    opt.update(net, grads)
    return net, opt, value


def test_nnx_modules_and_optimizers_fit_the_next_call():
    def init():
        net = Net()
        return net, nnx.Optimizer(net, ADAM, wrt=nnx.Param)

    step = Traces(fit)
    jitted = sharding.jit(step, donate_argnums=(0, 1))
    shapes = jax.eval_shape(init)
    with_specs = jax.tree_util.tree_map_with_path(
        lambda path, s: P(None, "tensor") if sharding.paths.text(path).endswith("w") else P(), shapes
    )
    net, opt = sharding.jit(init, out_shardings=with_specs)()
    net1, opt1 = init()
    for i in range(3):
        net, opt, value = jitted(net, opt, X)
        net1, opt1, value1 = nnx.jit(fit)(net1, opt1, X)
        assert net.w[...].sharding.spec == P(None, "tensor")
        assert int(net.calls[...]) == i + 1
        assert_close(value, value1, times=10)
    assert (type(net), type(opt)) == (Net, nnx.Optimizer)
    assert_close(net.w[...], net1.w[...], times=100)  # adam divides by small second moments
    assert step.count == 1
    moment = next(n for n in jitted.complete(net, opt, X).assignment.graph.names if n.endswith("mu/w"))
    assert jitted.complete(net, opt, X).spec(moment) == P(None, "tensor")


def test_same_call_is_completed_once(mesh):
    f = Traces(lambda a, b: a["k"] * b)
    step = sharding.jit(f)
    for b in (2.0, 3.0, np.float32(4)):
        step({"k": X}, b)
    step.complete({"k": shape(8, 8)}, shape())
    step.lower({"k": X + 1}, 5.0)
    assert f.count == 2  # a Python number is weakly typed


def calls(step, mesh):
    """Calls that differ in one thing each."""
    step({"k": X})
    yield "shape", lambda: step({"k": X[:4]})
    yield "dtype", lambda: step({"k": X.astype(np.int32)})
    yield "tree", lambda: step({"j": X})
    yield "committed sharding", lambda: step({"k": place(X, "data")})
    yield "static", lambda: step({"k": X}, 3)


def test_different_arguments_are_a_cache_miss(mesh):
    f = Traces(lambda a, n=2: next(iter(a.values())) * n)
    step = sharding.jit(f, static_argnames="n")
    for i, (what, call) in enumerate(calls(step, mesh), 1):
        assert f.count == i, what
        call()
        call()
        assert f.count == i + 1, what


def test_another_mesh_or_configuration_is_a_cache_miss():
    f = Traces(lambda x: x @ x)
    step = sharding.jit(f, in_shardings=P("data"))
    step(X)
    with sharding.mesh(data=8):
        assert step(X).sharding.mesh.shape == {"data": 8}
    step(X)
    assert f.count == 2
    with jax.default_matmul_precision("highest"):
        assert "HIGHEST" in str(step.lower(X).as_text())
    assert "HIGHEST" not in str(step.lower(X).as_text())
    assert f.count == 3


@pytest.mark.parametrize(
    "args, message",
    [
        (({"k": X[:4]}, X), r"a/k: \(\(8, 8\).* -> \(\(4, 8\)"),
        (({"k": X}, X.astype(np.int32)), r"b: .*float32.* -> .*int32"),
        (({"j": X}, X), "a: pytree"),
        (({"k": X},), "the number of arguments"),
    ],
)
def test_debug_log_names_what_changed(caplog, args, message):
    step = sharding.jit(lambda a, b=1: a)
    with caplog.at_level(logging.DEBUG, logger="sharding"):
        step.complete({"k": X}, X)
        assert caplog.text == ""
        step.complete(*args)
    assert "cache miss" in caplog.text
    assert re.search(message, caplog.text)


def test_debug_log_names_changed_axis_rules(caplog):
    step = sharding.jit(lambda a: a, in_shardings=P("rows"))
    with caplog.at_level(logging.DEBUG, logger="sharding"):
        for axis in ("data", "tensor"):
            with sharding.axis_rules({"rows": axis}):
                assert step.complete(X).spec("a") == P(axis)
    assert "cache miss: axis rules changed" in caplog.text


def test_committed_arguments_are_annotations():
    c = sharding.jit(lambda a, b: a @ b).complete(place(X, "data"), place(W, None, "tensor"))
    assert c.in_shardings == (P("data"), P(None, "tensor"))
    assert c.out_shardings == P("data", "tensor")


def test_abstract_arguments_with_a_sharding_are_annotations(mesh):
    for m in (mesh, mesh.abstract_mesh):
        s = shape(8, 8, sharding=NamedSharding(m, P("data")))
        assert sharding.jit(lambda x: x * 2).complete(s).spec("out") == P("data")


def test_conflicting_committed_argument_is_an_error_with_its_path():
    step = sharding.jit(lambda s: s["w"], in_shardings=({"w": P("tensor")},))
    with pytest.raises(
        ShardingError, match=r"(?s)\(s/w\)\n.*committed to P\('data',?\).*in_shardings requires P\('tensor'"
    ):
        step({"w": place(X, "data")})


def test_array_from_another_mesh_is_an_error():
    x = place(X, "data")
    with sharding.mesh(data=8), pytest.raises(ShardingError, match=r"(?s)\(x\)\n.*mesh is \{'data': 8\}"):
        sharding.jit(lambda x: x)(x)


def test_uncommitted_arrays_are_sharded():
    out = sharding.jit(lambda x: x * 2, in_shardings=P("data", "tensor"))(X)
    assert out.sharding.spec == P("data", "tensor")
    assert out.addressable_shards[0].data.shape == (4, 2)


def test_in_shardings_are_never_overridden_by_annotations():
    def f(x):
        return annotate(x, P("tensor"))

    step = sharding.jit(f, in_shardings=P("data"), out_shardings=P(None, "data"))
    assert step.complete(X).in_shardings == (P("data"),)
    assert step(X).sharding.spec == P(None, "data")
    assert_close(step(X), X)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"in_shardings": (P(),)}, "2 arguments, and in_shardings is"),
        ({"in_shardings": (None, {"w": P()})}, r"in_shardings\[1\]"),
        ({"in_shardings": ({"v": P()}, None)}, r"(?s)in_shardings\[0\].*'v'"),
        ({"in_shardings": (P("model"), None)}, r"(?s)\(s/w\): in_shardings.*names 'model'"),
        ({"in_shardings": ("data", None)}, r"(?s)'data', of type str.*fix: +P\('data'\)"),
        ({"out_shardings": (P(), P())}, r"(?s): out_shardings\n.*the result is \{'w': \*\}"),
        ({"out_shardings": {"w": P("data", "data")}}, r"\(out/w\): out_shardings"),
        ({"engine": "shard"}, r"(?s)engine='shard'.*fix: +engine='sharding'\n +engine='shardy'\n +engine='xla'"),
    ],
)
def test_bad_request_is_an_error(options, message):
    with pytest.raises(ShardingError, match=message):
        sharding.jit(lambda s, x: {"w": s["w"] + x}, **options)({"w": X}, X)


ODD = np.ones((3, 6), np.float32)


def test_every_argument_that_does_not_divide_is_in_one_error():
    step = sharding.jit(lambda s, x: x, in_shardings=({"a": P("data"), "b": P(None, "tensor")}, P("tensor")))
    with pytest.raises(ShardingError, match=r"(?s)3 failures.*s/a.*3 = 1 x 2 \+ 1.*s/b.*6 = 1 x 4 \+ 2.*\(x\)"):
        step({"a": ODD, "b": ODD}, ODD)


def test_every_result_that_does_not_divide_is_in_one_error():
    step = sharding.jit(lambda x: {"k": x, "v": [x]}, out_shardings=P("data"))
    with pytest.raises(
        ShardingError,
        match=r"(?s)2 failures.*out/k.*out/v/0.*required: a dim divisible by the product of its axis sizes",
    ):
        step(ODD)


def test_uneven_inferred_sharding_is_dropped_at_arguments_and_listed():
    step = sharding.jit(lambda x: annotate(jnp.concatenate([x, x]), P("data")))
    c = step.complete(ODD)
    assert (c.in_shardings, c.out_shardings) == ((P(),), P("data"))
    assert c.uneven == ("x: dim 0 of size 3 over data=2 = 2: 3 = 1 x 2 + 1",)
    assert_close(step(ODD), np.ones((6, 6), np.float32))


def test_non_array_leaf_is_an_error_with_its_path():
    with pytest.raises(ShardingError, match=r"(?s)2 failures.*\(s/a\).*'text', of type str.*\(s/b/1\).*of type object"):
        sharding.jit(lambda s: 0)({"a": "text", "b": [X, object()]})


def test_call_with_shapes_is_an_error():
    with pytest.raises(ShardingError, match=r"(?s)s/w is a ShapeDtypeStruct.*fix: .*\.complete\("):
        sharding.jit(lambda s: s)({"w": shape(8, 8)})


def add_entry(s):
    s["z"] = s["w"] * 2
    return s["w"]


def set_entry(s):
    s["w"] = s["w"] * 2
    return 0.0


@pytest.mark.parametrize(("f", "message"), [(add_entry, "s: its pytree was mutated"), (set_entry, "s/w was mutated")])
def test_mutated_argument_that_is_not_returned_is_an_error(f, message):
    with pytest.raises(ShardingError, match=rf"(?s){f.__name__}\(\.\.\.\).*{message}\n.*is not returned"):
        sharding.jit(f)({"w": X, "b": W})


def test_entry_taken_out_of_an_argument_is_fine():
    batch = {"inputs": X, "labels": W}

    def f(batch):
        labels = batch.pop("labels")
        return batch["inputs"] @ labels

    assert_close(sharding.jit(f)(batch), X @ W)
    assert batch.keys() == {"inputs", "labels"}


def test_donated_array_passed_again_is_an_error_with_its_path():
    step = sharding.jit(lambda s: {"w": s["w"] + 1}, donate_argnums=0)
    state = {"w": place(X, "data")}
    new = step(state)
    with pytest.raises(ShardingError, match=r"(?s)s/w was donated.*pass the result"):
        step(state)
    assert_close(step(new), {"w": X + 2})


def test_mutated_argument_that_is_returned_is_fine():
    def f(s):
        s["z"], s["w"] = s["w"] * 2, s["w"] * 3
        return {"new": s}

    state = {"w": X}
    assert_close(sharding.jit(f)(state), {"new": {"w": 3 * X, "z": 2 * X}})
    assert state.keys() == {"w"}


def test_mutated_nnx_variable_that_is_not_returned_is_an_error_that_names_it():
    with pytest.raises(ShardingError, match=r"(?s)net/calls was mutated\n.*return the changed object"):
        sharding.jit(lambda net, x: net(x))(Net(), X)
    out, calls = sharding.jit(lambda net, x: (net(x), net.calls))(Net(), X)
    assert int(calls[...]) == 1
    assert_close(out, np.tanh(X @ W))


def test_no_mesh_is_an_error():
    with ThreadPoolExecutor(1) as thread, pytest.raises(ShardingError, match=r"(?s)no mesh.*sharding.mesh"):
        thread.submit(sharding.jit(lambda x: x), X).result()


def test_mesh_set_by_jax():
    auto = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    step = sharding.jit(lambda x: (annotate(x, P("a", "b")) @ W).sum(axis=1))
    with jax.set_mesh(auto):
        assert step(X).sharding.spec == P("a")
        assert_close(step(X), (X @ W).sum(axis=1))
        assert_close(jax.grad(lambda x: step(x).sum())(X), jax.grad(lambda x: (x @ W).sum())(X))


@pytest.mark.parametrize("devices", ["v5p:2x2x1", "h100:2x2", 4])
def test_described_devices_complete_and_lower_but_do_not_run(devices):
    step = sharding.jit(mlp, in_shardings=(P(None, "tensor"), P("data")))
    with sharding.mesh(data=2, tensor=2, devices=devices):
        assert step.complete(shape(8, 8), X).spec("out").index("data") == 0
        assert 'sdy.mesh @mesh = <["data"=2, "tensor"=2]>' in step.lower(shape(8, 8), shape(8, 8)).as_text()
        assert step.eval_shape(W, X).shape == (8, 8)
        with pytest.raises(ShardingError, match=r"(?s)described devices.*required: real devices.*\.complete"):
            step(W, X)


def test_compiled_program_takes_the_users_pytrees():
    step = sharding.jit(
        lambda s, x, n: {"w": s["w"] * x * n, "b": [x]}, in_shardings=(P("data"), None), static_argnums=2
    )
    compiled = step.lower({"w": X}, X, 2).compile()
    out = compiled({"w": X}, X)
    assert_close(out, {"w": 2 * X * X, "b": [X]})
    assert out["w"].sharding.spec == P("data")


def test_trace_and_eval_shape_have_shapes_and_shardings(mesh):
    step = sharding.jit(lambda s: {"w": s["w"][:4].astype(jnp.bfloat16)}, in_shardings=P(None, "tensor"))
    expected = {"w": shape(4, 8, dtype=jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "tensor")))}
    assert step.eval_shape({"w": shape(8, 8)}) == expected
    info = step.trace({"w": X}).out_info["w"]
    assert (info.shape, info.dtype, info.sharding) == ((4, 8), jnp.bfloat16, expected["w"].sharding)


def test_sharded_initialization_never_materializes_a_global_array():
    def init(key):
        k1, k2 = jax.random.split(key)
        return {"w": jax.random.normal(k1, (64, 128)), "b": jax.random.uniform(k2, (32, 16))}

    use = sharding.jit(lambda s, x: x @ s["w"], in_shardings=({"w": P("data", "tensor"), "b": P("tensor")}, None))
    shardings = use.complete(jax.eval_shape(init, jax.random.key(0)), shape(8, 64)).in_shardings[0]
    assert shardings == {"w": P("data", "tensor"), "b": P("tensor")}
    step = sharding.jit(init, out_shardings=shardings)
    hlo = step.lower(jax.random.key(0)).compile().as_text()
    assert "f32[32,32]" in hlo
    assert "f32[8,16]" in hlo
    assert not [shape for shape in ("[64,128]", "[8192]", "[32,16]", "[512]") if shape in hlo]
    params = step(jax.random.key(0))
    assert specs(params) == shardings
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, jax.jit(init)(jax.random.key(0)))


def test_initial_values_are_the_same_on_any_mesh():
    def init(key):
        return annotate(jax.random.normal(key, (8, 16)), P("data", None))

    first = np.asarray(sharding.jit(init)(jax.random.key(1)))
    with sharding.mesh(data=8):
        np.testing.assert_array_equal(sharding.jit(init)(jax.random.key(1)), first)


def test_xla_engine_infers_nothing_but_keeps_annotations():
    step = sharding.jit(mlp, engine="xla", in_shardings=(None, P("data")))
    c = step.complete(W, X)
    assert str(c.assignment.specs[c.value("out")]) == "[?, ?]"
    assert step.eval_shape(W, X).sharding is None
    assert_close(step(W, X), mlp(W, X))
    annotated = [e for e in step.trace(W, X).jaxpr.jaxpr.eqns if e.primitive.name == "annotate"]
    assert all(e.params["asked"] is not None for e in annotated)


@pytest.fixture(scope="module")
def remat_bytes():
    """Temporary bytes of a gradient with remat under sharding.jit, and of the same function under jax.jit."""

    def loss(ws, x):
        @jax.checkpoint
        def block(x, w):
            h = annotate(jnp.tanh(x @ w), P("data", "tensor"))
            return annotate(jnp.tanh((jnp.sin(h) * jnp.cos(h)) @ w.T), P("data", None))

        for w in ws:
            x = block(x, annotate(w, P(None, "tensor")))
        return (x**2).sum()

    args = [shape(32, 128)] * 8, shape(512, 32)
    with sharding.mesh(data=2, tensor=4) as m:
        placed = [NamedSharding(m, P(None, "tensor"))] * 8, NamedSharding(m, P("data"))
        ours = sharding.jit(jax.grad(loss), in_shardings=(P(None, "tensor"), P("data")))
        theirs = jax.jit(jax.grad(loss), in_shardings=placed)
        return [f.lower(*args).compile().memory_analysis().temp_size_in_bytes for f in (ours, theirs)]


def test_remat_takes_no_more_memory_than_when_constrained_by_hand(remat_bytes):
    # On JAX 0.10.2 the CPU compiler undoes remat in both; the comparison holds there too.
    ours, theirs = remat_bytes
    assert ours <= 1.01 * theirs


def test_arrays_created_under_the_mesh_are_resharded_as_the_program_requires(compiles):
    step = sharding.jit(lambda x: (annotate(x, P("data", "tensor")) * 2).sum(axis=0), in_shardings=P("data", ...))
    x = jnp.asarray(X)  # under a mesh JAX replicates it and marks it committed
    assert x.committed
    first = step(x)
    before = len(compiles)
    for again in (X, x, x + 0, place(X, "data", "tensor")):
        assert_close(step(again), first)
    assert step.complete(x).spec("x") == P("data", "tensor")
    x + 0
    assert len(compiles) - before <= 1  # that of x + 0


def test_lower_accepts_arrays_that_a_call_would_reshard():
    step = sharding.jit(lambda w, x: mlp(w, x))
    w, x = place(W), place(X)  # replicated counts as uncommitted, so they get sharded
    assert step.complete(w, x).in_shardings[1] == P("data")
    lowered = step.lower(w, x)
    assert_close(lowered.compile()(*jax.device_put((np.array(W), np.array(X)))), step(w, x))


def test_a_lowered_program_names_its_arguments():
    def step(params, x):
        return params["mlp"][0]["w"] @ x

    with sharding.mesh(data=2, tensor=2, devices=jax.devices()[:4]):
        lowered = sharding.jit(step).lower({"mlp": [{"w": X}]}, X)
    text = lowered.as_text(debug_info=True)
    assert 'loc("params_mlp_0_w")' in text and 'loc("x")' in text
