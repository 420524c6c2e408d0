"""Knocked-out edges equal a dense mask on the reference, in every way that models attend."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.bias import plus
from headwise.core.edges import Edge, Steer
from headwise.core.place import Place
from headwise.core.steering import Hole, segments, without
from tests.thinned import thinned
from tests.watching.stacks import Layer, Stack, attending, by_headwise, by_torch

EDGES = [(1, 2, (2, 5)), (0, None, 0, (3, 9)), (1, 0, (8, 12))]


def seen_without(edges: list[tuple[object, ...]], layer: int, heads: int, n: int) -> Tensor:
    """The causal mask without a layer's edges, (1, H, N, M), written out by hand."""
    seen = torch.ones(n, n, dtype=torch.bool).tril().repeat(1, heads, 1, 1)
    for number, head, keys, *queries in edges:
        if number != layer:
            continue
        for h in range(heads) if head is None else (head,):
            first, last = (keys, keys + 1) if isinstance(keys, int) else keys
            rows = slice(*queries[0]) if queries else slice(None)
            seen[0, h, rows, first:last] = False
    return seen


def by_mask(layer: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.zeros(q.shape[2], k.shape[2]).masked_fill(
        ~torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(), -torch.inf
    )
    return F.scaled_dot_product_attention(q, k, v, attn_mask=hidden)


def by_definition(edges: list[tuple[object, ...]], model: Stack) -> Callable[..., Tensor]:
    def attend(layer: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        number = list(model.layers).index(layer)
        seen = seen_without(edges, number, q.shape[1], q.shape[2])
        return hw.attention(q, k, v, mask=hw.mask.dense(seen), engine="reference")

    return attend


@pytest.mark.parametrize("attend", [by_torch, by_mask, by_headwise])
def test_a_model_without_edges_is_the_reference_with_a_dense_mask(
    attend: Callable[..., Tensor],
) -> None:
    model, x = Stack(attend), torch.randn(2, 12, 32)
    plain = model(x)
    with hw.knock_out(model, EDGES):
        out = model(x)
        out.square().sum().backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    with attending(model, by_definition(EDGES, model)):
        wanted = model(x)
        wanted.square().sum().backward()
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-4)
    for mine, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, atol=1e-4, rtol=1e-3)
    assert not torch.allclose(out, plain)
    assert torch.equal(model(x), plain)  # as it was before


def test_modules_of_headwise_lose_the_same_edges() -> None:
    attn = hw.nn.MultiHeadAttention(32, 4, kv_heads=2, mask=hw.mask.causal())
    x, edges = torch.randn(2, 12, 32), [(0, 2, (2, 5)), (0, 1, 0)]
    with hw.knock_out(attn, edges):
        out = attn(x)
    call = attn.prepare(x)
    seen = hw.mask.dense(seen_without(edges, 0, 4, 12))
    wanted = attn.join(hw.attention(call.q, call.k, call.v, mask=seen, engine="reference"))
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("bare", [True, False], ids=["attention", "encoder layer"])
def test_pytorchs_attention_loses_the_same_edges(bare: bool) -> None:
    x, edges = torch.randn(2, 12, 32), [("*self_attn" if not bare else 0, 2, (2, 5))]
    seen = seen_without([(0, *edges[0][1:])], 0, 4, 12).expand(2, -1, -1, -1).flatten(0, 1)
    causal = ~torch.ones(12, 12, dtype=torch.bool).tril()
    if bare:
        attn = nn.MultiheadAttention(32, 4, batch_first=True).eval()
        with hw.knock_out(attn, edges):
            out, weights = attn(x, x, x, attn_mask=causal)
        wanted, theirs = attn(x, x, x, attn_mask=~seen)
        torch.testing.assert_close(weights, theirs)
    else:
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
        with torch.no_grad(), hw.knock_out(layer, edges):  # without it the fast path would run
            out = layer(x, src_mask=torch.zeros(12, 12).masked_fill(causal, -torch.inf))
        wanted = layer(x, src_mask=~seen)
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "headwise"])
def test_models_of_transformers_lose_the_same_edges(implementation: str) -> None:
    transformers = pytest.importorskip("transformers")
    import headwise.transformers  # noqa: F401

    config = transformers.LlamaConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
        intermediate_size=48, vocab_size=64, attn_implementation=implementation,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(64, (1, 12))
    outs = []
    for number in (0, 1):  # of each layer by a mask, and by edges
        edges = [(number, 2, (2, 5)), (number, 0, 0, (4, 8))]
        with hw.knock_out(model, edges):
            outs.append(model(ids).logits)
        module = model.model.layers[number].self_attn
        seen = seen_without(edges, number, 4, 12)
        added = torch.zeros(1, 4, 12, 12).masked_fill(~seen, -torch.inf)
        eager = transformers.LlamaForCausalLM(config).eval()
        eager.load_state_dict(model.state_dict())
        eager.set_attn_implementation("eager")
        module = eager.model.layers[number].self_attn
        module.register_forward_pre_hook(
            lambda _, given, options, added=added: (given, options | {"attention_mask": added}),
            with_kwargs=True,
        )
        wanted = eager(ids).logits
        torch.testing.assert_close(outs[-1], wanted, atol=1e-5, rtol=1e-4)
    loss = outs[-1].sum()
    loss.backward()
    assert model.model.embed_tokens.weight.grad is not None


