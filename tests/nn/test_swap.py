"""Whole models give the same with our attention as with PyTorch's, and can be restored."""

import copy

import pytest
import torch
from torch import Tensor, nn

import headwise as hw

D, HEADS, B, N = 32, 4, 2, 7
LENGTHS = torch.tensor([7, 4])
PADDING = torch.arange(N) >= LENGTHS[:, None]
KEPT = ~PADDING


def encoder(batch_first: bool = True) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(D, HEADS, 64, dropout=0.0, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # their fast path's own
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("recorded", [True, False], ids=["grad", "no grad"])
def test_an_encoder_gives_the_same_with_padding(training: bool, recorded: bool) -> None:
    model, x = encoder().train(training), torch.randn(B, N, D)
    with torch.set_grad_enabled(recorded):
        whole, padded = model(x), model(x, src_key_padding_mask=PADDING)
        hw.nn.swap_attention(model)
        assert not any(isinstance(m, nn.MultiheadAttention) for m in model.modules())
        same(model(x), whole)
        same(model(x, src_key_padding_mask=PADDING)[KEPT], padded[KEPT])


@pytest.mark.parametrize("batch_first", [True, False])
def test_masks_of_every_kind_mean_the_same(batch_first: bool) -> None:
    model = encoder(batch_first)
    x = torch.randn(B, N, D) if batch_first else torch.randn(N, B, D)
    hidden = torch.rand(N, N) > 0.7
    hidden.fill_diagonal_(False)
    masks = {
        "bool": {"mask": hidden},
        "float": {"mask": torch.zeros(N, N).masked_fill(hidden, -torch.inf)},
        "one per head": {"mask": hidden.expand(B * HEADS, N, N)},
        "causal": {
            "mask": nn.Transformer.generate_square_subsequent_mask(N),
            "is_causal": True,
        },
        "causal, without the hint": {"mask": nn.Transformer.generate_square_subsequent_mask(N)},
    }
    expected = {name: model(x, **given) for name, given in masks.items()}
    hw.nn.swap_attention(model)
    for name, given in masks.items():
        same(model(x, **given), expected[name])


def test_an_encoder_and_decoder_and_its_gradients_are_the_same() -> None:
    model = nn.Transformer(D, HEADS, 1, 1, 64, dropout=0.0, batch_first=True)
    source, target = torch.randn(B, N, D), torch.randn(B, 5, D)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    padding = {"src_key_padding_mask": PADDING, "memory_key_padding_mask": PADDING}
    given = {"tgt_mask": causal, **padding}
    ours = hw.nn.swap_attention(copy.deepcopy(model))
    same(ours(source, target, **given), model(source, target, **given))
    for one in (model, ours):
        one(source, target, **given).square().sum().backward()
    crossing = ours.decoder.layers[0].multihead_attn.attention
    made = torch.cat([m.weight.grad for m in (crossing.query, crossing.key, crossing.value)])
    same(made, model.decoder.layers[0].multihead_attn.in_proj_weight.grad)


@pytest.mark.parametrize("average", [True, False])
def test_weights_are_returned_as_theirs_and_have_gradients(average: bool) -> None:
    theirs = nn.MultiheadAttention(D, HEADS, batch_first=True)
    ours = hw.nn.swap_attention(theirs)
    x, context = torch.randn(B, 3, D), torch.randn(B, N, D)
    given = {"key_padding_mask": PADDING, "average_attn_weights": average}
    (out, weights), (expected, expected_weights) = (
        attn(x, context, context, **given) for attn in (ours, theirs)
    )
    same(out, expected)
    same(weights, expected_weights)
    weights.square().sum().backward()
    assert ours.attention.query.weight.grad.abs().max() > 0
    unbatched = ours(x[0], context[0], context[0])[1]
    same(unbatched, theirs(x[0], context[0], context[0])[1])


def test_rows_that_see_nothing_are_zero_and_not_nan() -> None:
    ours = hw.nn.swap_attention(nn.MultiheadAttention(D, HEADS, batch_first=True))
    x = torch.randn(B, N, D)
    out, weights = ours(x, x, x, key_padding_mask=torch.ones(B, N, dtype=torch.bool))
    assert torch.equal(out, ours.attention.out.bias.expand(B, N, D))
    assert torch.equal(weights, torch.zeros(B, N, N))


def test_there_and_back_is_the_same_model() -> None:
    model, x = encoder().eval(), torch.randn(B, N, D)
    nested, state, expected = model.use_nested_tensor, model.state_dict(), model(x)
    hw.nn.restore_attention(hw.nn.swap_attention(model))
    assert model.use_nested_tensor == nested
    assert not hasattr(model, "nested_before")
    assert list(model.state_dict()) == list(state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert torch.equal(model(x), expected)


def test_other_widths_modes_and_dtypes_come_along() -> None:
    theirs = nn.MultiheadAttention(D, HEADS, dropout=0.3, bias=False, kdim=12, vdim=20)
    theirs = theirs.double().eval().requires_grad_(False)
    model = nn.ModuleDict({"attn": theirs, "again": theirs})
    hw.nn.swap_attention(model)
    assert model["attn"] is model["again"]
    ours = model["attn"].attention
    assert (ours.dropout, ours.training, ours.query.bias) == (0.3, False, None)
    assert ours.key.weight.dtype == torch.float64
    assert not ours.key.weight.requires_grad
    hw.nn.restore_attention(model)
    assert torch.equal(model["again"].k_proj_weight, theirs.k_proj_weight)


def test_unsupported_attention_is_refused_by_name() -> None:
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(D, HEADS, add_bias_kv=True)})
    with pytest.raises(ValueError, match="attn uses add_bias_kv, which headwise does not support"):
        hw.nn.swap_attention(model)
    with pytest.raises(ValueError, match="uses add_zero_attn"):
        hw.nn.swap_attention(nn.MultiheadAttention(D, HEADS, add_zero_attn=True))
    swapped = hw.nn.swap_attention(nn.MultiheadAttention(D, HEADS))
    swapped.attention = hw.nn.MultiHeadAttention(D, HEADS, kv_heads=2)
    with pytest.raises(ValueError, match=r"nn\.MultiheadAttention can't compute"):
        hw.nn.restore_attention(swapped)
    with pytest.raises(ValueError, match="is_causal=True is a hint about attn_mask"):
        swapped(*(torch.randn(N, B, D),) * 3, is_causal=True)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_are_read_as_intervals(kind: str) -> None:
    """So an engine may skip blocks, and no mask of all pairs is made of padding."""
    swapped = hw.nn.swap_attention(nn.MultiheadAttention(D, HEADS, batch_first=True))
    x, seen = torch.randn(B, N, D), []

    def look(module: nn.Module, args: object, options: dict[str, object]) -> None:
        seen.append(options["mask"])

    swapped.attention.register_forward_pre_hook(look, with_kwargs=True)
    future = torch.ones(N, N, dtype=torch.bool).triu(1)
    padding = PADDING
    if kind == "float":
        future, padding = (
            torch.zeros(m.shape).masked_fill(m, -torch.inf) for m in (future, padding)
        )
    for given in ({"attn_mask": future}, {"key_padding_mask": padding}):
        swapped(x, x, x, **given)
    swapped(x, x, x, attn_mask=future, key_padding_mask=padding)
    assert str(seen[0]) == "causal(offset=0)"
    assert [mask.pieces for mask in seen] == [1, 1, 1]


