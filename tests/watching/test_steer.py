"""Steered weights equal factors that are multiplied by hand, in every way that models attend."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.core.mask_parts import rows_of
from headwise.core.place import Place
from headwise.watching.recorder import changed_call
from tests.watching.foreign import implementation, model_of
from tests.watching.stacks import Stack, attending, by_headwise, by_torch

STEERS: list[tuple[Any, ...]] = [
    (1, 2, (2, 5), 3.0),
    (0, None, 0, 0.25, (3, 9)),
    (1, 0, slice(8, 12), 0),
    (1, 2, 4, 0.5),
]


def by_distance(layer: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return hw.attention(q, k, v, mask=hw.mask.causal(), bias=hw.ALiBi(4), softcap=2.0)


def factors_of(steers: list[tuple[Any, ...]], layer: int, heads: int, n: int, m: int) -> Tensor:
    """The factor of each weight, (1, H, N, M)."""
    found = torch.ones(1, heads, n, m, dtype=torch.float64)
    for number, head, keys, factor, *queries in steers:
        if number != layer:
            continue
        heads_of = slice(None) if head is None else slice(head, head + 1)
        bounds = (keys, keys + 1) if isinstance(keys, int) else keys
        keys = bounds if isinstance(bounds, slice) else slice(*bounds)
        rows = slice(*queries[0]) if queries else slice(None)
        found[:, heads_of, rows, keys] *= factor
    return found


def by_hand(logits: Tensor, seen: Tensor, factors: Tensor, v: Tensor) -> Tensor:
    weights = factors * (logits - logits.amax(-1, keepdim=True)).exp() * seen
    return (weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)) @ v


def steered(attend: Callable[..., Tensor], steers: list[tuple[Any, ...]], model: Stack) -> Any:
    """The attention function with the factors multiplied by hand, in float64."""

    def by_definition(layer: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        number, n = list(model.layers).index(layer), q.shape[2]
        logits = (q @ k.mT).double() * 8**-0.5
        if attend is by_distance:
            away = (torch.arange(n)[:, None] - torch.arange(n)).abs()
            logits = 2 * torch.tanh(logits / 2) - hw.ALiBi(4).slopes[:, None, None] * away
        seen = torch.ones(n, n).tril()
        factors = factors_of(steers, number, 4, n, n)
        return by_hand(logits, seen, factors, v.double()).to(q.dtype)

    return by_definition


@pytest.mark.parametrize("attend", [by_torch, by_headwise, by_distance])
def test_weights_are_multiplied_before_they_are_normalised(attend: Callable[..., Tensor]) -> None:
    model, x = Stack(attend), torch.randn(2, 12, 32)
    plain = model(x)
    with hw.steer(model, STEERS):
        out = model(x)
        out.square().sum().backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    with attending(model, steered(attend, STEERS, model)):
        wanted = model(x)
        wanted.square().sum().backward()
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-4)
    for mine, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, atol=1e-4, rtol=1e-3)
    assert torch.equal(model(x), plain)  # as it was before


def test_factors_have_exact_gradients() -> None:
    torch.manual_seed(1)
    model, x = Stack(by_headwise).double(), torch.randn(1, 9, 32, dtype=torch.float64)
    one = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    keys = torch.tensor([0.5, 3.0, 1.0], dtype=torch.float64, requires_grad=True)
    heads = torch.rand(4, 1, dtype=torch.float64).add(0.5).requires_grad_()

    def loss(one: Tensor, keys: Tensor, heads: Tensor) -> Tensor:
        steers = [
            (0, 1, (2, 5), keys), (1, None, 3, heads), (1, 2, 1, one, (4, 8)), (0, 1, 0, one),
            (1, 3, (0, 2), 0),
        ]  # fmt: skip
        with hw.steer(model, steers):
            return model(x).square().sum()

    assert torch.autograd.gradcheck(loss, (one, keys, heads))


@pytest.mark.parametrize("bare", [True, False], ids=["attention", "encoder layer"])
def test_pytorchs_attention_is_steered(bare: bool) -> None:
    torch.manual_seed(0)
    x, steers = torch.randn(2, 12, 32), [("*", 2, (2, 5), 4.0), ("*", None, 1, 0.5, (3, 9))]
    attn = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    model: nn.Module = attn
    if not bare:
        model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
        attn = model.self_attn  # type: ignore[assignment]
    added = factors_of([(0, *x[1:]) for x in steers], 0, 4, 12, 12).log().float()
    added = added.expand(2, -1, -1, -1).flatten(0, 1)
    with torch.no_grad():
        plain = model(x, x, x)[0] if bare else model(x)
        with hw.steer(model, steers):
            out = model(x, x, x) if bare else model(x)
        torch.backends.mha.set_fastpath_enabled(False)
        wanted = model(x, x, x, attn_mask=added) if bare else model(x, src_mask=added)
        torch.backends.mha.set_fastpath_enabled(True)
        torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-4)
        after = model(x, x, x)[0] if bare else model(x)
    assert torch.equal(after, plain)


@pytest.mark.parametrize("first", [False, True], ids=["length first", "batch first"])
def test_pytorchs_attention_across_sequences_learns(first: bool) -> None:
    torch.manual_seed(0)
    attn = nn.MultiheadAttention(32, 4, batch_first=first, kdim=16, vdim=24)
    inputs = torch.randn(2, 5, 32), torch.randn(2, 7, 16), torch.randn(2, 7, 24)
    given = [x if first else x.transpose(0, 1) for x in inputs]
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 5:] = True
    added = factors_of([(0, 2, (2, 5), 4.0)], 0, 4, 5, 7).log().float()
    added = added.expand(2, -1, -1, -1).flatten(0, 1)
    padded = torch.zeros(2, 7).masked_fill(padding, -torch.inf)
    wanted, _ = attn(*given, key_padding_mask=padded, attn_mask=added)
    wanted.square().sum().backward()
    grads = [p.grad.clone() for p in attn.parameters() if p.grad is not None]
    attn.zero_grad()
    with hw.steer(attn, (0, 2, range(2, 5), 4.0)):
        out, none = attn(*given, key_padding_mask=padding, need_weights=False)
        out.square().sum().backward()
    assert none is None
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-4)
    for mine, theirs in zip([p.grad for p in attn.parameters()], grads, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)


SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64}


def family(name: str, implementation: str) -> Any:
    transformers = pytest.importorskip("transformers")
    import headwise.transformers  # noqa: F401

    torch.manual_seed(0)
    more = {"attn_implementation": implementation, "pad_token_id": 0}
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_embd=32, n_head=4, n_layer=2, vocab_size=64, n_positions=64, bos_token_id=1,
            eos_token_id=2, **more,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config).eval()
    if name == "gemma2":
        config = transformers.Gemma2Config(
            **SMALL, num_key_value_heads=2, intermediate_size=48, head_dim=8, sliding_window=6,
            attn_logit_softcapping=3.0, **more,
        )  # fmt: skip
        return transformers.Gemma2ForCausalLM(config).eval()
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, intermediate_size=48, **more)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("name", "implementation"),
    [("llama", "sdpa"), ("llama", "headwise"), ("gemma2", "eager"), ("gpt2", "sdpa")],
)
def test_models_of_transformers_are_steered_while_they_generate(
    name: str, implementation: str
) -> None:
    model = family(name, implementation)
    ids = torch.randint(3, 64, (2, 9))
    steers: list[tuple[Any, ...]] = [(1, 2, (2, 5), 6.0), (0, None, 1, 0.5, (4, 8)), (1, 0, 3, 0)]
    with torch.no_grad():
        plain = model(ids).logits
        with hw.steer(model, steers):
            whole = model(ids).logits
            parts, cache = [], None
            for part in ids.split([4, 1, 1, 3], 1):
                step = model(part, past_key_values=cache, use_cache=True)
                parts, cache = [*parts, step.logits], step.past_key_values
            model.generation_config.eos_token_id = None
            text = model.generate(ids, max_new_tokens=4, do_sample=False)
            again = ids
            for _ in range(4):
                again = torch.cat((again, model(again).logits[:, -1:].argmax(-1)), 1)
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-4, rtol=1e-4)
        assert torch.equal(text, again)
        # The same by the weights that eager attention returns.
        model.set_attn_implementation("eager")
        with hw.watch(model) as seen:
            model(ids)
        with hw.steer(model, steers), hw.watch(model) as changed:
            again = model(ids).logits
        torch.testing.assert_close(again, whole, atol=1e-4, rtol=1e-4)
        model.set_attn_implementation(implementation)
        assert torch.equal(model(ids).logits, plain)
    before, after = seen.map(0, 3).to_tensor(), changed.map(0, 3).to_tensor()
    wanted = before * factors_of(steers, 0, 4, 9, 9)[:, 3:4]
    wanted = wanted / wanted.sum(-1, keepdim=True)
    torch.testing.assert_close(after, wanted.to(after.dtype), atol=1e-5, rtol=1e-4)


def test_encoders_and_decoders_are_steered() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_heads=4, num_layers=2, vocab_size=64,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    ids = torch.randint(3, 64, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    given = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, :5]}
    cross = "decoder.block.*.layer.1.EncDecAttention"
    own = "decoder.block.1.layer.0.*"
    steers = [(cross, 1, (2, 5), 5.0), (0, None, 1, 0.5, (2, 4)), (own, 0, 0, 3.0)]
    with torch.no_grad():
        with hw.watch(model) as seen:
            plain = model(**given).logits
        with hw.steer(model, steers), hw.watch(model) as changed:
            out = model(**given).logits
        assert not torch.allclose(out, plain)
        assert torch.equal(model(**given).logits, plain)
    name = next(x.name for x in seen.layers if x.name.endswith("block.0.layer.1.EncDecAttention"))
    first = next(x.number for x in seen.layers if x.name == name)
    assert not changed.unread
    assert len(changed.layers) == 6
    before, after = (x.map(0, 2).to_tensor() for x in (seen, changed))
    wanted = before * factors_of([(0, *steers[1][1:])], 0, 4, 9, 9)[:, 2:3]
    wanted = wanted / wanted.sum(-1, keepdim=True)
    torch.testing.assert_close(after, wanted.to(after.dtype), atol=1e-5, rtol=1e-4)
    more, less = (x.map(first, 1).to_tensor()[..., 2:5].sum() for x in (changed, seen))
    assert more > less


@pytest.mark.parametrize("name", ["translator", "vit"])
def test_models_of_headwise_are_steered(name: str) -> None:
    torch.manual_seed(0)
    if name == "vit":
        config = hw.models.ViTConfig(d_model=32, layers=2, heads=4, image=8, patch=2, classes=3)
        model, given = hw.models.ViT(config).eval(), (torch.rand(1, 3, 8, 8),)
    else:
        loaded = hw.load("translate")
        model, given = loaded.model, (torch.randint(5, 40, (1, 7)), torch.randint(5, 40, (1, 5)))
    with torch.no_grad():
        plain = model(*given)
        with hw.watch(model) as seen:
            model(*given)
        for layer in seen.layers:
            steers = [(layer.number, 1, (1, 3), 8.0), (layer.number, 0, 0, 0.1, 2)]
            with hw.steer(model, steers), hw.watch(model) as changed:
                out = model(*given)
            assert not torch.equal(out, plain)
            mine = [(0, 1, (1, 3), 8.0), (0, 0, 0, 0.1, (2, 3))]
            for head in (0, 1):
                before, after = (x.map(layer.number, head).to_tensor() for x in (seen, changed))
                factors = factors_of(mine, 0, layer.heads, *before.shape[-2:])
                wanted = before * factors[:, head : head + 1]
                wanted = wanted / wanted.sum(-1, keepdim=True)
                torch.testing.assert_close(after, wanted.to(after.dtype), atol=1e-5, rtol=1e-4)
        assert torch.equal(model(*given), plain)


@pytest.mark.parametrize("attend", [by_torch, by_headwise])
def test_steers_multiply_and_nest_in_watches_in_any_order(attend: Callable[..., Tensor]) -> None:
    model, x = Stack(attend), torch.randn(2, 12, 32)
    steers = [(1, 2, (2, 5), 3.0), (0, None, 0, 0.25, (3, 9)), (1, 0, 9, 0)]
    with torch.no_grad():
        with hw.steer(model, [*steers, (1, 2, 4, 0.5)]):
            wanted = model(x)
            with hw.watch(model) as seen:
                torch.testing.assert_close(model(x), wanted, atol=1e-6, rtol=1e-5)
            table = seen.heads()
        blocks = {
            "watch": lambda: hw.watch(model),
            "steer": lambda: hw.steer(model, [*steers[:2], (1, 2, 4, 1.0)]),
            "inner": lambda: hw.steer(model, (1, 2, 4, 0.5)),
            "knock_out": lambda: hw.knock_out(model, (1, 0, 9)),
        }
        for order in permutations(blocks):
            with ExitStack() as stack:
                entered = {name: stack.enter_context(blocks[name]()) for name in order}
                torch.testing.assert_close(model(x), wanted, atol=1e-6, rtol=1e-5)
            found = entered["watch"].heads()
            for name in ("entropy_mean", "max_logit_max"):
                assert found[name] == pytest.approx(table[name], abs=1e-4)
        after = F.scaled_dot_product_attention
    assert after is torch.nn.functional.scaled_dot_product_attention
    assert not hasattr(after, "__watched_function__")


def test_a_watch_that_passes_over_a_step_does_not_end_a_steer() -> None:
    model, x = Stack(by_torch), torch.randn(2, 12, 32)
    steer = [(1, 2, (2, 5), 3.0)]
    with torch.no_grad(), hw.steer(model, steer):
        wanted = model(x)
        watch = hw.watch(model, every=2)
        with watch:
            for _ in range(4):
                torch.testing.assert_close(model(x), wanted, atol=1e-6, rtol=1e-5)
                watch.step()
        torch.testing.assert_close(model(x), wanted)
        with hw.watch(model.layers[1]) as part:  # a part, in a steer of the whole
            torch.testing.assert_close(model(x), wanted, atol=1e-6, rtol=1e-5)
        assert len(part.heads()) == 4
    part_steer = hw.steer(model.layers[1], (0, 2, (2, 5), 3.0))
    with torch.no_grad(), hw.watch(model) as seen, part_steer:  # and the other way round
        torch.testing.assert_close(model(x), wanted, atol=1e-6, rtol=1e-5)
    assert len(seen.heads()) == 8


def test_an_exception_inside_restores_the_model() -> None:
    model, x = Stack(by_torch), torch.randn(2, 12, 32)
    plain = model(x)
    with pytest.raises(RuntimeError), hw.watch(model), hw.steer(model, STEERS):
        model(x[..., :31])  # too narrow
    assert torch.equal(model(x), plain)
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_factor_of_one_changes_no_bit() -> None:
    model, x = Stack(by_torch), torch.randn(2, 12, 32)
    plain = model(x)
    with hw.steer(model, [(0, None, (0, 12), 1.0), (1, 2, 3, 1, (2, 4))]):
        assert torch.equal(model(x), plain)


def test_spans_are_steered_by_name() -> None:
    model, x = Stack(by_torch), torch.randn(2, 12, 32)
    spans = {"cut": (2, 5), "ragged": (torch.tensor([0, 3]), torch.tensor([4, 6]))}
    spans["end"] = (2, torch.tensor([4, 6]))
    with torch.no_grad(), hw.watch(model, spans=spans) as seen:
        with hw.steer(model, [(1, 2, "cut", 0), (0, 1, "cut", torch.tensor([2.0, 1.0, 3.0]))]):
            model(x)
        weight = {(row["layer"], row["head"]): row["span_cut_mean"] for row in seen.heads()}
        assert weight[1, 2] == 0 < weight[1, 1]
        with hw.steer(model, (1, 3, "ragged", 0)):
            model(x)
        one, other = (seen.map(1, 3, batch).to_tensor()[0, 0] for batch in (0, 1))
        assert not one[:, :4].any()
        assert one[5:, 4:6].any()
        assert not other[:, 3:6].any()
        assert other[:, :3].any()
        with hw.steer(model, (1, 3, "end", 0)):
            model(x)
        one, other = (seen.map(1, 3, batch).to_tensor()[0, 0] for batch in (0, 1))
        assert not one[:, 2:4].any()
        assert one[5:, 4:6].any()
        assert not other[:, 2:6].any()
        with (
            pytest.raises(ValueError, match=r"the span 'other', which the watch .* ragged, end"),
            hw.steer(model, (0, 0, "other", 2.0)),
        ):
            model(x)


def test_sampled_rows_of_a_steered_call_are_those_of_its_map() -> None:
    model, x = Stack(by_torch), torch.randn(2, 12, 32)
    with torch.no_grad(), hw.steer(model, STEERS):
        with hw.watch(model) as all_rows:
            model(x)
        with hw.watch(model, rows=5) as some:
            model(x)
    for number in (0, 1):
        seen = some.layer(number).observation
        whole = all_rows.layer(number).observation
        assert seen is not None
        assert whole is not None
        assert seen.rows is not None
        torch.testing.assert_close(seen.entropy, whole.entropy[:, :, seen.rows])
        p = torch.cat([all_rows.map(number, head).to_tensor() for head in range(4)], 1)
        entropy = -torch.special.xlogy(p, p).sum(-1)
        found = whole.entropy[:1]
        torch.testing.assert_close(found, entropy.to(found.dtype), atol=1e-5, rtol=1e-4)


def test_checkpointed_layers_are_recomputed_with_their_factors() -> None:
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    model, x = Stack(by_headwise), torch.randn(2, 12, 32, requires_grad=True)
    factor = torch.tensor(3.0, requires_grad=True)
    found = []
    for again in (False, True):
        with hw.watch(model), hw.steer(model, [(1, 2, (2, 5), factor), (0, 1, 3, factor, (2, 9))]):
            y = x
            for layer in model.layers:
                y = checkpoint(layer, y, use_reentrant=False) if again else layer(y)
            found.append(torch.autograd.grad(y.square().sum(), (x, factor)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_memory_does_not_grow_with_pairs() -> None:
    n = 6000  # a float32 tensor of all pairs of four heads would be 576 MB
    attn = hw.nn.MultiHeadAttention(16, 4, mask=hw.mask.causal())
    x = torch.randn(1, n, 16)
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for one in out if isinstance(out, tuple | list) else (out,):
                if isinstance(one, Tensor):
                    largest = max(largest, one.untyped_storage().nbytes())
            return out

    steers = [(0, 1, (2, 5), 3.0), (0, 2, 9, 0), (0, 2, 11, 0), (0, None, 1, 0.5, (100, 3000))]
    with torch.no_grad(), hw.steer(attn, steers), Sizes():
        attn(x)
    assert largest < 100e6


def test_some_rows_of_a_mask_stand_where_they_stood() -> None:
    place = Place(batch=2, heads=1, queries=6, keys=8, offset=2)
    part = Place(batch=2, heads=1, queries=3, keys=8, offset=5)
    masks = [
        None, hw.mask.causal(), hw.mask.causal(1) & hw.mask.window(2, 0, 1),
        hw.mask.lengths([7, 4]),
        hw.mask.documents(torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2]])),
        hw.mask.dense(torch.rand(1, 1, 6, 8) > 0.5),
        hw.mask.between(torch.arange(6), torch.arange(6) + 2), hw.mask.causal(torch.tensor([0, 2])),
    ]  # fmt: skip
    for mask in masks:
        some = rows_of(mask, place, slice(2, 5))
        some.check(part)
        whole = torch.ones(1, 1, 6, 8, dtype=torch.bool) if mask is None else mask.to_dense(place)
        found = some.to_dense(part).expand(2, 1, 3, 8)
        assert torch.equal(found, whole.expand(2, 1, 6, 8)[:, :, 2:5])
        q, k, v = torch.randn(2, 1, 6, 4), torch.randn(2, 1, 8, 4), torch.randn(2, 1, 8, 4)
        out = hw.attention(q, k, v, mask=mask, bias=hw.ALiBi(1))[:, :, 2:5]
        mine = hw.attention(q[:, :, 2:5], k, v, mask=some, bias=hw.ALiBi(1))
        torch.testing.assert_close(mine, out)


@pytest.mark.parametrize(
    ("steers", "says"),
    [
        ((5, 0, 0, 2.0), r"\(5, 0, \(0, 1\), None\) was about nothing.* 0 layers.0, 1 layers.1"),
        ((1, 7, 0, 2.0), "layer 1 has no head 7; its heads are 0 to 3"),
        ((1, 0, 99, 1.0), "was about nothing"),
        ((1, 0, 0), r"is not \(layer, head, keys, factor\)"),
        ((1, 0, 0, -1.0), "must be a number from 0 on"),
        ((1, 0, 0, float("inf")), "must be a number from 0 on"),
        ((1, 0, 0, "x"), "must be a number from 0 on"),
        ((1, 0, 0, torch.tensor(-1.0)), "finite and not negative"),
        ((1, 0, 0, torch.tensor(0.0, requires_grad=True)), "log 0 has no gradient"),
        ((1, 0, (0, 3), torch.rand(2)), "do not broadcast to its heads and keys"),
        ((1, 0, (0, 3), torch.rand(2, 1)), "do not broadcast to its heads and keys"),
        ((1, 0, range(0, 4, 2), 2.0), "are not positions"),
        ((1, 0, "image", 2.0), "the span 'image', which the watch"),
        ([], "there is no edge to steer"),
        ("x", "a list of"),
    ],
)
def test_what_can_not_be_steered_is_refused(steers: Any, says: str) -> None:
    model = Stack(by_torch)
    with pytest.raises(ValueError, match=says), hw.steer(model, steers):
        model(torch.randn(2, 12, 32))
    with pytest.raises(ValueError, match="takes a torch"), hw.steer(None, (0, 0, 0, 1.0)):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize("factor", [0, 0.5])
def test_the_map_of_a_generation_is_that_of_its_whole_text(factor: float) -> None:
    model = model_of("llama")
    with torch.no_grad(), hw.steer(model, (0, 2, (2, 4), factor, (3, 8))):
        with hw.watch(model) as steps:
            text = model.generate(torch.arange(3, 9)[None], max_new_tokens=4, pad_token_id=0)
        with hw.watch(model) as whole:
            model(text[:, :-1])
    for head in (1, 2):
        found, wanted = steps.map(0, head)[0, 0], whole.map(0, head)[0, 0]
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_a_generation_whose_prompt_was_too_large_to_keep_has_no_map(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(changed_call, "LARGEST", 4 * 6 * 6 - 1)  # weights of the prompt
    model = model_of("llama")
    steered = hw.steer(model, (0, 2, (2, 4), 0.5, (3, 8)))
    with implementation(model, "sdpa"), torch.no_grad(), steered, hw.watch(model) as seen:
        model.generate(torch.arange(3, 9)[None], max_new_tokens=4, pad_token_id=0)
    with pytest.raises(ValueError, match=r"no map of model\.layers\.0\.self_attn was kept"):
        seen.map(0, 2)
    assert seen.map(1, 2).shape == (1, 1, 9, 9)
