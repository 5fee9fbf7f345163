"""Built-in chips, each number with its public source.

Vendors publish peaks; programs reach a fraction of them, which `sharding calibrate` measures. What Hopper GPUs reach
is known from train steps on an H200 (`tests/benchmarks/step_times.py`, JAX 0.11.2): their matrix products 0.77 of the
peak, on average; a copy 0.87 of the bandwidth. Latencies and overheads are not published; these are approximations:

- TPU links: about 1 us per hop (J. Austin et al., How to Scale Your Model, parts 2 and 3:
  jax-ml.github.io/scaling-book).
- GPU links: 1.9 us per hop over NVLink, 4 us over the network, 4.4 us startup: the constants of NCCL's tuner for its
  LL128 protocol (github.com/NVIDIA/nccl, `src/graph/tuning.cc`, `hwLat` and the tree's `baseLat`, release 2.12).
- Host links: 10 us per copy, about what a small `cudaMemcpyAsync` takes.
- Per op: 3 us for a CUDA kernel launch, 1 us for a step of a TPU program.

To and from the host's memory, over PCIe: about 15 GB/s per TPU, 32 GB/s for v6e, which is taken for 7x, too (How to
Scale Your Model, part 2); 16 lanes of PCIe 4 (A100: 32 GB/s) or 5 (64 GB/s) per GPU, by NVIDIA's data sheets.
The host's memory: 448 GB for 4 chips (cloud.google.com/tpu/docs/v5p), 1,536 GiB for 8 (docs/v6e), 2 TB for 8 GPUs (DGX
H100 and H200).

Usable memory: what libtpu 0.0.52 calls available when a program is too large for a chip (v5p: all of it); on GPUs
JAX's share, which `XLA_CLIENT_MEM_FRACTION` sets (docs.jax.dev/en/latest/gpu_memory_allocation.html).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from ..errors import ShardingError
from .chip import Chip, Rates, Wire

CHIPS_PER_TPU_HOST = 4
"""TPU chips per host of the slices that libtpu describes: v4, v5e, v5p, v6e and 7x."""

GPUS_PER_HOST = 8
"""GPUs per host where only their number is given, as in NVIDIA's DGX and HGX systems."""

JAX_SHARE = 0.75
"""Of a GPU's memory that JAX allocates unless told otherwise."""

_GIB = 2**30
_TERA = 1e12
_GIGA = 1e9
_US = 1e-6


def _tpu_rates(bfloat16_tera: float, *, int8_tera: float | None, float8_tera: float | None, vector_tera: float):
    """Rates of a TPU: float32 matmuls take one bfloat16 pass by default, six at precision "highest"
    (`jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6`)."""
    return Rates(
        bfloat16_flops_per_second=bfloat16_tera * _TERA,
        float32_flops_per_second=bfloat16_tera * _TERA,
        exact_float32_flops_per_second=bfloat16_tera * _TERA / 6,
        int8_flops_per_second=int8_tera * _TERA if int8_tera else None,
        float8_flops_per_second=float8_tera * _TERA if float8_tera else None,
        vector_flops_per_second=vector_tera * _TERA,
    )


def _gpu_rates(bfloat16_tera: float, *, tf32_tera: float, float32_tera: float, eight_bit_tera: float, float8: bool):
    """Rates of an NVIDIA GPU: float32 matmuls run in TF32 below precision "highest"."""
    return Rates(
        bfloat16_flops_per_second=bfloat16_tera * _TERA,
        float32_flops_per_second=tf32_tera * _TERA,
        exact_float32_flops_per_second=float32_tera * _TERA,
        int8_flops_per_second=eight_bit_tera * _TERA,
        float8_flops_per_second=eight_bit_tera * _TERA if float8 else None,
        vector_flops_per_second=float32_tera * _TERA,
    )


def _ici(giga: float, torus_dims: int) -> Wire:
    """Links to the two neighbours along each torus dim, by GB/s per link and direction."""
    return Wire(bytes_per_second=giga * _GIGA, num_links=2 * torus_dims, latency_seconds=1 * _US)


def _nvlink(giga: float, num_links: int) -> Wire:
    """Links to the switch, by GB/s per link and direction."""
    return Wire(bytes_per_second=giga * _GIGA, num_links=num_links, latency_seconds=1.9 * _US)


