"""The remedy for growing logits: exactly the limit afterwards, or a refusal by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import headwise as hw
from headwise import qk_clip
from headwise.watching.table import figure

LIMIT = 20.0
WIDTH, HEADS = 32, 4


def grown(model: nn.Module, times: float = 40.0) -> nn.Module:
    """The same model with queries and keys made as large as in a run that diverges."""
    parts = ("query", "key", "q_proj", "k_proj", "qkv_proj", "c_attn", "mapping_in")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in parts) and "out" not in name:
                parameter.normal_(std=times / WIDTH)
    return model.eval()


def largest(model: nn.Module, ask: Callable[[], object], **options: Any) -> hw.Watch:
    with hw.watch(model, **options) as seen:
        ask()
    return seen


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False, "position": hw.nn.Rotary()},
        {"projections": hw.nn.Shared()},
        {"score": hw.nn.General()},
        {"score": hw.Dot(0.7), "sinks": True},
        {"head_dim": 16},
    ],
    ids=["plain", "rotary", "shared", "general", "scaled with sinks", "wide"],
)
def test_the_same_input_has_the_limit_as_its_largest_logit_afterwards(options: Any) -> None:
    model = grown(hw.nn.MultiHeadAttention(WIDTH, HEADS, **options))
    x = torch.randn(2, 12, WIDTH)
    before = largest(model, lambda: model(x))
    values = torch.tensor(before.heads()["max_logit_max"])
    assert (values > LIMIT).any()
    clipped = qk_clip(model, before, LIMIT)
    after = torch.tensor(largest(model, lambda: model(x)).heads()["max_logit_max"])
    torch.testing.assert_close(after, values.clamp_max(LIMIT), rtol=1e-4, atol=1e-4)
    assert {clip.head for clip in clipped} == set((values > LIMIT).nonzero().flatten().tolist())
    assert not any(clip.lower_bound for clip in clipped)


def test_heads_that_share_keys_each_get_their_own_factor_and_no_weight_grows() -> None:
    model = grown(hw.nn.MultiHeadAttention(WIDTH, HEADS, kv_heads=2), times=10.0)
    with torch.no_grad():  # head 0 far too large, head 1 which shares its keys as it should be
        model.query.weight[:8] *= 20
        model.query.weight[8:16] *= 0.05
    x = torch.randn(2, 12, WIDTH)
    before = largest(model, lambda: model(x))
    values = torch.tensor(before.heads()["max_logit_max"])
    assert values[0] > LIMIT > values[1]
    weights = {name: x.detach().norm() for name, x in model.named_parameters()}
    qk_clip(model, before, LIMIT)
    after = torch.tensor(largest(model, lambda: model(x)).heads()["max_logit_max"])
    torch.testing.assert_close(after, values.clamp_max(LIMIT), rtol=1e-4, atol=1e-4)
    assert all(x.norm() <= weights[name] for name, x in model.named_parameters())


def test_keys_that_all_their_heads_want_smaller_shrink_with_the_queries() -> None:
    model = grown(hw.nn.MultiHeadAttention(WIDTH, HEADS, kv_heads=1))
    x = torch.randn(2, 12, WIDTH)
    keys = model.key.weight.detach().clone()
    before = largest(model, lambda: model(x))
    qk_clip(model, before, LIMIT)
    least = max(LIMIT / value for value in before.heads()["max_logit_max"])
    torch.testing.assert_close(model.key.weight, keys * least**0.5)


def foreign(family: str) -> nn.Module:
    """A transformers model of one layer, from its configuration alone."""
    size = {"num_hidden_layers": 1, "hidden_size": WIDTH, "num_attention_heads": HEADS}
    grouped = {**size, "intermediate_size": 32, "vocab_size": 50, "num_key_value_heads": 2}
    configs: dict[str, Callable[[], Any]] = {
        "bert": lambda: transformers.BertConfig(vocab_size=50, intermediate_size=32, **size),
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=50, n_layer=1, n_embd=WIDTH, n_head=HEADS
        ),
        "llama": lambda: transformers.LlamaConfig(**grouped),
        "gpt_neox": lambda: transformers.GPTNeoXConfig(vocab_size=50, intermediate_size=32, **size),
        "phi3": lambda: transformers.Phi3Config(pad_token_id=0, **grouped),
        "bigcode": lambda: transformers.GPTBigCodeConfig(
            vocab_size=50, n_layer=1, n_embd=WIDTH, n_head=HEADS
        ),
        "bigcode, no shared keys": lambda: transformers.GPTBigCodeConfig(
            vocab_size=50, n_layer=1, n_embd=WIDTH, n_head=HEADS, multi_query=False
        ),
        "albert": lambda: transformers.AlbertConfig(
            vocab_size=50, embedding_size=16, intermediate_size=32, **size
        ),
        "hunyuan": lambda: transformers.HunYuanDenseV1Config(head_dim=8, pad_token_id=0, **grouped),
        "bloom": lambda: transformers.BloomConfig(
            vocab_size=50, n_layer=1, hidden_size=WIDTH, n_head=HEADS
        ),
        "qwen3": lambda: transformers.Qwen3Config(head_dim=8, **grouped),
        "gemma2": lambda: transformers.Gemma2Config(  # transformers 4 would take sdpa, and no cap
            head_dim=8, attn_implementation="eager", **grouped
        ),
    }
    return grown(transformers.AutoModel.from_config(configs[family]()), times=25.0)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # GPT-BigCode's file
@pytest.mark.parametrize(
    "family",
    ["bert", "gpt2", "llama", "gpt_neox", "phi3", "bigcode", "bigcode, no shared keys", "albert"],
)
def test_transformers_models_are_clipped_to_the_limit(family: str) -> None:
    model, tokens = foreign(family), torch.randint(1, 50, (2, 12))
    before = largest(model, lambda: model(tokens))
    values = torch.tensor(before.heads()["max_logit_max"])
    assert (values > LIMIT).any()
    qk_clip(model, before, LIMIT)
    after = torch.tensor(largest(model, lambda: model(tokens)).heads()["max_logit_max"])
    torch.testing.assert_close(after, values.clamp_max(LIMIT), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("keys", [None, 24])
def test_pytorch_s_own_attention_is_clipped_to_the_limit(keys: int | None) -> None:
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, kdim=keys)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "in_proj" in name or "q_proj" in name or "k_proj" in name:
                parameter.normal_()
    model = model.eval()
    x = torch.randn(2, 12, WIDTH)
    context = x if keys is None else torch.randn(2, 9, keys)
    value = x if keys is None else torch.randn(2, 9, WIDTH)
    before = largest(model, lambda: model(x, context, value, need_weights=False))
    qk_clip(model, before, LIMIT)
    after = largest(model, lambda: model(x, context, value, need_weights=False))
    expected = torch.tensor(before.heads()["max_logit_max"]).clamp_max(LIMIT)
    found = torch.tensor(after.heads()["max_logit_max"])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: hw.nn.MultiHeadAttention(WIDTH, HEADS, qk_norm=hw.nn.RMSNorm()), "query_norm"),
        (lambda: hw.nn.MultiHeadAttention(WIDTH, HEADS, score=hw.nn.Cosine()), "cosine score"),
        (lambda: hw.nn.MultiHeadAttention(WIDTH, HEADS, score=hw.nn.Additive()), "additive score"),
        (lambda: hw.nn.MultiHeadAttention(WIDTH, HEADS, softcap=30.0), "cap"),
        (lambda: hw.nn.MultiHeadAttention(WIDTH, HEADS, position=hw.nn.ALiBi()), "ALiBi is added"),
        (lambda: hw.nn.MultiHeadAttention(WIDTH, HEADS, projections=hw.nn.Unprojected()), "no we"),
    ],
    ids=["qk-norm", "cosine", "additive", "softcap", "alibi", "unprojected"],
)
@pytest.mark.parametrize("maps", [True, False])
def test_a_layer_whose_weights_do_not_set_its_logits_is_refused_by_name(
    model: Callable[[], nn.Module], reason: str, maps: bool
) -> None:
    whole = nn.Sequential(model())
    x = torch.randn(1, 6, WIDTH)
    before = largest(whole, lambda: whole(x), maps=maps)
    weights = [x.clone() for x in whole.parameters()]
    with pytest.raises(ValueError, match=r"hw\.qk_clip can't clip 0") as refusal:
        qk_clip(whole, before, 1e-6)
    assert reason in str(refusal.value)
    assert all(map(torch.equal, weights, whole.parameters()))


@pytest.mark.parametrize("maps", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "hunyuan", "bloom"])
def test_transformers_models_with_norms_caps_or_biases_are_refused(family: str, maps: bool) -> None:
    model, tokens = foreign(family), torch.randint(1, 50, (2, 12))
    before = largest(model, lambda: model(tokens), maps=maps)
    with pytest.raises(ValueError, match=r"hw\.qk_clip can't clip (layers|h)\.0\.self_att"):
        qk_clip(model, before, LIMIT)


class Fused(nn.Module):
    """Attention as nanoGPT writes it: one plain linear layer for queries, keys and values."""

    def __init__(self, bias: bool = True, outputs: int = 3 * WIDTH, norm: str | None = None):
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, outputs, bias=bias)
        if norm is not None:
            setattr(self, norm, nn.LayerNorm(WIDTH // HEADS))

    def forward(self, x: Tensor) -> Tensor:
        made = self.c_attn(x)[..., : 3 * WIDTH].chunk(3, -1)
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in made)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("bias", [True, False])
def test_one_plain_layer_for_queries_keys_and_values_keeps_its_values(bias: bool) -> None:
    model, x = grown(Fused(bias)), torch.randn(2, 12, WIDTH)
    values = model.c_attn.weight[2 * WIDTH :].clone()
    before = largest(model, lambda: model(x))
    qk_clip(model, before, LIMIT)
    after = torch.tensor(largest(model, lambda: model(x)).heads()["max_logit_max"])
    expected = torch.tensor(before.heads()["max_logit_max"]).clamp_max(LIMIT)
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(model.c_attn.weight[2 * WIDTH :], values)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"outputs": 3 * WIDTH + 5}, "101 outputs are not 4 heads of width 8"),
        ({"norm": "q_ln"}, r"normalises queries and keys \(q_ln\)"),
        ({"norm": "qk_norm"}, r"normalises queries and keys \(qk_norm\)"),
    ],
)
def test_weights_that_are_not_understood_are_refused_in_words(
    options: dict[str, Any], said: str
) -> None:
    model, x = grown(Fused(**options)), torch.randn(2, 12, WIDTH)
    with pytest.raises(ValueError, match=f"hw.qk_clip can't clip the model: .*{said}"):
        qk_clip(model, largest(model, lambda: model(x)), LIMIT)


def test_weights_that_are_computed_from_others_are_refused() -> None:
    model, x = grown(Fused()), torch.randn(2, 12, WIDTH)
    nn.utils.parametrizations.weight_norm(model.c_attn)
    with pytest.raises(ValueError, match="quantised, or computed from other"):
        qk_clip(model, largest(model, lambda: model(x)), LIMIT)


def test_a_norm_of_the_output_changes_nothing() -> None:
    model, x = grown(Fused(norm="out_norm")), torch.randn(2, 12, WIDTH)
    assert qk_clip(model, largest(model, lambda: model(x)), LIMIT)


def test_a_model_is_clipped_in_all_its_layers_or_in_none() -> None:
    layers = [grown(hw.nn.MultiHeadAttention(WIDTH, HEADS)) for _ in range(2)]
    model, x = nn.Sequential(*layers), torch.randn(2, 12, WIDTH)
    before = largest(model, lambda: model(x))
    model[1].query_norm = nn.RMSNorm(WIDTH // HEADS)
    weights = [x.clone() for x in model.parameters()]
    with pytest.raises(ValueError, match="can't clip 1"):
        qk_clip(model, before, LIMIT)
    assert all(map(torch.equal, weights, model.parameters()))
    model[1].query_norm = None
    assert {clip.layer for clip in qk_clip(model, before, LIMIT)} == {0, 1}  # not used before


def test_a_folder_s_figures_are_no_ground_to_clip_on(tmp_path: Path) -> None:
    model, x = grown(hw.nn.MultiHeadAttention(WIDTH, HEADS)), torch.randn(2, 12, WIDTH)
    largest(model, lambda: model(x)).save(tmp_path / "run")
    with pytest.raises(ValueError, match="not how its logits were made"):
        qk_clip(model, hw.watching.open_run(tmp_path / "run"), LIMIT)


def test_sampled_rows_are_clipped_by_what_they_show_and_say_so() -> None:
    model = grown(hw.nn.MultiHeadAttention(WIDTH, HEADS))
    x = torch.randn(2, 64, WIDTH)
    before = largest(model, lambda: model(x), rows=8)
    clipped = qk_clip(model, before, LIMIT)
    assert clipped
    assert all(clip.lower_bound for clip in clipped)
    sampled = largest(model, lambda: model(x), rows=8)
    assert max(figure(sampled.heads(), "max_logit_max")) == pytest.approx(LIMIT, rel=1e-4)


def test_the_figures_of_a_step_are_used_once() -> None:
    model = grown(hw.nn.MultiHeadAttention(WIDTH, HEADS))
    x = torch.randn(2, 12, WIDTH)
    watch = hw.watch(model).attach()
    model(x)
    watch.step()
    assert qk_clip(model, watch, LIMIT)
    assert qk_clip(model, watch, LIMIT) == []
    model(x)
    watch.step()
    assert qk_clip(model, watch, LIMIT / 2)
    watch.detach()


def test_gradients_and_optimisers_go_on_with_the_clipped_weights() -> None:
    model = grown(hw.nn.MultiHeadAttention(WIDTH, HEADS)).train()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(2, 12, WIDTH)
    watch = hw.watch(model).attach()
    for _ in range(3):
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.step()
        qk_clip(model, watch, LIMIT)
    watch.detach()
    assert all(x.is_leaf and x.requires_grad for x in model.parameters())


def test_bad_calls_are_refused_in_words() -> None:
    model = hw.nn.MultiHeadAttention(WIDTH, HEADS)
    x = torch.randn(1, 4, WIDTH)
    with pytest.raises(ValueError, match="the limit must be positive"):
        qk_clip(model, largest(model, lambda: model(x)), 0)
    with pytest.raises(ValueError, match="reads max_logit, which was not recorded"):
        qk_clip(model, largest(model, lambda: model(x), stats=("entropy",)))
    wrapped = nn.Sequential(model)
    with pytest.raises(ValueError, match="there is no '0' in this MultiHeadAttention"):
        qk_clip(model, largest(wrapped, lambda: wrapped(x)))
    with pytest.raises(ValueError, match=r"head 0\.0 has a logit that is infinite or NaN"):
        qk_clip(model, largest(model, lambda: model(x * float("nan"))))
