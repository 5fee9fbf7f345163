"""Programs with arrays without elements, such as a slice of no rows, run sharded as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from sharding import P, cost

PROGRAMS = {
    "reshape": lambda x: jnp.reshape(x[:0] * 2, (1, 0, 16)),
    "flattened": lambda x: x[:0].reshape(-1),
    "concatenate": lambda x: jnp.concatenate([x[:0], x, x[:0]]),
    "product over nothing": lambda x: x[:, :0] @ x[:, :0].T,
    "sum": lambda x: x[:0].sum(0),
    "scan": lambda x: jax.lax.scan(lambda c, row: (c + row, row * 2), x[0], x[:0]),
    "scatter": lambda x: x.at[jnp.zeros((0,), int)].add(1.0),
    "pad": lambda x: jnp.pad(x[:0], ((0, 2), (0, 0))),
    "gradient": jax.grad(lambda x: (x[:0] @ x.T).sum() + x.sum()),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("spec", [P(None, "model"), P("data"), P("data", "model")], ids=str)
def test_equals_one_device(name, spec):
    x = np.arange(64, dtype=np.float32).reshape(4, 16)
    with sharding.mesh(data=2, model=2, devices=jax.devices()[:4]):
        step = sharding.jit(PROGRAMS[name], in_shardings=spec)
        completion = step.complete(x)
        assert completion.memory().peak_bytes > 0
        assert {c.kind for c in completion.communication()} <= {*cost.KINDS}
        found = step(x)
    jax.tree.map(np.testing.assert_allclose, found, jax.jit(PROGRAMS[name])(x))
