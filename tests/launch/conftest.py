"""Runs that several tests look at."""

import shutil
from pathlib import Path

import pytest
from runs import STEPS, train


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole")
    train(out)
    return out


@pytest.fixture
def half_run(whole_run: Path, tmp_path: Path) -> Path:
    """The run as if it had been killed after its checkpoint of step 3."""
    out = tmp_path / "half"
    shutil.copytree(whole_run, out)
    shutil.rmtree(out / "checkpoints" / str(STEPS))
    return out
