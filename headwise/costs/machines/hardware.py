"""Well-known devices with their peak rates, and the document each is taken from.

Rates are of dense matrix products that accumulate in float32, at half of what most data sheets
print: those count zeros that structured sparsity skips. Vendors who publish no matrix rates, such
as Apple, are not in the table; `headwise cost --measure` measures such a machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headwise.costs.machines.speeds import AttentionSpeed, Speeds
from headwise.messages import say

MATMUL, BANDWIDTH, ATTENTION, BACKWARD = 0.75, 0.85, 0.85, 0.75
"""Shares of the peak that large kernels reach; of a measured device the measurements are used."""

FLOPS_PER_SPECIAL = 256
"""Matrix FLOPs that an H100 computes in the time of an exponential, for GPUs that don't say."""

OTHERS = {"laptop", "mobile", "q", "nvl", "mig", "d", "ti", "super"}
"""Words in the names of other devices than those of the table."""

WIDTHS = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Device:
    """A device that computes, in FLOPs and bytes per second.

    `units` is the number of its multiprocessors or threads, `special` its exponentials per second;
    None if unknown. `measured` holds speeds that were measured on it, by dtype.
    """

    id: str
    name: str
    matrix: Mapping[str, float]
    bandwidth: float
    memory: float
    source: str
    special: float | None = None
    units: int | None = None
    cpu: bool = False
    measured: Mapping[str, Speeds] = field(default_factory=dict, repr=False)

    def peak(self, dtype: str) -> float:
        """The matrix FLOPs per second in a dtype; ValueError if the device has no rate for it."""
        if dtype not in self.matrix:
            raise ValueError(
                say(
                    "{device} has no matrix rate for {dtype}; it has {there}",
                    device=self.name,
                    dtype=dtype,
                    there=", ".join(self.matrix),
                )
            )
        return self.matrix[dtype]

    def speeds(self, dtype: str) -> Speeds:
        """The measured speeds for a dtype, else the usual share of the peak rates.

        >>> device("h100").speeds("bf16").overlap
        True
        """
        if dtype in self.measured:
            return self.measured[dtype]
        peak = self.peak(dtype)
        special = 1 / (self.special or peak / FLOPS_PER_SPECIAL)
        byte = 1 / (BANDWIDTH * self.bandwidth)
        attention = tuple(
            AttentionSpeed(
                width,
                pair=(4 * width / peak + special) / ATTENTION,
                row=0.0,
                decode_pair=0.0,
                decode_byte=byte,
                backward_pair=(10 * width / peak + special) / BACKWARD,
            )
            for width in WIDTHS
        )
        return Speeds(
            flop=1 / (MATMUL * peak),
            flop_byte=byte,
            byte=byte,
            special=special,
            launch=4e-6,
            attention=attention,
            overlap=not self.cpu,
            tile=(256, 512) if self.cpu else (128, 128),
        )


def device(name: str) -> Device:
    """A device of the table by its id, such as h100; ValueError if there is none.

    >>> device("A100").memory
    80000000000.0
    """
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    if wanted not in DEVICES:
        raise ValueError(
            say(
                "there is no device {name!r}; use this, which headwise cost --measure measures, "
                "or one of {there}",
                name=name[:40],
                there=", ".join(DEVICES),
            )
        )
    return DEVICES[wanted]


def named(hardware: str) -> Device | None:
    """The device of the table that a driver calls by this name; None if it is not there.

    >>> named("NVIDIA H100 80GB HBM3").id, named("NVIDIA A100-SXM4-80GB").id
    ('h100', 'a100')
    >>> named("NVIDIA H100 PCIe").id, named("NVIDIA GeForce RTX 4090 Laptop GPU")
    ('h100-pcie', None)
    """
    words = set(hardware.lower().replace("-", " ").split())
    if words & OTHERS or {"a100", "40gb"} <= words:
        return None
    found = [
        each
        for each in DEVICES.values()
        if set(each.id.split("-")) <= words and ("pcie" in words) == ("pcie" in each.id)
    ]
    return max((each for each in found if not each.cpu), key=lambda x: len(x.id), default=None)


def _nvidia(
    id: str,
    name: str,
    source: str,
    rates: dict[str, float],
    bandwidth: float,
    memory: float,
    units: int,
    clock: float | None = None,
) -> Device:
    """A GPU by TFLOP/s, TB/s, GB, multiprocessors and GHz of its boost clock."""
    # 16 special functions per clock and multiprocessor: CUDA C++ Programming Guide, table of
    # arithmetic instructions.
    special = None if clock is None else 16 * units * clock * 1e9
    rates = {dtype: rate * 1e12 for dtype, rate in rates.items()}
    return Device(id, name, rates, bandwidth * 1e12, memory * 1e9, source, special, units)


