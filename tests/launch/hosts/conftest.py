"""What disturbed runs are held against."""

import pytest
from groups import run_args
from runs import losses

from sharding import launch
from sharding.launch import metrics


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run of one process."""
    out = tmp_path_factory.mktemp("undisturbed")
    launch.main(run_args(out))
    return losses(metrics.read(out / metrics.FILE_NAME))
