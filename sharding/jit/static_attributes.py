"""Static attributes that a function changes in place: `model.train()`, a Python counter of an nnx module.

They are part of an argument's pytree structure, not of its values, as are parts of an nnx object that are removed or
set to None. A change belongs to one structure, as the program does, so it is found once per trace and applied after
every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax


class StaticChange(NamedTuple):
    """A node of an argument's pytree whose static data changed."""

    keys: tuple[Any, ...]
    """From the argument to the node."""
    attributes: tuple[tuple[str, Any, Any], ...] | None
    """Name, value (of a part the structure) before, and value after of the attributes of an nnx object; None for what
    can't be given to the caller's."""
    kind: str
    replaced_by: str | None = None
    """The type of the object that took the node's place."""
    is_of_parts: bool = False
    """Whether parts were removed or moved, which a function may do with its own copy."""

    def text(self, argument: str) -> str:
        """What changed, for an error."""
        path = "/".join(map(str, (argument, *self.keys)))
        if self.replaced_by is not None:
            return f"{path}: a {self.kind} was replaced by a {self.replaced_by}"
        if self.is_of_parts and self.attributes is None:
            return f"{path}: parts of a {self.kind} were moved"
        if self.attributes is None:
            return f"{path}: static data of a {self.kind} was changed"
        return "; ".join(f"{path}.{name} was changed from {old!r} to {new!r}" for name, old, new in self.attributes)


def changes(before: Any, after: Any) -> Iterator[StaticChange]:
    """The nodes of an argument whose static data, or of nnx objects the parts, differ between two pytree structures.

    Entries that other containers lost or gained are not: those are values.
    """
    if before == after:
        return
    (kind, old), (other, new) = _node(before), _node(after)
    if kind is not other:
        return
    if _is_nnx(kind):
        were, are = dict(zip(*old[1:], strict=True)), dict(zip(*new[1:], strict=True))
        changed = [n for n in {**were, **are} if not n.startswith("_pytree__") and _differ(were, are, n)]
        if changed:
            yield StaticChange(
                (), tuple((n, were.get(n, _MISSING), are.get(n, _MISSING)) for n in changed), kind.__name__
            )
        yield from _changed_parts(before, after)
    elif kind not in _CONTAINERS and old != new:
        yield StaticChange((), None, kind.__name__)
    theirs = _children(after)
    for key, child in _children(before).items():
        if key in theirs:
            (was, _), (now, _) = _node(child), _node(theirs[key])
            if _is_nnx(kind) and was is not now and type(None) not in (was, now):
                yield StaticChange((key,), None, was.__name__, now.__name__)
            yield from (one._replace(keys=(key, *one.keys)) for one in changes(child, theirs[key]))


def _changed_parts(before: Any, after: Any) -> Iterator[StaticChange]:
    """The parts of an nnx object that are gone or None; those of a list, or in another place, can't be given back."""
    mine, theirs = _children(before), _children(after)
    present = {key for key, child in theirs.items() if child != _NONE}
    gone = [key for key, child in mine.items() if key not in present and child != _NONE]
    moved = [key for key in present if mine.get(key, _NONE) == _NONE]
    kind = _node(before)[0].__name__
    if moved or not all(isinstance(key, str) for key in gone):
        yield StaticChange((), None, kind, is_of_parts=True)
    elif gone:
        parts = tuple((str(key), mine[key], None if key in theirs else _MISSING) for key in gone)
        yield StaticChange((), parts, kind, is_of_parts=True)


def apply(arguments: Sequence[Any], changed: Sequence[tuple[int, StaticChange]]) -> None:
    """Gives the nnx objects of a caller's arguments the changed attributes."""
    for position, change in changed:
        node = arguments[position]
        for key in change.keys:
            children, _ = jax.tree_util.default_registry.flatten_one_level(node) or ((), None)
            node = dict(zip(_children(jax.tree.structure(node)), children, strict=True))[key]
        for name, _, value in change.attributes or ():
            delattr(node, name) if value is _MISSING else setattr(node, name, value)


def contains(tree: Any, part: Any) -> bool:
    """Whether a pytree structure has another as a part."""
    return tree == part or any(contains(child, part) for child in tree.children())


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


_MISSING = _Missing()
_NONE = jax.tree.structure(None)
_CONTAINERS: tuple[Callable[..., Any], ...] = (dict, list, tuple)


def _is_nnx(kind: Any) -> bool:
    """Whether objects of a type flatten as those of nnx do: keys of values, names of static attributes, these."""
    return hasattr(kind, "_pytree__flatten")


def _node(tree: Any) -> tuple[Any, Any]:
    return tree.node_data() or (type(None), None)


def _children(tree: Any) -> dict[Any, Any]:
    """The children of a structure by key or attribute; by position if they have none."""
    kind, data = _node(tree)
    children = tree.children()
    keys = data if kind is dict else data[0] if _is_nnx(kind) else range(len(children))
    return dict(zip(keys, children, strict=True))


def _differ(one: dict[str, Any], other: dict[str, Any], name: str) -> bool:
    a, b = one.get(name, _MISSING), other.get(name, _MISSING)
    return type(a) is not type(b) or bool(a != b)
