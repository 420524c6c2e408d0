"""The tanh of a softcap: accurate for every score, without the special-function unit for most.

tanh x = 1 - 2 / (1 + e^2x) takes two operations of that unit, and softmax a third. At 16 per clock
they would take longer than the matrix products. For |x| < LIMIT, which nearly all scores satisfy in
practice, an odd polynomial is as good. A thread chooses for up to TOGETHER of its scores at once
in assembly, because a branch in Triton waits for all threads of the program.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs, disable-error-code="annotation-unchecked"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from headwise.engines.triton.kernels.interpreter import INTERPRETING

TWO_LOG2E = tl.constexpr(2.8853900817779268)  # e^2x is 2 to this times x
INTERPRETED = tl.constexpr(INTERPRETING)
TOGETHER = 64
GROUP = 8  # scores whose squares are summed, which is cheaper than finding the largest
LIMIT = tl.constexpr(0.45)
SERIES = tl.constexpr(  # minimax: x · SERIES(x²) is tanh x to 3.3e-7 of itself for |x| < LIMIT
    (0.999999764394643, -0.333295349284928, 0.132372591414493, -0.046057459185412)
)


@triton.constexpr_function
def together(elements: int, threads: int) -> int:
    """Return how many scores of a tile a thread takes at once: no more than it holds.

    Triton would pad with undefined registers, which could then decide the choice of formula.
    """
    return max(1, min(TOGETHER, elements // threads))


@triton.constexpr_function
def assembly(pack: int) -> str:
    """Return PTX code for the tanh of `pack` scores.

    Operands, `pack` of each: the results, the scores, then constants, each repeated `pack` times:
    the limit for a sum of squares, the factor of the exponent, the series' four coefficients.
    """
    every = range(pack)
    score = [f"${pack + n}" for n in every]
    limit, factor, *series = [f"${pack * n}" for n in range(2, 8)]
    groups = max(1, pack // GROUP)
    lines = [f"{{ .reg .pred small; .reg .f32 x<{pack}>, y<{pack}>;"]
    for n in every:
        first = n < groups
        sum_to = f"x{n % groups}, {score[n]}, {score[n]}"
        lines.append(f"mul.f32 {sum_to};" if first else f"fma.rn.f32 {sum_to}, x{n % groups};")
    while groups > 1:  # max.NaN, so that NaN does not count as small
        groups //= 2
        lines += [f"max.NaN.f32 x{n}, x{n}, x{n + groups};" for n in range(groups)]
    lines.append(f"setp.lt.f32 small, x0, {limit}; @!small bra LARGE;")
    lines += [f"mul.f32 x{n}, {score[n]}, {score[n]};" for n in every]
    lines += [f"fma.rn.f32 y{n}, x{n}, {series[3]}, {series[2]};" for n in every]
    lines += [f"fma.rn.f32 y{n}, x{n}, y{n}, {series[1]};" for n in every]
    lines += [f"fma.rn.f32 y{n}, x{n}, y{n}, {series[0]};" for n in every]
    lines += [f"mul.f32 ${n}, {score[n]}, y{n};" for n in every]
    lines.append("bra DONE; LARGE:")
    for n in every:
        lines.append(f"mul.f32 x{n}, {score[n]}, {factor}; ex2.approx.ftz.f32 x{n}, x{n};")
        lines.append(f"add.f32 x{n}, x{n}, 0f3F800000; rcp.approx.ftz.f32 x{n}, x{n};")
        lines.append(f"fma.rn.f32 ${n}, x{n}, 0fC0000000, 0f3F800000;")  # 1 - 2 x
    return "\n".join([*lines, "DONE: }"])


@triton.constexpr_function
def operands(pack: int) -> str:
    """Return the operand constraints: results, written before all inputs are read, then inputs."""
    return ",".join(["=&f"] * pack + ["f"] * (7 * pack))


@triton.jit
def capped(s, ratio, CAP: tl.constexpr = 1):
    """Return tanh(ratio · s), with an error below 2.5e-7; CAP as `operands.cap_of` returns it."""
    if CAP == 2:
        s *= ratio
        ratio = 1.0
    factor = ratio * TWO_LOG2E
    if INTERPRETED:
        x = s * ratio
        x2 = x * x
        y = SERIES[0] + x2 * (SERIES[1] + x2 * (SERIES[2] + x2 * SERIES[3]))
        found = tl.where(tl.abs(x) < LIMIT, x * y, 1.0 - 2.0 / (1.0 + tl.exp2(s * factor)))
    else:
        r2 = ratio * ratio
        r4 = r2 * r2
        limit = (LIMIT * LIMIT) / r2
        PACK: tl.constexpr = together(s.numel, cuda.num_threads())
        found = tl.inline_asm_elementwise(
            assembly(PACK), operands(PACK),
            [s, limit, factor, SERIES[0] * ratio, SERIES[1] * ratio * r2, SERIES[2] * ratio * r4,
             SERIES[3] * ratio * r2 * r4],
            dtype=tl.float32, is_pure=True, pack=PACK,
        )  # fmt: skip
    return found
