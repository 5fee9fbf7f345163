"""What disturbed runs are held against."""

import pytest
from groups import losses_alone


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run of one process."""
    return losses_alone(tmp_path_factory.mktemp("undisturbed"))
