"""Runs shared by several tests."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.short_runs import STEPS, train

from sharding.launch.text import text_batches
from sharding.launch.workloads import bert_text, gpt_text


@pytest.fixture(scope="session", autouse=True)
def few_heldout_tokens() -> Iterator[None]:
    """Fewer held-out tokens: evaluating all takes ten times as long as the few steps of these runs."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (bert_text, gpt_text, text_batches):
            patch.setattr(module, "NUM_HELDOUT_TOKENS", 2**12)
        yield


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run."""
    out = tmp_path_factory.mktemp("whole")
    train(out)
    return out


@pytest.fixture
def killed_run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of the run as if killed after its checkpoint of step 3."""
    out = tmp_path / "half"
    shutil.copytree(finished_run, out)
    shutil.rmtree(out / "checkpoints" / str(STEPS))
    return out
