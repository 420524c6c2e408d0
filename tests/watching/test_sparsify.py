"""Sparsified models equal a dense mask of the kept keys, in every way that models attend."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from tests.watching.stacks import Stack, attending, by_headwise, by_torch

torch.manual_seed(0)
SCORES = torch.rand(1, 4, 7)
CHOSEN = torch.randint(-1, 12, (2, 1, 12, 3))
POLICIES: dict[str, hw.sparse.Policy] = {
    "top": hw.sparse.TopK(3),
    "top of each head": hw.sparse.TopK((1, 2, 5, 50)),
    "window": hw.sparse.Window(2, sinks=1),
    "blocks": hw.sparse.Blocks(3, 2, by="exact"),
    "blocks by mean": hw.sparse.Blocks(3, (1, 2, 3, 9)),
    "indices": hw.sparse.Indices(CHOSEN),
    "evicted": hw.sparse.Evicted(SCORES, 3),
}


def kept(policy: hw.sparse.Policy, logits: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The keys that a policy keeps of causal logits (B, H, N, N), -inf where hidden."""
    batch, heads, n, _ = logits.shape
    found = torch.zeros(logits.shape, dtype=torch.bool)
    p = logits.softmax(-1)
    for b in range(batch):
        for h in range(heads):
            for i in range(n):
                s, own = logits[b, h, i].tolist(), i
                seen = range(own + 1)
                if isinstance(policy, hw.sparse.TopK):
                    count = policy.k if isinstance(policy.k, int) else policy.k[h]
                    keys = sorted(seen, key=lambda j: (-s[j], j))[:count]
                elif isinstance(policy, hw.sparse.Window):
                    keys = [j for j in seen if j < policy.sinks or j >= own - policy.left]
                elif isinstance(policy, hw.sparse.Indices):
                    chosen = policy.keys.expand(batch, heads, -1, -1)[b, h, i].tolist()
                    keys = [j for j in seen if j in chosen]
                elif isinstance(policy, hw.sparse.Evicted):
                    best = policy.scores[0, h].argsort(descending=True)[: int(policy.budget)]
                    keys = [j for j in seen if j in best.tolist() or j >= policy.scores.shape[-1]]
                else:
                    count = policy.count if isinstance(policy.count, int) else policy.count[h]
                    blocks = range(own // policy.size + 1)
                    rank = {}
                    for x in blocks:
                        part = slice(x * policy.size, (x + 1) * policy.size)
                        if policy.by == "exact":
                            rank[x] = float(p[b, h, i, part].sum())
                        else:
                            rank[x] = float(q[b, h, i] @ k[b, h, part].mean(0))
                            rank[x] = torch.inf if x == own // policy.size else rank[x]
                    best_blocks = sorted(blocks, key=lambda x: (-rank[x], x))[:count]
                    keys = [j for j in seen if j // policy.size in best_blocks]
                found[b, h, i, keys] = True
    return found


def by_hand(
    policies: dict[int, list[hw.sparse.Policy]], model: Stack, logs: Tensor | None = None
) -> Callable[..., Tensor]:
    def attend(layer: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        number, n = list(model.layers).index(layer), q.shape[2]
        hidden = ~torch.ones(n, n, dtype=torch.bool).tril()
        logits = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
        logits = logits if logs is None else logits + logs
        for policy in policies.get(number, []):
            seen = kept(policy, logits.detach(), q.detach(), k.detach())
            hidden = hidden | ~seen
        logits = logits.masked_fill(hidden, -torch.inf)
        blind = hidden.all(-1, keepdim=True)
        return logits.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0) @ v

    return attend


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("attend", [by_torch, by_headwise])
def test_a_model_computes_as_if_other_keys_were_not_there(
    name: str, attend: Callable[..., Tensor]
) -> None:
    torch.manual_seed(1)
    policy, model, x = POLICIES[name], Stack(attend), torch.randn(2, 12, 32)
    plain = model(x)
    with hw.sparsify(model, policy):
        out = model(x)
        out.square().sum().backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    with attending(model, by_hand({0: [policy], 1: [policy]}, model)):
        wanted = model(x)
        wanted.square().sum().backward()
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-4)
    for mine, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, atol=1e-4, rtol=1e-3)
    assert torch.equal(model(x), plain)


