"""`layout`: specs of parameters by their paths, for models that don't annotate themselves."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from .. import paths
from ..errors import ShardingError, raise_together
from ..mesh import current
from ..spec import indivisible_error, refuse_unreduced
from . import axis_rules
from .annotate import annotate

U = P.UNCONSTRAINED


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of a layout: which parameters have which spec."""

    pattern: str
    """A path, the end of one, or a glob: `*/mlp/w1` matches `blocks/0/mlp/w1`, with or without its index."""
    spec: P | None
    """None, or `P.UNCONSTRAINED` for a dim, leaves it to a later rule, or else to be inferred."""
    priority: int = 0
    """Of the annotations in `Layout.annotate`: lower numbers propagate first."""
    optional: bool = False
    """Whether it may match no parameter."""
    trailing: bool = False
    """Whether the entries are those of the last dims: one rule for a layer and for stacked ones, whose leading dims
    stay unconstrained."""

    def entries(self, ndim: int) -> tuple[Any, ...]:
        """The entry of each dim of an array."""
        own = () if self.spec is None else tuple(self.spec)
        if self.spec is None or self.trailing:
            return (*[U] * (ndim - len(own)), *own)
        return (*own, *[None] * (ndim - len(own)))


@dataclass(frozen=True, slots=True)
class Layout:
    """A table of rules: an entry of `in_shardings` or `out_shardings`; called with parameters it gives their specs."""

    rules: tuple[Rule, ...]
    strict: bool = False

    def __call__(self, params: Any) -> Any:
        """The specs of parameters: a pytree like them, for `in_shardings`; None where the sharding is to be inferred.

        Args:
            params: a pytree of arrays or ShapeDtypeStructs: dicts of flax linen or haiku, nnx and equinox modules, nnx
                states. Leaves that are no arrays, such as functions, get None.

        Raises:
            ShardingError: patterns that match nothing, or only what earlier rules decide; specs with more entries than
                an array has dims; with a mesh in context, unknown axes and dims that their axes do not divide; under
                `strict`, parameters that nothing matches. All failures of one kind together.
        """
        named, tree, ndims = self._checked(params)
        matching = {path: self._matching(path) for path in ndims}
        raise_together("sharding.layout", list(self._shadowed(matching, ndims)))
        specs = {path: _spec(matching[path], ndim) for path, ndim in ndims.items()}
        raise_together("sharding.layout", list(_misfits(specs, dict(named))))
        return jax.tree.unflatten(tree, [specs.get(path) for path, _ in named])

    def annotate(self, params: Any) -> Any:
        """Parameters annotated by every matching rule, for use inside a traced function; errors as for a call."""
        named, tree, _ = self._checked(params)

        def annotated(path: str, leaf: Any) -> Any:
            for rule in self._matching(path) if _is_array(leaf) else ():
                if rule.spec is not None:
                    leaf = annotate(leaf, P(*rule.entries(np.ndim(leaf))), priority=rule.priority)
            return leaf

        return jax.tree.unflatten(tree, [annotated(path, leaf) for path, leaf in named])

    def unmatched(self, params: Any) -> tuple[str, ...]:
        """The paths of the parameters that no rule matches, whose sharding is inferred."""
        named, _ = _named(params)
        return tuple(path for path, leaf in named if _is_array(leaf) and not self._matching(path))

    def _checked(self, params: Any) -> tuple[list[tuple[str, Any]], Any, dict[str, int]]:
        """The leaves with their paths, their tree, and the number of dims of each array."""
        named, tree = _named(params)
        arrays = {path: np.ndim(leaf) for path, leaf in named if _is_array(leaf)}
        raise_together("sharding.layout", [f for rule in self.rules for f in _faults(rule, arrays)])
        left = self.unmatched(params) if self.strict else ()
        if left:
            raise ShardingError(
                "sharding.layout(..., strict=True)",
                found=[f"{len(left)} of {len(arrays)} parameters that no pattern matches:", *left],
                required="a pattern for every parameter",
                fix='a last rule "*": None, which leaves the rest to be inferred, or "*": P(), which replicates it',
            )
        return named, tree, arrays

    def _shadowed(self, matching: Mapping[str, list[Rule]], ndims: Mapping[str, int]) -> Iterable[ShardingError]:
        """The errors of rules that earlier ones leave no parameter to; the last one, for all the rest, may be such."""
        for rule in self.rules:
            if rule.spec is None or rule.optional or rule.pattern == "*":
                continue
            earlier = {path: rules[: rules.index(rule)] for path, rules in matching.items() if rule in rules}
            if all(_is_shadowed(rule, rules, ndims[path]) for path, rules in earlier.items()):
                path, (first, *_) = next(iter(earlier.items()))
                yield ShardingError(
                    f"layout rule {rule.pattern!r}",
                    found=f"{first.pattern!r} comes before and gives the specs of all that it matches, such as {path}",
                    required="a rule that is the first to match some parameter",
                    fix=f"the rule {rule.pattern!r} before {first.pattern!r}",
                )

    def _matching(self, path: str) -> list[Rule]:
        return [rule for rule in self.rules if paths.Glob(rule.pattern).matches(path)]


