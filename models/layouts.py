"""Parameter layouts of the models: the few annotations from which propagation infers all other shardings.

A layout is a table of rules from parameter path to spec. A rule has an entry for each dim of the parameter in one
layer; leading dims of stacked layers stay unconstrained. Rules of priority 0 place the tensor axis, those of priority 1
the fsdp axis.
"""

import dataclasses
import difflib
import fnmatch
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from sharding import paths
from sharding.annotations.annotate import annotate as annotate_array
from sharding.errors import ShardingError, raise_together

U = P.UNCONSTRAINED


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """One line of a layout: a parameter pattern and its spec."""

    pattern: str
    """Glob over the parameter's path, with or without its layer index: `*/mlp/w1` matches `blocks/0/mlp/w1`."""
    spec: P
    """One entry for each dim of the parameter in one layer."""
    priority: int = 0
    """Lower numbers propagate first."""
    optional: bool = False
    """Whether the rule may match no parameter of a model."""


Layout = tuple[Rule, ...]

# Megatron-LM: one all-reduce over tensor after each branch. References: Shoeybi et al., arXiv:1909.08053, section 3.
BLOCKS: Layout = (
    Rule("*/attention/qkv", P(U, "tensor", U, U)),
    Rule("*/attention/out", P("tensor", U, U)),
    Rule("*/mlp/w1", P(U, "tensor")),
    Rule("*/mlp/w2", P("tensor", U)),
    Rule("*/attention/qkv", P("fsdp", U, U, U), 1),
    Rule("*/attention/out", P(U, U, "fsdp"), 1),
    Rule("*/mlp/w1", P("fsdp", U), 1),
    Rule("*/mlp/w2", P(U, "fsdp"), 1),
)

TABLE: Layout = (Rule("*/table", P("tensor", U)), Rule("*/table", P(U, "fsdp"), 1))

GPT: Layout = TABLE + BLOCKS

# Experts are sharded over their own axis, and each like an MLP.
GPT_MOE: Layout = (
    *GPT,
    Rule("*/experts/up", P("expert", U, U)),
    Rule("*/experts/down", P("expert", U, U)),
    Rule("*/experts/up", P(U, U, "tensor")),
    Rule("*/experts/down", P(U, "tensor", U)),
    Rule("*/experts/up", P(U, "fsdp", U), 1),
    Rule("*/experts/down", P(U, U, "fsdp"), 1),
)

BERT: Layout = (*GPT, Rule("output/w", P("fsdp", U), 1))

VIT: Layout = (*BLOCKS, Rule("embed/w", P(U, "fsdp"), 1), Rule("head/w", P("fsdp", U), 1))

# The last two convolutions of a block are like the two matrices of an MLP: the channels between them are sharded, and
# one all-reduce over tensor ends the block. A bottleneck's first convolution is small.
RESNET: Layout = (
    Rule("*/conv1/kernel", P(U, U, U, "tensor")),
    Rule("*/conv2/kernel", P(U, U, "tensor", U)),
    Rule("stem/kernel", P(U, U, U, "fsdp"), 1),
    Rule("*/narrow/kernel", P(U, U, "fsdp", U), 1, optional=True),
    Rule("*/conv1/kernel", P(U, U, "fsdp", U), 1),
    Rule("*/conv2/kernel", P(U, U, U, "fsdp"), 1),
    Rule("*/shortcut/kernel", P(U, U, "fsdp", U), 1, optional=True),
    Rule("head/w", P("fsdp", U), 1),
)

# Nearly all parameters are table rows: each device looks up its own, and an all-reduce over tensor combines them. The
# MLPs are small in comparison; only fsdp is worth it for them.
DLRM: Layout = (
    Rule("tables/rows", P("tensor", U)),
    Rule("tables/rows", P(U, "fsdp"), 1),
    Rule("bottom/*/w", P(U, "fsdp"), 1),
    Rule("top/*/w", P(U, "fsdp"), 1),
)


def gpt(axis_names: Iterable[str]) -> Layout:
    """The rules for `models.gpt` on a mesh with these axes."""
    return _on(GPT, axis_names)


def gpt_moe(axis_names: Iterable[str]) -> Layout:
    """The rules for `models.gpt_moe` on a mesh with these axes."""
    return _on(GPT_MOE, axis_names)


def bert(axis_names: Iterable[str]) -> Layout:
    """The rules for `models.bert` on a mesh with these axes."""
    return _on(BERT, axis_names)


