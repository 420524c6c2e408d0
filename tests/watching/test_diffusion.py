"""Diffusion models: joint attention of text and image tokens, cross-attention, and steps."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.watching import SpanWeight
from headwise.watching.adapters import joint_attention

TEXT, IMAGE, WIDTH, HEADS = 6, 16, 32, 4


class Joint(nn.Module):
    """Attention over text and image together, with the names of diffusers."""

    factors: ClassVar = {"q": 3, "k": 1, "v": 1}

    def __init__(self, text_first: bool) -> None:
        super().__init__()
        self.text_first = text_first
        names = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
        for name in names:
            setattr(self, name, nn.Linear(WIDTH, WIDTH))

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor
    ) -> tuple[Tensor, Tensor]:
        projected = []
        for name in ("q", "k", "v"):
            image = getattr(self, f"to_{name}")(hidden_states)
            text = getattr(self, f"add_{name}_proj")(encoder_hidden_states)
            both = (text, image) if self.text_first else (image, text)
            x = torch.cat(both, 1).unflatten(2, (HEADS, -1)).transpose(1, 2)
            projected.append(self.factors[name] * x)
        out = F.scaled_dot_product_attention(*projected).transpose(1, 2).flatten(2)
        sizes = (TEXT, IMAGE) if self.text_first else (IMAGE, TEXT)
        first, last = out.split(sizes, 1)
        return (last, first) if self.text_first else (first, last)


class Changed(Joint):
    """Its values do not tell which of them are of the text."""

    factors: ClassVar = {"q": 3, "k": 1, "v": 2}


class Denoiser(nn.Module):
    def __init__(self, text_first: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Joint(text_first) for _ in range(2))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        for block in self.blocks:
            image, text = block(hidden_states=image, encoder_hidden_states=text)
        return image


def check(seen: hw.Watch, first: int, last: int, layers: int) -> None:
    """The weights on the text are those of the map, and those on the image are the rest."""
    assert len(seen.spans["text"]) == layers
    for number, weight in seen.spans["text"].items():
        assert seen.layer(number).kind == "self"
        mass = seen.layer(number).map().mass(first, last)
        torch.testing.assert_close(weight, mass, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(seen.spans["image"][number], 1 - mass, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("text_first", [True, False])
def test_joint_attention_is_split_into_text_and_image(text_first: bool) -> None:
    torch.manual_seed(0)
    model = Denoiser(text_first).double()
    image, text = torch.randn(2, IMAGE, WIDTH).double(), torch.randn(2, TEXT, WIDTH).double()
    before = model(image, text)
    with hw.watch(model, strict=True) as seen:
        assert torch.equal(model(image, text), before)
    first = 0 if text_first else IMAGE
    check(seen, first, first + TEXT, 2)
    row = seen.heads()[0]
    assert row["span_text_mean"] + row["span_image_mean"] == pytest.approx(1)
    assert "self_mass_mean" in row


def test_every_step_of_a_pipeline_is_a_step() -> None:
    torch.manual_seed(0)
    model, image, text = Denoiser(True), torch.randn(1, IMAGE, WIDTH), torch.randn(1, TEXT, WIDTH)
    with torch.no_grad(), hw.watch(model, alarms=SpanWeight("text", below=0.9)) as seen:
        for _ in range(3):
            image = image - 0.1 * model(image, text)
            seen.step()
    means = [entry.table["span_text_mean"][0] for entry in seen.series]
    assert len(set(means)) == 3
    assert [alarm.rule for alarm in seen.alarms] == ["little weight on text"]


def test_a_step_is_kept_only_where_it_was_asked_for() -> None:
    torch.manual_seed(0)
    model, image, text = Denoiser(True), torch.randn(1, IMAGE, WIDTH), torch.randn(1, TEXT, WIDTH)
    with torch.no_grad(), hw.watch(model) as seen:
        for number in range(4):
            model(image * number, text)
            seen.step(keep=number == 1)
        seen.step(keep=True)  # nothing ran
    kept = seen.kept_steps
    assert list(kept) == [1]
    with torch.no_grad(), hw.watch(model) as alone:
        model(image, text)
    assert kept[1].heads()["entropy_mean"] == pytest.approx(alone.heads()["entropy_mean"])
    with hw.watch(model, maps=False) as seen, pytest.raises(ValueError, match=r"maps=True"):
        seen.step(keep=True)


def test_values_that_are_not_the_projected_text_leave_the_spans_out() -> None:
    model = nn.Sequential(Changed(True))
    with hw.watch(model) as seen:
        model[0](torch.randn(1, IMAGE, WIDTH), torch.randn(1, TEXT, WIDTH))
    assert seen.layer(0).kind == "self"
    assert not seen.spans


def real() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Tiny transformers of diffusers, and what they are called with."""
    import diffusers

    joint = {"joint_attention_dim": 32, "pooled_projection_dim": 32, "in_channels": 4}
    sizes = {"attention_head_dim": 16, "num_attention_heads": 2, "num_layers": 1}
    text, when = torch.randn(1, TEXT, 32), torch.tensor([0.5])
    given = {"timestep": when, "encoder_hidden_states": text, "return_dict": False}
    pooled = {"pooled_projections": torch.randn(1, 32)}
    places = {"img_ids": torch.zeros(IMAGE, 3), "txt_ids": torch.zeros(TEXT, 3)}
    return {
        "sd3": (
            diffusers.SD3Transformer2DModel(
                **joint, **sizes, sample_size=8, patch_size=2, caption_projection_dim=32,
                out_channels=4, pos_embed_max_size=8,
            ),
            {**given, **pooled, "hidden_states": torch.randn(1, 4, 8, 8)},
        ),
        "flux": (
            diffusers.FluxTransformer2DModel(
                **{**joint, "in_channels": 16}, **sizes, patch_size=1, num_single_layers=1,
                axes_dims_rope=(4, 4, 8),
            ),  # a token is four pixels of four channels
            {**given, **pooled, **places, "hidden_states": torch.randn(1, IMAGE, 16)},
        ),
        "hunyuan video": (
            diffusers.HunyuanVideoTransformer3DModel(
                **sizes, in_channels=4, out_channels=4, num_single_layers=1, num_refiner_layers=1,
                patch_size=2, patch_size_t=1, text_embed_dim=32, pooled_projection_dim=32,
                rope_axes_dim=(4, 4, 8), guidance_embeds=False,
            ),
            {
                **given, **pooled, "hidden_states": torch.randn(1, 4, 4, 4, 4),
                "encoder_attention_mask": torch.ones(1, TEXT, dtype=torch.long),
            },
        ),
        "pixart": (
            diffusers.PixArtTransformer2DModel(
                **sizes, in_channels=4, out_channels=8, cross_attention_dim=32, sample_size=8,
                caption_channels=32, norm_type="ada_norm_single", norm_elementwise_affine=False,
            ),
            {
                **given, "hidden_states": torch.randn(1, 4, 8, 8),
                "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
            },
        ),
        "unet": (
            diffusers.UNet2DConditionModel(
                sample_size=8, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
                down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), cross_attention_dim=32,
                up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), attention_head_dim=8,
            ),
            {**given, "sample": torch.randn(1, 4, 8, 8)},
        ),
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # of diffusers, as it is imported
def test_models_of_diffusers_are_read() -> None:
    pytest.importorskip("diffusers")
    torch.manual_seed(0)
    for name, (model, given) in real().items():
        with torch.no_grad():
            before = model.eval()(**given)[0]
            with hw.watch(model, strict=True) as seen:
                assert torch.equal(model(**given)[0], before), name
        if name in ("sd3", "hunyuan video", "flux"):
            first = 0 if name == "flux" else IMAGE
            check(seen, first, first + TEXT, {"sd3": 1}.get(name, 2))
        else:
            across = [layer for layer in seen.layers if layer.kind == "cross"]
            assert {layer.map().shape[3] for layer in across} == {TEXT}, name


