import json
from pathlib import Path

import pytest

from sharding import ShardingError, launch
from sharding.launch import config


def test_defaults():
    command = launch.parse(["train"])
    assert command == config.Train()
    recipe = command.over(config.Recipe())
    assert recipe == config.Recipe()
    config.check_batch(recipe.batch, config.parse_mesh(command.mesh))


def test_what_the_command_says_goes_before_the_recipe():
    command = launch.parse("train --batch 8 --lr 0.01 --eval-every 0".split())
    assert isinstance(command, config.Train)
    recipe = config.Recipe(steps=70, batch=64, optimization=config.Optimization(lr=0.1, clip=2.0), eval_every=5)
    assert command.over(recipe) == config.Recipe(
        steps=70, batch=8, optimization=config.Optimization(lr=0.01, clip=2.0), eval_every=0
    )


def test_every_option_is_read():
    command = launch.parse(
        "train --model gpt-small --dtype bfloat16 --dropout 0.1 --kv-heads 2 --remat --scan --mesh fsdp=4 --devices 4 "
        "--steps 7 --batch 8 --lr 0.01 --warmup 3 --weight-decay 0.2 --clip 2 --seed 5 --eval-every 2 "
        "--checkpoint-every 3 --sample 0 --out somewhere --resume".split()
    )
    assert command == config.Train(
        model=config.ModelChoice(name="gpt-small", dtype="bfloat16", dropout=0.1, kv_heads=2, remat=True, scan=True),
        mesh="fsdp=4",
        devices=4,
        steps=7,
        batch=8,
        optimization=config.OptimizationChoice(lr=0.01, warmup=3, weight_decay=0.2, clip=2.0),
        seed=5,
        eval_every=2,
        checkpoint_every=3,
        sample=0,
        out=Path("somewhere"),
        resume=True,
    )


def test_parse_mesh():
    assert config.parse_mesh("tensor=2, data=4") == {"tensor": 2, "data": 4}
    assert config.parse_mesh("data=-1,tensor=2") == {"data": -1, "tensor": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not name=size"),
        ("data", "'data' is not name=size"),
        ("data=two", "'data=two' is not name=size"),
        ("data=2;tensor=2", "is not name=size"),
        ("data=0", "the size of 'data' is 0"),
        ("data=2,data=2", "'data' is there twice"),
        ("model=2", "no layout knows the axis 'model'"),
        ("tensors=2", "did you mean 'tensor'"),
        ("data=-1,tensor=-1", "more than one size is -1"),
    ],
)
def test_a_mesh_that_is_none(text: str, message: str):
    with pytest.raises(ShardingError, match=message):
        config.parse_mesh(text)


def test_all_mistakes_of_a_mesh_at_once():
    with pytest.raises(ShardingError, match="'model'") as caught:
        config.parse_mesh("model=2,data=x")
    assert "'data=x'" in str(caught.value)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--batch", "6", "--mesh", "data=2,fsdp=2"], "--batch 8"),
        (["--batch", "0"], "must be at least 1"),
        (["--steps", "0"], "must be at least 1"),
        (["--clip", "0"], "more than 0"),
        (["--lr", "-1"], "must be at least 0"),
        (["--dtype", "float8"], "float8"),
        (["--stepz", "3"], "--steps"),
    ],
)
def test_what_the_command_line_refuses(args: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        launch.main(["train", *args])
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown


def test_the_batch_error_shows_the_arithmetic():
    with pytest.raises(ShardingError, match=r"data=2 \* fsdp=4 = 8 parts; 20 / 8 = 2.5"):
        config.check_batch(20, {"data": 2, "fsdp": 4, "tensor": 2})


def test_json():
    values = config.as_json(config.Train(out=Path("x")))
    assert json.loads(json.dumps(values)) == values
    assert values["model"]["name"] == "gpt-tiny"