def test_a_hint_of_causality_is_taken_as_pytorch_takes_it() -> None:
    """In place of attn_mask, but only if there is no padding and no weights are wanted."""
    theirs = nn.MultiheadAttention(D, HEADS, batch_first=True)
    ours, x = hw.nn.swap_attention(theirs), torch.randn(B, N, D)
    other = torch.ones(N, N, dtype=torch.bool).triu(3)
    for need_weights in (True, False):
        for padding in (None, PADDING):
            given = {"attn_mask": other, "is_causal": True, "need_weights": need_weights}
            (one, _), (two, _) = (
                attn(x, x, x, key_padding_mask=padding, **given) for attn in (ours, theirs)
            )
            same(one, two)


def test_a_learned_mask_keeps_its_gradient() -> None:
    theirs = nn.MultiheadAttention(D, HEADS, batch_first=True)
    ours, x = hw.nn.swap_attention(theirs), torch.randn(B, N, D)
    grads = []
    for attn in (ours, theirs):
        bias = torch.zeros(N, N, requires_grad=True)
        attn(x, x, x, attn_mask=bias, need_weights=False)[0].square().sum().backward()
        grads.append(bias.grad)
    same(*grads)


def test_a_swapped_model_compiles_whole() -> None:
    torch._dynamo.reset()
    model, x = hw.nn.swap_attention(encoder()).eval(), torch.randn(B, N, D)
    future = nn.Transformer.generate_square_subsequent_mask(N)
    given = {"mask": future, "src_key_padding_mask": PADDING.float().masked_fill(PADDING, -1e9)}
    compiled = torch.compile(model.layers[0], backend="aot_eager", fullgraph=True)
    expected = model.layers[0](x, future, given["src_key_padding_mask"])
    same(compiled(x, future, given["src_key_padding_mask"]), expected)


def test_masks_without_contents_stay_dense() -> None:
    with torch.device("meta"):
        layer, x = hw.nn.swap_attention(encoder()).layers[0], torch.randn(B, N, D)
        future = torch.ones(N, N, dtype=torch.bool).triu(1)
        assert layer(x, future, PADDING.to("meta")).shape == x.shape
