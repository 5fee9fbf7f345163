import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding import ShardingError, launch
from sharding.launch.config import mesh_config, model_config, optimizer_config, train_config


def test_defaults():
    command = launch.parse(["train"])
    assert command == train_config.Train()
    recipe = command.applied_to(train_config.Recipe())
    assert recipe == train_config.Recipe()
    mesh_config.check_batch(recipe.batch, mesh_config.parse_mesh(command.mesh))


def test_options_override_the_recipe():
    command = launch.parse("train --batch 8 --lr 0.01 --eval-every 0".split())
    assert isinstance(command, train_config.Train)
    recipe = train_config.Recipe(
        steps=70, batch=64, optimization=optimizer_config.Optimization(lr=0.1, clip=2.0), eval_every=5
    )
    assert command.applied_to(recipe) == train_config.Recipe(
        steps=70, batch=8, optimization=optimizer_config.Optimization(lr=0.01, clip=2.0), eval_every=0
    )


def test_every_option_is_read():
    command = launch.parse(
        "train --model gpt-small --dtype bfloat16 --dropout 0.1 --kernels xla --kv-heads 2 --remat --scan "
        "--mesh fsdp=4 --devices 4 "
        "--steps 7 --batch 8 --lr 0.01 --warmup 3 --weight-decay 0.2 --clip 2 --seed 5 --eval-every 2 "
        "--checkpoint-every 3 --sample 0 --out somewhere --resume".split()
    )
    assert command == train_config.Train(
        model=model_config.ModelOptions(
            name="gpt-small", dtype="bfloat16", dropout=0.1, kernels="xla", kv_heads=2, remat=True, scan=True
        ),
        mesh="fsdp=4",
        devices=4,
        steps=7,
        batch=8,
        optimization=optimizer_config.OptimizationOptions(lr=0.01, warmup=3, weight_decay=0.2, clip=2.0),
        seed=5,
        eval_every=2,
        checkpoint_every=3,
        sample=0,
        out=Path("somewhere"),
        resume=True,
    )


def test_parse_mesh():
    assert mesh_config.parse_mesh("tensor=2, data=4") == {"tensor": 2, "data": 4}
    assert mesh_config.parse_mesh("data=-1,tensor=2") == {"data": -1, "tensor": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not name=size"),
        ("data", "'data' is not name=size"),
        ("data=two", "'data=two' is not name=size"),
        ("data=2;tensor=2", "is not name=size"),
        ("data=0", "the size of 'data' is 0"),
        ("data=2,data=2", "axis 'data' is repeated"),
        ("model=2", "unknown axis 'model'"),
        ("tensors=2", "did you mean 'tensor'"),
        ("data=-1,tensor=-1", "more than one size is -1"),
    ],
)
def test_an_invalid_mesh(text: str, message: str):
    with pytest.raises(ShardingError, match=message):
        mesh_config.parse_mesh(text)


PARTS = st.tuples(
    st.sampled_from([*mesh_config.MESH_AXES, "model", ""]),
    st.sampled_from(["=", " = ", "", "=="]),
    st.one_of(st.integers(-3, 9).map(str), st.text("-+1\u00b2\u0663. ", max_size=3)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(PARTS.map("".join), max_size=4).map(",".join))
def test_any_text_is_a_mesh_or_an_error_that_says_why_not(text: str):
    try:
        found = mesh_config.parse_mesh(text)
    except ShardingError as error:
        assert error.found and text in error.asked
        return
    pairs = [(name.strip(), int(size)) for name, size in (part.split("=") for part in text.split(","))]
    assert list(found.items()) == pairs  # in order, none lost
    assert all(name in mesh_config.MESH_AXES and (size > 0 or size == -1) for name, size in pairs)
    assert list(found.values()).count(-1) <= 1


def test_all_mistakes_of_a_mesh_at_once():
    with pytest.raises(ShardingError, match="'model'") as caught:
        mesh_config.parse_mesh("model=2,data=x")
    assert "'data=x'" in str(caught.value)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--batch", "6", "--mesh", "data=2,fsdp=2"], "--batch 8"),
        (["--batch", "0"], "required: at least 1"),
        (["--steps", "0"], "required: at least 1"),
        (["--clip", "0"], "a norm greater than 0"),
        (["--lr", "-1"], "required: at least 0"),
        (["--dtype", "float8"], "float8"),
        (["--stepz", "3"], "--steps"),
    ],
)
def test_invalid_options(args: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        launch.main(["train", *args])
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown


def test_the_batch_error_shows_the_arithmetic():
    with pytest.raises(ShardingError, match=r"data=2 \* fsdp=4 = 8 parts; 20 / 8 = 2.5"):
        mesh_config.check_batch(20, {"data": 2, "fsdp": 4, "tensor": 2})


def test_json():
    values = train_config.as_json(train_config.Train(out=Path("x")))
    assert json.loads(json.dumps(values)) == values
    assert values["model"]["name"] == "gpt-tiny"
