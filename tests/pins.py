"""Small programs with annotations written as text, and the pass run on them.

One word per dim: `a` is split by a and closed, `a,b?` by a and b and open, `?` is open, `-` is closed and whole, `a@2`
has priority 2.
"""

import jax
import jax.numpy as jnp

import sharding
from sharding import graph
from sharding.graph import Pin
from sharding.propagation import complete, shardy
from sharding.spec import Dim, Spec, axis_name

ABC = {"a": 2, "b": 2, "c": 2}


def dim(text):
    text, _, priority = text.partition("@")
    axes = tuple(a for a in text.rstrip("?").split(",") if a)
    return Dim(axes=axes, open=text.endswith("?"), priority=int(priority or 0))


def spec(text):
    return Spec(dims=tuple(dim("" if d == "-" else d) for d in text.split()))


def pin(text):
    return None if text is None else Pin(spec=spec(text), origin=f"pin {text}")


def run(fn, *args, sizes=ABC, outs=None, engine="sharding"):
    """The assignment of `fn` by an engine; each argument is (shape, pin text or None)."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s, _ in args]
    with sharding.mesh(sizes, devices=8) as mesh:
        program = jax.make_jaxpr(fn)(*shapes)
    n = len(program.out_avals)
    built = graph.build(
        program,
        sizes=sizes,
        in_names=[f"x{i}" for i in range(len(args))],
        out_names=[f"y{i}" for i in range(n)],
        in_pins=[pin(p) for _, p in args],
        out_pins=[pin(p) for p in (outs or [None] * n)],
    )
    if engine == "sharding":
        return complete(built, sizes)
    return shardy.complete(built, sizes, program=program, mesh=mesh, platform="cpu")


def of(assignment, *names):
    """The completed specs of named values, as text; one name gives one text."""
    found = [assignment.specs[assignment.graph.names[n]] for n in names]
    texts = [" ".join(",".join(map(axis_name, d.axes)) or "-" for d in s.dims) for s in found]
    return texts[0] if len(names) == 1 else texts


def named(x, name):
    return sharding.annotate(x, name=name)
