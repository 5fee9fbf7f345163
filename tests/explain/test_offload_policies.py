"""Names that a policy offloads in vain are reported."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import sharding

WS, X = jax.ShapeDtypeStruct((4, 16, 16), jnp.float32), jax.ShapeDtypeStruct((16, 16), jnp.float32)


def policy(*names):
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(names),
        offload_src="device",
        offload_dst="pinned_host",
    )


def at_the_end(x, w):
    return checkpoint_name(jnp.tanh(x @ w), "h")


def at_the_start(x, w):
    return jnp.tanh(checkpoint_name(x, "h") @ w)


def inside(x, w):
    return jnp.sin(checkpoint_name(jnp.tanh(x @ w), "h"))


def report(layer, *, differentiated=True, names=("h",)):
    body = jax.checkpoint(layer, policy=policy(*names))

    def loss(ws, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (body(x, w), None), x, ws)[0])

    with sharding.mesh(data=8):
        return sharding.jit(jax.grad(loss) if differentiated else loss).complete(WS, X).memory()


def test_a_named_carry_that_stays_on_the_device_is_reported():
    found = report(at_the_end)
    (line,) = found.unmoved
    assert line.startswith("'h' at test_offload_policies.py:23 (at_the_end)") and "scan's carry" in line
    assert f"not offloaded: {line}" in str(found) and found.host.total_bytes == 0


@pytest.mark.parametrize("layer", [at_the_start, inside])
def test_residuals_move(layer):
    found = report(layer)
    assert found.unmoved == () and found.host.temporary_bytes > 0 and "not offloaded" not in str(found)


def test_nothing_is_asked_for():
    assert report(at_the_end, names=("other",)).unmoved == ()
    assert report(at_the_end, differentiated=False).unmoved == ()
