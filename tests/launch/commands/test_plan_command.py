"""`sharding plan`, and `sharding train --plan`: the numbers of the plan's mesh are those of one device."""

import json

import jax
import pytest

import sharding
from sharding import launch, planner
from sharding.errors import ShardingError
from sharding.launch import jitted_workload, memory_budget, workloads
from sharding.launch.commands import plan as plan_command
from sharding.launch.config.byte_size import parse_bytes
from sharding.launch.config.optimizer_config import Optimization

TINY = ("--model", "gpt-tiny", "--scan", "--devices", "cpu:8", "--mesh", "2x4", "--seconds", "3")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    launch.main(["plan", *TINY, "--out", str(path)])
    return path


def test_a_batch_is_placed_where_the_planned_step_reads_it(saved):
    plan, config = planner.Plan.load(saved), launch.parse(["plan", *TINY])
    family, model = workloads.find(config.model)
    workload = family.build("gpt-tiny", memory_budget.as_planned(model, plan), Optimization(), steps=4, seed=0)
    with plan.mesh() as mesh:
        over = jitted_workload.jit_workload(workload, mesh, batch_size=config.batch, plan=plan)
        batch = over.placed(workload.batch_shapes(config.batch))
    read = jax.sharding.NamedSharding(mesh, over.completion.in_shardings[1])
    assert batch.sharding.is_equivalent_to(read, batch.ndim) and not read.is_fully_replicated


def test_a_plan_is_shown_and_written_out_as_code_and_a_report(capsys, tmp_path):
    launch.main(["plan", *TINY, "--code", "--report", str(tmp_path / "plan.html")])
    shown = capsys.readouterr().out
    assert "the best plan for each mesh tried" in (tmp_path / "plan.html").read_text()
    assert "plan of train_step on cpu:1x8, mesh x=2, y=4" in shown
    assert "in_shardings = {" in shown


@pytest.mark.slow
def test_algorithms_are_compared_and_the_curve_is_drawn(capsys, tmp_path):
    launch.main(["plan", *TINY, "--seconds", "60", "--compare", "--frontier", str(tmp_path / "curve.svg")])
    shown = capsys.readouterr().out
    assert all(name in shown for name in planner.ALGORITHMS)
    assert (tmp_path / "curve.svg").read_text().startswith("<svg")


@pytest.mark.slow
def test_stages_are_planned_and_trained(tmp_path):
    """Of all versions of the step those in two stages, as if the mesh had been asked for."""
    config = launch.parse(["plan", "--model", "gpt-tiny", "--devices", "cpu:4", "--pipeline"])
    staged = [one for one in plan_command.staged_steps(config) if one.stages.count == 2]
    assert {one.stages.schedule for one in staged} == {"1f1b", "interleaved"}
    step, args = plan_command.train_step(config)
    found = sharding.plan(step, *args, devices="cpu:4", mesh={"pipe": 2, "x": 2}, staged=staged)
    assert found.stages in [one.stages for one in staged]
    path = found.save(tmp_path / "plan.json")
    common = ("--steps", "3", "--eval-every", "0", "--sample", "0")
    launch.main(["train", "--plan", str(path), *common, "--out", str(tmp_path / "planned")])
    launch.main(["train", "--mesh", "data=1", *common, "--out", str(tmp_path / "one")])
    assert losses(tmp_path / "planned") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)


def test_stages_are_planned_beside_the_step(capsys):
    launch.main(["plan", "--model", "gpt-tiny", "--scan", "--devices", "cpu:2", "--pipeline", "--seconds", "6"])
    shown = capsys.readouterr()
    assert "2 stages over pipe by 1f1b" in shown.err


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines() if "loss" in line]


@pytest.fixture(scope="module")
def with_less_memory(saved, tmp_path_factory):
    """A plan of 0.7 times the peak."""
    path, peak = tmp_path_factory.mktemp("plan") / "plan.json", planner.Plan.load(saved).costs.peak_bytes
    launch.main(["plan", *TINY, "--memory", str(int(0.7 * peak)), "--seconds", "20", "--out", str(path)])
    return path


@pytest.mark.slow
def test_layers_recompute_where_memory_is_short(saved, with_less_memory):
    free, found = planner.Plan.load(saved), planner.Plan.load(with_less_memory)
    assert free.keeps_everything
    assert not found.keeps_everything
    assert found.costs.peak_bytes <= 0.7 * free.costs.peak_bytes


@pytest.mark.parametrize("plan", ["saved", pytest.param("with_less_memory", marks=pytest.mark.slow)])
def test_training_by_a_plan_has_the_losses_of_one_device(plan, request, tmp_path):
    path = request.getfixturevalue(plan)
    common = ("--scan", "--steps", "3", "--eval-every", "0", "--sample", "8")
    launch.main(["train", "--plan", str(path), *common, "--out", str(tmp_path / "planned")])
    launch.main(["train", "--mesh", "data=1", *common, "--out", str(tmp_path / "one")])
    assert losses(tmp_path / "planned") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    assert "the best plan for each mesh tried" in (tmp_path / "planned" / "plan.html").read_text()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--mesh", "2x2"], "8 devices"),
        (["--mesh", "data=8"], "--mesh 64x8"),
        (["--pipeline"], "leave --mesh out"),
        (["--memory", "16 apples"], "bytes per device, above 0"),
        (["--algorithm", "simplex"], "no such algorithm"),
        (["--out", "plan.txt"], "plan.txt.json"),
        pytest.param(["--memory", "1MB"], "at the least", marks=pytest.mark.slow),
    ],
)
def test_bad_options(options, match, capsys):
    with pytest.raises(SystemExit, match="2"):
        launch.main(["plan", *TINY, *options])
    assert match in capsys.readouterr().err


def test_a_plan_and_a_memory_limit_are_refused_together(saved, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        launch.main(["train", "--plan", str(saved), "--memory", "1GB", "--out", str(tmp_path / "run")])
    assert "sharding plan --memory 1GB" in capsys.readouterr().err


def test_a_missing_plan_is_an_error(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        launch.main(["train", "--plan", str(tmp_path / "none.json"), "--out", str(tmp_path / "run")])
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"), [("16GB", 16e9), ("1.5 GiB", 1.5 * 2**30), ("800mb", 8e8), ("7", 7), ("2KiB", 2048)]
)
def test_byte_sizes(text, size):
    assert parse_bytes("--memory", text) == size


@pytest.mark.parametrize("text", ["", "0", "-1GB", "GB", "1.2.3GB", "5XB", "nan"])
def test_bad_byte_sizes(text):
    with pytest.raises(ShardingError, match="--memory"):
        parse_bytes("--memory", text)
