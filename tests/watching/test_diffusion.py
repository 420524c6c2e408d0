"""Diffusion models: joint attention of text and image tokens, cross-attention, and steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.watching import SpanWeight

TEXT, IMAGE, WIDTH, HEADS = 6, 16, 32, 4


class Joint(nn.Module):
    """Attention over text and image together, with the names of diffusers."""

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
            projected.append(3 * x if name == "q" else x)
        out = F.scaled_dot_product_attention(*projected).transpose(1, 2).flatten(2)
        sizes = (TEXT, IMAGE) if self.text_first else (IMAGE, TEXT)
        first, last = out.split(sizes, 1)
        return (last, first) if self.text_first else (first, last)


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


def test_values_that_are_not_the_projected_text_leave_the_spans_out() -> None:
    class Changed(Joint):
        def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Any:
            return super().forward(hidden_states, 2 * encoder_hidden_states)

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
                **joint, **sizes, patch_size=1, num_single_layers=1, axes_dims_rope=(4, 4, 8)
            ),
            {**given, **pooled, **places, "hidden_states": torch.randn(1, IMAGE, 4)},
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
