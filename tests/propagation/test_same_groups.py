"""Propagation with groups and barriers: golden cases, and agreement with Shardy's own groups and barriers."""

import random

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support import shardy_oracle
from support.annotated_programs import ABC, named, parse_annotation, propagate, specs_of

import sharding
from sharding import P, ShardingError, annotate, barrier, same

U = P.UNCONSTRAINED
ENGINES = ("sharding", "shardy")


def test_a_group_comes_before_the_first_op_priority():
    def f(x, y, w):
        x, y = same(x, y)
        return named(x @ w, "dot"), named(jnp.sin(y), "sin")

    a = propagate(f, ((8, 8), "a ?"), ((8, 8), None), ((8, 8), "? b"))
    assert specs_of(a, "x0", "x1", "sin", "dot") == ["a -", "a -", "a -", "a b"]


def test_the_members_of_a_group_share_one_sharding():
    def f(x, y, w):
        p, q = same(named(x @ w, "p"), named(jnp.tanh(y), "q"))
        return p * 2.0, q

    a = propagate(f, ((8, 8), "a ?"), ((8, 8), None), ((8, 8), "? b"))
    assert specs_of(a, "p", "q", "x1", "y0") == ["a b"] * 4


def test_axes_of_two_members_are_combined():
    def f(x, y, z):
        x, y, z = same(x * 1.0, y * 1.0, named(jnp.sin(z), "z"))
        return z

    a = propagate(f, ((8, 8), "a ?"), ((8, 8), "? b"), ((8, 8), None))
    assert specs_of(a, "z", "y0") == ["a b", "a b"]


def test_a_group_and_the_carry_of_a_loop():
    def f(x, w):
        def body(h, _):
            h, g = same(named(jnp.tanh(h), "h"), named(w * 2.0, "g"))
            return h + g, None

        return lax.scan(body, x, None, length=3)[0]

    a = propagate(f, ((8, 8), "a ?"), ((8, 8), "? b"))
    assert specs_of(a, "h", "g", "x0", "x1", "y0") == ["a b"] * 5


def test_a_group_has_an_axis_on_one_dim_only():
    def f(x, y):
        return same(x * 1.0, y * 1.0)

    a = propagate(f, ((8, 8), "a ?"), ((8, 8), "? a"))
    assert specs_of(a, "y0", "y1") in (["a -", "a -"], ["- a", "- a"])


@pytest.mark.parametrize("allowed, found", [("forward", "- -"), ("backward", "a -"), ("none", "- -")])
def test_a_barrier_at_every_priority(allowed, found):
    def f(x, w):
        return named(barrier(named(x * 2.0, "before"), allowed), "after") @ w

    a = propagate(f, ((8, 8), None), ((8, 8), None), outs=["a ?"])
    assert specs_of(a, "after", "before") == ["a -", found]
    b = propagate(f, ((8, 8), "a ?"), ((8, 8), None))
    assert specs_of(b, "before", "after") == ["a -", "a -" if allowed == "forward" else "- -"]


# Agreement with Shardy


def agreement(f, annotations, *shapes):
    with sharding.mesh(ABC, devices=8) as mesh:
        program = jax.jit(f).trace(*[jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]).jaxpr
        return shardy_oracle.compare(program, [parse_annotation(p) for p in annotations], mesh)


def tied_weights(x, w, y):
    """Groups of arguments, of a loop's values and of values from grad, under vmap and remat."""
    w, v = same(w, x * 0.5)

    def loss(w):
        h = jax.checkpoint(lambda w: jax.vmap(lambda r, q: same(jnp.tanh(r), q)[0])(x @ w, w * 2.0))(w)
        return (h**2).sum()

    def body(h, z):
        h, u = same(jnp.tanh(h @ v), z * 2.0)
        return jnp.sin(h), u

    return jax.grad(loss)(w), *lax.scan(body, x, y)


