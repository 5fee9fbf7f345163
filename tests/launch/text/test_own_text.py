"""Runs on a user's own text, from the command line."""

from pathlib import Path

import numpy as np
import pytest

from sharding import checkpoint, launch
from sharding.launch import metrics

SMALL = "--steps 2 --batch 4 --eval-every 0 --checkpoint-every 0 --mesh data=2 --scan --sample 0".split()
WORDS = "the mesh splits every array along an axis that somebody named before".split()


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("prose") / "text.txt"
    path.write_text("\n".join(" ".join(rng.choice(WORDS, 12)) for _ in range(1500)))
    return path


@pytest.fixture(scope="module")
def run(prose: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    train(out, "--data", str(prose), "--vocab", "300")
    return out


def train(out: Path, *args: str) -> None:
    launch.main(["train", *SMALL, "--out", str(out), "--cache", str(out.parent / "cache"), *args])


def test_a_run_on_a_text(run: Path, capsys: pytest.CaptureFixture[str]):
    lines = metrics.read(run / metrics.FILE_NAME)
    ((_, bits),) = metrics.series(lines, "heldout_bits_per_byte")
    # After two steps the model is near uniform: about log2(384) bits per token of some four bytes.
    assert 1 < bits < 4
    settings = checkpoint.extra(run / "checkpoints")
    assert settings["model_config"]["vocab"] == 384
    assert len(settings["text_sha256"]) == 64
    assert "text sha256" in (run / "report.html").read_text()


def refused(capsys: pytest.CaptureFixture[str], out: Path, *args: str) -> str:
    with pytest.raises(SystemExit, match="2"):
        train(out, *args)
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    return shown


def test_resumed_on_another_text(run: Path, prose: Path, tmp_path: Path, capsys):
    other = tmp_path / "other.txt"
    other.write_text(prose.read_text() + "more\n")
    shown = refused(capsys, run, "--data", str(other), "--vocab", "300", "--resume")
    assert "text_sha256 was" in shown
    shown = refused(capsys, run, "--data", str(prose), "--tokenizer", "bytes", "--resume")
    assert "text.tokenizer was None, is now bytes" in shown
    # The same text in another file.
    moved = tmp_path / "moved.txt"
    moved.write_text(prose.read_text())
    train(run, "--data", str(moved), "--vocab", "300", "--resume")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--data", "none.txt"], "none.txt: not found"),
        (["--vocab", "256"], "required: at least 257"),
        (["--vocab", "300", "--tokenizer", "bytes"], "leave --vocab out"),
    ],
    ids=lambda value: str(value),
)
def test_invalid_options(args: list[str], message: str, tmp_path: Path, capsys):
    assert message in refused(capsys, tmp_path, *args)


def test_too_little_text(tmp_path: Path, capsys):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"number {number}\n")
    shown = refused(
        capsys, tmp_path, "--data", str(tmp_path / "1.txt"), str(tmp_path / "2.txt"), "--tokenizer", "bytes"
    )
    assert "128 + 1 tokens" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    "args", [["--tokenizer", "bpe", "--vocab", "512"], ["--tokenizer", "bytes"]], ids=lambda a: a[1]
)
def test_the_standard_library_by_another_tokenizer(args: list[str], tmp_path: Path):
    train(tmp_path / "out", *args, "--sample", "4", "--lr", "1e-4")  # small: only two steps
    ((_, bits),) = metrics.series(metrics.read(tmp_path / "out" / metrics.FILE_NAME), "heldout_bits_per_byte")
    assert 3 < bits < 9
