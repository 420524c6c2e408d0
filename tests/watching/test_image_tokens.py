"""The weight on images and videos among the tokens of a prompt is found by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.watching.recorder.marked_keys import MarkedKeys

transformers = pytest.importorskip("transformers")

FAMILIES = (
    "Gemma3", "Idefics3", "InternVL", "Llama4", "Llava", "LlavaNext", "LlavaOnevision",
    "Mistral3", "PaliGemma", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "SmolVLM",
)  # fmt: skip
IMAGE, VIDEO = 97, 98
TEXT = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 99, "pad_token_id": 0,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 32,
    "image_size": 28, "patch_size": 14, "depth": 1, "embed_dim": 32, "num_heads": 4,
    "out_hidden_size": 32, "fullatt_block_indexes": [0], "deepstack_visual_indexes": [0],
}  # fmt: skip
ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
MORE: dict[str, dict[str, Any]] = {
    "Gemma3": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    "Llama4": {"num_local_experts": 2, "intermediate_size_mlp": 32, "attention_chunk_size": 8},
    "Qwen2VL": {"rope_parameters": ROTARY},
    "Qwen2_5_VL": {"rope_parameters": ROTARY},
    "Qwen3VL": {"rope_parameters": ROTARY},
}


def built(family: str, more: dict[str, Any] | None = None) -> Any:
    """A tiny model whose heads choose, in a dtype whose maps need no kernel."""
    kind = getattr(transformers, f"{family}Config")
    default = kind()
    text = {"model_type": default.text_config.model_type} | TEXT | MORE.get(family, {})
    eyes = {"model_type": default.vision_config.model_type} | VISION
    ids = {
        f"{name}_{end}": id
        for name, id in (("image_token", IMAGE), ("video_token", VIDEO))
        for end in ("id", "index")
        if hasattr(default, f"{name}_{end}")
    }
    config = kind(text_config=text, vision_config=eyes, **ids, **(more or {}))
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    for name, x in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            nn.init.normal_(x, std=x.shape[-1] ** -0.5)
    return model.double().eval()


def check(seen: hw.Watch, shown: Tensor, kind: str = "image") -> None:
    """Every layer that reads the tokens has the weight of its map on them."""
    found = seen.spans[kind]
    assert len(found) == 2  # both layers of the language model
    for number, weight in found.items():
        weights = seen.layer(number).map().to_tensor()
        keys = shown[:, None, None, -weights.shape[-1] :].to(weights)
        torch.testing.assert_close(weight, (weights * keys).sum(-1), atol=1e-6, rtol=1e-5)
    rows = [row[f"span_{kind}_mean"] for row in seen.heads() if row["layer"] in found]
    assert min(rows) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_image_tokens_are_found(family: str) -> None:
    model = built(family)
    ids = torch.randint(5, 60, (2, 17))
    ids[0, 3:7] = ids[0, 9:11] = ids[1, 2:9] = IMAGE  # two pictures, and one
    with torch.no_grad(), hw.watch(model, stats=("entropy",)) as seen:
        model(input_ids=ids)
    check(seen, ids == IMAGE)


def pictures(family: str, model: Any) -> tuple[Tensor, dict[str, Any]]:
    """A padded batch of two prompts with a picture each, as their processors make it."""
    if family == "Qwen2_5_VL":  # 4 x 6 patches, of which four are one token
        vision = model.config.vision_config
        width = 3 * vision.temporal_patch_size * vision.patch_size**2
        given = {
            "pixel_values": torch.randn(2 * 24, width),
            "image_grid_thw": torch.tensor([[1, 4, 6]] * 2),
        }
        count = 6
    else:
        given = {"pixel_values": torch.randn(2, 3, 28, 28)}
        count = model.config.mm_tokens_per_image if family == "Gemma3" else 4
    ids = torch.randint(5, 60, (2, 9 + count))
    ids[0, 2 : 2 + count] = ids[1, 6 : 6 + count] = IMAGE
    ids[1, :3] = 0
    kinds = (ids == IMAGE).int()
    return ids, {
        **{name: x.double() if x.is_floating_point() else x for name, x in given.items()},
        "attention_mask": (ids != 0).long(),
        **(
            {}
            if family == "Llava"
            else {"token_type_ids" if family == "Gemma3" else "mm_token_type_ids": kinds}
        ),
    }


@pytest.mark.parametrize("family", ["Gemma3", "Llava", "Qwen2_5_VL"])
def test_pictures_are_weighed_in_the_prompt_and_while_it_generates(family: str) -> None:
    more = {"mm_tokens_per_image": 4} if family == "Gemma3" else {}
    model = built(family, more)
    ids, given = pictures(family, model)
    with torch.no_grad(), hw.watch(model, strict=True) as seen:
        model(input_ids=ids, **given)
    check(seen, ids == IMAGE)
    with hw.watch(model, stats="entropy") as seen:
        text = model.generate(input_ids=ids, **given, max_new_tokens=3, do_sample=False)
    longer = text.shape[1] - 1 - ids.shape[1]
    for name in ("attention_mask", "token_type_ids", "mm_token_type_ids"):
        if name in given:
            given[name] = nn.functional.pad(
                given[name], (0, longer), value=name == "attention_mask"
            )
    with torch.no_grad(), hw.watch(model) as whole:
        model(input_ids=text[:, :-1], **given)
    for number, weight in whole.spans["image"].items():
        torch.testing.assert_close(seen.spans["image"][number], weight, atol=1e-6, rtol=1e-5)


def test_a_text_puts_no_weight_on_images_and_a_named_span_stays() -> None:
    model = built("Llava")
    ids = torch.randint(5, 60, (1, 9))
    with torch.no_grad(), hw.watch(model) as seen:
        model(input_ids=ids)
    assert seen.heads()["span_image_mean"] == [0.0] * 8
    assert seen.layers[0].number == 0
    with torch.no_grad(), hw.watch(model, spans={"image": (2, 4)}) as seen:
        model(input_ids=ids)
    mass = seen.layer(0).map().mass(2, 4)
    torch.testing.assert_close(seen.spans["image"][0], mass, atol=1e-6, rtol=1e-5)
    with torch.no_grad(), hw.watch(model) as seen:
        model(inputs_embeds=torch.randn(1, 9, 32).double())
    assert not seen.spans


def test_an_image_after_an_answer_is_where_it_stands() -> None:
    marked = MarkedKeys({"image": (IMAGE,)})
    for past, tokens in ((0, [1, IMAGE, 2]), (3, [3]), (4, [4]), (5, [5, IMAGE])):
        marked.note(torch.tensor([tokens]), past)
    assert marked.found["image"].order.tolist() == [[1, 6]]


def test_what_a_cache_holds_unseen_is_not_guessed() -> None:
    class Cache:
        pass

    marked, mine, other = MarkedKeys({"image": (IMAGE,)}), Cache(), Cache()
    marked.note(torch.tensor([[5]]), 7, mine)  # its prompt came before the watch
    assert not marked.found
    marked.note(torch.tensor([[1, IMAGE, 2]]), 0, mine)
    marked.note(torch.tensor([[5]]), 3, other)  # that of another generation
    assert not marked.found
    marked.note(torch.tensor([[1, IMAGE, 2]]), 0)
    marked.note(torch.tensor([[5]]), 3, mine)
    assert marked.found["image"].order.tolist() == [[1]]
    marked.note(torch.tensor([[5]]), 6, mine)  # some passes were not looked at
    assert not marked.found


def test_a_watch_that_begins_in_an_answer_tells_no_spans() -> None:
    model = built("Llava")
    ids = torch.randint(5, 60, (1, 9))
    ids[0, 2:6] = IMAGE
    with torch.no_grad():
        cache = model(input_ids=torch.randint(5, 60, (1, 12)), use_cache=True).past_key_values
        with hw.watch(model) as seen:
            model(input_ids=ids)
            assert seen.spans
            model(input_ids=torch.tensor([[7]]), past_key_values=cache)
    assert not seen.spans


def test_image_tokens_are_not_repetitions_of_each_other() -> None:
    model = built("Llava")
    ids = torch.arange(5, 45)[None].clone()
    ids[0, 4:24] = IMAGE
    with torch.no_grad(), hw.watch(model) as seen:
        model(input_ids=ids)
    assert seen.layer(0).parts["image"].equal(ids == IMAGE)
    types = seen.types()
    assert all(x != x for x in types["induction"])  # NaN: no token occurs twice
    assert "induction" not in types["type"]
    ids[0, 24:] = torch.arange(16) % 3 + 50
    with torch.no_grad(), hw.watch(model) as seen:
        model(input_ids=ids)
    assert all(0 < x < 1 for x in seen.types()["induction"])
