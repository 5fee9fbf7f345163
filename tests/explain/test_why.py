"""`why`: each step names the op, its line and the operand that an axis came from; repeated layers are written once."""

from inspect import currentframe

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sharding
from sharding import P, annotate
from sharding.explain.why import repeats

U = P.UNCONSTRAINED
X = jax.ShapeDtypeStruct((8, 8), jnp.float32)
HERE = "test_why.py"


@pytest.fixture(scope="module", autouse=True)
def mesh():
    with sharding.mesh(data=2, tensor=4, devices=8) as m:
        yield m


def complete(f, *args, **options):
    return sharding.jit(f, **options).complete(*args)


def line() -> int:
    frame = currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def test_each_step_names_op_line_and_operand():
    at = f"{HERE}:{line() + 3} (test_each_step_names_op_line_and_operand.<locals>.f)"

    def f(x, w):
        return annotate(x @ w, name="y")

    c = complete(f, X, X, in_shardings=(None, P(None, "tensor")))
    assert list(c.why("y", 1)) == [
        "y dim 1 is sharded over tensor:",
        f"  y dim 1 <- dot_general at {at}, from operand 1",
        "  w dim 1 <- in_shardings",
    ]
    c = complete(f, X, X, out_shardings=P("data"))
    assert list(c.why("x", 0)) == [
        "x dim 0 is sharded over data:",
        f"  x dim 0 <- dot_general at {at}, from its result",
        "  y dim 0 <- returned",
        "  out dim 0 <- out_shardings",
    ]


def test_a_loop_is_called_by_its_name():
    def f(x, xs):
        return jax.lax.scan(lambda c, y: (annotate(jnp.sin(c) + y, name="c"), None), x, xs)[0]

    c = complete(f, X, jax.ShapeDtypeStruct((4, 8, 8), jnp.float32), in_shardings=(P("data", U), None))
    words = [step.split("<- ")[1].split(" at ")[0] for step in list(c.why("c", 0))[1:-1]]
    assert words[-1] == "scan" and "edge" not in words


def test_a_result_of_a_conditional_names_the_branch():
    def by_columns(x):
        return annotate(jnp.cos(x), P(None, "tensor"))

    def f(x):
        by_rows = lambda x: annotate(jnp.sin(x), P("data"))  # noqa: E731
        return annotate(jax.lax.cond(x[0, 0] > 0, by_rows, by_columns, x), name="y")

    why = complete(f, X).why
    (_, of_rows, *_), (_, of_columns, *_) = why("y", 0), why("y", 1)
    assert "y dim 0 <- cond at" in of_rows and of_rows.endswith("from branch 1")
    assert of_columns.endswith("from branch 0")


def test_what_a_loop_carries_is_sharded_as_at_its_beginning_or_in_its_body():
    def f(x):
        body = lambda _, c: annotate(jnp.sin(c), P(U, "tensor"))  # noqa: E731
        return jax.lax.fori_loop(0, 3, body, annotate(x, P("data", U)))

    why = complete(f, X).why
    assert ", from its initial value" in " ".join(why("out", 0))
    assert ", from its body" in " ".join(why("out", 1))


def stack(x, params):
    for p in params:
        x = annotate(x + jnp.tanh(x @ p["w"]), name="x")
    return x


def test_repeated_layers_of_a_chain_are_written_once():
    params = [{"w": X}] * 12
    c = complete(stack, X, params, in_shardings=(P("data", None), None))
    steps = list(c.why("out", 0))
    assert len(steps) < 8
    assert steps[-1] == "  x dim 0 <- in_shardings"
    assert steps[-2] == "  (this step repeats 11 more times)"
    assert len(c.assignment.chain(c.value("out"), 0, "data")) > 12


def test_conflicts_repeated_in_every_layer_print_as_one():
    params = [{"w": X}] * 6
    specs = (P("data", None), [{"w": P(None, "data")}] * 6)
    c = complete(stack, X, params, in_shardings=specs)
    assert len(c.conflicts) >= 6
    lines = str(c.conflicts).splitlines()
    assert len(lines) < len(c.conflicts)
    assert any("params/*/w dim 1: (data) from in_shardings" in text and "(x6)" in text for text in lines)
    assert repr(c.conflicts) == str(c.conflicts)


@pytest.mark.parametrize(
    "text, runs",
    [
        ("", []),
        ("abc", [(0, 1, 1), (1, 1, 1), (2, 1, 1)]),
        ("aaa", [(0, 1, 3)]),
        ("xababab", [(0, 1, 1), (1, 2, 3)]),
        ("aabaab", [(0, 3, 2)]),
        ("abababc", [(0, 2, 3), (6, 1, 1)]),
    ],
)
def test_runs(text, runs):
    assert list(repeats(text)) == runs


@settings(derandomize=True, database=None, max_examples=200)
@given(st.text("ab", max_size=24))
def test_runs_cover_the_sequence(text):
    parts = [text[at : at + period] * times for at, period, times in repeats(text)]
    assert "".join(parts) == text
