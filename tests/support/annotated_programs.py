"""Propagation over small programs with annotations written as text.

One word per dim: `a` is sharded over a and closed, `a,b?` is sharded over a and b and open, `?` is open, `-` is closed
and replicated, `a@2` has priority 2.
"""

import jax
import jax.numpy as jnp

import sharding
from sharding import graph
from sharding.graph import Annotation
from sharding.propagation import complete, shardy
from sharding.spec import Dim, Spec, axis_name

ABC = {"a": 2, "b": 2, "c": 2}


def parse_dim(text):
    text, _, priority = text.partition("@")
    axes = tuple(a for a in text.rstrip("?").split(",") if a)
    return Dim(axes=axes, open=text.endswith("?"), priority=int(priority or 0))


def parse_spec(text):
    return Spec(dims=tuple(parse_dim("" if d == "-" else d) for d in text.split()))


def parse_annotation(text):
    return None if text is None else Annotation(spec=parse_spec(text), origin=f"annotation {text}")


def propagate(fn, *args, sizes=ABC, outs=None, engine="sharding"):
    """The assignment of `fn` by an engine; arguments are (shape, annotation text or None)."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s, _ in args]
    with sharding.mesh(sizes, devices=8) as mesh:
        program = jax.make_jaxpr(fn)(*shapes)
    n = len(program.out_avals)
    built = graph.build(
        program,
        sizes=sizes,
        in_names=[f"x{i}" for i in range(len(args))],
        out_names=[f"y{i}" for i in range(n)],
        in_annotations=[parse_annotation(p) for _, p in args],
        out_annotations=[parse_annotation(p) for p in (outs or [None] * n)],
    )
    if engine == "sharding":
        return complete(built, sizes)
    return shardy.complete(built, sizes, program=program, mesh=mesh, platform="cpu")


def specs_of(assignment, *names):
    """Inferred specs of named values as text; a string for one name, else a list."""
    found = [assignment.specs[assignment.graph.names[n]] for n in names]
    texts = [" ".join(",".join(map(axis_name, d.axes)) or "-" for d in s.dims) for s in found]
    return texts[0] if len(names) == 1 else texts


def named(x, name):
    return sharding.annotate(x, name=name)
