"""Emits sharding constraints into the jaxpr that is being rewritten."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from .. import compat
from ..annotations import annotate
from ..graph import Atom, Scope
from ..propagation import Assignment
from ..spec import Spec, divisible, indivisible
from .reshard import Step, chain
from .reshard_moves import DimAxes
from .row_major import row_major
from .sub_axes import refine

MOVES_SHARDS = ("all-to-all", "collective-permute")
"""The steps that neither only slice nor only gather."""


class AssignedProgram:
    """The specs and annotations of a program's values, and its mesh."""

    def __init__(self, assignment: Assignment, mesh: AbstractMesh):
        graph = assignment.graph
        self.specs, self.sizes, self.mesh = assignment.specs, assignment.sizes, mesh
        self.annotations, self.makers, self.divergent = graph.annotations, graph.makers, graph.divergent
        self.scope, self.shapes = graph.scope, graph.shapes
        self._searches = assignment.searches

    def chain(self, have: Spec, want: Spec, aval: Any, *, permutes: bool = True) -> tuple[Step, ...]:
        """Returns the cheapest steps from one spec of an array to another."""
        if have.axes == want.axes:
            return ()
        text = f"reshard {have.axes} {want.axes} {aval.shape} {aval.dtype.itemsize} {permutes}"
        if text not in self._searches:
            self._searches[text] = chain(have, want, aval.shape, aval.dtype.itemsize, self.sizes, permutes=permutes)
        return self._searches[text]

    def mesh_in(self, scope: Scope) -> AbstractMesh:
        """Returns the mesh in a scope, where some of its axes may be manual."""
        return self.mesh.update_axis_types(dict.fromkeys(scope.manual, AxisType.Manual)) if scope.manual else self.mesh

    def spec(self, atom: Atom) -> Spec | None:
        return None if atom is None else self.specs[atom]

    def constraint_spec(self, atom: Atom, aval: Any) -> Spec | None:
        """Returns the spec to constrain a value to; None for scalars, constants, keys, Refs and values left to XLA."""
        if atom is None or not getattr(aval, "shape", ()) or compat.is_ref(aval):
            return None
        spec = self.specs[atom]
        is_key = compat.is_extended(aval.dtype)
        return None if spec.is_open or (is_key and not any(spec.axes)) else spec

    def arrives_as_inferred(self, atom: Atom) -> bool:
        """Whether an argument of the program can arrive with its spec: its axes divide its dims."""
        return atom is None or divisible(self.specs[atom], self.shapes[atom], self.sizes).axes == self.specs[atom].axes

    def exact_spec(self, atom: Atom, aval: Any) -> Spec | None:
        """Returns the spec to constrain a value to, if a sharding can express it exactly."""
        spec = self.constraint_spec(atom, aval)
        return spec if spec is not None and self.is_exact(spec, aval.shape) else None

    def is_exact(self, spec: Spec, shape: tuple[int, ...]) -> bool:
        """Whether a sharding can express a spec exactly, also for arguments: no sub-axes, no padding."""
        return not spec.has_sub_axes and not indivisible(spec, shape, self.sizes)


