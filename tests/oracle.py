"""Second opinion on the pass: XLA's own, Shardy, run on the same program without compiling it.

Every value of our graph is marked by an unconstrained sharding constraint in a scope of its own name. After Shardy's
propagation pipeline each mark is a reshard whose sharding is Shardy's answer for that value. Closed arguments and
annotated values get no mark of their own, which could grow where they are closed. XLA writes `square` as a product
before Shardy sees it; so do we.
"""

import re
from dataclasses import dataclass

import jax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib.mlir import ir, passmanager

from sharding import compat, graph
from sharding.annotation import annotate_p
from sharding.graph import CALLS, Graph, Scope
from sharding.propagation import Assignment, complete
from sharding.spec import Axis, to_partition_spec

MARK = re.compile(r"mark_(\d+)_")
WAITS = re.compile(r"mark_\d+_((?:p\d+)+)_")
Dims = tuple[tuple[Axis, ...], ...]


@dataclass(frozen=True)
class Agreement:
    """How far our pass and Shardy agree on one program."""

    counted: int
    """Values of one dim or more that either side splits."""
    differences: tuple[str, ...]
    """One line per value on which they differ, with our reason."""

    @property
    def share(self) -> float:
        return 1 - len(self.differences) / max(1, self.counted)


def compare(program, in_pins, mesh: AbstractMesh) -> Agreement:
    """Our completion of `program` (a closed jaxpr with pins on its arguments) against Shardy's."""
    ours = pass_on(program, dict(mesh.shape), in_pins)
    theirs = shardy(ours.graph, program, in_pins, mesh)
    counted, differences = 0, []
    for v, dims in theirs.items():
        mine = ours.specs[v].axes
        if any(mine) or any(dims):
            counted += 1
            if mine != dims:
                differences.append(f"{_name(ours.graph, v)}: ours {ours.specs[v]}, Shardy {_text(dims)}")
    return Agreement(counted, tuple(differences))


def pass_on(program, sizes, in_pins) -> Assignment:
    """Our pass on a closed jaxpr with the given pins on its arguments and no ties."""
    jaxpr = compat.open_jaxpr(program)
    n_in, n_out = len(jaxpr.invars), len(jaxpr.outvars)
    built = graph.build(
        program,
        sizes=sizes,
        in_names=[f"in/{i}" for i in range(n_in)],
        out_names=[f"out/{i}" for i in range(n_out)],
        in_pins=in_pins,
        out_pins=[None] * n_out,
    )
    return complete(built, sizes)


def shardy(g: Graph, program, in_pins, mesh: AbstractMesh) -> dict[int, Dims]:
    """Shardy's sharding of every value of the graph, by value."""
    jaxpr = compat.open_jaxpr(program)
    consts = program.consts
    specs = [None if pin is None else pin.spec for pin in in_pins]
    closed = [s is not None and not any(d.open for d in s.dims) for s in specs]
    shardings = [NamedSharding(mesh, to_partition_spec(s)) if c else None for s, c in zip(specs, closed, strict=True)]

    def marked(*args):
        asked = zip(args, g.inputs, specs, closed, strict=True)  # JAX takes no open dim in `in_shardings`
        args = [x if c else _mark(x, v, mesh, s) for x, v, s, c in asked]
        return _run(g.scope, jaxpr, consts, args, mesh)

    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.invars]
    lowered = jax.jit(marked, in_shardings=tuple(shardings)).trace(*avals).lower(lowering_platforms=("cpu",))
    return _read(_propagated(lowered), g)


def _mark(x, value, mesh, spec=None):
    if value is None or not getattr(x, "ndim", 0) or jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    asked = P(*[P.UNCONSTRAINED] * x.ndim) if spec is None else to_partition_spec(spec, keep_open=True)
    waits = "".join(f"p{d.priority if d.axes else 0}" for d in spec.dims) if spec is not None else ""
    with jax.named_scope(f"mark_{value}_{waits}_"):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, asked))


