"""Ops that a compiler runs as several, as another one, or in other arrays than those that the program has."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from .cpu_fusion import reduces_in_library
from .cudnn_convolutions import cudnn_convolution
from .instruction import Instruction
from .library_calls import arithmetic, library_call
from .local_op import LocalOp
from .primitive_traits import INDEX_REDUCTIONS, REDUCTIONS, gathers_rows, masks_rows

WINDOW = 32
"""The most elements along a dim that XLA:CPU reduces at once."""

Expansion = Callable[[LocalOp], Instruction | None]
"""The result of an op; None where it runs as it is."""


def convolution(op: LocalOp) -> Instruction | None:
    """A library's on CPUs and GPUs."""
    if op.emitter.traits.uses_library:
        return library_call(op)
    return cudnn_convolution(op) if op.emitter.traits.uses_cudnn else None


def product(op: LocalOp) -> Instruction | None:
    """Elementwise if it sums nothing; else on CPUs a library's, and elsewhere a reduction if it is of vectors, or of a
    vector and a matrix that is not too large, one each per batch."""
    summed, batch = op.eqn.params["dimension_numbers"]
    if not summed[0] or (len(op.operands) == 2 and math.prod(op.operands[0].shape[d] for d in summed[0]) == 1):
        factors = [op.emitter.emit("broadcast_in_dim", "fusible", [x], op.shape, x.itemsize) for x in op.operands]
        return op.emit("mul", factors, elementwise=True)
    if op.emitter.traits.uses_library:
        return library_call(op)
    if len(op.operands) != 2:
        return None
    sizes = zip(op.operands, summed, batch, strict=True)
    vectors = [x.num_elements == math.prod(x.shape[d] for d in (*sums, *batches)) for x, sums, batches in sizes]
    num_batch = math.prod(op.operands[0].shape[d] for d in batch[0])
    num_elements = sum(x.num_elements for x in op.operands) // max(1, num_batch)
    if all(vectors) or (any(vectors) and num_elements < op.emitter.traits.most_reduced_elements):
        return op.emit("reduce_sum", op.operands, expensive=True)
    return None


def random_words(op: LocalOp) -> Instruction | None:
    """On CPUs a loop computes two words for each random number, and needs a third array: both depend on both."""
    if not op.emitter.traits.uses_library:
        return None
    loop = op.emitter.emit("threefry2x32", "unfusible", op.operands, (0,), 1, eqn=op.eqn)
    words = op.emitter.tuple_elements(loop, [(op.shape, 4, None, op.eqn)] * 3)
    return op.emit("xor", words[:2], elementwise=True)


def selected_and_scattered(op: LocalOp) -> Instruction | None:
    """The gradient of a maximum over windows: indices of the maxima are found and added to (openxla/xla,
    `service/select_and_scatter_expander.cc`); on TPUs it is an op of its own."""
    traits, emitter = op.emitter.traits, op.emitter
    if traits.fuses_into_products:
        return None
    source, x = op.operands
    ndim, facts = len(x.shape), {"eqn": op.eqn}
    role = "unfusible" if traits.uses_library else "fusible"
    places = [emitter.emit("iota", role, [], x.shape, 4, key=d, **facts) for d in range(ndim)]
    fuses = not traits.uses_library
    windows = emitter.emit("reduce_window", "unfusible", [x, *places], (0,), 1, fuses_operands=fuses, **facts)
    found = emitter.tuple_elements(windows, [(source.shape, n, None, op.eqn) for n in (x.itemsize, *[4] * ndim)])
    indices = emitter.emit("concatenate", role, found[1:], (*source.shape, ndim), 4, **facts)
    zeros = emitter.owned(emitter.constant(op.shape, op.itemsize))
    return op.emit("scatter_add", [zeros, indices, source], role="unfusible", in_place=((0, 0),))


def scattered(op: LocalOp) -> Instruction | None:
    """An update of a slice if it has one index (openxla/xla, `service/scatter_expander.cc`).

    On TPUs a scatter of one element to each row, as of a gradient of `take_along_axis`, compares an iota with the
    indices.
    """
    *batch, _ = op.eqn.invars[1].aval.shape
    if math.prod(batch) == 1:
        return updated_slice(op)
    numbers = op.eqn.params["dimension_numbers"]
    indexed = numbers.scatter_dims_to_operand_dims
    is_in_rows = len(indexed) == 1 and len(numbers.operand_batching_dims) == len(op.shape) - 1
    if not (op.emitter.traits.fuses_into_products and is_in_rows):
        return None
    x, *rows = op.operands
    if any(one.num_elements * op.shape[indexed[0]] != x.num_elements for one in rows):
        return None
    rows = [op.emitter.emit("broadcast_in_dim", "fusible", [one], op.shape, one.itemsize) for one in rows]
    return op.emit("select_n", [x, *rows], elementwise=True)


def updated_slice(op: LocalOp) -> Instruction:
    """An update in place; of an array that its own kernel fills, an array like a pad."""
    x, *others = op.operands
    if x.is_constant:
        return op.emit("pad", others)
    return op.emit("dynamic_update_slice", op.operands, in_place=((0, 0),))