def walled(x, w, y):
    """Barriers of each kind around a layer, under grad, vmap and remat."""

    def loss(w):
        h = barrier(jnp.sin(barrier(x @ w, "forward")), "backward")
        return (jax.checkpoint(lambda h: jax.vmap(lambda r: barrier(jnp.cos(r)))(h * 2.0))(h) ** 2).sum()

    return jax.grad(loss)(w) + y.sum(0)


@pytest.mark.parametrize("annotations", [("a ?", "? b", None), ("? c", None, "- a ?"), (None, "a,b? ?", "- - c")])
@pytest.mark.parametrize("f", [tied_weights, walled])
def test_agreement_under_transformations(f, annotations):
    found = agreement(f, annotations, (8, 8), (8, 8), (3, 8, 8))
    assert found.num_sharded and not found.differences, "\n".join(found.differences)


OPS = {
    "add": lambda a, b: a + b,
    "dot": lambda a, b: a @ b,
    "transpose": lambda a, b: a.T,
    "tanh": lambda a, b: jnp.tanh(a),
    "annotate": lambda a, b: annotate(jnp.sin(a), P(U, ("c", ...))),
    "forward": lambda a, b: barrier(a, "forward"),
    "backward": lambda a, b: barrier(a, "backward"),
    "none": lambda a, b: barrier(a, "none"),
}


def generated(seed):
    """Returns a straight-line program of arrays [8, 8] with groups and barriers, and its arguments' annotations."""
    draw = random.Random(seed)
    steps = [
        (draw.choice([*OPS, "same", "same", "same"]), draw.randint(0, i + 1), draw.randint(0, i + 1))
        for i in range(draw.randint(3, 8))
    ]
    annotations = draw.choices(["- -", "a -", "- a", "a b", "b? ?", "? a,c?", "c,a? b", None, None], k=2)

    def f(x, y):
        values = [x, y]
        for op, i, j in steps:
            i, j = i % len(values), j % len(values)
            if op == "same":
                values[i], values[j] = same(values[i], values[j])
            else:
                values.append(OPS[op](values[i], values[j]))
        return values[2:]

    return f, annotations


def compared(seeds):
    counted, differences, conflicts = 0, [], 0
    for seed in seeds:
        f, annotations = generated(seed)
        try:
            found = agreement(f, annotations, (8, 8), (8, 8))
        except ShardingError as e:
            assert "one spec for all members of a group" in str(e)
            conflicts += 1
            continue
        counted += found.num_sharded
        differences += [f"{seed}: {line}" for line in found.differences]
    return counted, differences, conflicts


def check(seeds):
    counted, differences, conflicts = compared(seeds)
    assert counted > 2 * len(seeds) and conflicts < len(seeds) / 4
    assert not differences, "\n".join(differences)


def test_agreement_on_generated_programs():
    check(range(30))


@pytest.mark.slow
def test_agreement_on_many_generated_programs():
    check(range(30, 600))


def test_engine_shardy_with_groups_barriers_and_state():
    def step(state, x):
        w = annotate(state["w"], P("a", U))
        m, w = same(state["m"], w)
        h = barrier(jnp.tanh(x @ annotate(w, name="w")), "forward")
        return {"w": w - 0.1 * (x.T @ h), "m": m + w}, named(h, "h")

    x = jnp.ones((8, 8))
    with sharding.mesh(ABC):
        found = {
            e: sharding.jit(step, donate_argnums=0, engine=e, policy="shardy").complete({"w": x, "m": x}, x)
            for e in ENGINES
        }
        for name in ("state/w", "state/m", "x", "h", "out/0/m"):
            assert found["shardy"].spec(name) == found["sharding"].spec(name), name
        assert found["shardy"].spec("state/m") == P("a")
        for c in found.values():
            lines = str(c.why("state/m", dim=0)).splitlines()
            assert lines[1].startswith("  state/m dim 0 <- same group at test_same_groups.py:")
            assert lines[-1].startswith("  state/w dim 0 <- annotate at test_same_groups.py:")
