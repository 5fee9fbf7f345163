"""The ops that may send: all others do not, whatever the compiler."""

import jax
import jax.numpy as jnp
import pytest

import sharding
from sharding import P
from sharding.explain.predicted_collectives import ProgramCollectives
from sharding.explain.sending_ops import sending_ops

X = jax.ShapeDtypeStruct((16, 24), jnp.float32)


def products(x):
    return jnp.tanh(x @ x.T) @ x


def shifted(x):
    return jnp.roll(x, 1, axis=0) + x[::-1] + jnp.pad(x, ((1, 0), (0, 0)))[:-1]


def looped(x):
    return jax.lax.fori_loop(0, 3, lambda _, c: c - c.mean(0, keepdims=True), x) + sharding.annotate(
        jnp.cumsum(x, 0), P(None, "b")
    )


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("spec", [P("a"), P(None, "b"), P("a", "b"), P(("a", "b"))], ids=str)
@pytest.mark.parametrize("f", [products, shifted, looped])
@pytest.mark.filterwarnings("ignore:.*XLA pads it")
def test_other_ops_send_nothing(f, spec, platform):
    with sharding.mesh(a=2, b=4, devices=8):
        assignment = sharding.jit(f).complete(X).annotate("x", spec).assignment
    found = ProgramCollectives(assignment, platform=platform)
    left, exchanges = found.reassociation.left, found.exchanges
    arriving = {*found.arriving}
    sending = sending_ops(found.graph, found.moving_ops, arriving=arriving, reduced=left, exchanges=exchanges)
    sent = [(op, [*found.transfers(op)]) for op in found.graph.live_ops]
    assert not any(transfers for op, transfers in sent if id(op) not in sending)
    assert any(transfers for _, transfers in sent) or spec == P(None, "b")
