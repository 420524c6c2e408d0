"""transformers' models, unchanged: their outputs, and every statistic against eager attention."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

import headwise as hw
import headwise.transformers
from headwise.watching import Watch
from tests.watching.foreign import (
    DECODERS,
    IMPLEMENTATIONS,
    INTERFACE,
    PADDINGS,
    UNSUPPORTED,
    WRITTEN_OUT,
    B,
    N,
    implementation,
    inputs,
    model_of,
    shown,
    written_out,
)


def close(ours: Tensor, theirs: Tensor, rows: Tensor, name: str) -> None:
    """Equal to float32 rounding on (B, H, N) where rows (B, N) are no padding."""
    kept = rows[:, None].expand_as(ours)
    assert ours.shape == theirs.shape, name
    torch.testing.assert_close(
        ours[kept], theirs[kept], rtol=1e-4, atol=2e-5, msg=lambda said: f"{name}: {said}"
    )


def real_rows(given: dict[str, Tensor], layer: Any) -> tuple[Tensor, Tensor]:
    """Which rows of a layer are no padding (B, N), and each sequence's first key (B,)."""
    decoder = "decoder_input_ids" in given and "encoder" not in layer.name.split(".")[:2]
    rows, keys = "attention_mask", "attention_mask"
    if decoder:
        rows = "decoder_attention_mask"
        keys = rows if layer.kind == "self" else keys
    everything = torch.ones(B, layer.observation.sees.shape[2], dtype=torch.long)
    first = given.get(keys, torch.ones(B, 1)).argmax(-1)
    return given.get(rows, everything).bool(), first


CASES = [
    (family, attention, padding)
    for family in INTERFACE
    for attention in IMPLEMENTATIONS
    for padding in PADDINGS
    if (family, attention) not in UNSUPPORTED and (family != "vit" or padding == "whole")
]


@pytest.mark.parametrize(("family", "attention", "padding"), CASES)
def test_outputs_stay_and_every_statistic_is_that_of_attention_written_out(
    family: str, attention: str, padding: str
) -> None:
    model, given = model_of(family), inputs(family, padding)
    with implementation(model, attention), torch.no_grad():
        before = model(**given)[0]
        with hw.watch(model) as seen:
            during = model(**given)[0]
    if attention == "headwise":  # another engine observes: equal to rounding
        torch.testing.assert_close(during, before, rtol=1e-4, atol=1e-4)
    else:
        assert torch.equal(during, before)
    calls = written_out(model, given)
    for layer, call in zip(seen.layers, calls, strict=True):
        rows, begins = real_rows(given, layer)
        across = layer.kind == "cross"
        wanted = call.statistics(begins, across)
        assert set(layer.observation.values) == set(wanted)
        for name, value in wanted.items():
            close(layer.observation.values[name], value, rows, f"{layer.name} {name}")
        if layer.padding is not None:
            assert torch.equal(layer.padding, ~rows)
        else:
            assert rows.all()
        mean = float(wanted["entropy"][:, 1][rows].mean())
        said = [row for row in seen.heads() if row["name"] == layer.name and row["head"] == 1]
        assert said[0]["entropy_mean"] == pytest.approx(mean, abs=1e-4)


