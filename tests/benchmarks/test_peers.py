"""Peer libraries reproduce our losses with the same model, weights and tokens."""

import dataclasses
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

from benchmarks import gpt2, gpt_workload
from benchmarks.peers import environment
from sharding.models import gpt

ROOT = Path(__file__).parent.parent.parent
PEERS = Path(__file__).parent / "peers"
SMALL = gpt.Config(vocab=96, context=32, layers=4, features=64, heads=4, kv_heads=4, mlp_features=128, tied=False)
# Ten times the actual difference. The exact GELU, another norm epsilon or another Adam beta all differ by 2e-5.
TOLERANCE = 5e-6
STEPS = 4  # the fourth loss is after three updates
Lines = dict[str, dict[str, Any]]
"""Schedule or axis -> the script's output for it."""
SCHEDULES = ["single", "gpipe", "1f1b", "interleaved", "zbv"]
AXES = ["data", "fsdp", "tensor"]


def test_the_file_holds_every_parameter_and_the_tokens(tmp_path: Path):
    gpt_workload.export(tmp_path / "gpt.npz", SMALL, steps=2, batch=4)
    with np.load(tmp_path / "gpt.npz") as arrays:
        found = dict(arrays)
    tokens = found.pop("tokens")
    assert tokens.shape == (2, 4, 33) and tokens.dtype == np.int32 and tokens.max() < SMALL.vocab
    assert not np.array_equal(tokens[0], tokens[1])
    model = gpt_workload.model(SMALL)
    assert sum(value.size for value in found.values()) == gpt.num_params(model)
    assert {value.dtype for value in found.values()} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(found["blocks/3/attention/qkv"], model.blocks[3].attention.qkv[...])
    np.testing.assert_array_equal(found["head/table"], model.head.table[...])


def test_the_model_has_the_documented_size():
    assert gpt.num_params(nnx.eval_shape(gpt_workload.model)) == 6_820_096


def test_a_missing_python_is_reported_and_creates_no_environment(tmp_path: Path):
    messages: list[str] = []
    for python_of in (environment.torch_python, environment.auto_sharding_python):
        assert python_of(tmp_path, pythons=["no-such-python"], say=messages.append) is None
    needs = "needs no-such-python, which is not installed on this machine."
    assert messages == [f"PyTorch {needs}", f"jax==0.10.0 {needs}"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "need, cuda",
    [
        ('nvidia-cublas==13.0.0.19; platform_system == "Linux"', True),
        ("cuda-bindings<14,>=13.0.3", True),
        ("triton==3.5.0", True),
        ("networkx>=2.5.1", False),
        ('nvidia-ml-py; extra == "monitor"', False),
    ],
)
def test_cuda_builds_are_recognized_by_their_requirements(need: str, cuda: bool):
    assert bool(environment.CUDA.match(need)) == cuda


@pytest.fixture(scope="module")
def torch_python() -> Path:
    messages: list[str] = []
    python = environment.torch_python(ROOT / ".venv-peers", say=messages.append)
    if python is None:
        pytest.skip(messages[0])
    return python


def measured(python: Path, folder: Path, script: str, *options: str) -> Lines:
    gpt_workload.export(folder / "gpt.npz", SMALL, steps=STEPS)
    command = [python, PEERS / script, folder / "gpt.npz", "--processes", "2", "--threads", "1", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def torch_lines(torch_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Lines:
    folder = tmp_path_factory.mktemp("peers")
    return {
        **measured(torch_python, folder, "torch_pipeline.py", "--names", *SCHEDULES),
        **measured(torch_python, folder, "torch_axes.py", "--names", *AXES),
    }


@pytest.fixture(scope="module")
def losses() -> list[float]:
    return gpt_workload.losses(SMALL, steps=STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES + AXES)
def test_pytorch_gives_our_losses(name: str, torch_lines: Lines, losses: list[float]):
    found = torch_lines[name]
    np.testing.assert_allclose(found["losses"], losses, rtol=TOLERANCE)
    assert losses[-1] < losses[0]
    assert found["processes"] == (1 if name == "single" else 2) and len(found["step_seconds"]) == STEPS


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="compiling PyTorch's blocks needs a C++ compiler")
def test_compiled_blocks_give_our_losses(torch_python: Path, tmp_path: Path, losses: list[float]):
    lines = measured(torch_python, tmp_path, "torch_pipeline.py", "--names", "1f1b", "zbv", "--compile")
    assert {name: line["compiled"] for name, line in lines.items()} == {"1f1b": True, "zbv": False}
    for line in lines.values():
        np.testing.assert_allclose(line["losses"], losses, rtol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="compiling PyTorch's model needs a C++ compiler")
@pytest.mark.parametrize("is_rotary", [True, False], ids=["rotary", "learned positions, tied"])
def test_training_in_bfloat16_is_close_to_ours(torch_python: Path, tmp_path: Path, is_rotary: bool):
    more = {} if is_rotary else {"positions": "learned", "tied": True}
    config = dataclasses.replace(SMALL, **more)
    gpt_workload.export(tmp_path / "gpt.npz", config, steps=STEPS)
    command = [torch_python, PEERS / "torch_accelerator.py", tmp_path / "gpt.npz", "--device", "cpu", "--warmup", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    np.testing.assert_allclose(found["losses"], gpt_workload.losses(config, steps=STEPS), rtol=gpt2.TOLERANCE)
    assert len(found["seconds"]) == 1
