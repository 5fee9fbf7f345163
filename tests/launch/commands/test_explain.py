import importlib.util

import pytest

from sharding import launch


def explain(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    launch.main(["explain", *args])
    return capsys.readouterr().out


def test_the_completion_is_shown(capsys):
    shown = explain(capsys, "--mesh", "data=2,tensor=4")
    assert "embed/table" in shown
    assert "tensor" in shown


def test_why(capsys):
    shown = explain(capsys, "--mesh", "data=2,tensor=4", "--why", "state/params/embed/table")
    assert "tensor" in shown
    assert "embed/table" in shown


def test_described_devices(capsys):
    shown = explain(capsys, "--mesh", "data=-1,tensor=4", "--devices", "v5p:4x4x4")
    assert "tensor" in shown


def test_the_ledger_and_the_memory(capsys):
    shown = explain(capsys, "--mesh", "data=2,tensor=4", "--communication", "--memory")
    assert "all-reduce" in shown and "transformer_layers.py" in shown
    assert "peak" in shown


@pytest.mark.parametrize("model", [["--model", "dlrm-tiny"], pytest.param([], marks=pytest.mark.slow)], ids=str)
def test_the_annotations_that_would_save_most(model, capsys):
    shown = explain(capsys, *model, "--mesh", "fsdp=2,tensor=2", "--suggest")
    assert shown.startswith("annotate ") and "peak memory" in shown


def test_a_page(capsys, tmp_path):
    path = tmp_path / "page.html"
    shown = explain(capsys, "--mesh", "data=2,tensor=4", "--devices", "v5p:2x2x2", "--report", str(path))
    assert shown == f"written to {path}\n"
    assert '"devices":"v5p:2x2x2"' in path.read_text()


def test_a_lock_file(capsys, tmp_path):
    path = str(tmp_path / "plan.lock.json")
    assert "written to" in explain(capsys, "--mesh", "data=2,tensor=4", "--lock", path)
    assert f"matches {path}" in explain(capsys, "--mesh", "data=2,tensor=4", "--check", path)
    with pytest.raises(SystemExit, match="2"):
        launch.main(["explain", "--mesh", "data=4,tensor=2", "--check", path])
    assert "mesh: data=2, tensor=4 -> data=4, tensor=2" in capsys.readouterr().err


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit, match="2"):
        launch.main(["explain", *args])
    return capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed")
def test_a_compiler_that_is_not_installed(capsys):
    shown = refused(capsys, "--mesh", "data=-1,tensor=8", "--aot", "v5p:8x8x8")
    assert "pip install 'sharding-jax[tpu]'" in shown
    shown = refused(capsys, "--devices", "h100:64x8", "--aot", "v5p:8x8x8")
    assert "--devices h100:64x8 --aot v5p:8x8x8" in shown


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_compiled_for_devices_that_are_not_there(capsys):
    shown = explain(capsys, "--mesh", "data=-1,tensor=4", "--aot", "v5p:2x2x2")
    assert "predicted" in shown and "all-reduce" in shown and "peak" in shown and "fits v5p" in shown


def test_mistakes(capsys):
    with pytest.raises(SystemExit, match="2"):
        launch.main(["explain", "--model", "gpt-tinny"])
    assert "--model gpt-tiny" in capsys.readouterr().err
