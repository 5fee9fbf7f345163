"""Model libraries."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training import train_state

from .comparison import raised, split

X = np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8)


class _Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(nnx.relu(self.linear(split(x)))))


def nnx_modules(jit):
    """nnx modules as arguments, in `eval` mode"""
    model = _Block(nnx.Rngs(0))
    model.eval()
    return jit(lambda model, x: model(x))(model, X)


def nnx_split(jit):
    """nnx `split` and `merge`, `state`, `update`"""
    graphdef, state = nnx.split(_Block(nnx.Rngs(0)))

    @jit
    def step(state, x):
        model = nnx.merge(graphdef, state)
        y = model(x)
        return y, nnx.state(model)

    y, state = step(state, X)
    y, state = step(state, X)
    return y, jax.tree.leaves(state)


def nnx_transforms_inside(jit):
    """`nnx.grad`, `nnx.scan`, `nnx.vmap`, `nnx.remat`, `nnx.jit` inside"""
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    f = jit(lambda model, x: nnx.grad(lambda m, x: (nnx.remat(lambda m, x: m(x))(m, split(x)) ** 2).sum())(model, x))
    stacked = nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs))(nnx.Rngs(0).split(3))
    deep = jit(lambda m, x: nnx.scan(lambda x, m: m(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(split(x), m))
    return jax.tree.leaves(f(model, X)), deep(stacked, X)


def nnx_inside_nnx_jit(jit):
    """A jitted function inside `nnx.jit`"""
    inner = jit(lambda x: split(x) * 2)
    return nnx.jit(lambda model, x: inner(model(x)))(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), X)


def linen_modules(jit):
    """linen: `init`, `apply` with mutable collections and rngs, `TrainState`"""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train=True):
            x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(split(x)))
            return nn.Dropout(0.5, deterministic=not train)(x)

    net = Net()
    variables = jit(net.init, static_argnames="train")({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)

    @jit
    def step(state, stats, key):
        def loss(params):
            y, new = net.apply({"params": params, **stats}, X, mutable=["batch_stats"], rngs={"dropout": key})
            return jnp.sin(y * X).sum(), new

        (value, new), gradient = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=gradient), new, value

    state = train_state.TrainState.create(apply_fn=net.apply, params=variables["params"], tx=optax.sgd(1e-2))
    stats = {"batch_stats": variables["batch_stats"]}
    for i in range(3):
        state, stats, value = step(state, stats, jax.random.key(i))
    return jax.tree.leaves(state), stats, value


def equinox_modules(jit):
    """equinox modules: `partition`, `combine`, functions as leaves an error"""
    model = eqx.nn.MLP(8, 8, 16, 2, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_array)
    f = jit(lambda arrays, x: jax.vmap(eqx.combine(arrays, static))(split(x)))
    return f(arrays, X), raised(lambda: jit(lambda model, x: x)(model, X))


def equinox_filter_jit(jit):
    """A jitted function inside `eqx.filter_jit`"""
    inner = jit(lambda x: split(x) * 2)
    return eqx.filter_jit(lambda model, x: inner(jax.vmap(model)(x)))(eqx.nn.Linear(8, 8, key=jax.random.key(0)), X)


def optax_states(jit):
    """optax states: `adamw` with schedules, `chain`, `multi_transform`, `apply_updates`"""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-2, 10)))
    params = {"w": jnp.asarray(X), "b": jnp.zeros(8)}

    @jit
    def step(params, state, x):
        loss, gradient = jax.value_and_grad(lambda p: ((split(x) @ p["w"] + p["b"][None]) ** 2).mean())(params)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = tx.init(params)
    for _ in range(3):
        params, state, loss = step(params, state, X)
    return params, jax.tree.leaves(state), loss


def haiku_like_transforms(jit):
    """haiku-style pairs of `init` and `apply`: functions that return functions of pytrees"""
    init = lambda key, x: {"linear": {"w": jax.random.normal(key, (8, 8)), "b": jnp.zeros(8)}}  # noqa: E731
    apply = lambda params, x: split(x) @ params["linear"]["w"] + params["linear"]["b"][None]  # noqa: E731
    params = jit(init)(jax.random.key(0), X)
    return params, jit(apply)(params, X), jax.grad(lambda p: jit(apply)(p, X).sum())(params)
