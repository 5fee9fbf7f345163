"""Packages of the optional extra `data`."""

import importlib.metadata

from sharding.errors import ShardingError


def version(package: str, asked: str, *alternatives: str) -> str:
    """The version of a package of the extra `data`; raises an error with the install command if it is missing.

    Args:
        package: its name.
        asked: the request that needs it.
        alternatives: options that don't need it.
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise ShardingError(
            asked,
            found=f"the package {package} is not installed",
            required=f"{package}, part of the extra `data`",
            fix=["pip install 'sharding-jax[data]'", *alternatives],
        ) from None
