"""Instructions of single equations: their pass, and equal ones that are computed once."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest

import sharding
from sharding.memory.compiler_traits import TRAITS
from sharding.memory.device_program import lower
from sharding.memory.instruction import all_instructions

SQUARE = jax.ShapeDtypeStruct((32, 32), jnp.float32)


def instructions(f, *args, platform="gpu"):
    with sharding.mesh(data=1, devices=jax.devices()[:1]):
        return [*all_instructions(lower(sharding.jit(f).complete(*args).assignment, TRAITS[platform]).body)]


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)


def scanned(w, x):
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=3)[0].sum()


@pytest.mark.parametrize("f", [loss, scanned])
def test_instructions_belong_to_the_pass_that_computes_them(f):
    alone = {one.phase for one in instructions(f, SQUARE, SQUARE) if one.name != "argument"}
    both = instructions(jax.value_and_grad(f), SQUARE, SQUARE)
    (outside,) = alone
    phases = {name: [one.phase for one in both if one.name == name] for name in ("tanh", "dot_general")}
    assert phases["tanh"] == ["forward"]
    assert phases["dot_general"][0] == "forward" and {*phases["dot_general"][1:]} == {"backward"}
    assert outside not in ("forward", "backward")


@pytest.mark.parametrize("platform", TRAITS)
def test_only_equal_equations_are_computed_once(platform):
    def count(f):
        return Counter(one.name for one in instructions(f, SQUARE, SQUARE, platform=platform))

    assert count(lambda x, y: jnp.sin(x) * jnp.sin(x).sum())["sin"] == 1
    assert count(lambda x, y: jnp.sin(x) * jnp.sin(y).sum())["sin"] == 2
    assert (
        count(lambda x, y: jnp.roll(x, 1, 0) * jnp.roll(x, 2, 0)).total()
        > count(lambda x, y: jnp.roll(x, 1, 0) * jnp.roll(x, 1, 0)).total()
    )
    assert count(lambda x, y: (x + 1.0) * (x + 2.0).sum())["add"] == 2
    assert count(lambda x, y: (x + 1.0) * (x + 1.0).sum())["add"] == 1
