"""Parameters as a safetensors file, the form in which other tools read and write them.

Tensors have the names of their paths. The file knows no mesh: each device reads the part that it holds.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..errors import ShardingError
from .folder import Directory, existing_step, first_line
from .names import Tree, is_key, named_leaves
from .restore import restore_named

File = str | os.PathLike[str]


def write_tensors(tree: Tree, file: File, *, metadata: Mapping[str, str] | None = None) -> list[str]:
    """The names in `file`, once it holds every array of `tree` under the name of its path; dtypes stay.

    The arrays come to this host whole. A file that is there is replaced once the new one is complete.
    """
    safetensors = _package()
    arrays = named_leaves(tree)
    keys = [name for name, array in arrays.items() if is_key(array)]
    if keys:
        raise ShardingError(
            f"write {os.fspath(file)!r}", there=[f"{name}: random keys" for name in keys], must="tensors are numbers"
        )
    # In C order: the package writes the memory as it lies.
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
            there=first_line(error),
            must="the file must be one to write, with room for it",
        ) from None
    return list(host)


def export_tensors(directory: Directory, file: File, *, step: int | None = None, prefix: str = "params/") -> list[str]:
    """The names in `file`, once it holds the arrays of a checkpoint whose names begin with `prefix`, cut off there."""
    step = existing_step(directory, step)
    arrays = restore_named(directory, step, prefix=prefix)
    tree = {name.removeprefix(prefix): array for name, array in arrays.items()}
    return write_tensors(tree, file, metadata={"step": str(step), "format": "sharding"})


def read_tensors(file: File, like: Tree | None = None) -> Tree:
    """The tensors of a safetensors file in the structure of `like`; without it a dict of whole arrays by name.

    The leaves of `like` are arrays, or ShapeDtypeStructs with a sharding on any mesh. Each device reads its part alone.

    Raises:
        ShardingError: no file of this kind; or names, shapes or dtypes differ, every difference listed.
    """
    safetensors = _package()
    try:
        opened = safetensors.safe_open(os.fspath(file), framework="numpy")
    except Exception as error:
        raise ShardingError(
            f"read {os.fspath(file)!r}", there=first_line(error), must="the file must be a whole safetensors file"
        ) from None
    with opened as tensors:
        there = {name: _whole_shape(tensors.get_slice(name)) for name in tensors.keys()}
        if like is None:
            return {name: jax.numpy.asarray(_reader(tensors, name)(())) for name in there}
        wanted = named_leaves(like)
        _check_same(file, there, wanted)
        arrays = [
            jax.make_array_from_callback(leaf.shape, leaf.sharding, _reader(tensors, name))
            for name, leaf in wanted.items()
        ]
    return jax.tree.unflatten(jax.tree.structure(like), arrays)


_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64",
}  # fmt: skip
"""JAX's names of the format's dtypes."""

ShapeAndDtype = tuple[tuple[int, ...], str]


def _whole_shape(tensor: Any) -> ShapeAndDtype:
    kind = str(tensor.get_dtype())
    return tuple(tensor.get_shape()), _DTYPES.get(kind, kind)


def _reader(tensors: Any, name: str) -> Callable[[Any], np.ndarray]:
    """index -> that part of a tensor."""

    def read(index: Any) -> np.ndarray:
        # A scalar has no part.
        return np.asarray(tensors.get_slice(name)[index] if index else tensors.get_tensor(name))

    return read


def _check_same(file: File, there: Mapping[str, ShapeAndDtype], wanted: Mapping[str, Any]) -> None:
    """Raise an error that lists every tensor that is missing, left over, or of another shape or dtype."""
    differences = [f"{name}: not in the file" for name in wanted if name not in there]
    differences += [f"{name}: in the file alone" for name in there if name not in wanted]
    for name, leaf in wanted.items():
        asked = (tuple(leaf.shape), str(leaf.dtype))
        if there.get(name, asked) != asked:
            shape, dtype = there[name]
            differences.append(f"{name}: in the file {dtype}{list(shape)}, asked as {asked[1]}{list(asked[0])}")
    if differences:
        raise ShardingError(
            f"read {os.fspath(file)!r}",
            there=differences,
            must="the tensors of the file must have the names, shapes and dtypes asked for",
        )


def _package() -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError:
        raise ShardingError(
            "read or write a safetensors file",
            there="the package safetensors is not installed",
            must="the extra `data` brings it",
            fix="pip install 'sharding-jax[data]'",
        ) from None
    return safetensors
