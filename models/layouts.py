"""Which parameters of a model are split over which mesh axis: the few annotations that the rest is completed from.

A layout is a table of rules from parameter path to spec. A rule writes every dim of the parameter; a stacked layer has
more, and those lead and stay open. Rules of priority 0 place the tensor axis, those of priority 1 the fsdp axis.
"""

import dataclasses
import difflib
import fnmatch
from collections.abc import Iterable
from typing import Any

import jax

import sharding
from sharding import P

U = P.UNCONSTRAINED


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    pattern: str
    """A glob over the parameter's path, with or without its layer index: `*/mlp/w1` is `blocks/0/mlp/w1`."""
    spec: P
    """One entry for each dim of the parameter in one layer."""
    priority: int = 0
    """Lower numbers are propagated first."""


Layout = tuple[Rule, ...]

GPT: Layout = (
    Rule("*/table", P("tensor", U)),
    Rule("*/attention/qkv", P(U, "tensor", U, U)),
    Rule("*/attention/out", P("tensor", U, U)),
    Rule("*/mlp/w1", P(U, "tensor")),
    Rule("*/mlp/w2", P("tensor", U)),
    Rule("*/table", P(U, "fsdp"), 1),
    Rule("*/attention/qkv", P("fsdp", U, U, U), 1),
    Rule("*/attention/out", P(U, U, "fsdp"), 1),
    Rule("*/mlp/w1", P("fsdp", U), 1),
    Rule("*/mlp/w2", P(U, "fsdp"), 1),
)


def gpt(axis_names: Iterable[str]) -> Layout:
    """The rules for `models.gpt` on a mesh with these axes."""
    names = set(axis_names)
    return tuple(rule for rule in GPT if names.intersection(entry for entry in rule.spec if isinstance(entry, str)))


def batch(axis_names: Iterable[str]) -> P:
    """The spec of a token batch [B, S]: sequences over the axes of `data` and `fsdp` that the mesh has."""
    names = set(axis_names)
    return P(tuple(axis for axis in ("data", "fsdp") if axis in names) or None)


def specs(params: Any, layout: Layout) -> Any:
    """A tree like `params` of specs, `None` where no rule speaks; of two rules for one dim the first counts."""
    _check(params, layout)

    def joined(key_path: tuple[Any, ...], leaf: Any) -> P | None:
        rules = [_whole(rule, _path(key_path), leaf.ndim) for rule in _matching(_path(key_path), layout)]
        return P(*(next((e for e in entries if e is not U), U) for entries in zip(*rules))) if rules else None

    return jax.tree_util.tree_map_with_path(joined, params)


def annotate(params: Any, layout: Layout) -> Any:
    """`params` with every rule given to `sharding.annotate`; for use inside a traced step."""
    _check(params, layout)

    def annotated(key_path: tuple[Any, ...], leaf: Any) -> Any:
        for rule in _matching(_path(key_path), layout):
            leaf = sharding.annotate(leaf, _whole(rule, _path(key_path), leaf.ndim), priority=rule.priority)
        return leaf

    return jax.tree_util.tree_map_with_path(annotated, params)


def _path(key_path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(key_path, simple=True, separator="/").removesuffix("/value")


def _without_indices(path: str) -> str:
    return "/".join(part for part in path.split("/") if not part.isdigit())


def _matching(path: str, layout: Layout) -> list[Rule]:
    forms = (path, _without_indices(path))
    return [rule for rule in layout if any(fnmatch.fnmatchcase(form, rule.pattern) for form in forms)]


def _whole(rule: Rule, path: str, ndim: int) -> P:
    if ndim < len(rule.spec):
        raise ValueError(
            f"layout rule {rule.pattern!r}: {path} has {ndim} dims, the spec {rule.spec} has {len(rule.spec)}"
        )
    return P(*[U] * (ndim - len(rule.spec)), *rule.spec)


def _check(params: Any, layout: Layout) -> None:
    paths = [_path(key_path) for key_path, _ in jax.tree_util.tree_leaves_with_path(params)]
    matched = {rule for path in paths for rule in _matching(path, layout)}
    unused = dict.fromkeys(rule.pattern for rule in layout if rule not in matched)
    if unused:
        raise ValueError("layout rules that match no parameter: " + "; ".join(_nearest(name, paths) for name in unused))


def _nearest(pattern: str, paths: list[str]) -> str:
    known = sorted({_without_indices(path) for path in paths})
    return f"{pattern!r}, nearest are {', '.join(difflib.get_close_matches(pattern, known, n=3, cutoff=0)) or 'none'}"
