"""The reference for runs with injected failures."""

import pytest
from support.process_groups import uninterrupted_losses


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run of one process."""
    return uninterrupted_losses(tmp_path_factory.mktemp("uninterrupted"))
