"""The benchmark of planning on a tiny GPT: its rows, its table and the README's text."""

import json

import jax

from benchmarks import compared_plans, planning, result_file
from benchmarks.peers import plain_gpt
from sharding import P

TINY = plain_gpt.Sizes(layers=2, features=64, heads=4, hidden=128, vocab=256, length=32, batch=16)
AXES = {"x": 4}


def tiny() -> list[planning.Program]:
    return [
        planning.Program(
            name="tiny GPT",
            devices="v5e:2x2",
            axes=AXES,
            make=lambda: compared_plans.unplanned_step(TINY),
            what_if={"state/params/head": P(None, "x")},
        )
    ]


def test_times_of_a_tiny_step(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(planning, "PROGRAMS", {"gpt": tiny})
    file = tmp_path / "planning.json"
    planning.main(planning.Options(layers=(), seconds=10, json=file))
    found = result_file.load(file)
    (row,) = found.of_kind("time")
    assert row["is_proven"] and row["nodes"] < row["ops"]
    assert row["proven_seconds"] == row["complete_seconds"] + row["problem_seconds"] + row["solve_seconds"]
    assert row["what_if_step_seconds"] > 0
    assert "tiny GPT on 4 devices: proven in" in planning.summary(found)
    assert "| tiny GPT | 4 |" in capsys.readouterr().out


def test_xlas_plan_is_read_from_the_folder_of_those_made_before(tmp_path):
    """What planning takes is the compile that plans, less one that is told the plan."""
    args = jax.tree.leaves(plain_gpt.arguments(TINY))
    times = {"seconds": 3.0, "cpu_seconds": 2.0}
    given = {"specs": [[] for _ in args], "planning": times, "telling": {"seconds": 1.0, "cpu_seconds": 1.0}}
    plan = {**given, "peak_bytes": 1000, "text": "HloModule m\n\nENTRY %main () -> f32[] {\n}\n"}
    (tmp_path / "plans").mkdir()
    name = "-".join(map(str, TINY)) + "-v5e-2x2-x=4-0.json"
    (tmp_path / "plans" / name).write_text(json.dumps(plan))
    found = compared_plans.their_plan(TINY, 0, "v5e:2x2", AXES, tmp_path)
    assert found == plan
    first = next(compared_plans.rows(TINY, 0, devices="v5e:2x2", axes=AXES, peer=tmp_path))
    assert (first["planning_seconds"], first["planning_cpu_seconds"], first["peak_bytes"]) == (2.0, 1.0, 1000)


def test_our_plan_over_xlas():
    text = planning.against(
        result_file.measured(
            "planning",
            planning.Options(),
            [
                {"kind": "plan", "layers": 1, "budget_gb": 16, "planning_cpu_seconds": cpu, "sent_bytes": size}
                | {"peak_bytes": 10, "name": name, "estimated_seconds": cpu}
                for name, cpu, size in (
                    (f"{compared_plans.THEIRS}, as it compiled it", 40.0, 200),
                    (f"{compared_plans.THEIRS}, in_shardings", 40.0, 300),
                    (compared_plans.OURS, 2.0, 100),
                )
            ],
        )
    )
    assert text == [
        "GPT, 1 layer, 16 GB: planned in 0.05 of the time of XLA's auto-sharding, sends 0.50, peak 1.00, "
        "estimated step 0.05"
    ]


def test_the_step_updates_a_state_of_the_same_shapes():
    state, tokens = plain_gpt.arguments(TINY)
    (updated, loss) = jax.eval_shape(plain_gpt.train_step(TINY), state, tokens)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), updated) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert loss.shape == ()