def _run(scope: Scope, jaxpr, consts, args, mesh):
    env = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))

    def read(atom):
        return atom.val if compat.is_literal(atom) else env[atom]

    for i, eqn in enumerate(jaxpr.eqns):
        name, ins = eqn.primitive.name, [read(a) for a in eqn.invars]
        inner = [child for (at, _, _), child in scope.children.items() if at == i]
        if eqn.primitive is annotate_p:
            asked = eqn.params["asked"]
            silent = asked is None or asked.is_open
            env[eqn.outvars[0]] = ins[0] if silent else _mark(ins[0], scope.env[eqn.outvars[0]], mesh, asked)
            continue
        elif name == "square":
            outs = [jax.lax.integer_pow(ins[0], 2)]
        elif name in CALLS:
            child = inner[0]
            closed = next(j for _, _, j in compat.sub_jaxprs(eqn.params))
            outs = _run(child, child.jaxpr, getattr(closed, "consts", ()), ins, mesh)
        elif name == "scan" and inner:
            outs = _scan(eqn, inner[0], ins, mesh)
        else:
            bound = eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(eqn.params))
            outs = bound if eqn.primitive.multiple_results else [bound]
        for var, x in zip(eqn.outvars, outs, strict=True):
            if not compat.is_drop(var):
                leaf = name not in CALLS
                env[var] = _mark(x, scope.env[var], mesh) if leaf else x
    return [read(a) for a in jaxpr.outvars]


def _scan(eqn, child, ins, mesh):
    n_consts, n_carry = compat.scan_parts(eqn.params)
    consts, carry, xs = ins[:n_consts], ins[n_consts : n_consts + n_carry], ins[n_consts + n_carry :]
    closed = eqn.params["jaxpr"]

    def body(state, x):
        x = [_mark(a, child.env[v], mesh) for a, v in zip(x, child.jaxpr.invars[n_consts + n_carry :], strict=True)]
        outs = _run(child, child.jaxpr, closed.consts, [*consts, *state, *x], mesh)
        return tuple(outs[:n_carry]), tuple(outs[n_carry:])

    state, ys = jax.lax.scan(body, tuple(carry), tuple(xs), length=eqn.params["length"], reverse=eqn.params["reverse"])
    return [*state, *ys]


def _propagated(lowered):
    """A copy of the module after Shardy; the original is what JAX caches, so it is left alone."""
    module = lowered.compiler_ir()
    with module.context:
        copy = ir.Module.parse(module.operation.get_asm(enable_debug_info=True))
        copy.operation.walk(_prioritise)
        passmanager.PassManager.parse("builtin.module(sdy-propagation-pipeline)").run(copy.operation)
    return copy


def _prioritise(op):
    """Gives the dims of a constraint the priorities that its scope tells; JAX has no word for them."""
    waits = WAITS.search(str(op.location)) if op.name == "sdy.sharding_constraint" else None
    if waits is not None:
        dims = iter(waits.group(1).split("p")[1:])
        text = re.sub(r"}", lambda _: "}" if (p := next(dims)) == "0" else "}p" + p, str(op.attributes["sharding"]))
        op.attributes["sharding"] = ir.Attribute.parse(text)
    return ir.WalkResult.ADVANCE


def _read(module, g: Graph) -> dict[int, Dims]:
    found: dict[int, Dims] = {}

    def visit(op):
        mark = MARK.search(str(op.location)) if op.name == "sdy.reshard" else None
        if mark is not None:
            found[int(mark.group(1))] = _dims(str(op.attributes["sharding"]))
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def _dims(text: str) -> Dims:
    body = text[text.index("[") : text.rindex("]") + 1]
    return tuple(
        tuple(_axis(a) for a in re.findall(r'"\w+"(?::\(\d+\)\d+)?', dim)) for dim in re.findall(r"\{(.*?)\}", body)
    )


def _axis(text: str) -> Axis:
    part = re.fullmatch(r'"(\w+)":\((\d+)\)(\d+)', text)
    return (part[1], int(part[2]), int(part[3])) if part else text.strip('"')


def _name(g: Graph, v: int) -> str:
    maker = next((op.name for op in g.ops if v in op.results), "argument")
    return f"{v} {maker} {list(g.shapes[v])} at {g.source(v)}"


def _text(dims: Dims) -> str:
    return "[" + ", ".join(",".join(map(str, d)) or "-" for d in dims) + "]"
