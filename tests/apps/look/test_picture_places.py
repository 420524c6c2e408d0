"""Where a prompt's tokens lie on its pictures, told by what a change of a picture changes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.apps.look.readers.image_bytes import tensor
from headwise.apps.look.readers.picture_places import Prompt, pictures
from headwise.apps.look.scene import Picture
from headwise.models.trained import ASSETS
from tests.watching.test_image_tokens import IMAGE, TEXT

transformers = pytest.importorskip("transformers", reason="its processors cut pictures up")
processing_smolvlm = pytest.importorskip("transformers.models.smolvlm.processing_smolvlm")
PIL = pytest.importorskip("PIL.Image", reason="images are read with Pillow")

WRITES = re.compile(r"(out_proj|o_proj|attn\.proj|fc2|down_proj|linear_fc2|w2)\.(weight|bias)$")
"""What a layer of a vision tower adds to its patches."""

SHAPES = re.compile("merger|adapter")
"""What makes them tokens."""


def tokeniser(*tokens: str, **named: str) -> Any:
    """The built-in GPT's tokeniser, in which the first of these tokens is that of an image."""
    found = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(ASSETS / "gpt" / "tokenizer.json"), pad_token="!", eos_token=".",
        extra_special_tokens=named,
    )  # fmt: skip
    found.add_tokens([*tokens, *named.values()], special_tokens=True)
    return found


