"""The indexer's loss against the dense formula in float64, with its gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import headwise as hw
from tests.oracle import answer
from tests.problems import Call, Recipe, recipes, small_blocks

problems = recipes(longest=14, dropout="none", dtype="float64", logits=("usual", "tiny"))
blocks = st.sampled_from((nullcontext, small_blocks))


def indexer(call: Call, heads: int = 3, width: int = 5) -> list[Tensor]:
    sizes, numbers = call.sizes, torch.Generator().manual_seed(call.seed + 1)
    shapes = (
        (sizes.batch, heads, sizes.queries, width),
        (sizes.batch, sizes.keys, width),
        (sizes.batch, heads, sizes.queries),
    )
    made = (torch.randn(shape, generator=numbers, dtype=torch.float64) for shape in shapes)
    return [x.requires_grad_() for x in made]


def dense(call: Call, index: list[Tensor], selected: Tensor | None = None) -> Tensor:
    """The formula, written out."""
    found = answer(call)
    s = found.s.detach()
    if selected is not None:
        some = torch.zeros(*s.shape[:1], *s.shape[2:], dtype=torch.bool)
        for b in range(s.shape[0]):
            for i in range(s.shape[2]):
                for j in selected[b if selected.shape[0] > 1 else 0, i].tolist():
                    if 0 <= j < s.shape[3]:
                        some[b, i, j] = True
        s = s.masked_fill(~some[:, None], -torch.inf)
    columns = s
    if call.sinks is not None:
        columns = torch.cat(
            [s, call.sinks.double()[None, :, None, None].expand(*s.shape[:3], 1)], -1
        )
    p = columns.softmax(-1).nan_to_num(0)[..., : s.shape[3]]
    target = p.sum(1)  # (B, N, M)
    seen = (s != -torch.inf).any(1)
    rows = seen.any(-1)
    target = target / target.sum(-1, keepdim=True).masked_fill(~rows[..., None], 1)
    q, k, w = index
    scores = torch.einsum("bhn,bhnm->bnm", w, (q @ k[:, None].mT).relu())
    scores = scores.masked_fill(~seen, -torch.inf).masked_fill(~rows[..., None], 0)
    log_q = scores.log_softmax(-1).masked_fill(~seen, 0)
    divergence = (torch.xlogy(target, target) - target * log_q).sum(-1)
    return (divergence * rows).sum() / rows.sum().clamp_min(1)


def sparse(call: Call, index: list[Tensor], selected: Tensor | None = None) -> Tensor:
    return hw.index_loss(call.q, call.k, *index, selected=selected, **call.options())


@given(problems, blocks, st.booleans())
def test_the_loss_and_its_gradients_are_those_of_the_dense_formula(
    recipe: Recipe, blocks: Callable, some: bool
) -> None:
    call = recipe.call()
    index, sizes = indexer(call), call.sizes
    selected = None
    if some:
        numbers = torch.Generator().manual_seed(recipe.seed % 2**31)
        shape = (1 if recipe.seed % 2 else sizes.batch, sizes.queries, 4)
        selected = torch.randint(-1, sizes.keys + 1, shape, generator=numbers)
    with blocks():
        loss = sparse(call, index, selected)
        grads = torch.autograd.grad(loss, index)
    wanted = dense(call, index, selected)
    torch.testing.assert_close(loss, wanted, rtol=1e-9, atol=1e-9, msg=str(recipe))
    for grad, right in zip(grads, torch.autograd.grad(wanted, index), strict=True):
        torch.testing.assert_close(grad, right, rtol=1e-8, atol=1e-9, msg=str(recipe))


def test_the_main_heads_learn_nothing() -> None:
    q, k = (x.requires_grad_() for x in torch.randn(2, 1, 2, 9, 8).unbind(0))
    sinks = torch.zeros(2, requires_grad=True)
    index = (torch.randn(1, 2, 9, 4, requires_grad=True), torch.randn(1, 9, 4), torch.ones(1, 2, 9))
    hw.index_loss(q, k, *index, mask=hw.mask.causal(), sinks=sinks).backward()
    assert q.grad is k.grad is sinks.grad is None
    assert index[0].grad.any()


def test_a_perfect_indexer_has_no_loss_and_no_gradient() -> None:
    q, k = torch.randn(2, 1, 1, 12, 8, dtype=torch.float64).unbind(0)
    q, k = q.abs(), k.abs()  # so that ReLU changes nothing
    weights = torch.full((1, 1, 12), 8**-0.5, dtype=torch.float64)
    index_q = q.clone().requires_grad_()
    loss = hw.index_loss(q, k, index_q, k[:, 0], weights, mask=hw.mask.causal())
    assert abs(loss.item()) < 1e-12
    assert torch.autograd.grad(loss, index_q)[0].abs().max() < 1e-12


def test_training_on_the_loss_finds_the_keys_that_attention_looks_at() -> None:
    torch.manual_seed(0)
    q, k = 3 * torch.randn(1, 4, 48, 8), torch.randn(1, 1, 48, 8)
    index_q = torch.nn.Parameter(0.1 * torch.randn(1, 8, 48, 8))
    index_w = torch.nn.Parameter(torch.ones(1, 8, 48))
    adam, mask = torch.optim.Adam([index_q, index_w], lr=0.1), hw.mask.causal()
    amap = hw.attention_map(q, k, mask=mask)

    def recall() -> float:
        scores = torch.einsum("bhn,bhnm->bnm", index_w, (index_q @ k.mT).relu())
        scores = scores.masked_fill(torch.ones(48, 48).triu(1).bool(), -torch.inf)
        some = hw.sparse.Indices(scores.topk(8).indices[:, None])
        return amap.recall(some).of_mass.mean().item()

    before = recall()
    losses = []
    for _ in range(60):
        loss = hw.index_loss(q, k, index_q, k[:, 0], index_w, mask=mask)
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    assert recall() > before


def test_a_compiled_loss_is_the_same() -> None:
    q, k = torch.randn(2, 1, 2, 20, 8).unbind(0)
    index = [torch.randn(1, 3, 20, 4), torch.randn(1, 20, 4), torch.randn(1, 3, 20)]
    index = [x.requires_grad_() for x in index]

    def run() -> Tensor:
        return hw.index_loss(q, k, *index, mask=hw.mask.causal())

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(), run())
    pair = [torch.autograd.grad(f(), index) for f in (compiled, run)]
    torch.testing.assert_close(*pair)


def test_bfloat16_agrees_with_float64() -> None:
    q, k = torch.randn(2, 2, 4, 80, 16).bfloat16().unbind(0)
    index = [torch.randn(2, 3, 80, 8), torch.randn(2, 80, 8), torch.rand(2, 3, 80)]
    index = [x.bfloat16() for x in index]
    half = hw.index_loss(q, k, *index, mask=hw.mask.causal())
    wide = hw.index_loss(
        q.double(), k.double(), *(x.double() for x in index), mask=hw.mask.causal()
    )
    assert half.dtype == torch.float32
    torch.testing.assert_close(half.double(), wide, rtol=1e-5, atol=1e-6)


def test_rows_without_keys_do_not_count() -> None:
    q, k = torch.randn(2, 1, 2, 6, 8, dtype=torch.float64).unbind(0)
    index = [
        x.double() for x in (torch.randn(1, 2, 6, 4), torch.randn(1, 6, 4), torch.ones(1, 2, 6))
    ]
    some = hw.index_loss(q, k, *index, mask=hw.mask.causal() & hw.mask.window(5, offset=-2))
    shown = [x[:, :, 2:] for x in (q, index[0], index[2])]
    rest = hw.index_loss(
        shown[0], k, shown[1], index[1], shown[2], mask=hw.mask.window(7, -2, offset=2)
    )
    torch.testing.assert_close(some, rest)
    blind = hw.index_loss(q, k, *index, mask=hw.mask.lengths([0]))
    assert float(blind) == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"index_q": torch.zeros(1, 2, 5)}, r"index_q must be a tensor \(batch, index heads"),
        (
            {"index_k": torch.zeros(1, 6, 3)},
            r"index_k has shape \(1, 6, 3\); this call needs",
        ),
        ({"index_weights": torch.zeros(1, 1, 5)}, r"index_weights has shape"),
        ({"selected": torch.zeros(1, 5, 2)}, "selected must be an integer tensor"),
        ({"selected": torch.ones(1, 5, 5).bool()}, "selected must be an integer tensor"),
        ({"selected": torch.zeros(1, 4, 2, dtype=torch.int64)}, "selected has shape"),
        ({"q": torch.zeros(2, 5, 8)}, "q and k need the axes"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_call(change: dict[str, Tensor], said: str) -> None:
    given = {
        "q": torch.zeros(1, 2, 5, 8),
        "k": torch.zeros(1, 2, 5, 8),
        "index_q": torch.zeros(1, 2, 5, 3),
        "index_k": torch.zeros(1, 5, 3),
        "index_weights": torch.zeros(1, 2, 5),
    } | change
    with pytest.raises(ValueError, match=rf"(?s){said}.*\n  in hw\.index_loss\(q float32"):
        hw.index_loss(**given)


@pytest.mark.parametrize("family", ["DeepseekV32", "GlmMoeDsa"])
def test_the_loss_of_a_real_indexer_is_that_of_its_own_scores(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"this version of transformers has no {family}")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=50, hidden_size=32, intermediate_size=32, moe_intermediate_size=16,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1, kv_lora_rank=16,
        q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, index_n_heads=3,
        index_head_dim=16, index_topk=6, max_position_embeddings=64,
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForCausalLM")(config).double().eval()
    layer = model.model.layers[0].self_attn
    caught: dict[str, Tensor] = {}
    indexer = type(layer.indexer)

    def products(module: torch.nn.Module, given: tuple, out: Tensor) -> None:
        caught["selected"] = out

    multiply = torch.matmul

    def matmul(a: Tensor, b: Tensor, **more: object) -> Tensor:
        if a.ndim == 4 and a.shape[1] != 4 and a.shape[-1] == 16:  # q (B, N, Hi, Di) by k
            caught["q"], caught["k"] = a, b
        if a.ndim == 4 and a.shape[-2] == 1 and a.shape[-1] == 3:  # weights by ReLU(scores)
            caught["w"] = a
        return multiply(a, b, **more)

    layer.indexer.register_forward_hook(products)
    ids = torch.randint(0, 50, (2, 24))
    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), hw.watch(model) as seen:
        patch.setattr(torch, "matmul", matmul)
        model(ids)
    assert indexer.__name__.endswith("Indexer")
    scale = config.index_head_dim**-0.5
    q, k = caught["q"].double().transpose(1, 2), caught["k"].double()[:, 0].mT
    w = caught["w"].double()[..., 0, :].mT * scale  # ReLU(scale · x) = scale · ReLU(x)
    scores = torch.einsum("bhn,bhnm->bnm", w, (q @ k[:, None].mT).relu())
    causal = torch.ones(24, 24).tril().bool()
    own = scores.masked_fill(~causal, -torch.inf).topk(6).indices
    late = slice(6, None)  # earlier rows see fewer keys than the indexer must choose
    assert torch.equal(own[:, late].sort().values, caught["selected"][:, late].long().sort().values)
    call = seen.layers[0].map().region
    loss = hw.index_loss(
        call.q, call.k, q, k, w, score=hw.Dot(call.terms.scale), mask=hw.mask.causal()
    )
    main = call.terms.scale * call.q @ call.k.mT.repeat_interleave(call.group, 1)
    p = main.masked_fill(~causal, -torch.inf).softmax(-1).sum(1) / 4
    log_q = scores.masked_fill(~causal, -torch.inf).log_softmax(-1).masked_fill(~causal, 0)
    wanted = (torch.xlogy(p, p) - p * log_q).sum(-1).mean()
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-7)
    recall = hw.attention_map(call.q, call.k, mask=hw.mask.causal()).recall(
        hw.sparse.Indices(own[:, None])
    )
    assert (recall.keys[..., late] == 6).all()
