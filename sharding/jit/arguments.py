"""The arguments of one call: which are static, and the leaves of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from .. import compat, paths
from ..errors import ShardingError, raise_together
from .nnx_variables import ties
from .signature import Label, Signature


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the arguments come from in calls with this number of positional arguments, and these keywords."""

    labels: tuple[Label, ...]
    """Of the arguments that are not static."""
    num_positional: int
    sources: tuple[int | str, ...]
    """Of each of these, its position or keyword in the call."""
    static_sources: tuple[tuple[Label, int | str], ...]

    @staticmethod
    def of(signature: Signature, num_args: int, keywords: tuple[str, ...]) -> Layout:
        """The layout of such a call; raises TypeError as Python does if the function does not take these arguments."""
        by_label = dict(zip(*signature.bound(tuple(range(num_args)), {k: k for k in keywords}), strict=True))
        dynamic = {label: source for label, source in by_label.items() if label not in signature.static}
        positional = [label for n, label in enumerate(by_label) if n == label and label in dynamic]
        return Layout(
            labels=tuple(dynamic),
            num_positional=len(positional),
            sources=tuple(dynamic.values()),
            static_sources=tuple((label, s) for label, s in by_label.items() if label in signature.static),
        )

    def split(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The arguments of a call that are not static; label, type and value of those that are (1 is not True)."""
        values = tuple([args[s] if isinstance(s, int) else kwargs[s] for s in self.sources])
        if not self.static_sources:
            return values, ()
        statics = [(label, args[s] if isinstance(s, int) else kwargs[s]) for label, s in self.static_sources]
        return values, tuple([(label, type(value), value) for label, value in statics])


@dataclass(slots=True, kw_only=True)
class Arguments:
    """The arguments of one call."""

    signature: Signature
    labels: tuple[Label, ...]
    """Of the arguments that are not static."""
    num_positional: int
    """The number of these that are passed by position; the others are by keyword."""
    dynamic: tuple[Any, ...]
    statics: tuple[tuple[Label, type, Any], ...]
    """Label, type and value."""
    leaves: list[Any]
    """Of a `jax.Ref`, its value."""
    refs: dict[int, Any]
    """The leaves that are Refs."""
    ties: Mapping[int, int]
    """Of a function with mutable arguments, each leaf of an nnx Variable that occurs a second time -> the first."""
    tree: Any
    sources: tuple[int | str, ...]
    """Of each argument that is not static, its position or keyword in the call."""
    num_args: int
    """The number of positional arguments of the call."""
    keywords: tuple[str, ...]

    @staticmethod
    def of(signature: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """The arguments of a call; raises TypeError as Python does if the function does not take these."""
        layout = Layout.of(signature, len(args), tuple(kwargs))
        values, statics = layout.split(args, kwargs)
        leaves, tree = jax.tree.flatten(values)
        refs = {i: leaf for i, leaf in enumerate(leaves) if compat.is_ref(leaf)}
        found = Arguments(
            signature=signature,
            labels=layout.labels,
            num_positional=layout.num_positional,
            dynamic=values,
            statics=statics,
            leaves=leaves,
            refs=refs,
            ties=ties(values) if signature.mutable != frozenset() else {},
            tree=tree,
            sources=layout.sources,
            num_args=len(args),
            keywords=tuple(kwargs),
        )
        for i, ref in refs.items():
            try:
                leaves[i] = ref[...]
            except ValueError as error:  # JAX's names neither the argument nor a remedy
                asked = f"{signature.function}({found.leaf_names[i]})"
                raise ref_elsewhere(asked, "a mutable array (jax.new_ref) on other devices than the mesh") from error
        return found

    @property
    def names(self) -> list[str]:
        """The names of the arguments that are not static."""
        return [self.signature.name(label) for label in self.labels]

    @property
    def leaf_names(self) -> list[str]:
        """The path of each leaf."""
        return [n for name, a in zip(self.names, self.dynamic, strict=True) for n in paths.of_tree(a, name)]

    @property
    def donated(self) -> tuple[int, ...]:
        """Indices of the donated arguments among those that are not static."""
        return tuple(i for i, label in enumerate(self.labels) if label in self.signature.donated)

    def as_passed(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Other leaves as the positional and keyword arguments that are not static."""
        values, n = jax.tree.unflatten(self.tree, leaves), self.num_positional
        return values[:n], dict(zip(self.names[n:], values[n:], strict=True))

    def as_called(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """As `as_passed`, but by keyword what the call passed by keyword. JAX sorts these by name."""
        values = jax.tree.unflatten(self.tree, leaves)
        by_source = dict(zip(self.sources, values, strict=True))
        return (
            tuple(x for source, x in by_source.items() if isinstance(source, int)),
            {source: x for source, x in by_source.items() if isinstance(source, str)},
        )

    def refuse_unhashable(self) -> None:
        """Raises for static arguments that are not hashable."""
        function = self.signature.function
        failures = [
            ShardingError(
                f"{function}({self.signature.name(label)})",
                found=f"{value!r:.60}, of type {kind.__name__}",
                required="a hashable static argument: it is part of the cache key",
                fix="a tuple or a frozen dataclass",
            )
            for label, kind, value in self.statics
            if not _is_hashable(value)
        ]
        raise_together(f"{function}: static arguments", failures)


def ref_elsewhere(asked: str, found: str) -> ShardingError:
    """The error for a mutable array that is not on all devices of the mesh."""
    return ShardingError(
        asked,
        found=found,
        required="a mutable array on the devices of the mesh",
        fix=[
            "make it of an array that is: jax.new_ref(jax.device_put(x, NamedSharding(mesh, P())))",
            "pass its value, ref[...], as an argument and return the new value",
        ],
    )


def _is_hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True
