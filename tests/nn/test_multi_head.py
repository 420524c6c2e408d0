"""The layer: the formula, its variants, and a module that behaves as modules should."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.nn import MultiHeadAttention

D, HEADS, B, N = 32, 4, 2, 9


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def randomised(module: MultiHeadAttention) -> MultiHeadAttention:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def by_hand(attn: MultiHeadAttention, x: Tensor, seen: Tensor | None = None) -> Tensor:
    """softmax(Q Kᵀ / √d) V head by head, concatenated, through the output matrix."""
    made = []
    for head in range(attn.heads):
        group = head * attn.kv_heads // attn.heads
        mine = slice(head * attn.head_dim, (head + 1) * attn.head_dim)
        theirs = slice(group * attn.head_dim, (group + 1) * attn.head_dim)
        values = slice(group * attn.value_dim, (group + 1) * attn.value_dim)
        q, k, v = attn.query(x)[..., mine], attn.key(x)[..., theirs], attn.value(x)[..., values]
        s = q @ k.mT / attn.head_dim**0.5
        s = s if seen is None else s.masked_fill(~seen, -torch.inf)
        made.append(s.softmax(-1) @ v)
    return attn.out(torch.cat(made, -1))


SHAPES = {
    "plain": {},
    "no bias": {"bias": False},
    "grouped": {"kv_heads": 2},
    "multi-query": {"kv_heads": 1},
    "narrow heads": {"head_dim": 4},
    "full-width heads": {"head_dim": D},
    "wide values": {"value_dim": 12},
    "all at once": {"kv_heads": 2, "head_dim": 6, "value_dim": 10, "out_bias": False},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_formula(shape: str) -> None:
    attn = randomised(MultiHeadAttention(D, HEADS, **SHAPES[shape])).double()
    x = torch.randn(B, N, D, dtype=torch.float64)
    torch.testing.assert_close(attn(x), by_hand(attn, x))
    causal = torch.ones(N, N, dtype=torch.bool).tril()
    torch.testing.assert_close(attn(x, mask=hw.mask.causal()), by_hand(attn, x, causal))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 4 * D**2 + 4 * D),
        ({"bias": False}, 4 * D**2),
        ({"bias": True, "out_bias": False}, 4 * D**2 + 3 * D),
        ({"heads": 1}, 4 * D**2 + 4 * D),
        ({"heads": D}, 4 * D**2 + 4 * D),
        # grouped: 2d²(1 + g/a), biases 2d(1 + g/a)
        ({"kv_heads": 2}, 2 * D**2 + 2 * D**2 * 2 // 4 + 2 * D + 2 * D * 2 // 4),
        ({"kv_heads": 1, "bias": False}, 2 * D**2 + 2 * D**2 // 4),
        # full width: h times as many, but one output bias
        ({"head_dim": D}, HEADS * (4 * D**2 + 3 * D) + D),
        ({"head_dim": D, "bias": False}, HEADS * 4 * D**2),
        # free widths: d·a·k + d·g·(k + v) + a·v·d
        ({"head_dim": 6, "value_dim": 10, "bias": False}, D * 4 * 6 + D * 4 * 16 + 4 * 10 * D),
        ({"context_dim": 20, "bias": False}, 2 * D**2 + 2 * 20 * D),
        ({"context_dim": (20, 28), "bias": False}, 2 * D**2 + 20 * D + 28 * D),
        ({"projections": hw.nn.Shared()}, 3 * D**2 + 3 * D),
        ({"projections": hw.nn.Unprojected()}, 2 * D**2 + 2 * D),
        ({"score": hw.nn.Additive(), "bias": False}, 4 * D**2 + D),
        ({"score": hw.nn.General(), "bias": False}, 4 * D**2 + HEADS * (D // HEADS) ** 2),
        ({"score": hw.nn.Cosine(), "bias": False}, 4 * D**2 + HEADS),
        ({"sinks": True, "bias": False}, 4 * D**2 + HEADS),
        ({"qk_norm": hw.nn.RMSNorm(), "bias": False}, 4 * D**2 + 2 * (D // HEADS)),
        ({"qk_norm": hw.nn.LayerNorm(), "bias": False}, 4 * D**2 + 4 * (D // HEADS)),
        ({"position": hw.nn.Rotary(), "bias": False}, 4 * D**2),
        ({"position": hw.nn.ALiBi(), "bias": False}, 4 * D**2),
        ({"position": hw.nn.ALiBi(learned=True), "bias": False}, 4 * D**2 + HEADS),
        ({"position": hw.nn.RelativeBuckets(32), "bias": False}, 4 * D**2 + 32 * HEADS),
        ({"position": hw.nn.Learned(50), "bias": False}, 4 * D**2 + 50 * D),
        ({"position": hw.nn.Sinusoidal(), "bias": False}, 4 * D**2),
    ],
)
def test_parameters_are_those_of_the_formulas(options: dict[str, object], expected: int) -> None:
    assert parameters(MultiHeadAttention(D, options.pop("heads", HEADS), **options)) == expected


def test_many_heads_cost_what_one_does() -> None:
    counts = {parameters(MultiHeadAttention(64, heads)) for heads in (1, 2, 4, 8, 16, 32, 64)}
    assert counts == {4 * 64**2 + 4 * 64}


def test_cross_attention_equals_torch() -> None:
    theirs = nn.MultiheadAttention(D, HEADS, batch_first=True)
    ours = MultiHeadAttention(D, HEADS)
    ours.load_state_dict(theirs.state_dict())
    x, context = torch.randn(B, N, D), torch.randn(B, 5, D)
    expected = theirs(x, context, context)[0]
    torch.testing.assert_close(ours(x, context), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours(x[0], context[0]), expected[0], rtol=1e-5, atol=1e-5)


def test_one_matrix_for_queries_and_keys_gives_symmetric_scores() -> None:
    call = MultiHeadAttention(D, HEADS, projections=hw.nn.Shared()).prepare(torch.randn(B, N, D))
    scores = call.q @ call.k.mT
    torch.testing.assert_close(scores, scores.mT)
    assert call.q.data_ptr() == call.k.data_ptr()  # computed once


def test_without_projections_heads_compare_the_input_itself() -> None:
    x = torch.randn(B, N, D)
    sliced = MultiHeadAttention(D, HEADS, projections=hw.nn.Unprojected()).prepare(x)
    assert torch.equal(sliced.q[:, 1], x[..., D // HEADS : 2 * D // HEADS])
    assert torch.equal(sliced.q, sliced.k)
    whole = MultiHeadAttention(D, HEADS, head_dim=D, projections=hw.nn.Unprojected()).prepare(x)
    assert torch.equal(whole.q, x[:, None].expand(B, HEADS, N, D))


@pytest.mark.parametrize("projections", [hw.nn.Shared(), hw.nn.Unprojected()])
def test_shared_and_missing_projections_serve_another_sequence_too(projections: object) -> None:
    attn = MultiHeadAttention(D, HEADS, projections=projections)
    x, context = torch.randn(B, N, D), torch.randn(B, 5, D)
    call = attn.prepare(x, context)
    torch.testing.assert_close(call.k, attn.prepare(context).q)
    torch.testing.assert_close(attn(x, attn.remember(context)), attn(x, context))


OPTIONS = {
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "unscaled": {"score": hw.Dot(scale=1.0)},
    "additive": {"score": hw.nn.Additive()},
    "general": {"score": hw.nn.General()},
    "cosine": {"score": hw.nn.Cosine()},
    "fixed cosine": {"score": hw.Cosine(5.0)},
    "rms": {"qk_norm": hw.nn.RMSNorm()},
    "layer norm": {"qk_norm": hw.nn.LayerNorm()},
    "alibi": {"position": hw.nn.ALiBi(learned=True)},
    "buckets": {"position": hw.nn.RelativeBuckets(8, 16)},
    "window": {"mask": hw.mask.causal() & (hw.mask.window(3) | hw.mask.prefix(1))},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_reaches_the_attention_and_has_gradients(option: str) -> None:
    attn = randomised(MultiHeadAttention(D, HEADS, **OPTIONS[option])).double()
    x = torch.randn(B, N, D, dtype=torch.float64)
    plain = MultiHeadAttention(D, HEADS).double()
    plain.load_state_dict(attn.state_dict(), strict=False)
    out = attn(x)
    assert not torch.allclose(out, plain(x))
    attn.engine = "reference"
    torch.testing.assert_close(attn(x), out)
    out.square().sum().backward()
    for name, parameter in attn.named_parameters():
        # A key's bias moves a row's logits alike, and softmax does not see that.
        assert parameter.grad is not None, name
        assert name == "key.bias" or parameter.grad.abs().max() > 0, name


def test_a_bias_of_the_call_is_added_and_learns() -> None:
    attn, x = MultiHeadAttention(D, HEADS), torch.randn(B, N, D)
    bias = torch.randn(HEADS, N, N, requires_grad=True)
    out = attn(x, bias=bias)
    assert not torch.allclose(out, attn(x))
    out.sum().backward()
    assert bias.grad is not None
    with pytest.raises(ValueError, match="can't be combined with the bias of ALiBi"):
        MultiHeadAttention(D, HEADS, position=hw.nn.ALiBi())(x, bias=bias)


def test_a_calls_mask_narrows_the_layers() -> None:
    attn, x = MultiHeadAttention(D, HEADS, mask=hw.mask.causal()), torch.randn(B, N, D)
    both = attn(x, mask=hw.mask.window(2))
    attn.mask = hw.mask.causal() & hw.mask.window(2)
    torch.testing.assert_close(attn(x), both)


def test_packed_documents_do_not_see_each_other() -> None:
    attn = MultiHeadAttention(D, HEADS, mask=hw.mask.causal(), position=hw.nn.Rotary())
    x = torch.randn(1, N, D)
    ids = torch.tensor([[0] * 4 + [1] * 5])
    apart = torch.cat((attn(x[:, :4]), attn(x[:, 4:])), 1)
    packed = attn(x, mask=hw.mask.documents(ids))
    torch.testing.assert_close(packed, apart, rtol=1e-5, atol=1e-5)
    numbered = attn(
        x, mask=hw.mask.documents(ids), positions=torch.cat((torch.arange(4), torch.arange(5)))
    )
    torch.testing.assert_close(numbered, apart, rtol=1e-5, atol=1e-5)


def test_dropout_is_for_training_only() -> None:
    attn, x = MultiHeadAttention(D, HEADS, dropout=0.5), torch.randn(B, N, D)
    assert not torch.equal(attn.train()(x), attn(x))
    assert torch.equal(attn.eval()(x), attn(x))
    attn.dropout = 0.0
    assert torch.equal(attn.train()(x), attn.eval()(x))


def test_observing_does_not_change_the_output() -> None:
    attn = randomised(MultiHeadAttention(D, HEADS, kv_heads=2, position=hw.nn.Rotary()))
    x = torch.randn(B, N, D)
    out, seen = attn.observe(x, mask=hw.mask.causal())
    torch.testing.assert_close(out, attn(x, mask=hw.mask.causal()), rtol=1e-5, atol=1e-5)
    weights = attn.attention_map(x, mask=hw.mask.causal()).to_tensor()
    entropy = -(weights * weights.clamp_min(1e-30).log()).sum(-1)
    torch.testing.assert_close(seen.entropy, entropy, rtol=1e-4, atol=1e-4)
    some = attn.observe(x, mask=hw.mask.causal(), stats=("max_logit",), rows=3)[1]
    assert some.max_logit.shape == (B, HEADS, 3)
    torch.testing.assert_close(some.max_logit, seen.max_logit[:, :, some.rows])


def test_a_dropped_head_is_one_whose_columns_of_the_output_are_zero() -> None:
    attn, x = randomised(MultiHeadAttention(D, HEADS, kv_heads=2)), torch.randn(B, N, D)
    cut = copy.deepcopy(attn)
    with torch.no_grad():
        cut.out.weight.view(D, HEADS, -1)[:, [1, 3]] = 0
    whole = attn(x)
    dropped = attn.drop_heads([1, -1])
    torch.testing.assert_close(attn(x), cut(x))
    torch.testing.assert_close(attn.observe(x)[0], cut(x), rtol=1e-5, atol=1e-5)
    dropped.restore()
    assert torch.equal(attn(x), whole)


def test_dropped_heads_add_up_and_come_back_in_order() -> None:
    attn, x = MultiHeadAttention(D, HEADS), torch.randn(B, N, D)
    with attn.drop_heads([0]):
        one = attn(x)
        with attn.drop_heads([1, 2, 3]):
            assert torch.equal(attn(x), attn.out.bias.expand(B, N, D))  # nothing is left
        with pytest.raises(ZeroDivisionError), attn.drop_heads([1]):
            _ = 1 / 0
        assert torch.equal(attn(x), one)
    assert attn.head_gate is None
    assert list(attn.state_dict()) == list(MultiHeadAttention(D, HEADS).state_dict())


@pytest.mark.parametrize("heads", [2, [2], {2}, (-2,), torch.tensor(2), torch.tensor([2, 2])])
def test_heads_to_drop_may_be_a_number_a_tensor_or_any_collection(heads: object) -> None:
    attn, x = randomised(MultiHeadAttention(D, HEADS)), torch.randn(B, N, D)
    with attn.drop_heads([2]):
        expected = attn(x)
    with attn.drop_heads(heads):
        assert torch.equal(attn(x), expected)
    with attn.drop_heads([]):
        assert not torch.equal(attn(x), expected)


@pytest.mark.parametrize("heads", [4, -5, 1.0, "2", None, True, torch.tensor([0.0]), [[1]]])
def test_heads_that_do_not_exist_are_refused_in_words(heads: object) -> None:
    attn = MultiHeadAttention(D, HEADS)
    with pytest.raises(ValueError, match=r"there is no head .* 0 to 3|takes the numbers of heads"):
        attn.drop_heads(heads)
    assert attn.head_gate is None


def test_the_gate_has_a_gradient_for_each_head() -> None:
    attn = MultiHeadAttention(D, HEADS)
    attn.head_gate = torch.ones(HEADS, requires_grad=True)
    attn(torch.randn(B, N, D)).square().sum().backward()
    assert attn.head_gate.grad is not None
    assert attn.head_gate.grad.shape == (HEADS,)


class LowRank(nn.Module):
    """An adapter: the layer as it was, and a small matrix product beside it."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