def _network(gigabits: float, latency_us: float) -> Wire:
    """The network, by Gb/s per device."""
    return Wire(bytes_per_second=gigabits / 8 * _GIGA, latency_seconds=latency_us * _US)


def _pcie(giga: float) -> Wire:
    """The link to the host, by GB/s per direction."""
    return Wire(bytes_per_second=giga * _GIGA, latency_seconds=10 * _US)


# Vector units of TPUs: lanes x sublanes x ALUs x cores x clock = 128 x 8 x 4 x cores x GHz (How to Scale Your Model,
# appendix of part 2, for v5p), with a multiply-add as one operation; an approximation for the others, at the same clock
# or that of their matrix unit. The network per chip is the data center network on the same Google pages.
# v4, v5p and 7x have wraparound links through optical switches where every dim consists of full 4x4x4 cubes; v5e and
# v6e where a dim spans the pod, 16 chips (How to Scale Your Model, part 2).

_TPU_V4 = Chip(
    # https://cloud.google.com/tpu/docs/v4: 275 teraflops in bf16 or int8, 32 GiB of HBM2, 1200 GB/s; a chip's two cores
    # act as one device (megacore). Links of 45 GB/s: How to Scale Your Model, part 2. Network: 25 GB/s for a host of 4.
    name="v4",
    platform="tpu",
    memory_bytes=32 * _GIB,
    usable_memory_bytes=int(30.75 * _GIB),
    memory_bytes_per_second=1200 * _GIGA,
    rates=_tpu_rates(275, int8_tera=275, float8_tera=None, vector_tera=8.6),
    link="ici",
    wire=_ici(45, 3),
    network=_network(50, 10),
    host_wire=_pcie(15),
    torus_dims=3,
    wraps_at=4,
    wraps_together=True,
    op_seconds=1 * _US,
    collective_seconds=1 * _US,
)
_TPU_V5E = Chip(
    # https://cloud.google.com/tpu/docs/v5e: 197 TFLOPs bf16, 393 TOPs int8, 16 GB of HBM2, 819 GB/s, 400 GB/s
    # bidirectional over 4 ports, 6.4 Tb/s of network for 256 chips.
    name="v5e",
    platform="tpu",
    memory_bytes=16 * _GIB,
    usable_memory_bytes=int(15.75 * _GIB),
    memory_bytes_per_second=819 * _GIGA,
    rates=_tpu_rates(197, int8_tera=393, float8_tera=None, vector_tera=6.1),
    link="ici",
    wire=_ici(50, 2),
    network=_network(25, 10),
    host_wire=_pcie(15),
    torus_dims=2,
    wraps_at=16,
    op_seconds=1 * _US,
    collective_seconds=1 * _US,
    gathers_while_computing=True,  # libtpu 0.0.52
)
_TPU_V5P = Chip(
    # https://cloud.google.com/tpu/docs/v5p: 459 TFLOPs in bf16 and in fp8, 95 GiB, 2765 GB/s, 1200 GB/s bidirectional
    # over 6 links, 50 Gb/s of network. int8 at twice the rate: How to Scale Your Model, part 2.
    name="v5p",
    platform="tpu",
    memory_bytes=95 * _GIB,
    memory_bytes_per_second=2765 * _GIGA,
    rates=_tpu_rates(459, int8_tera=918, float8_tera=459, vector_tera=14.3),
    link="ici",
    wire=_ici(100, 3),
    network=_network(50, 10),
    host_wire=_pcie(15),
    host_memory_bytes=448 * 10**9 // 4,
    torus_dims=3,
    wraps_at=4,
    wraps_together=True,
    op_seconds=1 * _US,
    collective_seconds=1 * _US,
)
_TPU_V6E = Chip(
    # https://cloud.google.com/tpu/docs/v6e and /tpu7x: 918 TFLOPs in bf16 and in fp8, 1836 TOPs int8, 32 GiB,
    # 1638 GB/s, 800 GB/s bidirectional over 4 ports, 100 Gb/s of network.
    name="v6e",
    platform="tpu",
    memory_bytes=32 * _GIB,
    usable_memory_bytes=int(31.24 * _GIB),
    memory_bytes_per_second=1638 * _GIGA,
    rates=_tpu_rates(918, int8_tera=1836, float8_tera=918, vector_tera=7.2),
    link="ici",
    wire=_ici(100, 2),
    network=_network(100, 10),
    host_wire=_pcie(32),
    host_memory_bytes=1536 * _GIB // 8,
    torus_dims=2,
    wraps_at=16,
    op_seconds=1 * _US,
    collective_seconds=1 * _US,
)
_TPU_7X = Chip(
    # https://cloud.google.com/tpu/docs/tpu7x, per chip: 2307 TFLOPs in bf16, 4614 in fp8 (no int8), 192 GiB, 7380 GB/s,
    # 1200 GB/s bidirectional over 6 links, 100 Gb/s of network. Two chiplets per chip, each a device with half of that;
    # between them six times the bandwidth of the links along one dim.
    name="tpu7x",
    platform="tpu",
    devices_per_chip=2,
    memory_bytes=96 * _GIB,
    usable_memory_bytes=int(94.74 * _GIB),
    memory_bytes_per_second=7380 / 2 * _GIGA,
    rates=_tpu_rates(2307 / 2, int8_tera=None, float8_tera=4614 / 2, vector_tera=7.2),
    link="ici",
    wire=_ici(100, 3).shared(2),
    core_wire=Wire(bytes_per_second=6 * 100 * _GIGA, latency_seconds=1 * _US),
    network=_network(50, 10),
    host_wire=_pcie(32 / 2),
    torus_dims=3,
    wraps_at=4,
    wraps_together=True,
    op_seconds=1 * _US,
    collective_seconds=1 * _US,
)
_A100 = Chip(
    # NVIDIA A100 80GB SXM data sheet: bf16 312, TF32 156, FP32 19.5, int8 624 TFLOPS, 80 GB of HBM2e, 2039 GB/s, NVLink
    # of 600 GB/s bidirectional, 12 links (Ampere white paper). DGX A100 data sheet: 200 Gb/s of network per GPU.
    # PCIe Gen4 of 64 GB/s bidirectional.
    name="a100",
    platform="gpu",
    memory_bytes=80 * 10**9,
    usable_memory_bytes=int(JAX_SHARE * 80 * 10**9),
    memory_bytes_per_second=2039 * _GIGA,
    rates=_gpu_rates(312, tf32_tera=156, float32_tera=19.5, eight_bit_tera=624, float8=False),
    link="nvlink",
    wire=_nvlink(25, 12),
    network=_network(200, 4),
    host_wire=_pcie(32),
    op_seconds=3 * _US,
    collective_seconds=4.4 * _US,
)
_H100 = Chip(
    # https://www.nvidia.com/en-us/data-center/h100/, SXM, whose tensor rates are with sparsity, twice these: bf16
    # 989.4, TF32 494.7, FP8 and int8 1978.9, FP32 66.9 TFLOPS (Hopper white paper), 80 GB of HBM3, 3.35 TB/s, NVLink of
    # 900 GB/s bidirectional, 18 links. DGX H100 data sheet: 400 Gb/s of network per GPU.
    # PCIe Gen5 of 128 GB/s bidirectional.
    name="h100",
    platform="gpu",
    memory_bytes=80 * 10**9,
    usable_memory_bytes=int(JAX_SHARE * 80 * 10**9),
    memory_bytes_per_second=3350 * _GIGA,
    rates=_gpu_rates(989.4, tf32_tera=494.7, float32_tera=66.9, eight_bit_tera=1978.9, float8=True),
    matmul_share=0.77,
    memory_share=0.87,
    link="nvlink",
    wire=_nvlink(25, 18),
    network=_network(400, 4),
    host_wire=_pcie(64),
    host_memory_bytes=2 * 10**12 // 8,
    op_seconds=3 * _US,
    collective_seconds=4.4 * _US,
)
# https://www.nvidia.com/en-us/data-center/h200/: an H100 with 141 GB of HBM3e at 4.8 TB/s.
_H200 = replace(
    _H100,
    name="h200",
    memory_bytes=141 * 10**9,
    usable_memory_bytes=int(JAX_SHARE * 141 * 10**9),
    memory_bytes_per_second=4800 * _GIGA,
)
_B200 = Chip(
    # NVIDIA DGX B200 data sheet: 8 GPUs with 1,440 GB of HBM3e and 64 TB/s in total, FP8 72 PFLOPS with sparsity,
    # NVLink of 14.4 TB/s bidirectional, 400 Gb/s of network per GPU. NVIDIA Blackwell data sheet (HGX B200, per GPU,
    # half of the rates with sparsity): bf16 2250, TF32 1100, int8 4500, FP32 80 TFLOPS; 18 links (NVLink 5), PCIe
    # Gen5 of 128 GB/s bidirectional.
    name="b200",
    platform="gpu",
    memory_bytes=180 * 10**9,
    usable_memory_bytes=int(JAX_SHARE * 180 * 10**9),
    memory_bytes_per_second=8000 * _GIGA,
    rates=_gpu_rates(2250, tf32_tera=1100, float32_tera=80, eight_bit_tera=4500, float8=True),
    link="nvlink",
    wire=_nvlink(50, 18),
    network=_network(400, 4),
    host_wire=_pcie(64),
    op_seconds=3 * _US,
    collective_seconds=4.4 * _US,
)
_CPU = Chip(
    # A generic server core: 2.5 GHz with two multiply-adds of 8 floats per cycle (AVX2), 10 GB/s of memory bandwidth, a
    # 25 Gb/s network card; a first approximation. bfloat16 is widened to float32. The overheads are those measured by
    # `sharding calibrate --mesh data=8` on two cores of an AMD EPYC, rounded. Calibrate your own machine.
    name="cpu",
    platform="cpu",
    memory_bytes=None,
    memory_bytes_per_second=10 * _GIGA,
    rates=Rates(
        bfloat16_flops_per_second=80 * _GIGA,
        float32_flops_per_second=80 * _GIGA,
        exact_float32_flops_per_second=80 * _GIGA,
        vector_flops_per_second=10 * _GIGA,
    ),
    link="shared memory",
    wire=Wire(bytes_per_second=5 * _GIGA, latency_seconds=10 * _US),
    network=_network(25, 30),
    host_wire=Wire(bytes_per_second=5 * _GIGA, latency_seconds=10 * _US),
    op_seconds=2 * _US,
    collective_seconds=50 * _US,
    shares_cores=True,
    sends_while_computing=False,
)

