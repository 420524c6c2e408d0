"""A watch records the weight on spans of keys: in tables, alarms, run folders and compiled code."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import transformers

import headwise as hw
from headwise.watching import SpanWeight, open_run
from tests.watching.test_compiled import Stack


@pytest.mark.parametrize("inside", [False, True], ids=["beside", "inside"])
def test_a_table_has_the_mean_weight_on_each_span(inside: bool) -> None:
    own = hw.nn.MultiHeadAttention(32, 4, kv_heads=2, mask=hw.mask.causal())
    model, x = own if inside else Stack(), torch.randn(2, 12, 32)
    spans = {"start": (0, 3), "late": (torch.tensor([4, 6]), 12)}
    with hw.watch(model, spans=spans) as seen:
        model(x)
    first = seen.heads()[0]
    weights = seen.layer(0).map().to_tensor()  # (B, H, N, M)
    torch.testing.assert_close(seen.spans["start"][0], weights[..., :3].sum(-1))
    late = torch.stack([weights[0, ..., 4:].sum(-1), weights[1, ..., 6:].sum(-1)])
    torch.testing.assert_close(seen.spans["late"][0], late)
    assert first["span_late_mean"] == pytest.approx(float(late[:, 0].mean()), abs=1e-5)
    assert seen.scalars()["attn/layer_00/span_start_mean"] > 0


def test_a_sample_of_the_rows_and_few_statistics_are_enough() -> None:
    with hw.watch(Stack(), stats=(), rows=4, spans={"a": (0, 2)}, maps=False) as seen:
        seen.model(torch.randn(2, 12, 32))
    assert seen.heads().columns[4:] == ["span_a_mean"]


def test_recomputed_layers_count_once() -> None:
    x = torch.randn(2, 12, 32)
    means = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = Stack(checkpointed)
        with hw.watch(model, spans={"a": (1, 5)}) as seen:
            model(x).sum().backward()
        means.append([row["span_a_mean"] for row in seen.heads()])
    assert means[0] == means[1]


def llava() -> transformers.LlavaForConditionalGeneration:
    small = {"intermediate_size": 32, "hidden_size": 16, "num_hidden_layers": 1}
    torch.manual_seed(0)
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            image_size=32, patch_size=8, num_attention_heads=2, **small
        ),
        text_config=transformers.LlamaConfig(
            vocab_size=99, num_attention_heads=4, attn_implementation="sdpa", **small
        ),
        image_token_index=98, vision_feature_layer=-1,
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config).eval()


@pytest.mark.parametrize("compiled", [False, True])
def test_spans_are_ranges_of_tokens_and_not_of_a_vision_towers_patches(compiled: bool) -> None:
    torch.compiler.reset()
    model, ids = llava(), torch.cat((torch.full((1, 16), 98), torch.arange(10)[None]), 1)
    if compiled:
        model.model.vision_tower.compile(backend="eager")
        model.model.language_model.compile(backend="eager")
    with torch.no_grad(), hw.watch(model, spans={"image": (0, 16)}) as seen:
        model(input_ids=ids, pixel_values=torch.randn(1, 3, 32, 32))
    weights = [row["span_image_mean"] for row in seen.heads()]
    assert [math.isnan(float(x)) for x in weights] == [True] * 2 + [False] * 4
    expected = seen.layer(1).map().to_tensor()[0, ..., :16].sum(-1).mean(-1)
    assert weights[2:] == pytest.approx(expected.tolist(), rel=1e-4)
    assert list(seen.spans["image"]) == [1]


def test_compiled_layers_record_spans() -> None:
    torch._dynamo.reset()
    model, x = Stack(), torch.randn(2, 12, 32)
    spans = {"a": (1, 5), "own": (torch.tensor([0, 3]), torch.tensor([4, 20]))}
    with hw.watch(model, spans=spans) as plain:
        wanted = model(x)
    compiled = torch.compile(model, backend="aot_eager")
    with hw.watch(model, spans=spans) as seen:
        torch.testing.assert_close(compiled(x), wanted)
    for mine, theirs in zip(seen.heads(), plain.heads(), strict=True):
        for name in ("span_a_mean", "span_own_mean"):
            assert mine[name] == pytest.approx(theirs[name], abs=1e-5)


def test_a_generated_token_weighs_the_same_span() -> None:
    gpt = hw.load("gpt")
    ids = gpt.encode("to be or not to be, that is the question")
    with hw.watch(gpt.model, spans={"start": (0, 4), "later": (500, 600)}) as whole:
        gpt.model(ids)
    caches = [hw.nn.GrowingCache() for _ in gpt.model.blocks]
    with hw.watch(gpt.model, spans={"start": (0, 4), "later": (500, 600)}) as steps:
        for part in ids.split([5, *[1] * (ids.shape[1] - 5)], 1):
            gpt.model(part, caches=caches)
    torch.testing.assert_close(steps.spans["start"][3], whole.spans["start"][3])
    assert not whole.spans["later"][0].any()  # keys that are not there get no weight


def test_an_alarm_watches_a_span_and_a_run_keeps_it(tmp_path: Path) -> None:
    rules = (SpanWeight("all", above=0.9), SpanWeight("end", below=0.5, per_head=True))
    watch = hw.watch(Stack(), spans={"all": (0, 12), "end": (11, torch.tensor([12, 12]))},
                     alarms=rules)  # fmt: skip
    with watch, watch.record(tmp_path / "run"):
        watch.model(torch.randn(2, 12, 32))
        watch.step()
    said = [(alarm.rule, alarm.layer) for alarm in watch.alarms]
    assert said == [("much weight on all", None)] + [
        ("little weight on end", x // 4) for x in range(8)
    ]
    run = open_run(tmp_path / "run")
    assert "span_all_mean" in run.figures
    assert run.manifest["looking"]["spans"] == {"all": [0, 12], "end": [11, [12, 12]]}


def test_a_rule_about_a_span_that_is_not_watched_is_refused() -> None:
    with pytest.raises(ValueError, match="little weight on image reads span_image"):
        hw.watch(Stack(), alarms=SpanWeight("image", below=0.1))
    with pytest.raises(ValueError, match="takes one limit"):
        SpanWeight("image")
    with pytest.raises(ValueError, match="0 <= first <= last"):
        hw.watch(Stack(), spans={"a": (4, 2)})


def test_bounds_for_another_batch_are_an_error_of_the_watch_not_of_the_model() -> None:
    model, x = Stack(), torch.randn(2, 12, 32)
    watch = hw.watch(model, spans={"a": (torch.tensor([0, 1, 2]), 9)}).attach()
    with pytest.warns(UserWarning, match="the batch has 2 entries"):
        out = model(x)
    watch.detach()
    assert torch.equal(out, model(x))
    assert watch.unread == ["layers.0", "layers.1"]
