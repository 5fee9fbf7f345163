"""What is known of equations: found once per program, whatever its shardings."""

import jax
import jax.numpy as jnp

import sharding
from sharding import P
from sharding.memory import usage
from sharding.memory.equation_facts import KnownEquations

X = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def loss(w, x):
    hidden = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=3)[0]
    return jnp.sum(jnp.roll(hidden, 2, axis=0) ** 2)


def test_other_shardings_of_a_program_need_the_memory_that_they_need_alone():
    specs = [P("a"), P(None, "a"), P("b", "a"), P()]
    with sharding.mesh(a=2, b=4, devices=8):
        base = sharding.jit(jax.grad(loss)).complete(X, X)
        known = [usage(base.annotate("x", spec).assignment, platform="tpu").peak_bytes for spec in specs]
        for spec, peak_bytes in zip(specs, known, strict=True):
            alone = sharding.jit(jax.grad(loss)).complete(X, X).annotate("x", spec)
            assert usage(alone.assignment, platform="tpu").peak_bytes == peak_bytes
    assert len({*known}) > 1


def test_equal_equations_have_one_key():
    def f(x, y):
        return jnp.exp(x) + 2.0, jnp.exp(y) + 2.0, x + 3.0

    with sharding.mesh(a=8, devices=8):
        graph = sharding.jit(f).complete(X, X).assignment.graph
    scope = graph.scope
    assert scope is not None
    known = KnownEquations.of(graph)
    assert known is KnownEquations.of(graph.with_annotations({}))
    facts = [known.facts(i, eqn, scope) for i, eqn in enumerate(scope.jaxpr.eqns)]
    assert facts[0] is known.facts(0, scope.jaxpr.eqns[0], scope)
    exps, adds = ([one for one in facts if one.name == name] for name in ("exp", "add"))
    assert exps[0].key is exps[1].key is not adds[0].key
    assert [one.key is adds[0].key for one in adds] == [True, True, False]
    assert all(one.op is not None and one.op.name == one.name and not one.is_constant for one in facts)