CHIPS: Mapping[str, Chip] = MappingProxyType(
    {known.name: known for known in (_TPU_V4, _TPU_V5E, _TPU_V5P, _TPU_V6E, _TPU_7X, _A100, _H100, _H200, _B200, _CPU)}
)

_KINDS = {
    "tpu v4": "v4",
    "tpu v5 lite": "v5e",
    "tpu v5e": "v5e",
    "tpu v5": "v5p",
    "tpu v5p": "v5p",
    "tpu v6 lite": "v6e",
    "tpu v6e": "v6e",
    "tpu7x": "tpu7x",
}
"""`jax.Device.device_kind` of TPUs, in lower case -> the chip's name."""


def chip(name: str, *, asked: str | None = None, shape_text: str = "") -> Chip:
    """The built-in chip of this name.

    Args:
        name: a key of ``CHIPS``, case-insensitive.
        asked: subject of the error, where the name is part of a larger input.
        shape_text: shape that the error appends to the names it suggests.
    """
    if (known := CHIPS.get(name.lower())) is not None:
        return known
    nearest = difflib.get_close_matches(name.lower(), CHIPS, n=2, cutoff=0.5)
    suffix = f":{shape_text}" if shape_text else ""
    raise ShardingError(
        asked or f"the chip {name!r}",
        found=f"no built-in chip {name!r}",
        required=f"one of {', '.join(CHIPS)}",
        fix=[f'"{near}{suffix}"' for near in nearest],
    )


def recognised(platform: str, device_kind: str) -> Chip | None:
    """The built-in chip of a real device, by its platform and `device_kind`; None if there is none."""
    if platform == "cpu":
        return CHIPS["cpu"]
    kind = device_kind.lower()
    if (name := _KINDS.get(kind)) is not None:
        return CHIPS[name]
    # "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", ...
    return next((known for known in CHIPS.values() if known.platform == "gpu" and known.name in kind), None)
