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


def test_mistakes(capsys):
    with pytest.raises(SystemExit, match="2"):
        launch.main(["explain", "--model", "gpt-tinny"])
    assert "--model gpt-tiny" in capsys.readouterr().err
