"""MaxText: the train and eval steps of its models, with its logical axis rules, remat policies and scanned layers.

Only the numbers of layers and experts are reduced, and those of key-value heads raised to 8.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import maxtext
import yaml
from flax import nnx
from flax.linen import logical_axis_rules
from jax.sharding import AxisType, Mesh
from maxtext.configs import pyconfig
from maxtext.trainers.pre_train import train, train_compile
from maxtext.utils import sharding
from support.train_steps.step import Sizes, Step

from sharding.mesh import current

from . import MakeProgram
from .common import renamed
from .nnx_training import without_mesh

PACKAGE = "maxtext"
CONFIGS = Path(maxtext.__file__).parent / "configs"
FSDP_ONLY = "custom_mesh_and_rule/pure-fsdp.yml"


@functools.cache
def rules_of(file: str) -> list[list[Any]]:
    """The logical axis rules of a configuration file: [logical axis, mesh axes], in order of preference."""
    return yaml.safe_load((CONFIGS / file).read_text())["logical_axis_rules"]


def on_axes(sizes: Sizes, file: str) -> list[list[Any]]:
    """A file's rules over our mesh: `tensor` is `model`, and experts are over it too.

    Without an axis `fsdp`, weights are sharded over `data`; with only FSDP they are over all axes, as is the batch.
    """
    fsdp = tuple(sizes) if file == FSDP_ONLY else ("fsdp" if "fsdp" in sizes else "data",)
    names = {"fsdp": fsdp, "tensor": ("model",)}

    def ours(axes: Any) -> list[str]:
        listed = [axes] if isinstance(axes, str) else axes
        if listed == ["expert"]:
            return ["model"]
        return list(dict.fromkeys(axis for a in listed for axis in names.get(a, (a,)) if axis in sizes))

    return [[logical, ours(axes)] for logical, axes in rules_of(file)]


def configuration(sizes: Sizes, rules: str, **options: Any) -> Any:
    """A configuration without data and checkpoints."""
    return pyconfig.initialize(
        ["", str(CONFIGS / "base.yml")],
        run_name="program",
        base_output_directory="",
        hardware="cpu",
        dataset_type="synthetic",
        enable_checkpointing=False,
        log_config=False,
        skip_jax_distributed_system=True,
        override_model_config=True,
        override_logical_axis_rules=True,
        attention="dot_product",
        mesh_axes=list(sizes),
        logical_axis_rules=on_axes(sizes, rules),
        **options,
    )


def concrete_mesh(sizes: Sizes) -> Mesh:
    """The current mesh, or one of the default devices: MaxText's attention reads the platform."""
    mesh = current()
    if isinstance(mesh, Mesh):
        return mesh
    num_devices, kinds = math.prod(sizes.values()), (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), kinds, devices=jax.devices()[:num_devices])


@dataclass(frozen=True, kw_only=True)
class Program:
    """A configured model on a mesh."""

    config: Any
    graph: Any
    """The graph of MaxText's train state."""
    shardings: Any
    state: Any
    """Shapes, as a dict."""
    batch: Any
    weights: Any
    """Specs of the state."""
    rows: Any
    """Specs of the batch."""

    @classmethod
    def of(cls, sizes: Sizes, num_rows: int, context: int, rules: str, options: dict[str, Any]) -> Program:
        """The program with its state's and batch's shapes from MaxText."""
        config = configuration(sizes, rules, per_device_batch_size=num_rows, max_target_length=context, **options)
        mesh = concrete_mesh(sizes)
        with without_mesh():
            (state, batch), _, shardings, _, graph = train_compile.get_shaped_inputs(mesh, config)
        state = nnx.to_pure_dict(state)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
        rows = {name: jax.ShapeDtypeStruct((num_rows, *leaf.shape[1:]), leaf.dtype) for name, leaf in batch.items()}
        return cls(
            config=config,
            graph=graph,
            shardings=shardings,
            state=shapes,
            batch=rows,
            weights=renamed(specs_of(state), shapes, sizes),
            rows=renamed(specs_of(batch), rows, sizes),
        )


def specs_of(tree: Any) -> Any:
    """The specs of sharded shapes."""
    return jax.tree.map(lambda leaf: leaf.sharding.spec, tree)