def model_of(family: str, tower: dict[str, Any], image: int, **more: Any) -> Any:
    """A tiny model whose vision tower leaves every patch to itself."""
    kind = getattr(transformers, f"{family}Config")
    default = kind()
    text = {"model_type": default.text_config.model_type} | TEXT | {"vocab_size": 4400}
    text |= more.pop("text", {})
    eyes = {"model_type": default.vision_config.model_type, "hidden_size": 32}
    eyes |= {"num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 32} | tower
    ids = {
        f"image_token_{end}": image
        for end in ("id", "index")
        if hasattr(default, f"image_token_{end}")
    }
    torch.manual_seed(3)
    config = kind(text_config=text, vision_config=eyes, **ids, **more)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    for name, x in model.named_parameters():
        tower = ("vision" in name or "visual" in name) and not SHAPES.search(name)
        if tower and WRITES.search(name):
            torch.nn.init.zeros_(x)
        elif "projector" in name and x.ndim > 1:  # zeros in Gemma 3
            torch.nn.init.normal_(x, std=0.1)
    return model


class OfRows:
    """Pixtral's processor, whose own needs torchvision: a separator after every row of patches."""

    def __init__(self, words: Any) -> None:
        self.tokenizer, self.side = words, 14
        self.image_break_token_id = words.convert_tokens_to_ids("[IMG_BREAK]")
        self.image_processor = SimpleNamespace(do_normalize=False)

    def __call__(self, images: Sequence[Any], text: str, return_tensors: str) -> dict[str, Tensor]:
        sizes, values = [], torch.zeros(len(images), 3, 84, 84)
        for number, image in enumerate(images):
            wide, high = (max(1, 6 * x // max(image.size)) for x in image.size)
            rows = ["[IMG]" * wide] * high
            text = text.replace("[IMG]\n", "[IMG_BREAK]".join(rows) + "[IMG_END]", 1)
            sizes.append((high * self.side, wide * self.side))
            small = tensor(image.resize(sizes[-1][::-1]))
            values[number, :, : sizes[-1][0], : sizes[-1][1]] = small
        ids = self.tokenizer(text, return_tensors="pt")["input_ids"]
        return {"input_ids": ids, "pixel_values": values, "image_sizes": torch.tensor(sizes)}


class OfTiles:
    """Llama 4's processor, whose own needs torchvision: six tiles, and then the whole."""

    def __init__(self, words: Any) -> None:
        self.tokenizer, self.image_processor = words, SimpleNamespace(do_normalize=False)

    def __call__(self, images: Sequence[Any], text: str, return_tensors: str) -> dict[str, Tensor]:
        values: list[Tensor] = []
        for image in images:
            patches = "<|patch|>" * 4
            row = "<|tile_x_separator|>".join([patches] * 3) + "<|tile_y_separator|>"
            asked = f"<|image_start|>{row * 2}<|image|>{patches}<|image_end|>"
            text = text.replace("<|patch|>\n", asked, 1)
            large = tensor(image.resize((84, 56)))
            values += [y for x in large.split(28, 1) for y in x.split(28, 2)]
            values.append(tensor(image.resize((28, 28))))
        ids = self.tokenizer(text, return_tensors="pt")["input_ids"]
        return {"input_ids": ids, "pixel_values": torch.stack(values)}


def built(family: str) -> tuple[Any, Any, str]:
    """A tiny model, its processor, and what stands for a picture in a prompt."""
    tower = {"image_size": 28, "patch_size": 7}
    square, cuts = {"height": 28, "width": 28}, [[28, 56], [56, 28], [56, 56], [28, 84]]
    match family:
        case "LlavaNext":
            words = tokeniser("<image>")
            values = transformers.LlavaNextImageProcessorPil(
                size={"shortest_edge": 28}, crop_size=square, image_grid_pinpoints=cuts
            )
            made = transformers.LlavaNextProcessor(
                values, words, patch_size=7, vision_feature_select_strategy="default",
                num_additional_image_tokens=1,
            )  # fmt: skip
            more = {"image_grid_pinpoints": cuts, "vision_feature_layer": -1}
        case "LlavaOnevision":
            words = tokeniser("<image>", "<video>")
            values = transformers.LlavaOnevisionImageProcessorPil(
                size=square, image_grid_pinpoints=[*cuts, [28, 28]]
            )
            made = transformers.LlavaOnevisionProcessor(
                values, words, None, num_image_tokens=16, vision_feature_select_strategy="full"
            )
            more = {"image_grid_pinpoints": [*cuts, [28, 28]], "vision_feature_layer": -1}
            more |= {"vision_aspect_ratio": "anyres_max_9"}
        case "Idefics3" | "SmolVLM":
            tower = {"image_size": 56, "patch_size": 7}
            names = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
            words = tokeniser("<image>", "<fake_token_around_image>", "<global-img>", *names)
            values = getattr(transformers, f"{family}ImageProcessorPil")(
                size={"longest_edge": 112}, max_image_size={"longest_edge": 56}
            )
            also = [None] if family == "SmolVLM" else []
            made = getattr(transformers, f"{family}Processor")(
                values, words, *also, image_seq_len=16
            )
            more = {"scale_factor": 2}
        case "InternVL":
            named = {"start_image": "<img>", "end_image": "</img>", "context_image": "<image>"}
            named = {f"{name}_token": token for name, token in named.items()}
            words = tokeniser("<image>", **named, video_token="<video>")
            tower = {"image_size": [28, 28], "patch_size": [7, 7]}
            values = transformers.GotOcr2ImageProcessorPil(
                size=square, crop_to_patches=True, min_patches=1, max_patches=6
            )
            made = transformers.InternVLProcessor(values, words, None, image_seq_length=4)
            more = {"image_seq_length": 4, "vision_feature_layer": -1}
        case "Gemma3":
            named = {"boi_token": "<start>", "eoi_token": "<end>", "image_token": "<image>"}
            words = tokeniser("<image>", **named)
            values = transformers.Gemma3ImageProcessorPil(size=square)
            made = transformers.Gemma3Processor(values, words, image_seq_length=4)
            more = {"mm_tokens_per_image": 4}
        case "PaliGemma":
            words = tokeniser("<image>")
            words.bos_token = "."
            values = transformers.SiglipImageProcessorPil(size=square)
            values.image_seq_length = 16
            made, more = transformers.PaliGemmaProcessor(values, words), {"projection_dim": 32}
            tower |= {"projection_dim": 32}
        case "Mistral3":
            words = tokeniser("[IMG]", "[IMG_BREAK]", "[IMG_END]")
            tower = {"image_size": 84, "patch_size": 7}
            made = OfRows(words)
            more = {"spatial_merge_size": 2, "vision_feature_layer": -1}
        case "Llama4":
            signs = ("patch", "image_start", "image_end", "image")
            signs += ("tile_x_separator", "tile_y_separator")
            words = tokeniser(*(f"<|{sign}|>" for sign in signs))
            tower |= {
                "intermediate_size": 128,
                "pixel_shuffle_ratio": 0.5,
                "projector_input_dim": 32,
                "vision_output_dim": 32,
            }
            tower |= {
                "projector_output_dim": 32,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            }
            made, more = (
                OfTiles(words),
                {"text": {"num_local_experts": 2, "intermediate_size_mlp": 32}},
            )
        case _:
            names = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
            words = tokeniser(*names)
            large = family == "Qwen3VL"
            tower = {
                "patch_size": 16 if large else 14, "depth": 1, "num_heads": 4, "embed_dim": 32,
                "out_hidden_size": 32, "fullatt_block_indexes": [], "window_size": 112,
                "deepstack_visual_indexes": [], "hidden_size": 32,
            }  # fmt: skip
            values = transformers.Qwen2VLImageProcessorPil(
                patch_size=16 if large else 14,
                size={"shortest_edge": 56 * 56, "longest_edge": 224 * 224},
            )
            made = getattr(transformers, f"{family}Processor")(values, words, None)
            rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
            ids = dict(zip(("image", "video", "vision_start", "vision_end"), names, strict=True))
            more = {
                f"{name}_token_id": words.convert_tokens_to_ids(token)
                for name, token in ids.items() if name != "image"
            } | {"text": {"rope_parameters": rotary}}  # fmt: skip
    shown = {"Mistral3": "[IMG]", "Gemma3": "<start>", "Llama4": "<|patch|>"}.get(family, "<image>")
    if family.startswith("Qwen"):
        shown = "<|image_pad|>"
    at = words.convert_tokens_to_ids("<image>" if family == "Gemma3" else shown)
    return model_of(family, tower, at, **more), made, shown


@pytest.fixture(autouse=True)
def without_videos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors are made without one for videos, which needs torchvision."""
    mixin = transformers.ProcessorMixin
    monkeypatch.setattr(mixin, "check_argument_for_proper_class", lambda *_: None)
    monkeypatch.setattr(processing_smolvlm, "num2words", str)


def read(model: Any, processor: Any, shown: str, opened: Sequence[Any]) -> tuple[Prompt, Tensor]:
    """What is known of a prompt with some pictures, and its embeddings in the language model."""
    text = f"{shown}\n" * len(opened) + "What is it?"
    given = processor(images=list(opened), text=text, return_tensors="pt")
    prompt = Prompt(given["input_ids"][0].tolist(), given, model, processor, opened)
    found: list[Tensor] = []

    def hear(module: Any, positional: Any, named: dict[str, Any]) -> None:
        found.append(named["inputs_embeds"][0])

    handle = model.get_decoder().register_forward_pre_hook(hear, with_kwargs=True)
    with torch.no_grad(), prompt.packing():
        model(**given)
    handle.remove()
    return prompt, found[0]


def changed(image: Any, picture: Picture, cell: int) -> Any:
    """The image with the middle of what a cell covers in another colour."""
    (down, across), (wide, high) = picture.grid, image.size
    row, column = divmod(cell, across)
    box = [(column + 0.3) * wide / across, (row + 0.3) * high / down]
    box += [(column + 0.7) * wide / across, (row + 0.7) * high / down]
    left, top, right, bottom = map(round, box)
    other = image.copy()
    other.paste((255, 40, 0), (left, top, max(right, left + 1), max(bottom, top + 1)))
    return other


def gradient(wide: int, high: int) -> Any:
    return PIL.radial_gradient("L").resize((wide, high)).convert("RGB")


WAYS = {  # a picture of 200 × 130 as grids of tokens
    "LlavaNext": [(6, 8), (4, 4)],
    "LlavaOnevision": [(6, 8), (4, 4)],
    "Idefics3": [(8, 8), (4, 4)],
    "SmolVLM": [(8, 8), (4, 4)],
    "InternVL": [(4, 6), (2, 2)],
    "Llama4": [(4, 6), (2, 2)],
    "Gemma3": [(2, 2)],
    "PaliGemma": [(4, 4)],
    "Mistral3": [(3, 6)],
    "Qwen2VL": [(5, 7)],
    "Qwen2_5_VL": [(5, 7)],
    "Qwen3VL": [(4, 6)],
}


@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")  # of PaliGemma's processor
@pytest.mark.parametrize("family", WAYS)
def test_a_change_of_the_picture_changes_the_token_of_its_cell(family: str) -> None:
    model, processor, shown = built(family)
    opened = [gradient(200, 130)]
    prompt, before = read(model, processor, shown, opened)
    found = pictures(prompt)
    assert [picture.grid for picture in found] == WAYS[family]
    names = ["the image, in parts", "the image, small and whole"]
    assert [str(x.name) for x in found] == (names if len(found) > 1 else ["the image"])
    inside = [token for picture in found for token in picture.cells]
    assert len(set(inside)) == len(inside)
    assert set(inside) <= set(prompt.places)
    newlines = 7 if family == "LlavaOnevision" else 6 if family == "LlavaNext" else 0
    assert len(prompt.places) - len(inside) in (newlines, 6 if newlines else 0)
    for picture in found:
        for cell in {0, 1, picture.grid[1] * 5 // 4, len(picture.cells) - 1}:
            after = read(model, processor, shown, [changed(opened[0], picture, cell)])[1]
            moved = (after - before).norm(dim=-1)[list(picture.cells)]
            assert int(moved.argmax()) == cell


@pytest.mark.parametrize("family", [x for x in WAYS if x not in ("PaliGemma", "SmolVLM")])
def test_two_pictures_of_a_prompt_are_kept_apart(family: str) -> None:
    model, processor, shown = built(family)
    opened = [gradient(200, 130), gradient(100, 160)]
    prompt, before = read(model, processor, shown, opened)
    found = pictures(prompt)
    first, second = (
        [picture for picture in found if str(picture.name).startswith(f"image {number}")]
        for number in (1, 2)
    )
    assert len(first) + len(second) == len(found)
    assert [picture.grid for picture in first] == WAYS[family] or family == "LlavaOnevision"
    picture = second[0]
    cell = len(picture.cells) // 2
    after = read(model, processor, shown, [opened[0], changed(opened[1], picture, cell)])[1]
    moved = (after - before).norm(dim=-1)
    assert int(moved[list(picture.cells)].argmax()) == cell
    assert float(moved[[token for each in first for token in each.cells]].max()) == 0


def test_tokens_that_nothing_explains_are_refused() -> None:
    model = SimpleNamespace(config=SimpleNamespace(image_token_id=IMAGE))
    ids = [1, *[IMAGE] * 7, 2]
    values = {"pixel_values": torch.zeros(1, 3, 8, 8)}
    words = SimpleNamespace(decode=lambda ids: "")
    asked = Prompt(ids, values, model, SimpleNamespace(tokenizer=words), [gradient(8, 8)])
    with pytest.raises(ValueError, match="as 7 tokens, and it is not known which parts"):
        pictures(asked)
    asked.ids = [1, 2]
    with pytest.raises(ValueError, match="no image among the tokens"):
        pictures(asked)