def _other(
    id: str,
    name: str,
    source: str,
    rates: dict[str, float],
    bandwidth: float,
    memory: float,
    cpu: bool = False,
    special: float | None = None,
    units: int | None = None,
) -> Device:
    """A device by TFLOP/s, TB/s and GB."""
    rates = {dtype: rate * 1e12 for dtype, rate in rates.items()}
    return Device(id, name, rates, bandwidth * 1e12, memory * 1e9, source, special, units, cpu)


def _half(tensor: float, plain: float, **more: float) -> dict[str, float]:
    """The same rate for bf16 and fp16, and another without tensor cores for fp32."""
    return {"bf16": tensor, "fp16": tensor, "fp32": plain, **more}


_H100 = _half(989.4, 66.9, fp8=1978.9, int8=1978.9, tf32=494.7, fp64=66.9)

_TABLE = (
    _nvidia(
        "a100", "NVIDIA A100 80GB SXM", "NVIDIA A100 Tensor Core GPU, datasheet, 2021",
        _half(312, 19.5, int8=624, tf32=156, fp64=19.5), 2.039, 80, 108, 1.41,
    ),
    _nvidia(
        "h100", "NVIDIA H100 SXM", "NVIDIA H100 Tensor Core GPU Architecture, whitepaper, 2022",
        _H100, 3.352, 80, 132, 1.83,
    ),
    _nvidia(
        "h100-pcie", "NVIDIA H100 PCIe", "NVIDIA H100 Tensor Core GPU, datasheet, 2023",
        _half(756, 51, fp8=1513, int8=1513, tf32=378, fp64=51), 2.0, 80, 114, 1.755,
    ),
    _nvidia(
        "h200", "NVIDIA H200 SXM", "NVIDIA H200 Tensor Core GPU, datasheet, 2024",
        _H100, 4.8, 141, 132, 1.83,
    ),
    _nvidia(
        "b200", "NVIDIA B200 (HGX)",
        "NVIDIA Blackwell Architecture Technical Brief, 2024; memory: DGX B200, datasheet, 2024",
        _half(2250, 80, fp8=4500, int8=4500, fp4=9000, tf32=1100, fp64=40), 8.0, 180, 148,
    ),
    _nvidia(
        "rtx-4090", "NVIDIA GeForce RTX 4090", "NVIDIA Ada GPU Architecture, whitepaper, 2022",
        _half(165.2, 82.6, fp8=330.3, int8=660.6, tf32=82.6), 1.008, 24, 128, 2.52,
    ),
    _nvidia(
        "rtx-5090", "NVIDIA GeForce RTX 5090",
        "NVIDIA RTX Blackwell GPU Architecture, whitepaper, 2025, appendix",
        _half(209.5, 104.8, fp8=419, int8=838, tf32=104.8), 1.792, 32, 170, 2.407,
    ),
    _nvidia(
        "rtx-3090", "NVIDIA GeForce RTX 3090",
        "NVIDIA Ampere GA102 GPU Architecture, whitepaper, 2021, appendix A",
        _half(71, 35.6, int8=284, tf32=35.6), 0.936, 24, 82, 1.695,
    ),
    _nvidia(
        "l4", "NVIDIA L4", "NVIDIA L4 Tensor Core GPU, datasheet, 2023",
        _half(121, 30.3, fp8=242.5, int8=242.5, tf32=60), 0.3, 24, 58, 2.04,
    ),
    _nvidia(
        "l40s", "NVIDIA L40S", "NVIDIA L40S GPU, datasheet, 2023",
        _half(362, 91.6, fp8=733, int8=733, tf32=183), 0.864, 48, 142, 2.52,
    ),
    _nvidia(
        "v100", "NVIDIA V100 32GB SXM2", "NVIDIA V100 Tensor Core GPU, datasheet, 2020",
        {"fp16": 125, "fp32": 15.7, "fp64": 7.8}, 0.9, 32, 80, 1.53,
    ),
    _nvidia(
        "t4", "NVIDIA T4", "NVIDIA T4 Tensor Core GPU, datasheet, 2019",
        {"fp16": 65, "fp32": 8.1, "int8": 130}, 0.32, 16, 40, 1.59,
    ),
    _other(
        "mi300x", "AMD Instinct MI300X", "AMD Instinct MI300X Accelerator, data sheet, 2023",
        _half(1307.4, 163.4, fp8=2614.9, int8=2614.9, tf32=653.7, fp64=163.4), 5.3, 192, units=304,
    ),
    _other(
        "cpu", "a desktop CPU: 8 cores, AVX2, 4 GHz, DDR5-5600",
        "arithmetic: 8 cores × 4 GHz × 32 FLOPs per clock; two memory channels of 44.8 GB/s",
        {"fp32": 1.024, "bf16": 0.512, "fp64": 0.512}, 0.0896, 64,
        cpu=True, special=2.6e10, units=8,
    ),
)  # fmt: skip

DEVICES: Mapping[str, Device] = {each.id: each for each in _TABLE}
"""The table, by id."""
