"""Constraints left out: XLA moves the same data without them, and takes no more memory."""

import jax
import pytest
from programs import PROGRAMS, SQUARE, floats, trained

import sharding
from sharding import P, annotate, compat
from sharding.cost import read_compiled

constrain = sharding.jit.__globals__["Program"].flat.__globals__["constrain"].__globals__
pytestmark = pytest.mark.filterwarnings("ignore:.*XLA pads it")
QUICK = ["mlp, open", "attention", "lstm", "embedding", "reshaped", "branches", "dropout"]


def constraints(jaxpr):
    inner = compat.open_jaxpr(jaxpr)
    found = [e.outvars[0] for e in inner.eqns if e.primitive.name == "annotate"]
    return found + [v for e in inner.eqns for _, _, j in compat.sub_jaxprs(e.params) for v in constraints(j)]


def facts(fn, shapes, specs, sizes):
    """The number of constraints; the collectives of the compiled program, its bytes of results and of temporaries."""

    def annotated(*args):
        return fn(*[x if s is None else annotate(x, s) for x, s in zip(args, specs, strict=True)])

    with sharding.mesh(sizes):
        traced = sharding.jit(annotated).trace(*shapes)
        compiled = traced.lower().compile()
    found = read_compiled(compiled, mesh=sizes)
    return len(constraints(traced.jaxpr)), (found.by_axes(), found.memory.output_bytes), found.memory.temp_bytes


PACKED = {("experts", (("data", 4), ("tensor", 2))): 512}
"""(program, mesh) -> bytes by which XLA packs the temporaries of the program with few constraints worse."""


def check(name, sizes, monkeypatch):
    fn, shapes, specs = PROGRAMS[name]
    specs = [*specs, *[None] * (len(shapes) - len(specs))]
    few, sparse, temporaries = facts(fn, shapes, specs, sizes)
    monkeypatch.setitem(constrain, "settled", lambda *_, **__: set())
    all_of_them, full, temporaries_with_all = facts(fn, shapes, specs, sizes)
    assert few <= all_of_them
    assert sparse == full
    assert temporaries <= temporaries_with_all + PACKED.get((name, tuple(sizes.items())), 0)


@pytest.mark.parametrize("name", QUICK)
def test_program_moves_the_same_with_fewer_constraints(name, monkeypatch):
    check(name, {"data": 2, "tensor": 4}, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"data": 4, "tensor": 2}, {"tensor": 8, "data": 1}], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_moves_the_same_with_fewer_constraints(name, sizes, monkeypatch):
    check(name, sizes, monkeypatch)


def kept(f, *shapes):
    """The primitives whose results keep a constraint of their own."""
    with sharding.mesh(data=2, tensor=4):
        eqns = compat.open_jaxpr(sharding.jit(f).trace(*shapes).jaxpr).eqns
    makers = {v: e.primitive.name for e in eqns for v in e.outvars}
    return [
        makers[e.invars[0]]
        for e in eqns
        if e.primitive.name == "annotate" and makers.get(e.invars[0], "annotate") != "annotate"
    ]


@pytest.mark.parametrize(
    "f, expected",
    [
        (lambda x: jax.numpy.sin(annotate(x, P("data"))) * 2, []),
        (lambda x: annotate(jax.numpy.sin(x) + 1, P("data")) * 2, ["add"]),
        (lambda x: (annotate(x, P("data")) @ x) * 2, []),
        (lambda x: (annotate(x, P("data")) @ annotate(x.T * 2, P(None, "data"))) * 2, ["mul", "dot_general"]),
        (lambda x: jax.lax.cumsum(annotate(x, P("data"))) * 2, ["cumsum"]),
        (lambda x: jax.lax.sort(annotate(x, P("data")) * 3) * 2, ["mul", "sort"]),
    ],
    ids=["elementwise", "annotated amid", "dot", "dot that disagrees", "op not trusted", "use by an op not trusted"],
)
def test_what_keeps_its_constraint(f, expected):
    assert kept(f, SQUARE) == expected


def test_results_of_a_loop_body_keep_theirs():
    def f(x, w):
        return jax.lax.scan(lambda c, _: (jax.numpy.tanh(c @ w), None), annotate(x, P("data")), None, length=3)[0]

    with sharding.mesh(data=2, tensor=4):
        traced = sharding.jit(f).trace(floats(8, 8), floats(8, 8))
    (loop,) = [e for e in compat.open_jaxpr(traced.jaxpr).eqns if e.primitive.name == "scan"]
    body = compat.open_jaxpr(loop.params["jaxpr"])
    assert body.outvars[0] in constraints(loop.params["jaxpr"])


def test_gradient_of_a_chain_needs_almost_none():
    def f(x, w1, w2):
        return jax.numpy.tanh(annotate(x, P("data")) @ w1) @ w2

    with sharding.mesh(data=8):
        jaxpr = sharding.jit(trained(f)).trace(floats(8, 8), floats(8, 8), floats(8, 8)).jaxpr
    num_arrays = sum(bool(e.outvars[0].aval.shape) for e in compat.open_jaxpr(jaxpr).eqns)
    assert len(constraints(jaxpr)) == 3 < num_arrays / 4
