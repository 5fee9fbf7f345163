"""Combined axes: twenty steps on meshes of eight devices have the losses of one device."""

import functools

import numpy as np
import pytest
from support.short_runs import run_steps

from sharding.launch.config.optimizer_config import Optimization
from sharding.launch.config.pipeline_config import PipelineOptions
from sharding.launch.config.sequence_config import SequenceOptions
from sharding.launch.workloads import gpt_moe_text, gpt_text
from sharding.models.gpt import Config
from sharding.models.gpt_moe import Config as MoEConfig

SIZES = {"vocab": 64, "context": 16, "layers": 4, "features": 32, "heads": 4, "kv_heads": 4, "mlp_features": 64}
FORMS = {"dense": (gpt_text.FAMILY, Config(**SIZES)), "experts": (gpt_moe_text.FAMILY, MoEConfig(**SIZES))}
STEPS = 20

MESHES = {
    "dense": [
        ({"data": 2, "fsdp": 2, "tensor": 2}, {}),
        ({"data": 2, "fsdp": 2, "tensor": 2}, {"sequence_parallel": True, "zero": 1}),
        ({"data": 2, "tensor": 4}, {"zero": 3}),
        ({"pipe": 2, "data": 2, "tensor": 2}, {}),
        ({"pipe": 2, "data": 2, "fsdp": 2}, {"schedule": "zb-h1"}),
        ({"pipe": 4, "tensor": 2}, {"schedule": "chimera"}),
        ({"pipe": 2, "fsdp": 2, "tensor": 2}, {"sequence_parallel": True}),
        ({"data": 2, "seq": 4}, {}),
        ({"fsdp": 2, "seq": 2, "tensor": 2}, {"kind": "ring_self"}),
        ({"data": 2, "seq": 2, "tensor": 2}, {"kind": "ulysses", "zero": 2}),
        ({"pipe": 2, "seq": 2, "data": 2}, {}),
        ({"pipe": 2, "seq": 2, "tensor": 2}, {}),
    ],
    "experts": [
        ({"data": 2, "expert": 4}, {}),
        ({"data": 2, "expert": 2, "tensor": 2}, {"zero": 2}),
        ({"fsdp": 2, "expert": 2, "tensor": 2}, {}),
        ({"data": 2, "fsdp": 2, "expert": 2}, {}),
        ({"expert": 2, "seq": 2, "fsdp": 2}, {}),
        ({"data": 2, "expert": 2, "seq": 2}, {"kind": "ulysses", "zero": 2}),
        ({"expert": 2, "seq": 2, "tensor": 2}, {}),
        ({"pipe": 2, "expert": 2, "data": 2}, {}),
        ({"pipe": 2, "expert": 2, "fsdp": 2}, {"schedule": "gpipe"}),
        ({"pipe": 2, "expert": 2, "tensor": 2}, {"schedule": "zb-h1"}),
        ({"pipe": 2, "expert": 2, "seq": 2}, {}),
    ],
}


def losses(form, sizes, schedule=None, kind=None, **options):
    family, config = FORMS[form]
    pipeline = PipelineOptions(schedule=schedule).resolve(sizes)
    sequence = SequenceOptions(attention=kind).resolve(sizes, pipeline)
    optimization = Optimization(pipeline=pipeline, sequence=sequence, lr=1e-3, warmup=5, **options)
    found = run_steps(family.build("gpt", config, optimization, steps=STEPS, seed=0), sizes, STEPS)
    return [float(figures["loss"]) for figures in found.metrics_per_step]


@functools.cache
def one_device(form, parts):
    """With as many microbatches, since each has its own key, by which tokens choose their second experts."""
    return losses(form, {"expert": 1} if form == "experts" else {"data": 1}, accumulate=parts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "sizes", "options"), [(form, *each) for form, all_ in MESHES.items() for each in all_], ids=str
)
def test_losses_are_those_of_one_device(form, sizes, options):
    wanted = one_device(form, 2 * sizes["pipe"] if "pipe" in sizes else 1)
    np.testing.assert_allclose(losses(form, sizes, **options), wanted, rtol=1e-4)
    assert wanted[-1] < wanted[0] - 0.02
