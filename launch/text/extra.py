"""What the extra `data` brings."""

import importlib.metadata

from sharding.errors import ShardingError


def version(package: str, asked: str, *instead: str) -> str:
    """The version of a package of the extra `data`; an error that says how to get it if it is not there.

    Args:
        package: its name.
        asked: what needs it.
        instead: what would do without it.
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise ShardingError(
            asked,
            there=f"the package {package} is not installed",
            must="the extra `data` brings it",
            fix=["pip install 'sharding-jax[data]'", *instead],
        ) from None
