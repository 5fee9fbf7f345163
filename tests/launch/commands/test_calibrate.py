import pytest

from sharding import hardware, launch
from sharding.launch.config.calibrate_config import Calibrate


def test_every_option_is_read():
    command = launch.parse(
        "calibrate --mesh data=2,tensor=4 --devices 8 --like h100 --quick --out there/h.json".split()
    )
    assert isinstance(command, Calibrate)
    assert (command.mesh, command.devices, command.like, str(command.out)) == (
        "data=2,tensor=4",
        8,
        "h100",
        "there/h.json",
    )


def test_a_table_is_written(tmp_path, capsys):
    out = tmp_path / "machine.json"
    launch.main(["calibrate", "--mesh", "data=8", "--quick", "--out", str(out)])
    shown = capsys.readouterr().out
    assert "rates per device with all devices busy" in shown
    assert "all-reduce" in shown
    assert {one.num_devices for one in hardware.load(out).collectives} == {8}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--out", "machine.txt"], "--out machine.txt.json"),
        (["--mesh", "model=2"], "unknown axis 'model'"),
        (["--mesh", "data=64"], "the mesh needs 64"),
        (["--like", "h10"], '"h100"'),
    ],
)
def test_mistakes(capsys, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        launch.main(["calibrate", *args])
    assert message in capsys.readouterr().err
