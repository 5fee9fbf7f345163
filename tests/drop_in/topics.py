"""Whole programs on the topics of JAX's documentation."""

import functools

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import batching, mlir
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from .comparison import raised, split

X = np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8)
Y = np.cos(np.arange(64, dtype=np.float32)).reshape(8, 8)


def _mesh():
    return jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def _params(widths=(8, 16, 8)):
    keys = jax.random.split(jax.random.key(0), len(widths))
    sizes = zip(keys, widths[:-1], widths[1:], strict=False)
    return [{"w": jax.random.normal(k, (m, n)) / m, "b": jnp.zeros((1, n))} for k, m, n in sizes]


def _predict(params, x):
    for layer in params[:-1]:
        x = jax.nn.relu(split(x) @ split(layer["w"], None, "tensor") + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def _loss(params, x, y):
    return jnp.mean((_predict(params, x) - y) ** 2)


def training_loop(jit):
    """Just-in-time compilation: a training loop with a donated state and batches from a generator"""

    @functools.partial(jit, donate_argnums=0)
    def step(state, batch):
        loss, gradient = jax.value_and_grad(_loss)(state["params"], *batch)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], gradient)
        return {"params": params, "step": state["step"] + 1}, loss

    state, losses = {"params": _params(), "step": 0}, []
    for batch in ((X * scale, Y) for scale in (1, 2, 3)):
        state, loss = step(state, batch)
        losses.append(loss)
    return state["params"], int(state["step"]), losses


def per_example_gradients(jit):
    """Automatic vectorization: gradients of each example, clipped"""

    def loss(params, x, y):
        first, second = params
        return jnp.mean((jax.nn.relu(x @ split(first["w"], None, "tensor")) @ second["w"] - y) ** 2)

    def clipped(params, x, y):
        gradient = jax.grad(loss)(params, x, y)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient)))
        return jax.tree.map(lambda g: g / jnp.maximum(norm, 0.1), gradient)

    return jax.tree.map(lambda g: g.mean(0), jit(jax.vmap(clipped, (None, 0, 0)))(_params(), X, Y))


def curvature(jit):
    """Automatic differentiation: Hessian-vector products and a step of Gauss and Newton"""

    def hvp(x, v):
        return jax.jvp(jax.grad(lambda x: jnp.sum(jnp.cos(split(x)) * x)), (x,), (v,))[1]

    def newton(x):
        residual = lambda x: jnp.tanh(X @ x) - 0.1  # noqa: E731
        jacobian = jax.jacfwd(residual)(x)
        return x - jnp.linalg.solve(jacobian.T @ jacobian + jnp.eye(8), jacobian.T @ residual(x))

    return jit(hvp)(X, Y), jit(newton)(X[0])


def implicit_differentiation(jit):
    """Custom derivative rules: a fixed point by `while_loop`, differentiated implicitly"""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def fixed_point(f, a, x):
        return jax.lax.fori_loop(0, 40, lambda _, x: f(a, x), x)

    def forward(f, a, x):
        found = fixed_point(f, a, x)
        return found, (a, found)

    def backward(f, saved, g):
        a, x = saved
        _, pull_x = jax.vjp(lambda x: f(a, x), x)
        u = jax.lax.fori_loop(0, 40, lambda _, u: g + pull_x(u)[0], g)
        return jax.vjp(lambda a: f(a, x), a)[1](u)[0], jnp.zeros_like(x)

    fixed_point.defvjp(forward, backward)
    f = lambda a, x: jnp.tanh(0.2 * split(x) @ a) + 0.1  # noqa: E731
    return jit(jax.value_and_grad(lambda a: fixed_point(f, a, X).sum()))(Y)


def accumulated_gradients(jit):
    """Refs: gradients of microbatches accumulated in place"""

    def step(total, params, x, y):
        def add(i, _):
            rows = jax.lax.dynamic_slice_in_dim
            gradient = jax.grad(_loss)(params, rows(x, 2 * i, 2), rows(y, 2 * i, 2))
            for ref, g in zip(jax.tree.leaves(total), jax.tree.leaves(gradient), strict=True):
                ref[...] += g

        jax.lax.fori_loop(0, 4, add, None)

    params = _params()
    total = jax.tree.map(lambda p: jax.new_ref(jnp.zeros_like(p)), params)
    jit(step)(total, params, X, Y)
    return jax.tree.map(lambda ref: ref[...], total)


