"""Predicted times: no faster than the hardware, and slower for what takes longer."""

from dataclasses import replace
from functools import cache

import pytest

import headwise as hw
from headwise.costs.cost import Cost, kernel_seconds, seconds
from headwise.costs.kernel import AttentionShape, Kernel, MatmulShape
from headwise.costs.machines.hardware import DEVICES, Device, device
from headwise.models import GPTConfig

GPT = GPTConfig(vocabulary=1000, d_model=512, layers=4, heads=8, feed_forward=hw.nn.SwiGLU(1408))
H100 = device("h100")


@cache
def counted(queries: int, keys: int) -> Cost:
    return hw.cost(GPT, batch=4, queries=queries, keys=keys)


def attention(
    queries: int, keys: int, mask: hw.mask.Mask | None = None, batch: int = 8, **more: int
) -> Kernel:
    heads = more.get("heads", 8)
    pairs = batch * heads * queries * keys
    shape = AttentionShape(batch, heads, heads, queries, keys, 64, 64, pairs, pairs, mask)
    size = 2 * batch * heads * 64 * (queries + 2 * keys)
    return Kernel("a", "attention", bytes_read=size, shape=shape)


@pytest.mark.parametrize("id", [id for id in DEVICES if "bf16" in DEVICES[id].matrix])
@pytest.mark.parametrize(("queries", "keys"), [(2048, 2048), (1, 2048)])
def test_no_device_is_faster_than_its_peak_and_its_memory(id: str, queries: int, keys: int) -> None:
    found, on = counted(queries, keys), DEVICES[id]
    took = found.time(on)
    assert took > found.flops_executed / on.matrix["bf16"]
    matmuls = sum(k.bytes_moved * k.count for k in found.forward if k.kind == "matmul")
    assert took > matmuls / on.bandwidth


def test_a_step_of_training_takes_longer_than_twice_a_forward() -> None:
    found = hw.cost(GPT, batch=4, queries=2048)
    assert found.time("h100", training=True) > 2 * found.time("h100")


def test_kernels_add_up_and_repeat() -> None:
    product = Kernel("m", "matmul", 2**40, 2**20, 2**20, shape=MatmulShape(8192, 8192, 8192))
    once = kernel_seconds(product, H100)
    assert seconds([product, replace(product, count=3)], H100) == pytest.approx(4 * once)


def test_a_narrow_product_waits_for_memory_and_a_wide_one_for_arithmetic() -> None:
    speeds = H100.speeds("bf16")
    narrow = Kernel("m", "matmul", 2 * 4096 * 4096, 2 * 4096 * 4096, 8192)
    wide = Kernel("m", "matmul", 2 * 4096**3, 4 * 4096**2, 2 * 4096**2)
    taken = [kernel_seconds(product, H100) - speeds.launch for product in (narrow, wide)]
    assert taken == pytest.approx([narrow.bytes_moved * speeds.flop_byte, wide.flops * speeds.flop])


def test_on_a_cpu_arithmetic_and_traffic_add_up() -> None:
    cpu = DEVICES["cpu"]
    speeds = cpu.speeds("fp32")
    product = Kernel("m", "matmul", 2 * 512**3, 8 * 512**2, 4 * 512**2, dtype="fp32")
    both = product.flops * speeds.flop + product.bytes_moved * speeds.flop_byte
    assert kernel_seconds(product, cpu) == pytest.approx(both + speeds.launch)


def test_the_tiles_are_those_of_the_device() -> None:
    """PyTorch's kernel for CPUs computes blocks of 512 keys: a short causal call saves nothing."""
    full, causal = attention(512, 512), attention(512, 512, hw.mask.causal())
    causal = replace(causal, shape=replace(causal.shape, pairs=8 * 8 * 512 * 513 // 2))  # type: ignore[type-var]
    cpu = DEVICES["cpu"]
    assert kernel_seconds(causal, cpu) == kernel_seconds(full, cpu)
    assert kernel_seconds(causal, H100) < 0.75 * kernel_seconds(full, H100)


def test_few_blocks_of_queries_leave_units_idle() -> None:
    one, many = attention(2048, 2048, batch=1, heads=1), attention(2048, 2048, batch=64, heads=8)
    per_pair = [kernel_seconds(k, H100) / k.shape.pairs for k in (one, many)]  # type: ignore[union-attr]
    assert per_pair[0] > 5 * per_pair[1]


def test_decoding_reads_its_keys_and_values() -> None:
    slow = replace(H100, bandwidth=H100.bandwidth / 2)
    call = attention(1, 100_000)
    launch = H100.speeds("bf16").launch
    assert kernel_seconds(call, slow) - launch == pytest.approx(
        2 * (kernel_seconds(call, H100) - launch)
    )


def test_exponentials_take_time_of_their_own() -> None:
    few: Device = replace(H100, special=1e11)
    assert kernel_seconds(attention(2048, 2048), few) > 2 * kernel_seconds(
        attention(2048, 2048), H100
    )


def test_a_rank_of_context_parallelism_keeps_its_tiles() -> None:
    whole = hw.cost(GPT, batch=1, queries=8192).time("h100")
    rank = hw.cost(GPT, batch=1, queries=8192, mesh={"cp": 4}).time("h100")
    assert whole / 5 < rank < whole