def test_layers_have_their_own_budgets() -> None:
    model, x = Stack(by_torch), torch.randn(2, 12, 32)
    some, other = hw.sparse.TopK(3), hw.sparse.Window(1)
    with torch.no_grad():
        for given, wanted in (
            ({"layers": 1, "policy": some}, {1: [some]}),
            ({"layers": ["*layers.0"], "policy": other}, {0: [other]}),
            ({"policy": {1: some, "layers.*": other}}, {0: [other], 1: [some]}),
            # a number says more than a name, and a name more than a pattern, in any order
            ({"policy": {"layers.*": other, "layers.0": some}}, {0: [some], 1: [other]}),
            ({"policy": {"layers.*": other, 1: some}}, {0: [other], 1: [some]}),
        ):
            with hw.sparsify(model, **given):  # type: ignore[arg-type]
                out = model(x)
            with attending(model, by_hand(wanted, model)):  # type: ignore[arg-type]
                torch.testing.assert_close(out, model(x), atol=1e-5, rtol=1e-4)


PAIRS = [
    ["top", "window"], ["blocks", "top"], ["indices", "evicted"], ["evicted", "window"],
    ["blocks", "blocks by mean", "top of each head"],
]  # fmt: skip


@pytest.mark.parametrize("names", PAIRS, ids=lambda names: " & ".join(names))
def test_nested_policies_keep_what_all_of_them_keep(names: list[str]) -> None:
    torch.manual_seed(2)
    model, x = Stack(by_torch), torch.randn(2, 12, 32)
    policies = [POLICIES[name] for name in names]
    for order in (policies, policies[::-1]):
        with ExitStack() as stack:
            for policy in order:
                stack.enter_context(hw.sparsify(model, policy))
            out = model(x)
            grads = torch.autograd.grad(out.square().sum(), list(model.parameters()))
        with attending(model, by_hand({0: policies, 1: policies}, model)):
            wanted = model(x)
            others = torch.autograd.grad(wanted.square().sum(), list(model.parameters()))
        torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-4)
        for mine, theirs in zip(grads, others, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["top", "window", "blocks", "evicted", "indices"])
