"""What a caller passes: parameters by number and name, prefixes of specs, placed arrays."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding

import sharding
from sharding import P, ShardingError
from sharding.arguments import Signature, committed, per_leaf, pins

U = P.UNCONSTRAINED
X = np.ones((8, 6), np.float32)


@pytest.fixture(autouse=True)
def mesh():
    with sharding.mesh(data=2, tensor=4) as m:
        yield m


def step(state, batch, lr=0.1, *, debug=False):
    return state


def signature(f=step, static_argnums=(), static_argnames=(), donate_argnums=(), donate_argnames=()):
    return Signature.of(f, static_argnums, static_argnames, donate_argnums, donate_argnames)


def test_numbers_and_names_mean_the_same_parameters():
    assert signature(static_argnums=2, donate_argnums=(0, -2)) == signature(
        static_argnames="lr", donate_argnames=("state", "batch")
    )
    assert signature(static_argnums=-1).static == {2}


def test_keywords_become_positions_and_gaps_are_filled_by_defaults():
    s = signature(lambda a, b=2, c=3: a)
    assert s.positional((1,), {}) == (1,)
    assert s.positional((1,), {"c": 5}) == (1, 2, 5)
    assert s.positional((), {"b": 7, "a": 1}) == (1, 7)


def test_names_of_positions():
    s = signature(lambda a, *rest: a)
    assert [s.name(i) for i in range(3)] == ["a", "rest/0", "rest/1"]


@pytest.mark.parametrize(
    "options, says",
    [
        ({"static_argnames": "learning_rate"}, r"(?s)static_argnames=\['learning_rate'\].*parameters state, batch, lr"),
        ({"donate_argnames": ["state", "stat"]}, r"(?s)donate_argnames.*leave out 'stat'"),
        ({"static_argnums": 3}, r"(?s)static_argnums=\[3\].*3 positional parameters: state, batch, lr"),
        ({"donate_argnums": (0, -4)}, r"(?s)donate_argnums.*leave out -4"),
        ({"donate_argnums": 2, "static_argnames": "lr"}, "lr: both static and donated"),
    ],
)
def test_parameters_that_are_not_there_are_errors(options, says):
    with pytest.raises(ShardingError, match=says):
        signature(**options)


def test_numbers_beyond_the_names_are_those_of_variadic_arguments():
    assert signature(lambda *xs: xs, donate_argnums=5).donated == {5}


def test_keyword_only_argument_is_an_error():
    with pytest.raises(ShardingError, match=r"step\(..., debug=...\)"):
        signature().positional((1, 2), {"debug": True})
    with pytest.raises(ShardingError, match=r"(?s)signature Python can't tell"):
        signature(min).positional((1,), {"key": 2})


TREES = [{"a": 1, "b": [2, 3]}, 4]


@pytest.mark.parametrize(
    "specs, expected",
    [
        (None, [None] * 4),
        (P("data"), [P("data")] * 4),
        ((P("data"), None), [P("data")] * 3 + [None]),
        ([None, P()], [None] * 3 + [P()]),
        (({"a": None, "b": P("data")}, P()), [None, P("data"), P("data"), P()]),
        (({"a": P(), "b": [None, P("tensor")]}, None), [P(), None, P("tensor"), None]),
    ],
)
def test_specs_are_a_prefix_of_the_arguments(specs, expected):
    assert per_leaf(specs, TREES, "in_shardings", "f") == expected


@pytest.mark.parametrize(
    "specs, says",
    [
        ((P(),), r"(?s)2 arguments.*try: +in_shardings=\(None, None\)"),
        ({"a": P()}, "2 arguments, and in_shardings is {'a'"),
        (({"a": P()}, None), r"(?s)in_shardings\[0\].*the argument is \{'a'.*'b'"),
        ((None, [P()]), r"in_shardings\[1\]"),
        (({"a": None, "b": [P()]}, None), r"different lengths of list at \['b'\]"),
    ],
)
def test_specs_that_are_no_prefix_are_an_error_that_says_where(specs, says):
    with pytest.raises(ShardingError, match=says):
        per_leaf(specs, TREES, "in_shardings", "f")


def test_specs_of_results_speak_of_the_result():
    with pytest.raises(ShardingError, match=r"(?s)f: out_shardings\n.*the result is .*different types"):
        per_leaf((P(), P()), [{"a": 1}], "out_shardings", "f")


def pins_of(*specs):
    return pins(specs, [X] * len(specs), list("xyz")[: len(specs)], sharding.mesh(data=2, tensor=4).mesh, **WHAT)


WHAT = {"what": "in_shardings", "function": "f"}


def test_every_dim_that_does_not_divide_is_in_one_error():
    with pytest.raises(ShardingError, match=r"(?s)3 failures.*f\(x\).*6 = 1 x 4 \+ 2.*f\(y\).*names 'dat'.*f\(z\)"):
        pins_of(P(None, "tensor"), P("dat"), 3)


def test_open_spec_asks_nothing():
    assert pins_of(None, P(U, U), P((...,), U)) == [None, None, None]


def place(mesh, *entries):
    return jax.device_put(X, NamedSharding(mesh, P(*entries)))


@pytest.mark.parametrize("asked", [None, P("data"), P(("data", ...)), P(U), P(U, U), P((...,), None)])
def test_placed_array_stays_where_it_lies(mesh, asked):
    (pin,) = committed([place(mesh, "data")], pins_of(asked), ["x"], mesh, "f")
    assert pin is not None
    assert str(pin.spec) == "[data, -]"


@pytest.mark.parametrize("asked", [P("tensor"), P(), P(None, "data"), P(("tensor", ...)), P(("data", "tensor"))])
def test_placed_array_that_contradicts_is_an_error(mesh, asked):
    with pytest.raises(ShardingError, match=r"(?s)f\(x\).*placed as P\('data',?\).*in_shardings asks"):
        committed([place(mesh, "data")], pins_of(asked), ["x"], mesh, "f")


@pytest.mark.parametrize("other", ["names", "order", "one device"])
def test_array_from_another_mesh_is_an_error(mesh, other):
    names = ("data", "model") if other == "names" else ("data", "tensor")
    devices = mesh.devices[::-1] if other == "order" else mesh.devices
    elsewhere = NamedSharding(jax.sharding.Mesh(devices, names), P("data"))
    if other == "one device":
        elsewhere = SingleDeviceSharding(jax.devices()[3])
    with pytest.raises(ShardingError, match=r"(?s)f\(x\).*the array lies on.*mesh is \{'data': 2, 'tensor': 4\}"):
        committed([jax.device_put(X, elsewhere)], [None], ["x"], mesh, "f")