def trained(sizes: Sizes, *, rows: int, context: int, rules: str = "base.yml", **options: Any) -> Step:
    """The train step of a configured model."""
    program = Program.of(sizes, rows, context, rules, options)
    params, shardings = sharding.maybe_update_params_sharding_with_opt(program.config, program.shardings)

    def run(state: Any, batch: dict[str, jax.Array]) -> Any:
        with logical_axis_rules(program.config.logical_axis_rules):
            state, metrics = train.train_step(program.graph, program.config, shardings, params, state, dict(batch))
        return nnx.to_pure_dict(state), metrics

    return Step(run=run, args=(program.state, program.batch), specs=(program.weights, program.rows))


def evaluated(sizes: Sizes, *, rows: int, context: int, rules: str = "base.yml", **options: Any) -> Step:
    """The eval step of a configured model."""
    program = Program.of(sizes, rows, context, rules, options)

    def run(_: None, state: Any, batch: dict[str, jax.Array]) -> Any:
        with logical_axis_rules(program.config.logical_axis_rules):
            return None, train.eval_step(program.graph, program.config, state, dict(batch))

    return Step(run=run, args=(None, program.state, program.batch), specs=(None, program.weights, program.rows))


DENSE_EXPERTS = {"sparse_matmul": False, "megablox": False}

PROGRAMS: dict[str, MakeProgram] = {
    "llama 3.1 8b, 4 layers": partial(
        trained, model_name="llama3.1-8b", base_num_decoder_layers=4, rows=8, context=1024
    ),
    "llama 2 7b, 8 layers, accumulated": partial(
        trained,
        model_name="llama2-7b",
        base_num_decoder_layers=8,
        rows=32,
        context=512,
        gradient_accumulation_steps=4,
        remat_policy="save_qkv_proj",
    ),
    "llama 3.1 8b, 8 layers, 16 bits, vocab tiles": partial(
        trained,
        model_name="llama3.1-8b",
        base_num_decoder_layers=8,
        rows=8,
        context=1024,
        weight_dtype="bfloat16",
        num_vocab_tiling=4,
    ),
    "gemma 2 2b": partial(trained, model_name="gemma2-2b", rows=8, context=512, base_num_kv_heads=8),
    "gemma 3 4b, 12 layers": partial(
        trained,
        model_name="gemma3-4b",
        base_num_decoder_layers=12,
        base_num_kv_heads=8,
        rows=8,
        context=1024,
        sliding_window_size=512,
    ),
    "qwen 3 0.6b, fsdp": partial(
        trained, model_name="qwen3-0.6b", rows=64, context=256, rules=FSDP_ONLY, remat_policy="minimal_with_context"
    ),
    "qwen 3 1.7b, 14 layers, unrolled": partial(
        trained,
        model_name="qwen3-1.7b",
        base_num_decoder_layers=14,
        rows=8,
        context=512,
        scan_layers=False,
        remat_policy="minimal",
    ),
    "gpt 3 6b, 12 layers": partial(trained, model_name="gpt3-6b", base_num_decoder_layers=12, rows=8, context=1024),
    "olmo 3 7b, 4 layers": partial(trained, model_name="olmo3-7b", base_num_decoder_layers=4, rows=8, context=1024),
    "mixtral 8x7b, 2 layers": partial(
        trained,
        model_name="mixtral-8x7b",
        base_num_decoder_layers=2,
        rows=8,
        context=1024,
        capacity_factor=1.25,
        **DENSE_EXPERTS,
    ),
    "deepseek 2 16b, 3 layers": partial(
        trained,
        model_name="deepseek2-16b",
        base_num_decoder_layers=3,
        rows=8,
        context=512,
        capacity_factor=1.5,
        **DENSE_EXPERTS,
    ),
    "gpt oss 20b, 2 layers": partial(
        trained, model_name="gpt-oss-20b", base_num_decoder_layers=2, rows=8, context=512, **DENSE_EXPERTS
    ),
    "qwen 3 next, 4 layers": partial(
        trained,
        model_name="qwen3-next-80b-a3b",
        base_num_decoder_layers=4,
        base_num_kv_heads=8,
        num_experts=64,
        rows=8,
        context=512,
        capacity_factor=1.5,
        **DENSE_EXPERTS,
    ),
    "mistral 7b, 8 layers, evaluation": partial(
        evaluated, model_name="mistral-7b", base_num_decoder_layers=8, rows=8, context=2048, weight_dtype="bfloat16"
    ),
}