def manual_data_parallelism(jit):
    """shard_map: the loss and gradients of a batch over `data`, averaged by `pmean`"""
    mesh = _mesh()

    def loss(params, x, y):
        body = lambda params, x, y: jax.lax.pmean(jnp.mean((x @ params - y) ** 2), "data")  # noqa: E731
        return jax.shard_map(body, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())(params, x, y)

    with jax.set_mesh(mesh):
        return jit(jax.value_and_grad(loss))(X, X, Y)


def manual_gathers(jit):
    """shard_map: weights gathered for their use, products scattered, in a `scan` over layers"""
    mesh = _mesh()

    def layer(x, w):
        w = jax.lax.all_gather(w, "data", tiled=True)
        part = jnp.tanh(x) @ w
        return jax.lax.psum_scatter(jax.lax.all_gather(part, "data", tiled=True), "data", tiled=True) / 2, part.sum()

    def f(ws, x):
        body = jax.shard_map(
            lambda ws, x: jax.lax.scan(layer, x, ws)[0],
            mesh=mesh,
            in_specs=(P(None, "data"), P("data")),
            out_specs=P("data"),
            check_vma=False,
        )
        return body(ws, x)

    with jax.set_mesh(mesh):
        return jit(f)(np.stack([X, Y]), X)


def named_checkpoints(jit):
    """Gradient checkpointing: names, policies and nested checkpoints in a scanned model"""

    def block(x, w):
        h = checkpoint_name(jnp.sin(split(x) @ w), "hidden")
        return jax.checkpoint(lambda h: jnp.cos(h) * 2)(h), None

    policies = [None, jax.checkpoint_policies.save_only_these_names("hidden"), jax.checkpoint_policies.nothing_saveable]
    losses = [lambda ws, p=p: jax.lax.scan(jax.checkpoint(block, policy=p), X, ws)[0].sum() for p in policies]
    return [jit(jax.grad(loss))(np.stack([X, Y])) for loss in losses]


def offloaded_optimizer(jit):
    """Host offloading: an optimizer's moments kept in host memory between steps"""
    host = jax.sharding.NamedSharding(_mesh(), P("data"), memory_kind="pinned_host")

    def step(w, moment, x):
        moment = 0.9 * jax.device_put(moment, jax.memory.Space.Device) + jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)
        return w - 0.01 * moment, jax.device_put(moment, jax.memory.Space.Host)

    w, moment, jitted = jnp.asarray(X), jax.device_put(np.zeros_like(X), host), jit(step)
    for _ in range(2):
        w, moment = jitted(w, moment, Y)
    return w, np.asarray(moment), moment.sharding.memory_kind


def random_streams(jit):
    """Pseudorandom numbers: a key carried through a loop, dropout, and keys per device"""

    def body(state, _):
        key, x = state
        key, own = jax.random.split(key)
        return (key, x * jax.random.bernoulli(own, 0.8, x.shape)), jax.random.uniform(own)

    return jit(lambda key: jax.lax.scan(body, (key, split(jnp.asarray(X))), None, length=3))(jax.random.key(7))


def custom_pytrees(jit):
    """Pytrees: a class with keys and static data, transformed, stacked and scanned over"""

    @jax.tree_util.register_pytree_with_keys_class
    class Affine:
        def __init__(self, w, b, act):
            self.w, self.b, self.act = w, b, act

        def tree_flatten_with_keys(self):
            return ((jax.tree_util.GetAttrKey("w"), self.w), (jax.tree_util.GetAttrKey("b"), self.b)), self.act

        @classmethod
        def tree_unflatten(cls, act, children):
            return cls(*children, act)

        def __call__(self, x):
            return getattr(jnp, self.act)(split(x) @ self.w + self.b[None])

    layers = [Affine(X, Y[0], "tanh"), Affine(Y, X[0], "tanh")]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    f = jit(lambda model, x: jax.lax.scan(lambda x, layer: (layer(x), None), x, model)[0])
    names = [
        jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(jax.grad(lambda m: f(m, X).sum())(stacked))
    ]
    return f(stacked, X), names