def layout(rules: Mapping[str, P | None] | Iterable[Rule], *, strict: bool = False) -> Layout:
    """The specs of a model's parameters by their paths, for models of any library.

    A pattern matches from the start of any key to the end of a path: `q_proj/kernel`, or with `*` for any characters,
    `layers_*/attention/*/kernel`. Keys that are only an index may be left out. The first rule that matches a parameter
    gives its spec; later ones only the dims that it leaves unconstrained. What no rule matches is inferred by
    propagation; a last rule `"*": P()` replicates it instead. In `in_shardings` and `out_shardings` of `sharding.jit`
    a layout stands for the specs of the arrays in its place, such as a model and the moments of its optimizer.

    Args:
        rules: pattern -> spec, or `Rule`s. Each must match some parameter that earlier ones do not decide.
        strict: whether a parameter that no pattern matches is an error.

    Raises:
        ShardingError: rules of the wrong type.

    Example:
        >>> import jax, sharding
        >>> from sharding import P
        >>> array = jax.ShapeDtypeStruct((64, 64), "float32")
        >>> params = {"mlp/~/linear_0": {"w": array, "b": array}, "mlp/~/linear_1": {"w": array}}
        >>> specs = sharding.layout({"linear_0/w": P(None, "tensor"), "linear_1/w": P("tensor")})
        >>> specs(params)
        {'mlp/~/linear_0': {'b': None, 'w': P(None, 'tensor')}, 'mlp/~/linear_1': {'w': P('tensor', None)}}
        >>> specs.unmatched(params)
        ('mlp/~/linear_0/b',)
    """
    given: Any = rules
    found: list[Any] = [Rule(*pair) for pair in given.items()] if isinstance(given, Mapping) else list(given)
    wrong = [
        ShardingError(
            f"sharding.layout: {rule!r}",
            found=f"a value of type {type(getattr(rule, 'spec', rule)).__name__}",
            required="patterns with a PartitionSpec or None each",
            fix='{"*/kernel": P(None, "tensor")}',
        )
        for rule in found
        if not isinstance(rule, Rule) or not isinstance(rule.pattern, str) or not isinstance(rule.spec, P | None)
    ]
    raise_together("sharding.layout", wrong)
    for rule in found:
        refuse_unreduced(rule.spec, f"sharding.layout: {rule.pattern!r}")
    return Layout(tuple(found), strict)


def _named(params: Any) -> tuple[list[tuple[str, Any]], Any]:
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    return [(paths.text(path), leaf) for path, leaf in leaves], tree


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") or isinstance(leaf, numbers.Number)


def _spec(matching: Iterable[Rule], ndim: int) -> P | None:
    """The spec that rules give an array, the first one first; None if they give none."""
    rules = [rule for rule in matching if rule.spec is not None]
    columns = zip(*(rule.entries(ndim) for rule in rules), strict=True)
    return P(*(next((entry for entry in column if entry is not U), U) for column in columns)) if rules else None


def _is_shadowed(rule: Rule, earlier: Iterable[Rule], ndim: int) -> bool:
    """Whether earlier rules give each dim of an array that the rule would, at least one of them otherwise."""
    before = [one.entries(ndim) for one in earlier]
    dims = [d for d, entry in enumerate(rule.entries(ndim)) if entry is not U]
    given = [[entries[d] for entries in before if entries[d] is not U] for d in dims]
    return all(given) and any(found[0] != rule.entries(ndim)[d] for d, found in zip(dims, given, strict=True))


def _faults(rule: Rule, ndims: Mapping[str, int]) -> Iterable[ShardingError]:
    asked = f"layout rule {rule.pattern!r}"
    unused = None if rule.optional else paths.unmatched(asked, rule.pattern, ndims)
    if unused is not None:
        yield unused
    least = 0 if rule.spec is None else len(rule.spec)
    short = next((path for path in paths.Glob(rule.pattern).among(ndims) if ndims[path] < least), None)
    if short is not None:
        yield ShardingError(
            asked,
            found=f"{short} has {ndims[short]} dims, {rule.spec} has {least}",
            required="at most one entry for each dim of the parameter" + (" in one layer" if rule.trailing else ""),
        )


def _misfits(specs: Mapping[str, P | None], leaves: Mapping[str, Any]) -> Iterable[ShardingError]:
    """The errors of specs that don't fit the mesh in context, if there is one."""
    mesh = current()
    if mesh is None:
        return
    sizes = dict(mesh.shape)
    for path, spec in specs.items():
        if spec is not None:
            shape, asked = np.shape(leaves[path]), f"sharding.layout: {path}"
            try:
                found = axis_rules.resolve(spec, shape, sizes, asked=asked)
            except ShardingError as error:
                yield error
                continue
            error = indivisible_error(found, shape, sizes, asked=asked, given=spec)
            if error is not None:
                yield error
