"""A GPT with experts trains the same on every mesh, and its metrics show the expert load."""

import dataclasses
import math

import numpy as np
import pytest
from support.short_runs import check_same, losses, run_two_steps, train

from sharding.launch import main, metrics, workloads
from sharding.launch.config import mesh_config, model_config
from sharding.launch.config.optimizer_config import Optimization
from sharding.launch.config.pipeline_config import PipelineOptions
from sharding.launch.config.sequence_config import SequenceOptions
from sharding.launch.workloads import gpt_moe_text
from sharding.models.gpt_moe import Config

MODEL = Config(vocab=64, context=16, layers=2, features=32, heads=4, kv_heads=4, mlp_features=64, capacity_factor=1.0)


def step(sizes, config=MODEL, kind=None, schedule=None, executor=None, **options):
    pipeline = PipelineOptions(schedule=schedule, executor=executor).resolve(sizes)
    sequence = SequenceOptions(attention=kind).resolve(sizes, pipeline)
    optimization = Optimization(warmup=0, pipeline=pipeline, sequence=sequence, **options)
    return run_two_steps(gpt_moe_text.FAMILY.build("gpt-moe", config, optimization, steps=10, seed=0), sizes)


@pytest.fixture(scope="module")
def one_device():
    return step({"expert": 1})


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"data": 2, "expert": 4}, {}),
        pytest.param({"expert": 8}, {}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "expert": 2, "tensor": 2}, {}, marks=pytest.mark.slow),
        pytest.param({"fsdp": 2, "expert": 2, "tensor": 2}, {}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "expert": 2, "tensor": 2}, {"zero": 3}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_steps_are_those_of_one_device(sizes, options, one_device):
    found = step(sizes, **options)
    check_same(found, one_device)
    experts = found.state.params["blocks"][0]["sparse"]["experts"]
    for leaf in (experts["up"][...], experts["down"][...]):
        parts = math.prod(size for name, size in sizes.items() if name != "data" or options)
        assert leaf.addressable_shards[0].data.size * parts == leaf.size
    number = found.completion.communication().by_kind()["all-to-all"][0]
    assert number == 4  # one sparse layer


def check_figures(found, wanted):
    """Compare metrics, not parameters: Adam's first step amplifies rounding where a gradient is nearly zero."""
    for ours, theirs in zip(found.metrics_per_step, wanted.metrics_per_step, strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [
        ({"expert": 2, "seq": 2}, "ulysses"),
        *(
            pytest.param(sizes, kind, marks=pytest.mark.slow)
            for sizes in (
                {"expert": 2, "seq": 2, "fsdp": 2},
                {"data": 2, "expert": 2, "seq": 2},
                {"expert": 2, "seq": 2, "tensor": 2},
            )
            for kind in ("ring", "ulysses")
        ),
    ],
    ids=str,
)
def test_sequences_over_an_axis(sizes, kind, one_device):
    """The same tokens are dropped, because they keep their order."""
    found = step(sizes, kind=kind)
    check_figures(found, one_device)
    kinds = [(c.kind, c.axes) for c in found.completion.communication()]
    assert kinds.count(("all-to-all", ("expert",))) == 4


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"capacity_factor": None}, {"capacity_factor": 0.8}, {"scan": True}], ids=str)
def test_sequences_of_other_models(changes):
    """Without capacity, with a capacity that the axis doesn't divide, and stacked."""
    config = dataclasses.replace(MODEL, **changes)
    check_figures(step({"expert": 2, "seq": 2}, config, "ring"), step({"expert": 1}, config))


PAIRS = dataclasses.replace(MODEL, layers=4, scan=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "changes", "options"),
    [
        ({"pipe": 2, "expert": 2}, {}, {}),
        ({"pipe": 2, "expert": 1}, {}, {"executor": "mpmd"}),
        ({"pipe": 2, "expert": 2, "data": 2}, {"capacity_factor": None}, {}),
        ({"pipe": 2, "expert": 2, "seq": 2}, {}, {"kind": "ulysses"}),
        ({"pipe": 2, "expert": 2, "fsdp": 2}, {"dropout": 0.1, "remat": True}, {"schedule": "gpipe"}),
        ({"pipe": 2, "expert": 2, "tensor": 2}, {}, {"schedule": "zb-h1"}),
        ({"pipe": 2, "expert": 4}, {"tied": False}, {"schedule": "chimera"}),
    ],
    ids=str,
)
def test_stages_are_those_of_one_device(sizes, changes, options):
    """Compared with gradient accumulation, as each microbatch draws its own second experts; metrics are equal too."""
    config = dataclasses.replace(PAIRS, **changes)
    check_same(step(sizes, config, **options), step({"expert": 1}, config, accumulate=4))


def test_figures(one_device):
    for each in one_device.metrics_per_step:
        assert 1 <= each["peak_load"] <= MODEL.num_experts
        assert 0 < each["dropped_share"] < 1
        assert 0 < each["auxiliary_loss"] < 0.01 * MODEL.num_experts


def test_a_mesh_gets_the_expert_axis():
    family, _ = workloads.find(model_config.ModelOptions(name="gpt-moe-tiny"))
    assert workloads.with_required_axes({"data": 2, "tensor": 2}, family) == {"data": 2, "tensor": 2, "expert": 1}
    assert workloads.with_required_axes({"expert": 4, "data": 2}, family) == {"expert": 4, "data": 2}
    assert mesh_config.batch_parts({"expert": 4, "data": 2, "tensor": 3}) == 8


@pytest.mark.slow
def test_run(tmp_path):
    """The command line: another mesh, gradient accumulation, and sampling."""
    model = ["--model", "gpt-moe-tiny"]
    lines = train(tmp_path / "a", *model, "--sample", "8", mesh="data=2,expert=4")
    assert losses(lines) == pytest.approx(losses(train(tmp_path / "b", *model, mesh="data=1")), rel=1e-4)
    assert all(name in lines[0] for name in ("peak_load", "dropped_share", "auxiliary_loss"))
    parts = train(tmp_path / "c", *model, "--accumulate", "2", mesh="data=2,expert=2")
    assert metrics.series(parts, "peak_load")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["expert=2,seq=2,fsdp=2", "data=2,expert=2,seq=2", "expert=2,seq=2,tensor=2"])
def test_a_run_of_sequences_over_an_axis(tmp_path, mesh):
    args = ["--model", "gpt-moe-tiny", "--steps", "20"]
    found = train(tmp_path / "split", *args, "--sample", "4", mesh=mesh)
    wanted = train(tmp_path / "whole", *args, mesh="expert=1")
    assert len(losses(found)) == 20
    for name in ("loss", "heldout_bits_per_byte", "auxiliary_loss", "dropped_share"):
        ours, theirs = metrics.series(found, name), metrics.series(wanted, name)
        assert theirs
        np.testing.assert_allclose(ours, theirs, rtol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--mesh pipe=2 --schedule terapipe", "whose layers need full sequences"),
        ("--mesh pipe=4,expert=2", "2 blocks, 4 stages"),
        ("--mesh pipe=2,seq=2,expert=2 --attention ring", "--attention ulysses"),
    ],
)
def test_invalid_pipelines(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["explain", "--model", "gpt-moe-tiny", *arguments.split()])
    assert message in capsys.readouterr().err


def test_experts_that_do_not_divide(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["explain", "--model", "gpt-moe-tiny", "--mesh", "expert=3,data=2"])
    assert "8 experts" in capsys.readouterr().err