def vit(axis_names: Iterable[str]) -> Layout:
    """The rules for `models.vit` on a mesh with these axes."""
    return _on(VIT, axis_names)


def resnet(axis_names: Iterable[str]) -> Layout:
    """The rules for `models.resnet` on a mesh with these axes."""
    return _on(RESNET, axis_names)


def dlrm(axis_names: Iterable[str]) -> Layout:
    """The rules for `models.dlrm` on a mesh with these axes."""
    return _on(DLRM, axis_names)


def _on(layout: Layout, axis_names: Iterable[str]) -> Layout:
    names = set(axis_names)
    return tuple(rule for rule in layout if names.intersection(entry for entry in rule.spec if isinstance(entry, str)))


def batch(axis_names: Iterable[str]) -> P:
    """The spec of each array [B, ...] of a batch: examples sharded over `data`, `fsdp` and `expert`, where present."""
    names = set(axis_names)
    return P(tuple(axis for axis in ("data", "fsdp", "expert") if axis in names) or None)


def specs(params: Any, layout: Layout) -> Any:
    """A pytree of specs like `params`, `None` where no rule matches; the first rule for a dim wins."""
    _check(params, layout)

    def merged(key_path: tuple[Any, ...], leaf: Any) -> P | None:
        matched = [_full_rank(rule, leaf.ndim) for rule in _matching(paths.text(key_path), layout)]
        return P(*(_first(entries) for entries in zip(*matched, strict=True))) if matched else None

    return jax.tree_util.tree_map_with_path(merged, params)


def annotate(params: Any, layout: Layout) -> Any:
    """`params` annotated by every matching rule, for use inside a traced step."""
    _check(params, layout)

    def annotated(key_path: tuple[Any, ...], leaf: Any) -> Any:
        for rule in _matching(paths.text(key_path), layout):
            leaf = annotate_array(leaf, _full_rank(rule, leaf.ndim), priority=rule.priority)
        return leaf

    return jax.tree_util.tree_map_with_path(annotated, params)


def staged(params: Any, axis: str = "pipe") -> Any:
    """`params` of a stacked model with its layers sharded over the stages of a pipeline."""

    def annotated(key_path: tuple[Any, ...], leaf: Any) -> Any:
        if not paths.text(key_path).startswith("blocks/"):
            return leaf
        return annotate_array(leaf, P(axis, *[U] * (leaf.ndim - 1)))

    return jax.tree_util.tree_map_with_path(annotated, params)


def _first(entries: Iterable[Any]) -> Any:
    return next((entry for entry in entries if entry is not U), U)


def _full_rank(rule: Rule, ndim: int) -> P:
    return P(*[U] * (ndim - len(rule.spec)), *rule.spec)


def _without_indices(path: str) -> str:
    return "/".join(part for part in path.split("/") if not part.isdigit())


def _matching(path: str, layout: Layout) -> list[Rule]:
    forms = (path, _without_indices(path))
    return [rule for rule in layout if any(fnmatch.fnmatchcase(form, rule.pattern) for form in forms)]


def _check(params: Any, layout: Layout) -> None:
    ndims = {paths.text(key_path): leaf.ndim for key_path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    failures = [failure for rule in layout if (failure := _failure(rule, ndims)) is not None]
    raise_together("layout", failures)


def _failure(rule: Rule, ndims: dict[str, int]) -> ShardingError | None:
    """The error of a rule for parameters with these paths and numbers of dims, if any."""
    matched = [path for path in ndims if _matching(path, (rule,))]
    if not matched:
        return None if rule.optional else _unused(rule, ndims)
    short = next((path for path in matched if ndims[path] < len(rule.spec)), None)
    return None if short is None else _too_long(rule, short, ndims[short])


def _unused(rule: Rule, known: Iterable[str]) -> ShardingError:
    names = sorted({_without_indices(path) for path in known})
    return ShardingError(
        f"layout rule {rule.pattern!r}",
        found=f"no match among {len(names)} paths",
        required="a matching parameter for every non-optional rule",
        fix=difflib.get_close_matches(rule.pattern, names, n=3, cutoff=0),
    )


def _too_long(rule: Rule, path: str, ndim: int) -> ShardingError:
    return ShardingError(
        f"layout rule {rule.pattern!r}",
        found=f"{path} has {ndim} dims, {rule.spec} has {len(rule.spec)}",
        required="one entry for each dim of the parameter in one layer",
    )
