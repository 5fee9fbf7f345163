"""The dim that an axis shards, and the specs of optimizer states, by trying every dim of every small shape."""

import itertools
import math
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import sharding
from sharding import P, ShardingError, zero
from sharding.zero.state_specs import axes_of, leaf_specs, with_axis

SIZES = {"data": 4, "tensor": 2, "pod": 3}


def by_trying(shape: tuple[int, ...], spec: P) -> P | None:
    """The longest unsharded dim that the axis divides, first among equals; else the longest sharded one."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    names = [entry if isinstance(entry, tuple) else () if entry is None else (entry,) for entry in entries]
    if any("data" in own for own in names):
        return spec
    best: tuple[bool, int] | None = None
    found = None
    for dim, length in enumerate(shape):
        parts = math.prod(SIZES[name] for name in names[dim])
        if length == 0 or length % (parts * SIZES["data"]):
            continue
        rank = (not names[dim], length)
        if best is None or rank > best:
            added = [*entries]
            added[dim] = (*names[dim], "data") if names[dim] else "data"
            best, found = rank, P(*added)
    return found


def test_the_dim_that_is_sharded():
    specs = [P(), P("tensor"), P(None, "tensor"), P(("tensor", "pod")), P("data"), P("pod", "tensor")]
    count = 0
    for ndim in range(3):
        for shape in itertools.product((0, 1, 4, 6, 8, 24), repeat=ndim):
            for spec in specs:
                if len(spec) <= ndim:
                    assert with_axis(shape, spec, "data", SIZES) == by_trying(shape, spec), (shape, spec)
                    count += 1
    assert count > 200
    assert axes_of(P("a", None, ("b", "c"), P.UNCONSTRAINED), 5) == [("a",), (), ("b", "c"), (), ()]


def test_states_follow_their_parameter():
    """By the end of the path and the shape; others by their own shape."""
    params = {"a": {"w": jnp.zeros((8, 6))}, "w": jnp.zeros((4, 8))}
    specs = {"a": {"w": P("data", "tensor")}, "w": P("tensor", "data")}
    state = (optax.adam(1.0).init(params), {"a": {"w": jnp.zeros((8, 4))}}, {"other": jnp.zeros((6, 8))}, jnp.zeros(3))
    found = leaf_specs(state, params, specs, "data", SIZES)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    expected = {"count": None, "['a']['w']": P("data", "tensor"), "['w']": P("tensor", "data")}
    for name, spec in zip(names[:5], found[:5], strict=True):
        assert spec == next(value for end, value in expected.items() if name.endswith(end)), name
    assert found[5:] == [P("data", None), P(None, "data"), None]


@pytest.mark.parametrize("num", [1, 4, 5, 7])
def test_the_largest_replicated_parameters_are_named(num: int):
    params = {f"p{k}": jax.ShapeDtypeStruct((k + 1, 3), "bfloat16") for k in range(num)}
    with sharding.mesh(data=8), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = zero.specs(params)
    assert found.whole == {f"p{k}": 6 * (k + 1) for k in range(num)}
    (text,) = [str(one.message) for one in caught]
    largest = [f"p{k} ({6 * (k + 1)} bytes)" for k in reversed(range(num))]
    more = f" and {num - 4} more" if num > 4 else ""
    assert f"divides no dim of {', '.join(largest[:4])}{more}; " in text
    assert f"; {sum(found.whole.values())} bytes stay replicated" in text


def test_bytes_of_every_stage():
    for stage, devices in itertools.product(range(4), (1, 2, 64)):
        sizes = {"optimizer_bytes": 12.0, "gradient_bytes": 3.0, "param_bytes": 5.0}
        shared = [12.0, 3.0, 5.0][:stage]
        expected = sum(shared) / devices + sum([12.0, 3.0, 5.0][stage:])
        assert zero.model_state_bytes(10, devices, stage, **sizes) == pytest.approx(10 * expected)
    for devices, stage in ((0, 1), (1, 4), (1, -1)):
        with pytest.raises(ShardingError, match="required: "):
            zero.model_state_bytes(1, devices, stage)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("master", [False, True])
def test_updates_are_those_of_the_optimizer(stage: int, master: bool):
    """As `tx` itself updates the master weights, or the parameters."""
    tx = optax.adamw(0.1)
    params = {"w": jnp.linspace(-1.0, 1.0, 32).reshape(8, 4).astype("bfloat16"), "b": jnp.ones(3, "bfloat16")}
    gradients = jax.tree.map(lambda p: (0.3 * p + 0.01).astype(p.dtype), params)
    weights = jax.tree.map(lambda p: p.astype("float32"), params) if master else params
    state = tx.init(weights)
    with sharding.mesh(data=4, devices=4), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sharded = zero.shard(tx, stage=stage, master=master)
        own, new = sharded.init(params), params
        for _ in range(2):
            used = jax.tree.map(lambda g, w: g.astype(w.dtype), gradients, weights)
            updates, state = tx.update(used, state, weights)
            weights = optax.apply_updates(weights, updates)
            applied, _ = sharded.apply(gradients, own, new)
            updates, own = sharded.update(gradients, own, new)
            new = optax.apply_updates(new, updates)
            for found in (applied, new):
                for name, value in found.items():
                    assert value.dtype == "bfloat16"
                    assert jnp.array_equal(value, weights[name].astype("bfloat16"))
        if master:
            assert all(jnp.array_equal(own.weights[name], weights[name]) for name in weights)
