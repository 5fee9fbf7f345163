"""Export and import of parameters as safetensors files, for exchange with other tools.

Tensors are named by their paths. The file is independent of the mesh: each device reads only its shard.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..errors import ShardingError
from .array_names import Tree, is_key, named_leaves
from .directory import Directory, existing_step, first_line
from .restore import restore_named

File = str | os.PathLike[str]


def write_tensors(tree: Tree, file: File, *, metadata: Mapping[str, str] | None = None) -> list[str]:
    """Writes every array of `tree` to `file` under its path and returns the names; dtypes are kept.

    Every array is gathered on this host. An existing file is replaced once the new one is complete.
    """
    safetensors = _package()
    arrays = named_leaves(tree)
    keys = [name for name, array in arrays.items() if is_key(array)]
    if keys:
        raise ShardingError(
            f"write {os.fspath(file)!r}",
            found=[f"{name}: random keys" for name in keys],
            required="numeric tensors",
        )
    # In C order: the package writes the buffer as it is.
    host = {name: np.ascontiguousarray(jax.device_get(array)).reshape(array.shape) for name, array in arrays.items()}
    path = Path(file)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        safetensors.numpy.save_file(host, part, metadata=dict(metadata or {}))
        part.replace(path)
    except Exception as error:
        part.unlink(missing_ok=True) if path.parent.is_dir() else None
        raise ShardingError(
            f"write {os.fspath(file)!r}",
            found=first_line(error),
            required="a writable file and enough space",
        ) from None
    return list(host)


def export_tensors(directory: Directory, file: File, *, step: int | None = None, prefix: str = "params/") -> list[str]:
    """Writes the arrays of a checkpoint under `prefix` to `file`, with the prefix removed, and returns the names."""
    step = existing_step(directory, step)
    arrays = restore_named(directory, step, prefix=prefix)
    tree = {name.removeprefix(prefix): array for name, array in arrays.items()}
    return write_tensors(tree, file, metadata={"step": str(step), "format": "sharding"})


def read_tensors(file: File, like: Tree | None = None) -> Tree:
    """Reads a safetensors file into the structure of `like`; without it, into a dict of unsharded arrays by name.

    The leaves of `like` are arrays, or ShapeDtypeStructs with a sharding on any mesh. Each device reads only its shard.

    Raises:
        ShardingError: not a safetensors file; or names, shapes or dtypes differ, with every difference listed.
    """
    tensors = _mapped(file)
    if like is None:
        return {name: jax.numpy.asarray(np.array(tensor)) for name, tensor in tensors.items()}
    targets = named_leaves(like)
    _check_same(file, tensors, targets)
    arrays = [
        jax.make_array_from_callback(leaf.shape, leaf.sharding, _reader(tensors[name]))
        for name, leaf in targets.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(like), arrays)


_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
"""The format's dtypes by JAX name."""


def _mapped(file: File) -> dict[str, np.ndarray]:
    """Name -> array that is read from the file where it is used.

    The package checks the file, but reads no type that NumPy itself lacks, such as float8.
    """
    safetensors = _package()
    try:
        with safetensors.safe_open(os.fspath(file), framework="numpy"):
            pass
    except Exception as error:
        raise ShardingError(
            f"read {os.fspath(file)!r}", found=first_line(error), required="a complete safetensors file"
        ) from None
    data = np.memmap(file, np.uint8, mode="r")
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:start].tobytes())
    header.pop("__metadata__", None)
    unknown = [f"{name}: {one['dtype']}" for name, one in header.items() if one["dtype"] not in _DTYPES]
    if unknown:
        raise ShardingError(f"read {os.fspath(file)!r}", found=unknown, required=f"tensors of {', '.join(_DTYPES)}")
    found = {}
    for name, one in header.items():
        first, last = (start + offset for offset in one["data_offsets"])
        found[name] = data[first:last].view(jax.numpy.dtype(_DTYPES[one["dtype"]])).reshape(one["shape"])
    return found


def _reader(tensor: np.ndarray) -> Callable[[Any], np.ndarray]:
    """A function from an index to a copy of that slice of a tensor."""
    return lambda index: np.array(tensor[index])


def _check_same(file: File, found: Mapping[str, np.ndarray], targets: Mapping[str, Any]) -> None:
    """Raises one error for all tensors that are missing, unexpected, or of another shape or dtype."""
    differences = [f"{name}: not in the file" for name in targets if name not in found]
    differences += [f"{name}: only in the file" for name in found if name not in targets]
    for name, leaf in targets.items():
        have = found.get(name, leaf)
        if (have.shape, have.dtype) != (tuple(leaf.shape), leaf.dtype):
            asked = f"{leaf.dtype}{list(leaf.shape)}"
            differences.append(f"{name}: in the file {have.dtype}{list(have.shape)}, requested {asked}")
    if differences:
        raise ShardingError(
            f"read {os.fspath(file)!r}",
            found=differences,
            required="tensors with the requested names, shapes and dtypes",
        )


def _package() -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError:
        raise ShardingError(
            "read or write a safetensors file",
            found="the package safetensors is not installed",
            required="the extra `data`",
            fix="pip install 'sharding-jax[data]'",
        ) from None
    return safetensors