def gathered(op: LocalOp) -> Instruction | None:
    """Where a kernel gathers rows alone, as on TPUs, another one masks those that the device does not have.

    Rows that are only read in fewer bits are rounded after that, and partial sums of them after they are reduced.
    """
    if not (op.emitter.traits.moves_alone and gathers_rows(op.eqn) and op.operands):
        return None
    table, whole = op.operands[0], op.eqn.invars[0].aval.shape
    indexed = op.eqn.params["dimension_numbers"].start_index_map
    is_partial = len(table.shape) == len(whole) and any(table.shape[d] < whole[d] for d in indexed)
    facts = {"key": op.facts["key"], "eqn": op.eqn}
    found = op.emitter.emit("gather", "unfusible", op.operands, op.shape, table.itemsize, **facts)
    if is_partial:
        found = op.emitter.emit("select_n", "fusible", [found], op.shape, table.itemsize, elementwise=True, **facts)
    elif masks_rows(op.eqn) or op.emitter.stored_itemsize(op.itemsize, op.facts["value"]) < table.itemsize:
        return op.emit("select_n", [found], elementwise=True)
    found.value = op.facts["value"]
    return found


def reduction(op: LocalOp) -> Instruction | None:
    """A reshape where each device has one element to reduce; on CPUs a library's, or else first one of windows, which
    is an op of its own (openxla/xla, `service/tree_reduction_rewriter.cc`)."""
    if not op.operands:
        return None
    (x,) = op.operands
    if x.num_elements == math.prod(op.shape):
        return op.emit("reshape", [x], role="bitcast")
    if not op.emitter.traits.uses_library:
        return None
    facts = {"expensive": True}
    if reduces_in_library(op.eqn, x):
        return op.emit(op.eqn.primitive.name, [x], is_library_reduction=True, **facts)
    windows = {d: min(x.shape[d], WINDOW) for d in op.eqn.params["axes"]}
    if any(x.shape[d] > WINDOW for d in windows):
        x = op.emitter.widened(x)
        shape = [math.ceil(size / windows.get(d, 1)) for d, size in enumerate(x.shape)]
        x = op.emitter.emit("reduce_window", "unfusible", [x], shape, x.itemsize, eqn=op.eqn)
    return op.emit(op.eqn.primitive.name, [x], **facts)


def division(op: LocalOp) -> Instruction | None:
    """On CPUs a product with the inverse of what is broadcast, which is fewer divisions."""
    emitter = op.emitter
    if not emitter.traits.uses_library or len(op.operands) != 2:
        return None
    x, y = op.operands
    source = y.operands[0] if y.name == "broadcast_in_dim" else y
    if source.num_elements in (1, math.prod(op.shape)):
        return None
    facts = {"elementwise": True, "eqn": op.eqn}
    inverse = arithmetic("div", [source], source.shape, op.itemsize, emitter, expensive=True, **facts)
    spread = emitter.emit("broadcast_in_dim", "fusible", [inverse], op.shape, op.itemsize, eqn=op.eqn)
    return arithmetic("mul", [x, spread], op.shape, op.itemsize, emitter, **{**op.facts, **facts})


def inverse_error_function(op: LocalOp) -> Instruction | None:
    """On CPUs a polynomial of a logarithm and its root, which are stored where several need it."""
    if not (op.emitter.traits.uses_library and op.operands):
        return None
    (x,) = op.operands
    facts = {"elementwise": True, "expensive": True, "eqn": op.eqn}
    logarithm = op.emitter.emit("log1p", "fusible", [x], op.shape, op.itemsize, key="erf_inv", **facts)
    root = op.emitter.emit("sqrt", "fusible", [logarithm], op.shape, op.itemsize, key="erf_inv", **facts)
    return op.emit("erf_inv", [logarithm, root, x], elementwise=True)


def sliced(op: LocalOp) -> Instruction:
    """A slice, or one of several; a smaller broadcast along dims that the operand is broadcast over."""
    (x,) = op.operands
    if x.is_constant:
        return op.emitter.constant(op.shape, op.itemsize)
    if x.name == "broadcast_in_dim" and x.eqn is not None and x.eqn.primitive.name == "broadcast_in_dim":
        source, dims = x.operands[0], x.eqn.params["broadcast_dimensions"]
        if len(dims) == len(source.shape) and all(
            size == 1 or x.shape[d] == op.shape[d] for d, size in zip(dims, source.shape, strict=True)
        ):
            return op.emit("broadcast_in_dim", [source], key=("sliced", tuple(dims)))
    return op.emit(op.eqn.primitive.name, [x])


EXPANSIONS: Mapping[str, Expansion] = {
    **dict.fromkeys(REDUCTIONS - INDEX_REDUCTIONS, reduction),
    "conv_general_dilated": convolution,
    "div": division,
    "dot_general": product,
    "erf_inv": inverse_error_function,
    "gather": gathered,
    "scatter": scattered,
    "scatter-add": scattered,
    "select_and_scatter_add": selected_and_scattered,
    "threefry2x32": random_words,
}
"""Primitive -> its expansion; random bits of threefry keys count as `threefry2x32`."""
