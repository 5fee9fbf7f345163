"""Parameters of a jitted function by position and name."""

import jax.numpy as jnp
import pytest

import sharding
from sharding import ShardingError
from sharding.jit.signature import Signature


def step(state, batch, lr=0.1, *, debug=False):
    return state


def signature(f=step, **options):
    return Signature.of(f, **options)


def test_argnums_and_argnames_refer_to_the_same_parameters():
    assert signature(static_argnums=2, donate_argnums=(0, -2)) == signature(
        static_argnames="lr", donate_argnames=("state", "batch")
    )
    assert signature(static_argnums=-1).static == {2}


def test_keywords_become_positions_up_to_the_first_gap():
    s = signature(lambda a, b=2, c=3, **others: a)
    assert s.bound((1,), {}) == ((0,), (1,))
    assert s.bound((), {"b": 7, "a": 1}) == ((0, 1), (1, 7))
    assert s.bound((1,), {"c": 5, "bias": 6}) == ((0, "bias", 2), (1, 6, 5))
    assert s.call(lambda *args, **kwargs: (args, kwargs), {0: 1, 2: 5, "bias": 6}) == ((1,), {"c": 5, "bias": 6})


def test_names_of_positions():
    s = signature(lambda a, *rest: a)
    assert [s.name(i) for i in range(3)] == ["a", "rest/0", "rest/1"]


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"static_argnames": "learning_rate"},
            r"(?s)static_argnames=\['learning_rate'\].*parameters state, batch, lr, debug",
        ),
        ({"donate_argnames": ["state", "stat"]}, r"(?s)donate_argnames.*remove 'stat'"),
        ({"static_argnums": 3}, r"(?s)static_argnums=\[3\].*3 positional parameters: state, batch, lr"),
        ({"donate_argnums": (0, -4)}, r"(?s)donate_argnums.*remove -4"),
        ({"donate_argnums": 2, "static_argnames": "lr"}, "lr: both static and donated"),
    ],
)
def test_unknown_parameters_are_errors(options, message):
    with pytest.raises(ShardingError, match=message):
        signature(**options)


def test_positions_beyond_the_names_are_variadic_arguments():
    assert signature(lambda *xs: xs, donate_argnums=5).donated == {5}


def test_keyword_only_parameters():
    s = signature(static_argnames="debug", mutable=("state",))
    assert s.static == {"debug"}
    assert s.bound((1, 2), {"debug": True}) == ((0, 1, "debug"), (1, 2, True))
    assert [s.is_mutable(label) for label in (0, 1, "debug")] == [True, False, False]
    assert signature(mutable=True).is_mutable("debug")
    assert signature(min).bound((1,), {"key": 2}) == ((0, "key"), (1, 2))


@pytest.mark.parametrize("unhashable", [(), ("a",), ("b",), ("a", "b"), ("scale",), ("a", "b", "scale")])
def test_only_static_arguments_that_are_not_hashable_are_refused(unhashable):
    """All of them at once, by the names of their parameters."""

    def step(x, a, b, *, scale):
        return x * a[0] * b[0] * scale[0]

    values = {name: [2] if name in unhashable else (2,) for name in ("a", "b", "scale")}
    with sharding.mesh(data=8):
        jitted = sharding.jit(step, static_argnums=(1, 2), static_argnames="scale")
        if not unhashable:
            assert jitted(jnp.ones(8), **values)[0] == 8
            return
        with pytest.raises((ShardingError, TypeError), match="hashable") as caught:
            jitted(jnp.ones(8), values["a"], values["b"], scale=values["scale"])
    named = {name for name in values if f"step({name})" in str(caught.value)}
    assert named == {*unhashable}
