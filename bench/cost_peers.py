"""FLOPs and memory by headwise and by other counters, on the same layers.

    python -m venv peers
    peers/bin/pip install torch==2.13.0 transformers fvcore ptflops calflops deepspeed \\
        ultralytics-thop torchinfo accelerate
    peers/bin/python -m bench.cost_peers

A tool that is not installed is left out. The others count before headwise is imported, because
importing it teaches PyTorch's counter about attention on a CPU; a column shows it afterwards.

Numbers are FLOPs, two per multiply-add; tools that count multiply-adds are doubled. The truth is
written out here, independent of every tool: 2·m·n·k for each matrix product, over all pairs (dense)
and over the pairs that the mask shows (exact).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from bench import described
from bench.pairs import RESULTS

B, S, D, H, G, W = 2, 128, 64, 4, 2, 32  # batch, length, width, heads, key heads, window
PROJECTIONS = 2 * B * S * D * D * 4
GROUPED = 2 * B * S * D * (2 * D + 2 * D * G // H)
PAIRS = S * S
CAUSAL = S * (S + 1) // 2
WINDOW = S * W - W * (W - 1) // 2


def products(pairs: int) -> int:
    """FLOPs of scores and weighted values."""
    return 2 * 2 * B * pairs * D


class Attention(nn.Module):
    """A layer as people write it: four projections, and one of several ways to attend."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, kv = how, D * G // H if how == "grouped" else D
        self.q, self.o = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.k, self.v = nn.Linear(D, kv, bias=False), nn.Linear(D, kv, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, D // H)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        return self.o(self.attended(q, k, v).transpose(1, 2).flatten(-2))

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.how == "matmul":
            return (q @ k.transpose(-1, -2) / (D // H) ** 0.5).softmax(-1) @ v
        if self.how == "einsum":
            weights = torch.einsum("bhid,bhjd->bhij", q, k).div((D // H) ** 0.5).softmax(-1)
            return torch.einsum("bhij,bhjd->bhid", weights, v)
        if self.how == "window":
            seen = torch.ones(S, S, dtype=torch.bool, device=q.device).tril().triu(1 - W)
            return F.scaled_dot_product_attention(q, k, v, seen)
        causal, grouped = self.how == "causal", self.how == "grouped"
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)


class Whole(nn.Module):
    """nn.MultiheadAttention as a layer of one input."""

    def __init__(self, weights: bool, training: bool) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(D, H, bias=not training, batch_first=True)
        self.weights = weights
        self.train(training)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=self.weights)[0]


@dataclass(frozen=True)
class Layer:
    """A layer, its true FLOPs, and what headwise is asked for."""

    name: str
    build: Callable[[], nn.Module]
    dense: int
    exact: int
    ours: Callable[[Any], Any]  # takes headwise, which is not imported yet


def ours(mask: Callable[[Any], Any], kv_heads: int | None = None) -> Callable[[Any], Any]:
    def count(hw: Any) -> Any:
        layer = hw.nn.MultiHeadAttention(D, H, kv_heads=kv_heads, bias=False)
        return hw.cost(layer, batch=B, queries=S, dtype="fp32", mask=mask(hw.mask))

    return count


def of_torch(layer: nn.Module) -> Callable[[Any], Any]:
    return lambda hw: hw.cost(layer, batch=B, queries=S, dtype="fp32")


def full(mask: Any) -> None:
    return None


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(D, H, 4 * D, batch_first=True).eval()


FULL = PROJECTIONS + products(PAIRS)
LAYERS = (
    Layer("nn.MultiheadAttention, weights", lambda: Whole(True, True), FULL, FULL,
          of_torch(nn.MultiheadAttention(D, H, bias=False, batch_first=True))),
    Layer("nn.MultiheadAttention", lambda: Whole(False, True), FULL, FULL,
          of_torch(nn.MultiheadAttention(D, H, bias=False, batch_first=True))),
    Layer("nn.MultiheadAttention, eval", lambda: Whole(False, False), FULL, FULL,
          of_torch(nn.MultiheadAttention(D, H, batch_first=True))),
    Layer("nn.TransformerEncoderLayer, eval", encoder, FULL + 2 * B * S * D * 8 * D,
          FULL + 2 * B * S * D * 8 * D, of_torch(encoder())),
    Layer("F.sdpa", lambda: Attention("sdpa"), FULL, FULL, ours(full)),
    Layer("F.sdpa, causal", lambda: Attention("causal"), FULL, PROJECTIONS + products(CAUSAL),
          ours(lambda mask: mask.causal())),
    Layer("F.sdpa, window 32", lambda: Attention("window"), FULL, PROJECTIONS + products(WINDOW),
          ours(lambda mask: mask.causal() & mask.window(W - 1))),
    Layer("F.sdpa, 2 key heads", lambda: Attention("grouped"), GROUPED + products(PAIRS),
          GROUPED + products(PAIRS), ours(full, G)),
    Layer("written with @", lambda: Attention("matmul"), FULL, FULL, ours(full)),
    Layer("written with einsum", lambda: Attention("einsum"), FULL, FULL, ours(full)),
)  # fmt: skip


def by_torch_cpu(model: nn.Module, x: Tensor) -> float:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    return counter.get_total_flops()


def by_torch_meta(model: nn.Module, x: Tensor) -> float:
    return by_torch_cpu(model.to("meta"), x.to("meta"))


def by_fvcore(model: nn.Module, x: Tensor) -> float:
    from fvcore.nn import FlopCountAnalysis

    found = FlopCountAnalysis(model, x).unsupported_ops_warnings(False)
    return 2 * found.uncalled_modules_warnings(False).total()


def by_thop(model: nn.Module, x: Tensor) -> float:
    import thop

    return 2 * thop.profile(model, inputs=(x,), verbose=False)[0]


def by_ptflops(backend: str) -> Callable[[nn.Module, Tensor], float]:
    def count(model: nn.Module, x: Tensor) -> float:
        from ptflops import get_model_complexity_info

        macs, _ = get_model_complexity_info(
            model,
            (S, D),
            input_constructor=lambda _: {"x": x},
            as_strings=False,
            print_per_layer_stat=False,
            verbose=False,
            backend=backend,
        )
        return 2 * macs

    return count


def by_calflops(model: nn.Module, x: Tensor) -> float:
    from calflops import calculate_flops

    flops, _, _ = calculate_flops(
        model, args=[x], print_results=False, print_detailed=False, output_as_string=False
    )
    return flops


def by_deepspeed(model: nn.Module, x: Tensor) -> float:
    from deepspeed.profiling.flops_profiler import get_model_profile

    _, macs, _ = get_model_profile(
        model, args=[x], print_profile=False, detailed=False, as_string=False, warm_up=0
    )
    return 2 * macs


def by_torchinfo(model: nn.Module, x: Tensor) -> float:
    from torchinfo import summary

    return 2 * summary(model, input_data=x, verbose=0).total_mult_adds


TOOLS: dict[str, tuple[str, Callable[[nn.Module, Tensor], float]]] = {
    "FlopCounterMode, CPU": ("torch", by_torch_cpu),
    "FlopCounterMode, meta": ("torch", by_torch_meta),
    "fvcore": ("fvcore", by_fvcore),
    "ptflops, pytorch": ("ptflops", by_ptflops("pytorch")),
    "ptflops, aten": ("ptflops", by_ptflops("aten")),
    "calflops": ("calflops", by_calflops),
    "DeepSpeed": ("deepspeed", by_deepspeed),
    "ultralytics-thop": ("ultralytics-thop", by_thop),
    "torchinfo": ("torchinfo", by_torchinfo),
}


OURS, TAUGHT = "headwise", "FlopCounterMode, CPU, after import headwise"


def main() -> None:
    described(__doc__).parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    versions = {name: version(name) for name in ("transformers", "accelerate")}
    rows = [counted(layer, versions) for layer in LAYERS]
    import headwise as hw

    versions["headwise"] = hw.__version__
    for layer, row in zip(LAYERS, rows, strict=True):
        cost = layer.ours(hw)
        row["counted"][OURS] = cost.flops
        row["counted"][TAUGHT] = by_torch_cpu(layer.build(), torch.randn(B, S, D))
        assert cost.flops_dense == layer.dense, layer.name
    memory = memory_rows(hw, versions)
    content = {"versions": versions, "flops": rows, "memory": memory}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "cost_peers.json"
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(table(rows, versions))
    print()
    print(memory_table(memory))
    print(path)


def counted(layer: Layer, versions: dict[str, str | None]) -> dict[str, Any]:
    """The count of every peer for a layer."""
    found: dict[str, Any] = {}
    for name, (package, count) in TOOLS.items():
        versions[package] = version(package)
        if versions[package] is None:
            continue
        torch.manual_seed(0)
        try:
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                found[name] = int(count(layer.build(), torch.randn(B, S, D)))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    return {"layer": layer.name, "dense": layer.dense, "exact": layer.exact, "counted": found}


def memory_rows(hw: Any, versions: dict[str, str | None]) -> list[dict[str, Any]]:
    """Bytes of models by accelerate and by headwise, from the same configuration files."""
    if versions["accelerate"] is None or versions["transformers"] is None:
        return []
    from accelerate import init_empty_weights
    from accelerate.utils import calculate_maximum_sizes
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    rows = []
    small = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8}
    for name, config in (
        ("GPT-2", GPT2Config()),
        ("Llama, 8 heads on 2 key heads",
         LlamaConfig(**small, num_attention_heads=8, num_key_value_heads=2)),
    ):  # fmt: skip
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(config)
        total, _ = calculate_maximum_sizes(model)
        length = 1024
        cost = hw.cost(config, batch=1, queries=length, dtype="fp32")
        rows.append(
            {
                "model": name,
                "tokens": length,
                "parameters": sum(each.numel() for each in model.parameters()),
                "accelerate": {"weights": int(total), "kv_cache": None, "activations": None},
                "headwise": {
                    "parameters": cost.params,
                    "weights": cost.weights,
                    "kv_cache": cost.kv_cache,
                    "activations": cost.activations,
                },
            }
        )
    return rows


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def verdict(counted: Any, dense: int, exact: int) -> str:
    """How a count compares with the truth.

    >>> verdict(10, 10, 10), verdict(10, 10, 6), verdict(5, 10, 10), verdict(0, 10, 10)
    ('right', 'dense', '50 %', '0')
    """
    if isinstance(counted, str):
        return counted.split(":")[0]
    if counted == exact:
        return "right"
    if counted == dense:
        return "dense"
    return "0" if counted == 0 else f"{100 * counted / exact:.3g} %"


def table(rows: list[dict[str, Any]], versions: dict[str, str | None]) -> str:
    """Markdown: a line per layer, a column per tool."""
    tools = [OURS, *(name for name in TOOLS if name in rows[0]["counted"]), TAUGHT]
    head = [f"{name} {versions[TOOLS[name][0]]}" if name in TOOLS else name for name in tools]
    lines = [f"| layer | {' | '.join(head)} |", f"|---|{'---|' * len(tools)}"]
    for each in rows:
        said = [verdict(each["counted"][tool], each["dense"], each["exact"]) for tool in tools]
        lines.append(f"| {each['layer']} | {' | '.join(said)} |")
    return "\n".join(lines)


def memory_table(rows: list[dict[str, Any]]) -> str:
    """Markdown: the bytes that each tool states."""
    lines = ["| model | tool | weights | KV cache | saved activations |", "|---|---|---|---|---|"]
    for each in rows:
        for tool in ("headwise", "accelerate"):
            found = each[tool]
            sizes = [found[x] for x in ("weights", "kv_cache", "activations")]
            said = ["–" if size is None else f"{size:,}" for size in sizes]
            lines.append(f"| {each['model']} | {tool} | {' | '.join(said)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