def pipelines() -> dict[str, tuple[Any, nn.Module, dict[str, Any]]]:
    """Tiny pipelines of diffusers, their denoisers, and what they are called with."""
    import diffusers

    models = real()
    sd3, flux, unet = (models[name][0] for name in ("sd3", "flux", "unet"))
    vae = diffusers.AutoencoderKL(
        latent_channels=4, block_out_channels=(8,), norm_num_groups=4, layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",),
        shift_factor=0.0, scaling_factor=1.0,
    )  # fmt: skip
    texts = dict.fromkeys(f"{x}{n}" for x in ("text_encoder", "tokenizer") for n in ("", "_2"))
    flow = {"scheduler": diffusers.FlowMatchEulerDiscreteScheduler(), "vae": vae, **texts}
    plain = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    plain |= {"vae": vae, "text_encoder": None, "tokenizer": None}
    prompt, against = torch.randn(2, 1, TEXT, 32)
    both = {"prompt_embeds": prompt, "negative_prompt_embeds": against}
    pooled = {"pooled_prompt_embeds": torch.randn(1, 32)}
    negative = {"negative_pooled_prompt_embeds": torch.randn(1, 32)}
    third = {"text_encoder_3": None, "tokenizer_3": None}
    return {
        "sd3": (
            diffusers.StableDiffusion3Pipeline(transformer=sd3, **flow, **third), sd3,
            {**both, **pooled, **negative, "height": 8, "width": 8},
        ),
        "flux": (
            diffusers.FluxPipeline(transformer=flux, **flow), flux,
            {"prompt_embeds": prompt, **pooled, "height": 8, "width": 8},
        ),
        "unet": (
            diffusers.StableDiffusionPipeline(
                unet=unet, scheduler=diffusers.DDIMScheduler(), **plain
            ), unet,
            {**both, "height": 8, "width": 8},
        ),
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # of diffusers, as it is imported
@pytest.mark.parametrize("name", ["sd3", "flux", "unet"])
def test_a_pipeline_is_watched_over_its_steps(name: str) -> None:
    pytest.importorskip("diffusers")
    torch.manual_seed(0)
    pipe, denoiser, given = pipelines()[name]
    pipe.set_progress_bar_config(disable=True)

    def image(**more: Any) -> Tensor:
        noise = torch.Generator().manual_seed(1)
        made = pipe(**given, generator=noise, num_inference_steps=3, output_type="pt", **more)
        found: Tensor = made.images
        return found

    maps: list[list[Tensor]] = []

    def end(pipe: Any, number: int, time: Any, kept: dict[str, Any]) -> dict[str, Any]:
        maps.append([layer.map().to_tensor() for layer in seen.layers])
        seen.step(keep=True)
        return kept

    before = image()
    with hw.watch(denoiser, strict=True) as seen:
        assert torch.equal(image(callback_on_step_end=end), before)
    assert len(seen.series) == 3
    entropy = [entry.table["entropy_mean"][0] for entry in seen.series]
    assert len(set(entropy)) == 3  # each step has figures of its own
    if name == "unet":
        assert not seen.spans
        assert {layer.kind for layer in seen.layers} == {"self", "cross"}
    else:
        for entry in seen.series:
            row = entry.table[0]
            assert row["span_text_mean"] + row["span_image_mean"] == pytest.approx(1, abs=1e-4)
    for entry, (number, kept), then in zip(seen.series, seen.kept_steps.items(), maps, strict=True):
        assert (entry.step, entry.table["entropy_mean"]) == (
            number, pytest.approx(kept.heads()["entropy_mean"]),
        )  # fmt: skip
        assert kept.spans.keys() == seen.spans.keys()
        for layer, right in zip(kept.layers, then, strict=True):
            assert torch.equal(layer.map().to_tensor(), right)
    guided = 2 if "negative_prompt_embeds" in given else 1
    assert {len(layer.map().lse) for layer in seen.layers} == {guided}


def test_one_layer_of_each_class_is_asked_for_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[nn.Module] = []

    def spy(module: nn.Module, *given: Any) -> bool | None:
        asked.append(module)
        return order(module, *given)

    order = joint_attention._text_first
    monkeypatch.setattr(joint_attention, "_text_first", spy)
    model = Denoiser(True)
    model.blocks.insert(0, Changed(True))
    model.blocks.insert(1, Changed(True))
    with torch.no_grad(), hw.watch(model) as seen:
        for _ in range(3):
            model(torch.randn(1, IMAGE, WIDTH), torch.randn(1, TEXT, WIDTH))
    assert asked == [model.blocks[0], model.blocks[2]]
    assert 2 in seen.spans["text"]