def host_functions(jit):
    """External callbacks: a function of NumPy with a derivative rule"""

    @jax.custom_jvp
    def f(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda x: np.sinc(x).astype(x.dtype), shape, x, vmap_method="expand_dims")

    f.defjvp(lambda p, t: (f(*p), jnp.cos(p[0]) * t[0]))
    return jit(jax.value_and_grad(lambda x: f(split(x)).sum()))(X)


def errors(jit):
    """Errors: the kinds that JAX documents"""
    leaked = []
    jit(lambda x: leaked.append(x) or x)(X)
    return [
        raised(lambda: jit(lambda x: int(x.sum()))(X)),
        raised(lambda: jit(lambda x: X[x.sum() > 0 : 3] if x.sum().astype(int) else x)(X)),
        raised(lambda: jit(lambda x, i: [1, 2, 3][i])(X, 2)),
        raised(lambda: jit(lambda x: np.sin(x))(X)),
        raised(lambda: jit(lambda x: jnp.nonzero(x))(X)),
        raised(lambda: jit(lambda x: jnp.zeros(x.sum().astype(int)))(X)),
        raised(lambda: leaked[0] + 1),
        raised(lambda: jit(lambda x: x.__setitem__(0, 1))(X)),
        raised(lambda: jax.grad(jit(lambda x: x * 2))(X)),
        raised(lambda: jit(lambda n: jnp.arange(n))(3)),
    ]


def new_primitives(jit):
    """Custom primitives with abstract evaluation, lowering and batching"""
    twice_p = jex.Primitive("twice_of_a_test")
    twice_p.def_impl(lambda x: x * 2)
    twice_p.def_abstract_eval(lambda x: x)
    mlir.register_lowering(twice_p, mlir.lower_fun(lambda x: x * 2, multiple_results=False))
    batching.primitive_batchers[twice_p] = lambda args, dims: (twice_p.bind(*args), dims[0])
    return jit(lambda x: twice_p.bind(split(x)) + 1)(X), jit(jax.vmap(twice_p.bind))(X)


def interpreters(jit):
    """Custom interpreters: a jaxpr evaluated by a jitted function"""
    jaxpr = jax.make_jaxpr(lambda x: jnp.exp(jnp.tanh(x)))(X)

    def inverted(y):
        inverses = {"exp": jnp.log, "tanh": jnp.arctanh}
        for eqn in reversed(jaxpr.eqns):
            y = inverses[eqn.primitive.name](y)
        return split(y)

    return jit(inverted)(np.exp(np.tanh(X)))


def decoding(jit):
    """Control flow: beam search with `while_loop`, `top_k` and a cache that is updated in place"""

    def f(w):
        def step(state):
            i, tokens, scores = state
            logits = jax.nn.log_softmax(split(w)[tokens[:, i]])
            scores, best = jax.lax.top_k((scores[:, None] + logits).ravel(), 4)
            tokens = tokens[best // 8].at[:, i + 1].set(best % 8)
            return i + 1, tokens, scores

        start = 0, jnp.zeros((4, 6), jnp.int32), jnp.array([0, -1e9, -1e9, -1e9])
        return jax.lax.while_loop(lambda s: s[0] < 5, step, start)[1:]

    return jit(f)(X + Y)


def convolutional_training(jit):
    """Convolutions: a small network with pooling, batch statistics and softmax, one step"""

    def loss(params, images, labels):
        x = jax.lax.conv_general_dilated(
            split(images), params["k"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu((x - x.mean((0, 1, 2), keepdims=True)) / (x.std((0, 1, 2), keepdims=True) + 0.1))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        logits = x.reshape(x.shape[0], -1) @ params["w"]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()

    images = np.sin(np.arange(8 * 8 * 8, dtype=np.float32)).reshape(8, 8, 8, 1)
    params = {"k": np.cos(np.arange(36, dtype=np.float32)).reshape(3, 3, 1, 4), "w": np.resize(X, (64, 3)) / 8}
    return jit(jax.value_and_grad(loss))(params, images, np.arange(8) % 3)
