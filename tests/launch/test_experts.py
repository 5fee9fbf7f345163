"""A GPT with experts trains the same on every mesh, and the metrics say how its experts are used."""

import math

import pytest
from runs import check_same, losses, train, two_steps

from sharding.launch import config, main, metrics, tasks
from sharding.launch.config import Optimization
from sharding.launch.tasks import gpt_moe
from sharding.models.gpt_moe import Config

MODEL = Config(vocab=64, context=16, layers=2, features=32, heads=4, kv_heads=4, mlp_features=64, capacity_factor=1.0)


def step(sizes, **options):
    optimization = Optimization(warmup=0, **options)
    return two_steps(gpt_moe.FAMILY.build("gpt-moe", MODEL, optimization, steps=10, seed=0), sizes)


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


def test_figures(one_device):
    for each in one_device.figures:
        assert 1 <= each["peak_load"] <= MODEL.num_experts
        assert 0 < each["dropped_share"] < 1
        assert 0 < each["auxiliary_loss"] < 0.01 * MODEL.num_experts


def test_a_mesh_gets_its_axis():
    family, _ = tasks.find(config.ModelChoice(name="gpt-moe-tiny"))
    assert tasks.with_own_axes({"data": 2, "tensor": 2}, family) == {"data": 2, "tensor": 2, "expert": 1}
    assert tasks.with_own_axes({"expert": 4, "data": 2}, family) == {"expert": 4, "data": 2}
    assert config.batch_parts({"expert": 4, "data": 2, "tensor": 3}) == 8


@pytest.mark.slow
def test_run(tmp_path):
    """The command line: another mesh, parts of a batch and text of its own."""
    model = ["--model", "gpt-moe-tiny"]
    lines = train(tmp_path / "a", *model, "--sample", "8", mesh="data=2,expert=4")
    assert losses(lines) == pytest.approx(losses(train(tmp_path / "b", *model, mesh="data=1")), rel=1e-4)
    assert all(name in lines[0] for name in ("peak_load", "dropped_share", "auxiliary_loss"))
    parts = train(tmp_path / "c", *model, "--accumulate", "2", mesh="data=2,expert=2")
    assert metrics.series(parts, "peak_load")


def test_no_stages(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--model", "gpt-moe-tiny", "--mesh", "pipe=2", "--steps", "1"])
    assert "a model whose layers can be stages" in capsys.readouterr().err


def test_experts_that_do_not_divide(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["explain", "--model", "gpt-moe-tiny", "--mesh", "expert=3,data=2"])
    assert "8 experts" in capsys.readouterr().err