class ConstraintEmitter:
    """Appends equations to one jaxpr in one scope, and tracks the variables that replace others."""

    def __init__(self, program: AssignedProgram, scope: Scope):
        self.program, self.scope = program, scope
        self.mesh = program.mesh_in(scope)
        self.eqns: list[Any] = []
        self.replaced: dict[Any, Any] = {}
        self.resharded_to: dict[tuple[Any, DimAxes], Any] = {}
        """Variable and axes -> its reshard."""
        self.constants: dict[Any, Any] = {}
        """Annotated constant -> the constant, which is sharded otherwise at no cost."""

    def read(self, atom: Any) -> Any:
        """Returns the variable that currently stands for an operand."""
        return atom if compat.is_literal(atom) else self.replaced.get(atom, atom)

    def atom(self, var: Any) -> Atom:
        return None if compat.is_literal(var) else self.scope.env[var]

    def var_spec(self, var: Any) -> Spec | None:
        """Returns the spec to constrain a variable to, if any."""
        return self.program.constraint_spec(self.atom(var), var.aval)

    def reshard(
        self,
        operand: Any,
        have: Spec | None,
        spec: Spec,
        eqn: Any,
        *,
        asked: Spec | None = None,
        name: str | None = None,
        permutes: bool = True,
    ) -> Any:
        """Emits the reshard of an operand from `have` to `spec`, step by step, and returns the result."""
        itemsize = getattr(operand.aval.dtype, "itemsize", 0)
        permutes = permutes and not self.scope.divergent
        if have is not None and itemsize:
            steps = self.program.chain(have, spec, operand.aval, permutes=permutes)
            operand = self.before_last(operand, have, steps, eqn)
        return self.emit(operand, spec, eqn, asked=asked, name=name)

    def before_last(self, operand: Any, have: Spec | None, steps: Sequence[Step], eqn: Any) -> Any:
        """Emits all steps but the last; uses with a common prefix of steps share its variables.

        Before a step that moves shards, the present sharding is emitted once more. XLA of JAX 0.12 rewrites that of a
        dot's operand to an equal one in another form, from which it finds no all-to-all or permute and gathers the
        whole array. A constraint of its own keeps the form.
        """
        for k, step in enumerate(steps):
            if have is not None and step.kind in MOVES_SHARDS:
                operand = self.emit_once(operand, have, eqn)
            have = step.spec
            operand = self.emit_once(operand, have, eqn) if k < len(steps) - 1 else operand
        return operand

    def emit_once(self, operand: Any, spec: Spec, eqn: Any) -> Any:
        """Emits a constraint that all reshards of an operand through this spec share, and returns its result."""
        key = (operand, spec.axes)
        if key not in self.resharded_to:
            self.resharded_to[key] = self.emit(operand, spec, eqn)
        return self.resharded_to[key]

    def emit(self, operand: Any, spec: Spec, eqn: Any, *, asked: Spec | None = None, name: str | None = None) -> Any:
        """Emits a constraint and returns its result."""
        new = jex.Var(operand.aval)
        mesh = self.mesh
        if not mesh.manual_axes:  # in the body of a shard_map sub-axes are left to XLA
            mesh, spec = refine(mesh, spec)
        params = annotate.completed(spec, mesh, asked=asked, name=name)
        self.eqns.append(compat.new_eqn(eqn, [operand], [new], annotate.annotate_p, params))
        return new

    def inline(self, f: Callable[..., Any], operands: Sequence[Any], eqn: Any) -> None:
        """Emits the equations of a function of some operands, whose results replace those of an equation."""
        around = jax.sharding.use_abstract_mesh(self.mesh) if self.mesh.manual_axes else contextlib.nullcontext()
        with compat.beside(eqn), around:
            closed = jax.make_jaxpr(f)(*(v.aval for v in operands))
        body = compat.open_jaxpr(closed)
        constants = zip(body.constvars, compat.constants(closed), strict=True)
        names = dict(zip(body.invars, operands, strict=True)) | {
            var: compat.new_literal(value, var.aval) for var, value in constants
        }
        self.eqns += [compat.renamed(one, names) for one in body.eqns]
        pairs = zip(eqn.outvars, body.outvars, strict=True)
        self.replaced.update((old, names[new]) for old, new in pairs if not compat.is_drop(old))

    def with_layout(self, var: Any, eqn: Any) -> Any:
        """Emits a constraint of a variable to the row-major layout and returns its result."""
        new = jex.Var(var.aval)
        self.eqns.append(row_major(eqn, var, new))
        return new

    def clamp(self, index: Any, largest: Any, eqn: Any) -> Any:
        """Emits the clamp of a start index, or of an array of them, to 0 and `largest`, and returns its result."""
        new = jex.Var(index.aval)
        ends = [compat.new_literal(n, index.aval) for n in (np.zeros_like(largest), largest)]
        self.eqns.append(compat.new_eqn(eqn, [ends[0], index, ends[1]], [new], jax.lax.clamp_p, {}))
        return new

    def is_plain_constraint(self, eqn: Any) -> bool:
        """Whether an equation is a `with_sharding_constraint` to a spec alone, without layout or kind of memory."""
        if eqn.primitive.name != "sharding_constraint" or self.scope.manual or eqn.params.get("layout") is not None:
            return False
        sharding = eqn.params["sharding"]
        return isinstance(sharding, jax.sharding.NamedSharding) and sharding.memory_kind in (None, "device")
