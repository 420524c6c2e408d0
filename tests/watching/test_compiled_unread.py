"""Attention that can't be read in compiled code: named, with its reason, as in eager models."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._dynamo.utils
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import headwise as hw
from headwise.score import Dot

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout((q @ k.mT / math.sqrt(8)).softmax(-1), 0.0) @ v


def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = nn.Softmax(-1)(torch.einsum("bhid,bhjd->bhij", q, k))
    return torch.einsum("bhij,bhjd->bhid", weights.to(v.dtype), v)


def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = flex_attention(q, k, v)
    assert isinstance(out, Tensor)
    return out


def hidden(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch._C._nn.scaled_dot_product_attention(q, k, v)


def functional(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    x, one = q.transpose(1, 2).flatten(2).transpose(0, 1), torch.eye(32)
    given = (x, x, x, 32, 4, torch.cat([one] * 3), None, None, None, False, 0.0, one, None)
    out = F.multi_head_attention_forward(*given, need_weights=False)[0]
    return out.transpose(0, 1).unflatten(-1, (4, 8)).transpose(1, 2)


def read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def own(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return hw.attention(q, k, v, score=Dot(0.5), mask=hw.mask.causal())


class Layer(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.qkv, self.attend = nn.Linear(32, 96).requires_grad_(False), attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        return x + self.attend(q, k, v).transpose(1, 2).flatten(2)


class Gated(nn.Module):
    """A softmax that is no attention: it chooses among three linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.maps = nn.Linear(32, 3), nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).softmax(-1)
        return torch.einsum("bnc,bncd->bnd", chosen, self.maps(x).unflatten(-1, (3, 32)))


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize(
    ("attend", "reason"),
    [
        (written_out, r"its attention is written out.* in compiled code \(test_compiled_unread"),
        pytest.param(einsum, "its attention is written out", marks=pytest.mark.slow),
        (flex, r"it calls flex_attention in compiled code \(test_compiled_unread\.py, line"),
        (functional, r"it calls multi_head_attention_forward in compiled code \(test_compiled_unr"),
        pytest.param(
            hidden, "it calls scaled_dot_product_attention by a name", marks=pytest.mark.slow
        ),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_calls_that_are_not_read_are_listed(attend: Attend, reason: str) -> None:
    model = nn.Sequential(Layer(attend), Layer(read), Layer(attend))
    fast, x = compiled(model), torch.randn(2, 6, 32)
    with hw.watch(fast, maps=False) as seen:
        fast(x)
    with pytest.warns(UserWarning, match=reason):
        table = seen.heads()
    assert {row["name"] for row in table} == {"1"}
    assert "(could not be read: 0, 2)" in str(table)
    assert seen.unread == ["0", "2"]
    with hw.watch(fast, maps=False) as again:  # the graph is there already
        fast(x)
    assert again.unread == ["0", "2"]
    strict = hw.watch(fast, maps=False, strict=True)
    with pytest.raises(ValueError, match=f"0 can't be watched: {reason}"), strict:
        fast(x)


def test_a_model_in_a_folder_called_headwise_is_found_by_its_line(tmp_path: Path) -> None:
    own = tmp_path / "torch" / "headwise" / "own_model.py"
    source = "def attend(q, k, v):\n    return (q @ k.mT).softmax(-1) @ v\n"
    inside: dict[str, Attend] = {}
    exec(compile(source, str(own), "exec"), inside)
    fast = compiled(nn.Sequential(Layer(inside["attend"]), Layer(read)))
    with hw.watch(fast, maps=False) as seen:
        fast(torch.randn(2, 6, 32))
    with pytest.warns(UserWarning, match=r"own_model\.py, line 2\)"):
        seen.heads()


def test_nothing_in_the_package_looks_for_a_name_in_a_path() -> None:
    package = Path(hw.__file__).parent
    looked_for = re.compile(r"[\\/][^ ]{0,8}\b(torch|headwise)\b[^ ]{0,8}[\\/]|\w+-packages")
    found = [
        f"{path.relative_to(package)}:{node.lineno}: {node.value}"
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if "\n" not in node.value and looked_for.search(node.value)
    ]
    assert found == []


def test_a_model_of_which_nothing_is_read_raises() -> None:
    fast, x = compiled(nn.Sequential(Layer(flex))), torch.randn(2, 6, 32)
    watch = hw.watch(fast)
    with pytest.raises(ValueError, match="could be read in this Sequential; 0: it calls"), watch:
        fast(x)


def test_a_call_that_its_adapter_refuses_is_listed() -> None:
    class More(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(32, 4, batch_first=True, add_bias_kv=True)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x, x, x)[0]

    fast, x = compiled(nn.Sequential(More(), Layer(read))), torch.randn(2, 6, 32)
    with hw.watch(fast, maps=False) as seen:
        fast(x)
    with pytest.warns(UserWarning, match=r"0\.inner: it uses add_bias_kv.*\(in compiled code\)"):
        assert len(seen.heads()) == 4


def test_a_softmax_that_is_no_attention_is_not_listed() -> None:
    fast, x = compiled(nn.Sequential(Gated(), Layer(read))), torch.randn(2, 6, 32)
    with hw.watch(fast, strict=True, maps=False) as seen:
        fast(x)
    assert seen.unread == []


def test_equal_layers_that_share_a_graph_are_all_listed() -> None:
    model, x = (
        nn.Sequential(Layer(written_out), Layer(written_out), Layer(read)),
        torch.randn(2, 6, 32),
    )
    for layer in model:
        layer.compile(fullgraph=True, backend="aot_eager")
    with hw.watch(model, maps=False) as seen:
        model(x)
    with pytest.warns(UserWarning, match="2 modules"):
        assert len(seen.heads()) == 4
    assert seen.unread == ["0", "1"]


def test_what_eager_calls_read_is_not_listed_and_is_counted_once() -> None:
    model, x = nn.Sequential(Layer(written_out), Layer(read)), torch.randn(2, 6, 32)
    fast = compiled(model)
    with hw.watch(fast, maps=False, layers="1"):
        fast(x)  # its graph is known from here on
    with hw.watch(model, maps=False) as seen:
        model(x)
    assert seen.unread == []
    assert [int(layer.counted()[0]) for layer in seen.layers] == [12, 12]


def test_hw_attention_in_somebodys_module_is_read() -> None:
    model, x = nn.Sequential(Layer(own)), torch.randn(2, 6, 32)
    with hw.watch(model) as seen:
        model(x)
    fast = compiled(model)
    with hw.watch(fast) as watch:
        fast(x)
    assert watch.heads()["entropy_mean"] == pytest.approx(seen.heads()["entropy_mean"])
    torch.testing.assert_close(watch.map(0, 1)[0, 0], seen.map(0, 1)[0, 0])


def test_a_run_folder_names_what_is_not_read(tmp_path: Path) -> None:
    fast, x = compiled(nn.Sequential(Layer(flex), Layer(read))), torch.randn(2, 6, 32)
    watch = hw.watch(fast, maps=False)
    with watch, watch.record(tmp_path / "run"):
        fast(x)
        with pytest.warns(UserWarning, match="0: it calls flex"):
            watch.step()
    assert hw.watching.open_run(tmp_path / "run").unread == ["0"]
