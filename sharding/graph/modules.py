"""The modules of a model by its parameters, for frameworks whose ops have no name scopes, as Flax nnx and Equinox.

The ops that read `model/blocks/0/mlp/up/kernel`, or what is computed from that alone, run in the module
`model/blocks/0/mlp/up`; `model/blocks/0/mlp` has these ops, those of `.../mlp/down`, and all between them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..paths import Glob
from .graph import Graph, Op


@dataclass(frozen=True, eq=False)
class ParameterModules:
    """The values that modules compute in the forward pass."""

    graph: Graph
    backward: Collection[int]
    """The values of the backward pass. What depends on them, such as an update, belongs to no module."""

    @cached_property
    def own(self) -> Mapping[str, list[int]]:
        """Module -> what is computed with the parameters directly in it, in program order."""
        computed = set(self.graph.inputs)  # from arguments; others are constants
        leaves = {v: name for name, v in self.graph.names.items() if v in computed and "/" in name}
        module_of = {v: name.rpartition("/")[0] for v, name in leaves.items()}
        found: defaultdict[str, list[int]] = defaultdict(list)
        for op in self._forward:
            if not computed.isdisjoint(op.operands):
                computed.update(op.results)
            read = {module_of[v] for v in op.operands if v in module_of}
            if len(read) == 1 and all(v in module_of for v in op.operands if v in computed):
                module_of.update(dict.fromkeys(op.results, *read))
            elif op.name != "edge":
                for module in read:
                    found[module] += op.results
        return found

    def instances(self, name: str) -> list[list[int]]:
        """The values computed in each module of a name, of the end of a path or of a glob."""
        glob = Glob(name)
        found: defaultdict[str, list[str]] = defaultdict(list)  # module -> itself and those inside
        for one in self.own:
            for module in [outer for outer in enclosing(one) if glob.matches(outer)][:1]:
                found[module].append(one)
        return [self._computed(modules) for modules in found.values()]

    def results(self, values: Sequence[int]) -> list[int]:
        """Those of an instance's values that other modules, or results of the program, are computed from."""
        inside = set(values)
        read_outside = [v for v in values if v in self.graph.outputs or self._used(v) & self._leading_on - inside]
        return read_outside or [v for v in values if inside.isdisjoint(self._used(v))]

    @cached_property
    def _forward(self) -> list[Op]:
        """The ops of the forward pass."""
        after, found = set(self.backward), list[Op]()
        for op in self.graph.ops:
            if after.isdisjoint(op.operands) and after.isdisjoint(op.results):
                found.append(op)
            else:
                after.update(op.results)
        return found

    @cached_property
    def _leading_on(self) -> set[int]:
        """The values of modules, results of the program, and what these are computed from."""
        found = {*self.graph.outputs, *(v for values in self.own.values() for v in values)}
        return _with_ancestors(self._forward, found)

    def _computed(self, modules: Iterable[str]) -> list[int]:
        """What modules compute, with what is computed between several ones, in program order."""
        own = [self.own[module] for module in modules]
        values = {v for one in own for v in one}
        if len(own) > 1:
            descendants = set(values)
            for op in self._forward:
                if not descendants.isdisjoint(op.operands):
                    descendants.update(op.results)
            values |= descendants & _with_ancestors(self._forward, values)
        return [v for op in self._forward for v in op.results if v in values]

    def _used(self, v: int) -> set[int]:
        """The values that are computed from a value directly."""
        return {w for op in self.graph.users.get(v, ()) for w in op.results}


def _with_ancestors(ops: Sequence[Op], values: Iterable[int]) -> set[int]:
    found = set(values)
    for op in reversed(ops):
        if not found.isdisjoint(op.results):
            found.update(op.operands)
    return found


def enclosing(path: str) -> Iterator[str]:
    """The starts of a path that end with a key: `a`, `a/b` and `a/b/c`."""
    parts = path.split("/")
    return ("/".join(parts[: k + 1]) for k in range(len(parts)))