@pytest.mark.parametrize("family", ["bert", "llama", "gpt_oss", "t5"])
def test_the_attention_written_out_is_that_of_output_attentions(family: str) -> None:
    model, given = model_of(family), inputs(family, "right")
    with torch.no_grad():
        out = model(**given, output_attentions=True)
    if family == "t5":
        across = zip(out.decoder_attentions, out.cross_attentions, strict=True)
        weights = [*out.encoder_attentions, *(x for pair in across for x in pair)]
    else:
        weights = list(out.attentions)
    for ours, theirs in zip(written_out(model, given), weights, strict=True):
        rows = ours.logits.isfinite().any(-1)
        torch.testing.assert_close(ours.weights[rows], theirs[rows], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("family", WRITTEN_OUT)
def test_models_that_write_their_attention_out_are_seen_too(family: str, padding: str) -> None:
    model, given = model_of(family), inputs(family, padding)
    with torch.no_grad():
        before = model(**given)[0]
        with hw.watch(model) as seen:
            assert torch.equal(model(**given)[0], before)
        weights = model(**given, output_attentions=True).attentions
    rows = given.get("attention_mask", torch.ones(B, N)).bool()
    for layer, p in zip(seen.layers, weights, strict=True):
        observed = layer.observation
        close(observed.entropy, -torch.special.xlogy(p, p).sum(-1), rows, "entropy")
        close(observed.top_prob, p.amax(-1), rows, "top_prob")
        close(observed.self_mass, p.diagonal(dim1=-2, dim2=-1), rows, "self_mass")
        torch.testing.assert_close(layer.map().to_tensor()[0], p[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("family", ["gptj", "gpt_neo"])
def test_so_they_are_in_half_precision(family: str, padding: str) -> None:
    model, given = copy.deepcopy(model_of(family)).half(), inputs(family, padding)
    with torch.no_grad(), hw.watch(model) as seen:
        weights = model(**given, output_attentions=True).attentions
    rows = given["attention_mask"].bool()
    for layer, p in zip(seen.layers, weights, strict=True):
        assert torch.equal(layer.padding, ~rows)
        kept, p = rows[:, None].expand(-1, 4, -1), p.float()
        wanted = -torch.special.xlogy(p, p).sum(-1)
        torch.testing.assert_close(
            layer.observation.entropy[kept], wanted[kept], atol=0.01, rtol=0.01
        )
        assert float(layer.observation.logit_mean[kept].abs().max()) < 1e4


GENERATION = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "static": {"cache_implementation": "static"},
    "without a cache": {"use_cache": False},
}


GENERATING = [
    (family, attention)
    for family in DECODERS
    for attention in IMPLEMENTATIONS
    if (family, attention) not in UNSUPPORTED
]


@pytest.mark.parametrize("way", GENERATION)
@pytest.mark.parametrize(("family", "attention"), GENERATING)
def test_generated_tokens_are_seen_as_in_one_pass_over_all_of_them(
    family: str, attention: str, way: str
) -> None:
    check_generation(family, attention, GENERATION[way], "left")


def check_generation(family: str, attention: str, way: dict[str, Any], padding: str) -> None:
    """Generate watched and unwatched; every row's statistics are those of one pass."""
    model, prompt = model_of(family), inputs(family, padding)
    options = {**prompt, "max_new_tokens": 5, "min_new_tokens": 5, "pad_token_id": 0}
    options |= {"disable_compile": True, **way}
    with implementation(model, attention):
        torch.manual_seed(2)
        before = model.generate(**options)
        torch.manual_seed(2)
        with hw.watch(model) as seen:
            made = model.generate(**options)
    assert torch.equal(made, before)
    shown = prompt.get("attention_mask", torch.ones(B, N, dtype=torch.long))
    real = torch.cat([shown, torch.ones(B, 4, dtype=torch.long)], 1)
    whole = {"input_ids": made[:, :-1], "attention_mask": real}
    whole["position_ids"] = (real.cumsum(1) - 1).clamp_min(0)
    for layer, call in zip(seen.layers, written_out(model, whole), strict=True):
        rows = real.bool()
        wanted = call.statistics(real.argmax(-1), across=False)
        for name, value in wanted.items():
            close(layer.observation.values[name], value, rows, f"{layer.name} {name}")
        assert layer.padding is None or torch.equal(layer.padding, ~rows)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", ["t5", "bart", "llama"])
def test_generation_across_and_with_beams_is_unchanged_and_seen(
    family: str, attention: str, beams: int
) -> None:
    model = model_of(family)
    given = {k: v for k, v in inputs(family, "left").items() if not k.startswith("decoder")}
    options = {**given, "max_new_tokens": 5, "min_new_tokens": 5, "pad_token_id": 0}
    with implementation(model, attention):
        before = model.generate(**options, num_beams=beams)
        with hw.watch(model) as seen:
            assert torch.equal(model.generate(**options, num_beams=beams), before)
    last = seen.layers[-1]
    assert last.kind == ("self" if family == "llama" else "cross")
    new = 5 if family != "llama" else N + 4
    assert last.observation.entropy.shape == (B * beams, 4, new)
    if family != "llama" and beams == 1:
        whole = {**given, "decoder_input_ids": before[:, :-1]}
        for layer, call in zip(seen.layers, written_out(model, whole), strict=True):
            rows = layer.observation.sees[:, 0] if layer.padding is None else ~layer.padding
            value = call.statistics(torch.zeros(B), layer.kind == "cross")["entropy"]
            close(layer.observation.entropy, value, rows, layer.name)


def test_models_that_are_not_watched_and_a_second_watch_do_not_disturb() -> None:
    watched, other = model_of("llama"), model_of("bert")
    stranger = copy.deepcopy(watched)
    given = inputs("llama", "whole")
    with torch.no_grad(), hw.watch(watched) as first, hw.watch(other) as second:
        stranger(**given)
        assert first.layers == [] == second.layers
        watched(**given)
        other(**given)
    assert [len(seen.layers) for seen in (first, second)] == [2, 2]
    assert first.layers[0].name == "model.layers.0.self_attn"


def snapshot(model: nn.Module) -> list[object]:
    """Everything about a model that a watch might leave behind."""
    kept: list[object] = [dict(AttentionInterface._global_mapping)]
    kept += [dict(AttentionMaskInterface._global_mapping)]
    kept += [getattr(AttentionInterface, "get_interface", None)]  # transformers 4 has none
    kept += [vars(sys.modules[type(model).__module__]).get("eager_attention_forward")]
    kept += ["__getitem__" in vars(AttentionInterface), torch._C._len_torch_function_stack()]
    kept += [nn.MultiheadAttention.forward, nn.TransformerEncoderLayer.forward]
    for module in model.modules():
        kept += [sorted(vars(module)), list(module._forward_hooks), list(module._forward_pre_hooks)]
    config = getattr(model, "config", None)
    return [*kept, None if config is None else config.to_dict()]


@pytest.mark.parametrize("family", ["llama", "t5", "bloom"])
def test_everything_is_restored_after_a_watch_and_after_an_exception(family: str) -> None:
    model, given = model_of(family), inputs(family, "right")
    before, state = snapshot(model), {k: v.clone() for k, v in model.state_dict().items()}
    with hw.watch(model):
        model(**given)
    assert snapshot(model) == before
    broken = {**given, "input_ids": torch.full((B, N), 5000)}
    with pytest.raises(IndexError), hw.watch(model):
        model(**broken)
    assert snapshot(model) == before
    watch = hw.watch(model).attach()
    with pytest.raises(IndexError):
        model(**broken)
    model(**given)
    watch.detach()
    assert len(watch.layers) > 0
    assert snapshot(model) == before
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())


def train(model: Any, given: dict[str, Tensor]) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    model(**given).logits.square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_training_has_the_same_gradients_and_counts_no_row_twice(reentrant: bool | None) -> None:
    model, given = copy.deepcopy(model_of("llama")).train(), inputs("llama", "right")
    if reentrant is not None:
        options = {"use_reentrant": reentrant}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    model.config.use_cache = False
    before = train(model, given)
    with hw.watch(model) as seen:
        during = train(model, given)
        assert [layer.last.queries for layer in seen.layers] == [N, N]
        rows = [int(layer.counted()[0]) for layer in seen.layers]
    assert rows == [N + 5 + 7] * 2
    assert all(torch.equal(a, b) for a, b in zip(before, during, strict=True))


def test_dropout_changes_outputs_and_not_statistics() -> None:
    model = copy.deepcopy(model_of("bert"))
    given = inputs("bert", "right")
    with torch.no_grad(), hw.watch(model) as still:
        model(**given)
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module is not model.encoder.layer[0].attention.self:
            module.p = 0.0
    model.encoder.layer[0].attention.self.dropout.p = 0.5
    model.train()
    with torch.no_grad():
        torch.manual_seed(5)
        before = model(**given)[0]
        torch.manual_seed(5)
        with hw.watch(model) as seen:
            assert torch.equal(model(**given)[0], before)
    theirs, ours = still.layers[0].observation, seen.layers[0].observation
    torch.testing.assert_close(ours.entropy, theirs.entropy)
    torch.testing.assert_close(ours.output_norm, theirs.output_norm)


def test_autocast_is_watched_in_its_own_precision() -> None:
    model, given = model_of("llama"), inputs("llama", "right")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before = model(**given)[0]
        with hw.watch(model) as seen:
            assert torch.equal(model(**given)[0], before)
    exact = written_out(model, given)
    rows = given["attention_mask"].bool()[:, None].expand(-1, 4, -1)
    for layer, call in zip(seen.layers, exact, strict=True):
        wanted = call.statistics(torch.zeros(B), across=False)["entropy"]
        torch.testing.assert_close(
            layer.observation.entropy[rows], wanted[rows], atol=0.1, rtol=0.1
        )


def odd(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> Any:
    """Attention of another kind: a weight of its own for every key, whatever the query."""
    return value.repeat_interleave(2, 1).cumsum(2).transpose(1, 2).contiguous(), None


def test_a_function_that_computes_something_else_is_refused_by_name() -> None:
    model = model_of("llama")
    AttentionInterface.register("odd", odd)
    AttentionMaskInterface.register("odd", AttentionMaskInterface._global_mapping["sdpa"])
    try:
        with (
            implementation(model, "odd"),
            pytest.raises(ValueError, match=r"(?s)layers\.0\.self_attn can't be watched.*'odd'"),
            hw.watch(model, strict=True),
        ):
            model(**inputs("llama", "whole"))
    finally:
        del AttentionInterface._global_mapping["odd"]
        del AttentionMaskInterface._global_mapping["odd"]


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_calls_that_drop_weights_are_proved_without_and_use_up_no_random_number(
    family: str, attention: str
) -> None:
    model, given = copy.deepcopy(model_of(family)).train(), inputs(family, "right")
    with implementation(model, attention):
        torch.manual_seed(5)
        before = model(**given)[0]
        torch.manual_seed(5)
        with hw.watch(model) as seen:
            assert torch.equal(model(**given)[0], before)
    assert len(seen.layers) == 2
    assert all(module.training for module in model.modules())


def test_a_function_that_computes_something_else_is_refused_while_it_drops_weights() -> None:
    model = copy.deepcopy(model_of("llama")).train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    AttentionInterface.register("odd", odd)
    AttentionMaskInterface.register("odd", AttentionMaskInterface._global_mapping["sdpa"])
    refused = pytest.raises(ValueError, match=r"(?s)layers\.0\.self_attn.*can't be watched")
    try:
        with implementation(model, "odd"), refused, hw.watch(model, strict=True):
            model(**inputs("llama", "whole"))
    finally:
        del AttentionInterface._global_mapping["odd"]
        del AttentionMaskInterface._global_mapping["odd"]
    assert all(module.training for module in model.modules())


def flat(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    **_: Any,
) -> Any:
    """What flash attention does with padding (B, M) or nothing, by way of PyTorch's kernel."""
    i = torch.arange(query.shape[2])[:, None] + key.shape[2] - query.shape[2]
    j = torch.arange(key.shape[2])
    seen = (j <= i) if sliding_window is None else (j <= i) & (j > i - sliding_window)
    seen = seen if attention_mask is None else seen & attention_mask.bool()[:, None, None]
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


@pytest.fixture
def _flat() -> Iterator[None]:
    """An implementation "flat", whose masks are those of flash attention."""
    AttentionInterface.register("flat", flat)
    theirs = AttentionMaskInterface._global_mapping["flash_attention_2"]
    AttentionMaskInterface.register("flat", theirs)
    yield
    del AttentionInterface._global_mapping["flat"]
    del AttentionMaskInterface._global_mapping["flat"]


@pytest.mark.usefixtures("_flat")
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_masks_as_flash_attention_has_them_are_read(family: str, padding: str) -> None:
    model, given = model_of(family), inputs(family, padding)
    with implementation(model, "flat"), torch.no_grad(), hw.watch(model) as seen:
        model(**given)
    for layer, call in zip(seen.layers, written_out(model, given), strict=True):
        rows, begins = real_rows(given, layer)
        for name, value in call.statistics(begins, across=False).items():
            close(layer.observation.values[name], value, rows, f"{layer.name} {name}")


@pytest.mark.usefixtures("_flat")
@pytest.mark.parametrize("padding", ["whole", "left"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_they_are_read_while_a_sliding_cache_forgets(family: str, padding: str) -> None:
    check_generation(family, "flat", {}, padding)


@pytest.mark.parametrize("attention", ["sdpa", "headwise"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_guessed_tokens_that_are_rejected_are_rows_no_more(family: str, attention: str) -> None:
    model, ids = model_of(family), torch.tensor([[5, 6, 7, 8, 5, 6, 7, 9, 5, 6]])
    given = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    guesses = {} if family == "mistral" else {"prompt_lookup_num_tokens": 3}  # it may not slide
    with implementation(model, attention), torch.no_grad(), hw.watch(model) as seen:
        made = model.generate(ids, **given, **guesses)
    assert seen.tokens is not None
    assert torch.equal(seen.tokens, made[:, :-1])
    with torch.no_grad(), hw.watch(model) as whole:
        model(made[:, :-1])
    for one, other in zip(seen.layers, whole.layers, strict=True):
        torch.testing.assert_close(
            one.observation.entropy, other.observation.entropy, rtol=1e-3, atol=1e-4
        )


def test_a_mask_with_numbers_of_its_own_is_a_bias() -> None:
    model, ids = model_of("llama"), inputs("llama", "whole")["input_ids"]
    mask = torch.randn(B, 1, N, N).tril()
    mask = mask.masked_fill(torch.ones(N, N).triu(1).bool(), torch.finfo(torch.float32).min)
    given = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad(), hw.watch(model) as seen:
        model(**given)
    for layer, call in zip(seen.layers, written_out(model, given), strict=True):
        for name, value in call.statistics(torch.zeros(B), across=False).items():
            close(layer.observation.values[name], value, torch.ones(B, N).bool(), name)


def test_a_watch_of_a_part_sees_that_part() -> None:
    model, given = model_of("bart"), inputs("bart", "right")
    with torch.no_grad(), hw.watch(model.model.encoder) as seen:
        model(**given)
    assert [layer.name for layer in seen.layers] == ["layers.0.self_attn", "layers.1.self_attn"]


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own, inside
def test_steps_that_are_passed_over_cost_no_look() -> None:
    model, given = model_of("llama"), inputs("llama", "whole")
    watch: Watch = hw.watch(model, every=2, stats=("entropy",)).attach()
    with torch.no_grad():
        for _ in range(4):
            model(**given)
            watch.step()
    watch.detach()
    assert [entry.step for entry in watch.series] == [0, 2]


def test_shared_layers_have_a_name_for_each_depth() -> None:
    model, given = model_of("albert"), inputs("albert", "right")
    with torch.no_grad(), hw.watch(model) as seen:
        model(**given)
    names = [layer.name for layer in seen.layers]
    assert len(names) == len(set(names)) == 2
    assert names[1].startswith(names[0])


def test_padding_inside_a_sequence_is_no_interval_and_still_exact() -> None:
    model, ids = model_of("llama"), inputs("llama", "whole")["input_ids"]
    mask = shown("right", (9, 5, 7), N)
    mask[0, 3] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    for attention in IMPLEMENTATIONS:
        with implementation(model, attention), torch.no_grad(), hw.watch(model) as seen:
            model(**given)
        for layer, call in zip(seen.layers, written_out(model, given), strict=True):
            wanted = call.statistics(torch.zeros(B), across=False)["entropy"]
            close(layer.observation.entropy, wanted, mask.bool(), attention)


def test_flex_attention_is_read_from_its_block_mask() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    from headwise.watching.adapters.interface import InterfaceCall, to_call
    from headwise.watching.adapters.scaled_dot_product import MaskMemo

    q = torch.randn(1, 2, 130, 8)
    blocks = create_block_mask(lambda b, h, i, j: (j <= i) & (j > i - 40), 1, None, 130, 130, "cpu")
    call = to_call(
        InterfaceCall("flex_attention", nn.Identity(), q, q, q, blocks, {}),
        "self",
        None,
        MaskMemo(),
    )
    assert repr(call.mask) == "(causal(offset=0) & window(39, offset=0))"
