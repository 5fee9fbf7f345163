"""Parameter layouts of the models: the few annotations from which propagation infers all other shardings.

A layout is a table of rules from parameter path to spec, as for `sharding.layout`. A rule has an entry for each dim of
the parameter in one layer; leading dims of stacked layers stay unconstrained. A batch over `fsdp` keeps that axis:
parameters are stored over it, and gathered for their use.
"""

import dataclasses
import warnings
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from sharding import paths
from sharding.annotations.annotate import annotate as annotate_array
from sharding.annotations.layout import Layout, Rule

U = P.UNCONSTRAINED


Table = tuple[Rule, ...]


def rule(pattern: str, spec: P, *, optional: bool = False) -> Rule:
    """A rule with one entry for each dim of the parameter in one layer."""
    return Rule(pattern, spec, optional=optional, trailing=True)


# Megatron-LM: one all-reduce over tensor after each branch. References: Shoeybi et al., arXiv:1909.08053, section 3.
BLOCKS: Table = (
    rule("*/attention/qkv", P("fsdp", "tensor", U, U)),
    rule("*/attention/out", P("tensor", U, "fsdp")),
    rule("*/mlp/w1", P("fsdp", "tensor")),
    rule("*/mlp/w2", P("tensor", "fsdp")),
)

TABLE: Table = (rule("*/table", P("tensor", "fsdp")),)

GPT: Table = TABLE + BLOCKS

# Experts are sharded over their own axis, and each like an MLP.
GPT_MOE: Table = (
    *GPT,
    rule("*/experts/up", P("expert", "fsdp", "tensor")),
    rule("*/experts/down", P("expert", "tensor", "fsdp")),
)

BERT: Table = (*GPT, rule("output/w", P("fsdp", U)))

VIT: Table = (*BLOCKS, rule("embed/w", P(U, "fsdp")), rule("head/w", P("fsdp", U)))

# The last two convolutions of a block are like the two matrices of an MLP: the channels between them are sharded, and
# one all-reduce over tensor ends the block. A bottleneck's first convolution is small.
RESNET: Table = (
    rule("stem/kernel", P(U, U, U, "fsdp")),
    rule("*/narrow/kernel", P(U, U, "fsdp", U), optional=True),
    rule("*/conv1/kernel", P(U, U, "fsdp", "tensor")),
    rule("*/conv2/kernel", P(U, U, "tensor", "fsdp")),
    rule("*/shortcut/kernel", P(U, U, "fsdp", U), optional=True),
    rule("head/w", P("fsdp", U)),
)

# Nearly all parameters are table rows: each device looks up its own, and an all-reduce over tensor combines them. The
# MLPs are small in comparison; only fsdp is worth it for them.
DLRM: Table = (
    rule("tables/rows", P("tensor", "fsdp")),
    rule("bottom/*/w", P(U, "fsdp")),
    rule("top/*/w", P(U, "fsdp")),
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


OTHER_AXES = frozenset({"data", "expert", "fsdp", "pipe", "seq"})
"""Axes that batches, stages or sequences are sharded over, if no parameter is."""


def _on(table: Table, axis_names: Iterable[str]) -> Layout:
    """The rules with the axes that a mesh has; none for a parameter that these don't shard."""
    names = set(axis_names)
    known = {entry for one in table for entry in one.spec or () if isinstance(entry, str)}
    if unused := sorted(names - known - OTHER_AXES):
        warnings.warn(
            f"layout: no rule shards over the mesh {'axes' if len(unused) > 1 else 'axis'} "
            f"{', '.join(map(repr, unused))}; its rules shard over {', '.join(map(repr, sorted(known)))}",
            stacklevel=3,
        )
    specs = [P(*(axis if axis in names else U for axis in one.spec or ())) for one in table]
    return Layout(
        tuple(
            dataclasses.replace(one, spec=spec)
            for one, spec in zip(table, specs, strict=True)
            if any(isinstance(axis, str) for axis in spec)
        )
    )


def batch(axis_names: Iterable[str]) -> P:
    """The spec of each array [B, ...] of a batch: examples sharded over `data`, `fsdp` and `expert`, where present."""
    names = set(axis_names)
    return P(tuple(axis for axis in ("data", "fsdp", "expert") if axis in names) or None)


def staged(params: Any, axis: str = "pipe") -> Any:
    """`params` of a stacked model with its layers sharded over the stages of a pipeline."""

    def annotated(key_path: tuple[Any, ...], leaf: Any) -> Any:
        if not paths.text(key_path).startswith("blocks/"):
            return leaf
        return annotate_array(leaf, P(axis, *[U] * (leaf.ndim - 1)))

    return jax.tree_util.tree_map_with_path(annotated, params)
