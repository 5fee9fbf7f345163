"""`sharding.compare`: the values that two completions of one program shard differently."""

import jax
import jax.numpy as jnp
import pytest
from support.propagation_programs import PROGRAMS

import sharding
from sharding import P, ShardingError, annotate

SIZES = {"data": 2, "tensor": 4}


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def loss(params, x, w1=None, hidden=()):
    """A small network with configurable annotations."""
    first = params["w1"] if w1 is None else annotate(params["w1"], w1)
    h = annotate(jax.nn.relu(x @ first), name="hidden")
    for spec in hidden:
        h = annotate(h, spec)
    return jnp.mean((h @ params["w2"]) ** 2)


def completed(sizes=SIZES, *, batch="data", engine="sharding", donate=False, **annotations):
    def step(params, x):
        gradients = jax.grad(lambda p: loss(p, x, **annotations))(params)
        return jax.tree.map(lambda p, g: p - g, params, gradients)

    shapes = {"w1": floats(16, 32), "w2": floats(32, 16)}, floats(8, 16)
    donated = {"donate_argnums": 0} if donate else {}
    with sharding.mesh(sizes, devices=8):
        return sharding.jit(step, in_shardings=(None, P(batch)), engine=engine, **donated).complete(*shapes)


def test_equal_completions():
    c = sharding.compare(completed(), completed())
    assert c.same and len(c) == 0 and list(c) == []
    assert str(c) == f"step on mesh data=2, tensor=4: all {c.num_values} values are sharded identically"


def test_both_engines():
    specs = {"w1": P(None, "tensor")}
    assert sharding.compare(completed(**specs), completed(**specs, engine="shardy")).same
    c = sharding.compare(completed(**specs), completed(**specs, engine="xla"))
    assert next(d for d in c if d.name == "hidden").second.reason == "-"


def test_other_annotations():
    c = sharding.compare(completed(), completed(w1=P(None, "tensor")))
    found = {d.name: d for d in c}
    w1 = found["params/w1"]
    assert (str(w1.first.spec), w1.first.reason, w1.first.num_bytes) == ("[-, -]", "-", 2048)
    assert (str(w1.second.spec), w1.second.reason, w1.second.num_bytes) == ("[-, tensor]", "annotated", 512)
    assert found["params/w2"].second.reason == "dot_general"
    assert found["hidden"].num_bytes == 8 // 2 * 32 * 4
    assert "x" not in found
    sizes = [d.num_bytes for d in c]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 2048


def test_annotations_that_are_separate_values():
    once = completed(hidden=(P("data", None),))
    twice = completed(hidden=(P("data", None), P("tensor", None)))
    assert len(twice.assignment.specs) > len(once.assignment.specs)
    c = sharding.compare(once, twice)
    found = {(str(d.first.spec), str(d.second.spec)) for d in c if d.name == "hidden"}
    assert found == {("[data, -]", "[tensor, -]")}  # as the second product reads it
    assert "x" not in {d.name for d in c} and len({(d.first.value, d.second.value) for d in c}) == len(c)


def test_other_meshes():
    one, other = completed(w1=P(None, "tensor")), completed({"data": 4, "tensor": 2}, w1=P(None, "tensor"))
    assert str(sharding.compare(one, other)).startswith("step on mesh data=2, tensor=4 and data=4, tensor=2: all ")
    c = sharding.compare(one, completed({"data": 8, "tensor": 1}, w1=P(None, "tensor")))
    assert next(d for d in c if d.name == "params/w1").second.num_bytes == 2048


def test_outputs_with_and_without_donation():
    c = sharding.compare(completed(w1=P(None, "tensor")), completed(w1=P(None, "tensor"), donate=True))
    assert c.same


def test_it_prints_a_short_table():
    lines = str(sharding.compare(completed(), completed(w1=P(None, "tensor")))).splitlines()
    assert lines[0].startswith("step on mesh data=2, tensor=4: ") and lines[0].endswith(
        "values are sharded differently"
    )
    assert lines[1].split() == ["value", "first", "bytes", "reason", "second", "bytes", "reason"]
    row = next(line for line in lines if line.startswith("params/w1"))
    assert row.split() == ["params/w1", "[-,", "-]", "2,048", "-", "[-,", "tensor]", "512", "annotated"]
    assert lines[-1].startswith("bytes of these values per device: ")


def layers(sizes, **annotated):
    def deep(ws, x):
        for i, w in enumerate(ws):
            x = annotate(jnp.tanh(x @ w + float(i)), name=f"block/{'abcdefghijklmnopqrstuvwxyz'[i]}")
        return x

    with sharding.mesh(sizes, devices=8):
        return sharding.jit(deep, **annotated).complete([floats(16, 16)] * 26, floats(8, 16))


def test_identical_layers_share_a_row():
    lines = str(sharding.compare(layers(SIZES), layers(SIZES, in_shardings=(P(None, "tensor"), None)))).splitlines()
    assert any(line.startswith("ws/* (x26) ") for line in lines)


def test_a_long_table_is_truncated():
    lines = str(sharding.compare(layers(SIZES), layers(SIZES, in_shardings=(None, P("data"))))).splitlines()
    assert len(lines) == 25 and [line for line in lines if "..." in line] == lines[-2:-1]
    assert lines[-2].endswith(" more rows")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda params, x: loss(params, x) + 1.0, r"first: \d+ ops and 1 results.*second: \d+ ops"),
        (lambda params, x: -loss(params, jnp.cos(x)), r"first: op \d is sin of \[8, 16\] at .*second: op \d is cos"),
        (lambda params, x: -loss(params, jnp.sin(x[:4])), r"first: op 0 is slice of .*second: op 0 is slice of"),
        (lambda params, x: -loss({"w1": params["w2"].T, "w2": params["w1"].T}, jnp.sin(x)), r"first: \d+ ops"),
    ],
)
def test_other_programs_are_an_error(other, message):
    def base(params, x):
        return -loss(params, jnp.sin(x))

    def sliced(params, x):
        return -loss(params, jnp.sin(x[:8]))

    first = sliced if "slice" in message else base
    shapes = {"w1": floats(16, 32), "w2": floats(32, 16)}, floats(16 if first is sliced else 8, 16)
    with sharding.mesh(SIZES, devices=8):
        one, two = (sharding.jit(f).complete(*shapes) for f in (first, other))
    with pytest.raises(
        ShardingError, match=rf"(?s)sharding\.compare\(.*found: +{message}.*required: +completions of one"
    ):
        sharding.compare(one, two)


def test_other_arguments_are_an_error():
    with sharding.mesh(SIZES, devices=8):
        step = sharding.jit(lambda x: x * 2.0)
        one, two = (step.complete(floats(n)) for n in (8, 16))
    with pytest.raises(ShardingError, match=r"(?s)first: arguments of shapes \[\(8,\)\].*second: .*\[\(16,\)\]"):
        sharding.compare(one, two)


@pytest.mark.parametrize("name", ["lstm", "experts", "branches"])
def test_every_value_is_compared(name):
    fn, shapes, _ = PROGRAMS[name]
    with sharding.mesh(SIZES, devices=8):
        one, two = (sharding.jit(fn, engine=e).complete(*shapes) for e in ("sharding", "xla"))
    c = sharding.compare(one, two)
    assert c.num_values == len(one.assignment.specs)
