"""Convolutions as cuDNN runs them on GPUs: forward, or as a gradient for the kernel or for the input.

It dilates no input and pads both ends of a dim alike: otherwise the input is padded in memory first, or a larger
gradient for it is sliced. Kernels have output channels first and input channels last (openxla/xla, `service/gpu/
transforms/conv_rewriter.cc`, `conv_padding_legalization.cc`, `layout_assignment.cc`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .instruction import Instruction
from .local_op import LocalOp


@dataclass(frozen=True, slots=True)
class _Window:
    """A convolution along one spatial dim."""

    kernel_size: int
    input_size: int
    output_size: int
    low: int
    high: int
    stride: int
    input_dilation: int
    kernel_dilation: int

    @property
    def padded_size(self) -> int:
        """The size of an input that is dilated and padded in memory."""
        return (self.input_size - 1) * self.input_dilation + 1 + self.low + self.high

    @property
    def is_even(self) -> bool:
        """Whether a forward convolution pads its input by itself."""
        return self.low == self.high >= 0 and self.input_dilation == 1

    def padding_for_kernel(self) -> tuple[int, int] | None:
        """The padding of the convolution whose gradient for its kernel this is; None where it is of none."""
        if self.stride != 1 or self.input_dilation != 1:
            return None
        end = self.output_size + (self.kernel_size - 1) * self.kernel_dilation
        return _even_padding(self.low, end - self.input_size, self.kernel_dilation)

    def padding_for_input(self) -> tuple[int, int] | None:
        """The padding of the convolution whose gradient for its input this is; None where it is of none."""
        if self.stride != 1 or self.kernel_dilation != 1:
            return None
        end = self.kernel_size + (self.input_size - 1) * self.input_dilation
        return _even_padding(self.kernel_size - 1 - self.low, end - self.output_size, self.input_dilation)

    def swapped(self) -> _Window:
        """The same convolution with input and kernel exchanged."""
        shift = (self.input_size - 1) * self.input_dilation - (self.kernel_size - 1) * self.kernel_dilation
        return replace(
            self,
            kernel_size=self.input_size,
            input_size=self.kernel_size,
            low=self.low + shift,
            high=self.high + shift,
            input_dilation=self.kernel_dilation,
            kernel_dilation=self.input_dilation,
        )


def _even_padding(low: int, least: int, stride: int) -> tuple[int, int] | None:
    """The padding before and after that differs least; None where one is negative.

    Args:
        low: before.
        least: of both; up to `stride - 1` more after change nothing.
    """
    high = min(max(low, least - low), least - low + stride - 1)
    return (low, high) if min(low, high) >= 0 else None


def _if_all(paddings: Iterable[tuple[int, int] | None]) -> list[tuple[int, int]] | None:
    """The paddings; None where there is none of some dim."""
    every = list(paddings)
    found = [one for one in every if one is not None]
    return found if len(found) == len(every) else None


def cudnn_convolution(op: LocalOp) -> Instruction | None:
    """A convolution; None where it runs as it is."""
    eqn, operands, shape, itemsize, emitter = op.eqn, op.operands, op.shape, op.itemsize, op.emitter
    params = eqn.params
    if len(operands) != 2 or params["batch_group_count"] != 1:
        return None
    (x, kernel), numbers = operands, params["dimension_numbers"]
    x_spec, kernel_spec, out_spec = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    sizes = [_at(a, spec[2:]) for a, spec in ((kernel.shape, kernel_spec), (x.shape, x_spec), (shape, out_spec))]
    options = [params[name] for name in ("window_strides", "lhs_dilation", "rhs_dilation")]
    windows = [_Window(*one) for one in zip(*sizes, *zip(*params["padding"], strict=True), *options, strict=True)]
    is_grouped = params["feature_group_count"] > 1
    if not is_grouped and math.prod(sizes[0]) > math.prod(sizes[1]) and any(w.input_dilation > 1 for w in windows):
        x, x_spec, kernel, kernel_spec = kernel, kernel_spec, x, x_spec
        out_spec, windows = (out_spec[1], out_spec[0], *out_spec[2:]), [w.swapped() for w in windows]
    made, order = [*shape], _first(out_spec[0], len(shape))
    padded = given = [w.input_size for w in windows]
    to_kernel = _if_all(w.padding_for_kernel() for w in windows)
    to_input = _if_all(w.padding_for_input() for w in windows)
    if not is_grouped and to_kernel is not None and _is_of_kernel(windows):
        order = [out_spec[1], *out_spec[2:], out_spec[0]]
        if any(low != high for low, high in to_kernel):
            padded = [n + low + high for n, (low, high) in zip(given, to_kernel, strict=True)]
    elif not is_grouped and to_input is not None and _is_reversed(kernel, windows):
        kernel = kernel.operands[0] if kernel.name == "rev" else kernel
        kernel = emitter.transposed(kernel, [kernel_spec[1], *kernel_spec[2:], kernel_spec[0]])
        for d, (low, high) in zip(out_spec[2:], to_input, strict=True):
            made[d] += abs(low - high)
    else:
        padded = given if all(w.is_even for w in windows) else [w.padded_size for w in windows]
        x = emitter.transposed(x, _first(x_spec[0], len(shape)))
        kernel = emitter.transposed(kernel, [kernel_spec[0], *kernel_spec[2:], kernel_spec[1]])
    if padded != given:
        num_elements = x.num_elements // max(1, math.prod(given)) * math.prod(padded)
        x = emitter.emit("pad", "fusible", [x], (num_elements,), x.itemsize, key=tuple(padded), eqn=x.eqn)
    found = emitter.emit(eqn.primitive.name, "unfusible", [x, kernel], _at(made, order), itemsize, **op.facts)
    found = emitter.transposed(found, [order.index(d) for d in range(len(order))])
    return found if made == [*shape] else emitter.emit("slice", "fusible", [found], shape, itemsize, **op.facts)


def _is_of_kernel(windows: Sequence[_Window]) -> bool:
    """Whether a kernel is too large for a layer's, as the gradient of a result is."""
    larger = [w.kernel_size > w.output_size for w in windows]
    return any(larger) and (all(larger) or any(w.kernel_dilation > 1 for w in windows))


def _is_reversed(kernel: Instruction, windows: Sequence[_Window]) -> bool:
    """Whether a kernel is that of another convolution, reversed along all spatial dims."""
    is_trivial = all(w.kernel_size == 1 for w in windows) and any(w.input_dilation > 1 for w in windows)
    return is_trivial or kernel.name == "rev"


def _first(dim: int, ndim: int) -> list[int]:
    return [dim, *(d for d in range(ndim) if d != dim)]


def _at(sizes: Sequence[int], dims: Sequence[int]) -> list[int]:
    return [sizes[d] for d in dims]
