"""Redundant constraints: without them the compiled program has the same collectives and no more memory."""

import jax
import pytest
from support.propagation_programs import PROGRAMS, SQUARE, floats, grads_of

import sharding
from sharding import P, annotate, compat
from sharding.cost import read_compiled
from sharding.rewrite import constrain

pytestmark = pytest.mark.filterwarnings("ignore:.*XLA pads it")
QUICK = ["mlp, open", "attention", "lstm", "embedding", "reshaped", "branches", "dropout"]


def constraints(jaxpr):
    inner = compat.open_jaxpr(jaxpr)
    found = [e.outvars[0] for e in inner.eqns if e.primitive.name == "annotate"]
    return found + [v for e in inner.eqns for _, _, j in compat.sub_jaxprs(e.params) for v in constraints(j)]


def facts(fn, shapes, specs, sizes):
    """Returns the number of constraints, and (collectives, output bytes) and temporary bytes as compiled."""

    def annotated(*args):
        return fn(*[x if s is None else annotate(x, s) for x, s in zip(args, specs, strict=True)])

    with sharding.mesh(sizes):
        traced = sharding.jit(annotated).trace(*shapes)
        compiled = traced.lower().compile()
    found = read_compiled(compiled, mesh=sizes)
    return len(constraints(traced.jaxpr)), (found.by_axes(), found.memory.output_bytes), found.memory.temp_bytes


PACKED = {("experts", (("data", 4), ("tensor", 2))): 512}
"""(program, mesh) -> extra temporary bytes without the redundant constraints, from XLA's buffer packing."""


def check(name, sizes, monkeypatch):
    fn, shapes, specs = PROGRAMS[name]
    specs = [*specs, *[None] * (len(shapes) - len(specs))]
    num_kept, kept_facts, kept_temporaries = facts(fn, shapes, specs, sizes)
    monkeypatch.setattr(constrain, "redundant", lambda *_, **__: set())
    num_all, all_facts, all_temporaries = facts(fn, shapes, specs, sizes)
    assert num_kept <= num_all
    assert kept_facts == all_facts
    assert kept_temporaries <= all_temporaries + PACKED.get((name, tuple(sizes.items())), 0)


@pytest.mark.parametrize("name", QUICK)
def test_collectives_stay_the_same(name, monkeypatch):
    check(name, {"data": 2, "tensor": 4}, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"data": 4, "tensor": 2}, {"tensor": 8, "data": 1}], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_collectives_of_every_program_stay_the_same(name, sizes, monkeypatch):
    check(name, sizes, monkeypatch)


def kept(f, *shapes):
    """Returns the primitives whose results keep their constraints."""
    with sharding.mesh(data=2, tensor=4):
        eqns = compat.open_jaxpr(sharding.jit(f).trace(*shapes).jaxpr).eqns
    makers = {v: e.primitive.name for e in eqns for v in e.outvars}
    return [
        makers[e.invars[0]]
        for e in eqns
        if e.primitive.name == "annotate" and makers.get(e.invars[0], "annotate") != "annotate"
    ]


def outer(x):
    return jax.lax.broadcast_in_dim(x, SQUARE.shape, (0,))


@pytest.mark.parametrize(
    "f, expected",
    [
        (lambda x: jax.numpy.sin(annotate(x, P("data"))) * 2, []),
        (lambda x: annotate(jax.numpy.sin(x) + 1, P("data")) * 2, ["add"]),
        (lambda x: (annotate(x, P("data")) @ x) * 2, []),
        (lambda x: (annotate(x, P("data")) @ annotate(x.T * 2, P(None, "data"))) * 2, ["mul", "dot_general"]),
        (lambda x: jax.lax.cumsum(annotate(x, P("data"))) * 2, ["cumsum"]),
        (lambda x: jax.lax.sort(annotate(x, P("data")) * 3) * 2, ["mul", "sort"]),
        (
            lambda x: annotate(outer(jax.numpy.sin(annotate(x[:, 0], P("data")))) * 2, P("data", "tensor")),
            ["squeeze", "broadcast_in_dim", "mul"],
        ),
    ],
    ids=[
        "elementwise",
        "annotated inside",
        "dot",
        "conflicting dot",
        "op not trusted",
        "use by an op not trusted",
        "one axis from the operand",
    ],
)
def test_constraints_kept(f, expected):
    assert kept(f, SQUARE) == expected


def test_the_compiler_slices_a_replicated_operand_by_itself():
    def f(x, y):
        return jax.numpy.sin(annotate(x * 2, P())) + annotate(y * 2, P("data"))

    with sharding.mesh(data=2, tensor=4):
        jaxpr = sharding.jit(f).trace(floats(8, 8), floats(8, 8)).jaxpr
    makers = {v: e for e in compat.open_jaxpr(jaxpr).eqns for v in e.outvars}
    (sin,) = (e for e in makers.values() if e.primitive.name == "sin")
    asked = makers[sin.invars[0]]  # as the user says, and no constraint to the slice behind it
    assert (asked.primitive.name, str(asked.params["spec"])) == ("annotate", "[-, -]")


def test_results_of_a_loop_body_keep_their_constraints():
    def f(x, w):
        return jax.lax.scan(lambda c, _: (jax.numpy.tanh(c @ w), None), annotate(x, P("data")), None, length=3)[0]

    with sharding.mesh(data=2, tensor=4):
        traced = sharding.jit(f).trace(floats(8, 8), floats(8, 8))
    (loop,) = [e for e in compat.open_jaxpr(traced.jaxpr).eqns if e.primitive.name == "scan"]
    body = compat.open_jaxpr(loop.params["jaxpr"])
    assert body.outvars[0] in constraints(loop.params["jaxpr"])


def test_gradient_of_a_chain_needs_three_constraints():
    def f(x, w1, w2):
        return jax.numpy.tanh(annotate(x, P("data")) @ w1) @ w2

    with sharding.mesh(data=8):
        jaxpr = sharding.jit(grads_of(f)).trace(floats(8, 8), floats(8, 8), floats(8, 8)).jaxpr
    num_arrays = sum(bool(e.outvars[0].aval.shape) for e in compat.open_jaxpr(jaxpr).eqns)
    assert len(constraints(jaxpr)) == 3 < num_arrays / 4
