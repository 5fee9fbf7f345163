"""Completions sent to another process, or kept in a file."""

import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import sharding
from sharding import P, ShardingError, annotate


def loss(w, x):
    def layer(h, _):
        return jax.nn.gelu(h @ annotate(w, P(None, "tensor"), name="weight")), None

    return jnp.where(x.sum() > 0, jax.lax.scan(jax.checkpoint(layer), x, None, length=3)[0], x).sum()


def completed(engine="sharding"):
    x = jax.ShapeDtypeStruct((8, 8), "float32")
    with sharding.mesh(data=2, tensor=4):
        return sharding.jit(jax.grad(loss), in_shardings=(None, P("data")), engine=engine).complete(x, x)


@pytest.mark.parametrize("engine", ["sharding", "shardy", "xla"])
def test_a_pickled_completion_says_the_same(engine, tmp_path):
    before = completed(engine)
    after = pickle.loads(pickle.dumps(before))
    assert str(after) == str(before)
    assert after.in_shardings == before.in_shardings and after.out_shardings == before.out_shardings
    assert str(after.why("weight")) == str(before.why("weight")) and "test_pickling.py" in str(after.why("weight"))
    assert str(after.conflicts) == str(before.conflicts)
    assert after.communication().by_kind() == before.communication().by_kind()
    assert after.communication().lowered("tpu").by_kind() == before.communication().lowered("tpu").by_kind()
    assert [c.source for c in after.communication()] == [c.source for c in before.communication()]
    assert after.memory().peak_bytes == before.memory().peak_bytes
    assert after.report(tmp_path / "report.html").exists()
    assert pickle.loads(pickle.dumps(after)).diff(before) == ()


def test_annotations_can_be_added():
    before = completed()
    after = pickle.loads(pickle.dumps(before))
    assert after.annotate("out", P("data")).diff(before.annotate("out", P("data"))) == ()
    with pytest.raises(ShardingError, match="pickled completion"):
        pickle.loads(pickle.dumps(completed("xla"))).annotate("out", P("data"))


def test_arguments_of_flax():
    with sharding.mesh(data=2, tensor=4):
        model = nnx.Linear(8, 8, kernel_init=lambda *_: jnp.ones((8, 8)), rngs=nnx.Rngs(0))
        before = sharding.jit(lambda model, x: model(x), in_shardings=(None, P("data"))).complete(
            model, jnp.ones((8, 8))
        )
    after = pickle.loads(pickle.dumps(before))
    assert jax.tree.leaves(after.in_shardings) == jax.tree.leaves(before.in_shardings)


def test_another_process_without_devices(tmp_path):
    before, file = completed(), tmp_path / "completion.pickle"
    file.write_bytes(pickle.dumps(before))
    program = "import pickle, sys; c = pickle.load(open(sys.argv[1], 'rb')); print(c.memory().peak_bytes, c.spec('w'))"
    run = subprocess.run([sys.executable, "-c", program, file], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == f"{before.memory().peak_bytes} {before.spec('w')}"
