"""Runs that several tests look at."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import STEPS, train

from sharding.launch.tasks import bert, gpt
from sharding.launch.text import source


@pytest.fixture(scope="session", autouse=True)
def little_is_held_out() -> Iterator[None]:
    """Fewer tokens: looking at all of them takes ten times as long as the few steps of such runs."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (bert, gpt, source):
            patch.setattr(module, "NUM_HELDOUT_TOKENS", 2**12)
        yield


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