def test_blocks_nest_in_any_order_and_policies_choose_by_steered_logits(name: str) -> None:
    torch.manual_seed(3)
    model, x, policy = Stack(by_torch), torch.randn(2, 12, 32), POLICIES[name]
    logs = torch.zeros(1, 4, 12, 12)
    logs[:, 2, :, 2:5] = torch.tensor(20.0).log()
    logs[:, :, 3:9, 0] += torch.tensor(0.25).log()
    steers = [("*", 2, (2, 5), 20.0), ("*", None, 0, 0.25, (3, 9))]
    with torch.no_grad():
        with attending(model, by_hand({0: [policy], 1: [policy]}, model, logs)):
            wanted = model(x)
        blocks: dict[str, Callable[[], Any]] = {
            "sparsify": lambda: hw.sparsify(model, policy),
            "watch": lambda: hw.watch(model),
            "steer": lambda: hw.steer(model, steers),
        }
        for order in permutations(blocks):
            with ExitStack() as stack:
                entered = {each: stack.enter_context(blocks[each]()) for each in order}
                torch.testing.assert_close(model(x), wanted, atol=1e-5, rtol=1e-4)
            seen = entered["watch"]
            p = torch.cat([seen.map(1, head).to_tensor() for head in range(4)], 1)
            observed = seen.layer(1).observation
            entropy = -torch.special.xlogy(p, p).sum(-1)
            torch.testing.assert_close(observed.entropy[:1], entropy, atol=1e-4, rtol=1e-4)
            own = p.diagonal(dim1=-2, dim2=-1)
            torch.testing.assert_close(observed.self_mass[:1], own, atol=1e-5, rtol=1e-4)
            before = torch.nn.functional.pad(p.diagonal(-1, -2, -1), (1, 0))
            torch.testing.assert_close(observed.previous_mass[:1], before, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(observed.sink_mass[:1], p[..., 0], atol=1e-5, rtol=1e-4)
            ones = (p.sum(-1) - 1).abs() < 1e-4
            assert bool((ones | ~p.any(-1)).all())


def test_a_watch_records_spans_and_sampled_rows_of_the_sparse_attention() -> None:
    model, x = Stack(by_torch), torch.randn(2, 12, 32)
    with torch.no_grad(), hw.sparsify(model, hw.sparse.TopK(3)):
        with hw.watch(model, spans={"some": (1, 4)}) as whole:
            model(x)
        with hw.watch(model, spans={"some": (1, 4)}, rows=5) as few:
            model(x)
    for head in range(4):
        p = whole.map(0, head).to_tensor()
        seen = whole.layer(0).observation
        torch.testing.assert_close(
            seen.spans["some"][:1, head], p[0, 0, :, 1:4].sum(-1)[None], atol=1e-5, rtol=1e-4
        )
    seen = few.layer(0).observation
    assert seen.rows is not None
    all_rows = whole.layer(0).observation
    for name in ("entropy", "self_mass", "output_norm", "logit_mean", "distance", "span_some"):
        mine, theirs = seen.values[name], all_rows.values[name][:, :, seen.rows]
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("implementation", ["sdpa", "headwise", "eager"])
@pytest.mark.parametrize("name", ["top", "window", "blocks", "blocks by mean", "evicted"])
def test_generating_with_a_cache_is_the_full_recomputation(name: str, implementation: str) -> None:
    transformers = pytest.importorskip("transformers")
    import headwise.transformers  # noqa: F401

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
        intermediate_size=48, vocab_size=64, attn_implementation=implementation,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    ids, policy = torch.randint(3, 64, (2, 9)), POLICIES[name]
    with torch.no_grad():
        plain = model(ids).logits
        with hw.sparsify(model, policy):
            assert not torch.allclose(model(ids).logits, plain, atol=1e-3)
            text = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
            again = ids
            for _ in range(5):
                again = torch.cat((again, model(again).logits[:, -1:].argmax(-1)), 1)
            assert torch.equal(text, again)
        assert torch.equal(model(ids).logits, plain)


def test_a_softmax_in_float32_of_a_float64_model_is_understood() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=48,
        vocab_size=64, initializer_range=0.5, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval().double()
    ids = torch.randint(3, 64, (2, 9))
    with torch.no_grad():
        plain = model(ids).logits
        with hw.sparsify(model, hw.sparse.TopK(9)):
            torch.testing.assert_close(model(ids).logits, plain, atol=1e-4, rtol=1e-4)


def test_learned_sinks_stay_in_the_denominator() -> None:
    torch.manual_seed(0)
    attn = hw.nn.MultiHeadAttention(32, 4, kv_heads=2, mask=hw.mask.causal(), sinks=True)
    x = torch.randn(2, 12, 32)
    with torch.no_grad():
        attn.sinks.normal_()  # type: ignore[union-attr, operator]
        with hw.sparsify(attn, hw.sparse.TopK(2)), hw.watch(attn) as seen:
            out = attn(x)
        call = attn.prepare(x)
        k = call.k.repeat_interleave(2, 1)
        logits = (call.q @ k.mT) * 8**-0.5
        logits = logits.masked_fill(~torch.ones(12, 12, dtype=torch.bool).tril(), -torch.inf)
        hidden = ~kept(hw.sparse.TopK(2), logits, call.q, k)
        logits = logits.masked_fill(hidden, -torch.inf)
        sinks = call.sinks[None, :, None, None].expand(2, 4, 12, 1)
        p = torch.cat((logits, sinks), -1).softmax(-1)[..., :-1]
        wanted = attn.join(p @ call.v.repeat_interleave(2, 1))
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(seen.map(0, 1).to_tensor(), p[:1, 1:2], atol=1e-5, rtol=1e-4)


def test_translators_and_images_are_sparsified() -> None:
    loaded = hw.load("translate")
    source, target = torch.randint(5, 40, (1, 7)), torch.randint(5, 40, (1, 5))
    config = hw.models.ViTConfig(d_model=32, layers=2, heads=4, image=8, patch=2, classes=3)
    vit, image = hw.models.ViT(config).eval(), torch.rand(1, 3, 8, 8)
    with torch.no_grad():
        for model, given in ((loaded.model, (source, target)), (vit, (image,))):
            with hw.sparsify(model, hw.sparse.TopK(100)):
                everything = model(*given)
            torch.testing.assert_close(everything, model(*given), atol=1e-4, rtol=1e-4)
            with hw.sparsify(model, hw.sparse.TopK(2)), hw.watch(model) as seen:
                model(*given)
            for layer in seen.layers:
                p = seen.map(layer.number, 1).to_tensor()
                assert int((p > 0).sum(-1).max()) == 2
                torch.testing.assert_close(p.sum(-1), torch.ones_like(p.sum(-1)))
        says = "Window.* counts from a row's own key, and its rows look at another sequence"
        with pytest.raises(ValueError, match=says), hw.sparsify(loaded.model, hw.sparse.Window(2)):
            loaded.model(source, target)


def test_sliding_layers_whose_cache_forgets_are_sparsified() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
        intermediate_size=48, vocab_size=64, sliding_window=4,
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    ids = torch.randint(3, 64, (1, 9))
    with torch.no_grad():
        for policy in (hw.sparse.TopK(2), hw.sparse.Window(1, sinks=7), hw.sparse.Blocks(1, 2)):
            with hw.sparsify(model, policy):
                text = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
                again = ids
                for _ in range(5):
                    again = torch.cat((again, model(again).logits[:, -1:].argmax(-1)), 1)
                assert torch.equal(text, again)
        blocks = hw.sparsify(model, hw.sparse.Blocks(4, 2))
        with pytest.raises(ValueError, match="forgot the first"), blocks:
            model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)


class WrittenOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.heads = nn.Linear(32, 96), 4

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        return (torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("model", "given", "says"),
    [
        (Stack(by_torch), {"policy": 4}, "takes a policy: hw.sparse.TopK"),
        (Stack(by_torch), {"policy": hw.sparse.TopK((1, 2))}, "has 2 numbers, and this call 4"),
        (Stack(by_torch), {"policy": {7: hw.sparse.TopK(2)}}, "in layer 7 changed nothing"),
        (Stack(by_torch), {"policy": {}}, "is about no layer"),
        (Stack(by_torch), {"policy": {0.5: hw.sparse.TopK(2)}}, "must be a number or a name"),
        (Stack(by_torch), {"policy": hw.sparse.TopK(2), "layers": [9]}, "changed nothing"),
        (
            Stack(by_torch),
            {"policy": {0: hw.sparse.TopK(2)}, "layers": 0},
            "names its layers already",
        ),
        (Stack(by_torch), {"policy": hw.sparse.Indices(CHOSEN[:, :, :5])}, "this call needs"),
        (WrittenOut(), {"policy": hw.sparse.TopK(2)}, "its attention is written out"),
        (nn.Linear(32, 32), {"policy": hw.sparse.TopK(2)}, "changed nothing.* none"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_can_not_be_sparse_is_refused(
    model: nn.Module, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says), hw.sparsify(model, **given):
        model(torch.randn(2, 12, 32))