def test_while_generating_a_key_stays_hidden() -> None:
    gpt = hw.load("gpt")
    ids = gpt.encode("to be or not to be")
    edges = [(2, 1, (1, 3)), (3, None, 4, (5, 7))]
    with torch.no_grad(), hw.knock_out(gpt.model, edges):
        whole = gpt.model(ids)
        caches = [hw.nn.GrowingCache() for _ in gpt.model.blocks]
        parts = [gpt.model(part, caches=caches) for part in ids.split([3, 1, 1, 1, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("way", thinned(["whole", "in place", "block by block"]))
def test_a_compiled_model_loses_the_same_edges(way: str) -> None:
    plain, x = Stack(by_torch), torch.randn(2, 12, 32)
    with hw.knock_out(plain, EDGES):
        wanted = plain(x)
    model: nn.Module = plain
    if way == "whole":
        model = torch.compile(plain, backend="eager", fullgraph=True)
    for part in (plain,) if way == "in place" else plain.layers if way != "whole" else ():
        part.compile(backend="eager")
    before = model(x)
    with hw.knock_out(model, EDGES):
        assert torch.equal(model(x), wanted)
    with hw.watch(model, spans={"cut": (2, 5)}) as seen:
        with seen.knock_out((1, 2, (2, 5))):
            model(x)
        assert seen.heads().where(layer=1, head=2)["span_cut_mean"] == [0]
        assert torch.equal(model(x), before)  # compiled again, and watched
    assert not seen.unread


def test_a_watch_records_what_is_left() -> None:
    model, x = Stack(by_torch), torch.randn(2, 12, 32)
    with hw.watch(model, spans={"cut": (2, 5)}) as seen, seen.knock_out((1, 2, (2, 5))):
        model(x)
    weight = {(row["layer"], row["head"]): row["span_cut_mean"] for row in seen.heads()}
    assert weight[1, 2] == 0
    assert all(x > 0 for place, x in weight.items() if place != (1, 2))
    assert not seen.map(1, 2)[0, 0, :, 2:5].any()


def test_a_key_that_no_head_sees_is_not_padding() -> None:
    model, x = Stack(by_torch), torch.randn(2, 12, 32)
    with hw.watch(model) as seen, seen.knock_out([(0, None, 11), (1, None, 11)]):
        model(x)
    assert seen.layer(0).padding is None or not seen.layer(0).padding.any()
    assert not seen.map(0, 1)[0, 0, :, 11].any()


def test_two_holes_in_a_row_are_a_bias_of_keys() -> None:
    q, k, v = torch.randn(3, 1, 4, 12, 8).unbind(0)
    q, place = q[:, :, :5], Place(batch=1, heads=4, queries=5, keys=12)
    holes = [hole(0, (1, 2), slice(0, 5)), hole(0, (4, 5), slice(0, 5))]
    bias, mask = hw.ALiBi(torch.rand(4)), hw.mask.causal(offset=3)
    assert without(mask, holes, place) is None
    steer = Steer(Edge(0, 0, 0), 0.0)
    (run,) = segments([(steer, x) for x in holes], place, torch.float32)
    assert run.logs is not None
    assert run.logs.shape == (1, 4, 1, 12)
    seen = mask.to_dense(place).expand(1, 4, 5, 12).clone()
    seen[:, 0, :, [1, 4]] = False
    added = -bias.slopes[:, None, None] * (torch.arange(5)[:, None] + 3 - torch.arange(12)).abs()
    wanted = hw.attention(q, k, v, mask=hw.mask.dense(seen), bias=added[None], engine="reference")
    found = hw.attention(q, k, v, mask=mask, bias=plus(bias, run.logs))
    torch.testing.assert_close(found, wanted)


def hole(head: int, keys: tuple[int, int], rows: slice = slice(0, 12)) -> Hole:
    return Hole(slice(head, head + 1), rows, keys)


two = hw.mask.causal() & (hw.mask.window(3) | hw.mask.prefix(2))


@pytest.mark.parametrize(
    ("mask", "holes", "pieces"),
    [
        (None, [hole(0, (0, 3))], 1),
        (hw.mask.causal(), [hole(1, (9, 12), slice(2, 5))], 1),
        (hw.mask.causal(), [hole(0, (3, 5)), hole(1, (3, 5)), hole(1, (5, 7))], 2),
        (two, [hole(0, (4, 5))], 0),
        (None, [hole(0, (1, 2)), hole(0, (6, 8), slice(4, 9))], 0),
    ],
    ids=["at the start", "at the end", "joined", "two intervals", "two holes"],
)
def test_holes_are_intervals_where_that_is_enough(
    mask: hw.mask.Mask | None, holes: list[Hole], pieces: int
) -> None:
    place = Place(batch=1, heads=4, queries=12, keys=12)
    found = without(mask, holes, place)
    if not pieces:
        assert found is None
        return
    assert found is not None
    wanted = torch.ones(1, 4, 12, 12, dtype=torch.bool)
    wanted = wanted if mask is None else wanted & mask.to_dense(place)
    for heads, rows, (first, last), _ in holes:
        wanted[:, heads, rows, first:last] = False
    assert found.pieces == pieces
    assert torch.equal(found.to_dense(place).expand(1, 4, 12, 12), wanted)


class WrittenOut(Layer):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out((torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("model", "edges", "says"),
    [
        (Stack(by_torch), (1, 7, 0), "layer 1 has no head 7; its heads are 0 to 3"),
        (
            Stack(by_torch),
            (5, 0, 0),
            r"\(5, 0, \(0, 1\), None\) hid nothing.* 0 layers.0, 1 layers.1",
        ),
        (Stack(by_torch), (1, 0, 99), "hid nothing"),
        (WrittenOut(by_torch), (0, 0, 0), "its attention is written out"),
        (Stack(by_torch), [], "there is no edge"),
        (Stack(by_torch), "x", "a list of"),
        (Stack(by_torch), (1, 2), "not an edge"),
        (Stack(by_torch), (1.5, 0, 0), "must be a number or a name"),
        (Stack(by_torch), (1, -1, 0), "must be a number, or None"),
        (Stack(by_torch), (1, 0, (3, 3)), "are not positions"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_can_not_be_hidden_is_refused(model: nn.Module, edges: object, says: str) -> None:
    with pytest.raises(ValueError, match=says), hw.knock_out(model, edges):
        model(torch.randn(2, 12, 32))
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_row_of_pytorchs_attention_without_keys_gives_only_the_bias() -> None:
    attn, x = nn.MultiheadAttention(32, 4), torch.randn(12, 2, 32)
    with hw.knock_out(attn, (0, None, (0, 12))):
        out, weights = attn(x, x, x)
    torch.testing.assert_close(out, attn.out_proj.bias.expand(12, 2, -1))
    assert not weights.any()


def test_the_weights_that_a_model_returns_are_without_the_edges() -> None:
    transformers = pytest.importorskip("transformers")
    import headwise.transformers  # noqa: F401

    config = transformers.LlamaConfig(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=48,
        vocab_size=64, attn_implementation="headwise",
    )  # fmt: skip
    model, ids = transformers.LlamaForCausalLM(config).eval(), torch.randint(64, (1, 9))
    with torch.no_grad(), hw.knock_out(model, (0, 2, (2, 5))):
        (weights,) = model(ids, output_attentions=True).attentions
    assert not weights[0, 2, :, 2:5].any()
    assert weights[0, 1, :, 2:5].any()
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4, 9))


def test_a_call_without_a_batch_loses_its_edges() -> None:
    class Alone(Layer):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(1, 2, 0, 3).unbind(0)
            return self.out(hw.attention(q, k, v).transpose(0, 1).flatten(1))

    model, x = Alone(by_headwise), torch.randn(12, 32)
    with torch.no_grad():
        with hw.knock_out(model, (0, None, (0, 11))):
            out = model(x)
        value = model.qkv(x)[11, 64:]  # the only key that is left
    torch.testing.assert_close(out, model.out(value).expand(12, 32))