@pytest.mark.parametrize("name", ["query", "key", "value", "out"])
@pytest.mark.parametrize("training", [False, True])
def test_an_adapter_around_a_projection_takes_effect(name: str, training: bool) -> None:
    attn, x = MultiHeadAttention(D, HEADS).train(training), torch.randn(B, N, D)
    before = attn(x)
    setattr(attn, name, LowRank(getattr(attn, name)))
    after = attn(x)
    assert not torch.allclose(after, before)
    after.sum().backward()
    assert getattr(attn, name).down.weight.grad.abs().max() > 0


def test_hooks_on_every_projection_run() -> None:
    attn, called = MultiHeadAttention(D, HEADS), []
    for name, child in attn.named_children():
        child.register_forward_hook(lambda *_, name=name: called.append(name))
    attn.eval()(torch.randn(B, N, D))
    assert called == ["query", "key", "value", "out"]


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_halves_of_the_heads_on_two_machines_add_up(kv_heads: int) -> None:
    """As tensor parallelism splits it: columns of the first three matrices, rows of the last."""
    attn = randomised(MultiHeadAttention(D, HEADS, kv_heads=kv_heads, position=hw.nn.Rotary()))
    x = torch.randn(B, N, D)
    total = attn.out.bias.expand(B, N, D)
    for rank in range(2):
        part = copy.deepcopy(attn)
        for name in ("query", "key", "value"):
            weight, bias = getattr(attn, name).weight, getattr(attn, name).bias
            shard = nn.Linear(D, weight.shape[0] // 2)
            shard.weight.data, shard.bias.data = weight.chunk(2)[rank], bias.chunk(2)[rank]
            setattr(part, name, shard)
        part.out = nn.Linear(D // 2, D, bias=False)
        part.out.weight.data = attn.out.weight.chunk(2, 1)[rank]
        total = total + part(x)
    torch.testing.assert_close(total, attn(x), rtol=1e-5, atol=1e-5)


def test_it_survives_copies_pickles_and_the_meta_device() -> None:
    attn = MultiHeadAttention(D, HEADS, position=hw.nn.Rotary(), mask=hw.mask.causal())
    x = torch.randn(B, N, D)
    assert torch.equal(copy.deepcopy(attn)(x), attn(x))
    assert torch.equal(pickle.loads(pickle.dumps(attn))(x), attn(x))
    with torch.device("meta"):
        empty = MultiHeadAttention(D, HEADS, position=hw.nn.Rotary(), mask=hw.mask.causal())
    empty.to_empty(device="cpu").load_state_dict(attn.state_dict())
    assert torch.equal(empty(x), attn(x))


def test_autocast_and_half_precision_stay_close() -> None:
    attn, x = MultiHeadAttention(D, HEADS, position=hw.nn.Rotary()), torch.randn(B, N, D)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = attn(x)
    assert mixed.dtype == torch.bfloat16
    torch.testing.assert_close(mixed.float(), attn(x), rtol=0.05, atol=0.05)
    half = copy.deepcopy(attn).bfloat16()
    torch.testing.assert_close(half(x.bfloat16()).float(), attn(x), rtol=0.05, atol=0.05)


COMPILED = {
    "plain": {},
    "causal rotary grouped": {
        **{"kv_heads": 2, "mask": hw.mask.causal(), "position": hw.nn.Rotary()},
    },
    "alibi softcap sinks": {"position": hw.nn.ALiBi(), "softcap": 5.0, "sinks": True},
}


@pytest.mark.parametrize("variant", COMPILED)
def test_compiled_equals_eager(variant: str) -> None:
    torch._dynamo.reset()
    attn, x = MultiHeadAttention(D, HEADS, **COMPILED[variant]), torch.randn(B, N, D)
    compiled = torch.compile(attn, backend="aot_eager", fullgraph=True)
    out = compiled(x)
    torch.testing.assert_close(out, attn(x), rtol=1e-5, atol=1e-5)
    ours = torch.autograd.grad(attn(x).square().sum(), attn.query.weight)
    torch.testing.assert_close(
        torch.autograd.grad(out.square().sum(), attn.query.weight), ours, rtol=1e-4, atol=1e-4
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # inductor's own
@torch.no_grad()
def test_code_generated_for_a_step_with_a_fixed_cache_equals_eager() -> None:
    torch._dynamo.reset()
    attn = MultiHeadAttention(D, HEADS, **COMPILED["causal rotary grouped"]).eval()
    x, cache = torch.randn(B, N, D), hw.nn.FixedCache(N)
    cache.reserve(*torch.zeros(2, B, 2, 0, D // HEADS))
    step = torch.compile(lambda y: attn(y, cache=cache), fullgraph=True)
    out = torch.cat([step(x[:, i : i + 1]) for i in range(N)], 1)
    torch.testing.assert_close(out, attn(x), rtol=1e-5, atol=1e-5)


def test_a_row_that_sees_nothing_is_the_output_bias() -> None:
    attn, x = MultiHeadAttention(D, HEADS), torch.randn(B, N, D, requires_grad=True)
    out = attn(x, mask=hw.mask.lengths(torch.tensor([0, 3])))
    assert torch.equal(out[0], attn.out.bias.expand(N, D))
    out.sum().backward()
    assert torch.isfinite(x.grad).all()
    assert F.mse_loss(x.grad[0], torch.zeros(N, D)) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 5}, "does not divide into 5 heads"),
        ({"kv_heads": 3}, "kv_heads must divide heads"),
        ({"kv_heads": 0}, "kv_heads=0 must be a positive integer"),
        ({"head_dim": -1}, "head_dim=-1 must be a positive integer"),
        ({"head_dim": 8.0}, "head_dim=8.0 must be a positive integer"),
        ({"kv_heads": 2, "projections": hw.nn.Shared()}, "kv_heads=2, heads=4"),
        ({"context_dim": 8, "projections": hw.nn.Unprojected()}, "context_dim=8, d_model=32"),
        ({"head_dim": 5, "projections": hw.nn.Unprojected()}, "head_dim=5 is neither"),
        ({"head_dim": 5, "position": hw.nn.Rotary()}, "an even width up to 5"),
        ({"position": hw.nn.Rotary(width=10)}, "an even width up to 8"),
    ],
)
def test_widths_that_do_not_fit_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(D, options.pop("heads", HEADS), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"projections": hw.nn.Shared}, r"projections= takes .*hw\.nn\.Shared\(\)"),
        ({"projections": "separate"}, "not str 'separate'"),
        ({"position": "rotary"}, r"position= takes .*hw\.nn\.Rotary\(\).* not str 'rotary'"),
        ({"position": hw.nn.Rotary}, r"position= takes .*hw\.nn\.Rotary\(\)"),
        ({"position": hw.nn.RelativeBuckets}, "position= takes"),
        ({"qk_norm": True}, r"qk_norm= takes .*hw\.nn\.RMSNorm\(\).* not bool True"),
        ({"score": "dot"}, r"score= takes .*hw\.Dot\(\).* not str 'dot'"),
        ({"mask": torch.ones(9, 9, dtype=torch.bool)}, r"mask= takes .*bool \(9, 9\)"),
        ({"sinks": torch.zeros(4)}, r"sinks=float32 \(4,\) must be True or False"),
        ({"softcap": -2.0}, r"softcap=-2\.0 must be a positive number"),
        ({"dropout": -1.0}, r"dropout=-1\.0 must be in \[0, 1\)"),
        ({"engine": "flash"}, "engine='flash' is unknown; choose 'auto' or one of 'hopper'"),
    ],
)
def test_bad_options_are_refused_when_a_layer_is_built(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(D, HEADS, **options)


def test_too_few_buckets_are_refused_where_they_are_described() -> None:
    with pytest.raises(ValueError, match="at least 4 buckets; it has 2"):
        hw.nn.RelativeBuckets(2)


def test_calls_that_do_not_fit_are_refused() -> None:
    attn, x = MultiHeadAttention(D, HEADS, context_dim=20), torch.randn(B, N, D)
    with pytest.raises(ValueError, match=r"x has shape \(2, 9, 7\); .*\(batch, length, 32\)"):
        attn(torch.randn(B, N, 7))
    with pytest.raises(ValueError, match=r"made from \(2, 9, 32\).*context_dim=\(20, 20\)"):
        attn(x, x)
    with pytest.raises(ValueError, match=r"values from \(2, 9, 32\).*context_dim=\(20, 20\)"):
        attn(x, x[..., :20], values=x)
    plain = MultiHeadAttention(D, HEADS)
    with pytest.raises(ValueError, match=r"values= would be ignored.*attn.remember"):
        plain(x, plain.remember(x), values=x)
    with pytest.raises(ValueError, match="positions= would be ignored"):
        plain(x, positions=torch.arange(N))
    with pytest.raises(ValueError, match=r"positions=int64 \(4,\) must .*\(9,\) or \(2, 9\)"):
        MultiHeadAttention(D, HEADS, position=hw.nn.Rotary())(x, positions=torch.arange(4))
    with pytest.raises(ValueError, match=r"attn.remember\(context\)"):
        plain(x, x, cache=hw.nn.GrowingCache())
    with pytest.raises(ValueError, match="batch, length, width"):
        plain(x[0], cache=hw.nn.GrowingCache())
    with pytest.raises(ValueError, match="there is no head 4; this attention has heads 0 to 3"):
        plain.drop_heads([4])
    with pytest.raises(ValueError, match=r"hw\.mask\.dense"):
        plain(x, mask=torch.ones(N, N, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"hw\.mask\.dense"):
        MultiHeadAttention(D, HEADS, mask=hw.mask.causal())(
            x, mask=torch.ones(N, N, dtype=torch.bool)
        )
    with pytest.raises(ValueError, match=r"x is torch\.float64 and the layer torch\.float32"):
        plain(x.double())
    with pytest.raises(ValueError, match=r"context is torch\.float16"):
        plain(x, x.half())
    with pytest.raises(ValueError, match=r"x must be a tensor .* not ndarray"):
        plain(x.numpy())
    with pytest.raises(
        ValueError, match=r"cache=bool True is not a cache; try hw\.nn\.GrowingCache"
    ):
        plain(x, cache=True)
