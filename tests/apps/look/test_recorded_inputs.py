"""What the page shows of a recording: kept steps of a denoiser, requests, pictures in a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.apps.look.readers.image_bytes import png
from headwise.apps.look.scene import Group, Input
from headwise.apps.look.show import session_of
from tests.watching.test_diffusion import IMAGE, TEXT, WIDTH, Denoiser

WORDS = ["a", " red", " ball", " on", " green", " grass"]


class Across(nn.Module):
    """A denoiser whose picture looks at itself at two sizes, and at the text."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small, self.cross = (hw.nn.MultiHeadAttention(8, 2) for _ in range(3))

    def forward(self, sample: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        sample = sample + self.large(sample)
        self.small(sample[:, ::4])
        return sample + self.cross(sample, encoder_hidden_states)


def inputs(seen: Any, *given: Any, **more: Any) -> list[Input]:
    return [atlas.input for atlas in session_of(seen, *given, **more).atlases.values()]


def joint(text_first: bool = True, batch: int = 1) -> Any:
    torch.manual_seed(0)
    model = Denoiser(text_first)
    image, text = torch.randn(batch, IMAGE, WIDTH), torch.randn(batch, TEXT, WIDTH)
    with torch.no_grad(), hw.watch(model) as seen:
        for _ in range(3):
            image = image - model(image, text)
            seen.step(keep=True)
    return seen


@pytest.mark.parametrize("text_first", [True, False])
def test_kept_steps_of_joint_attention(text_first: bool) -> None:
    seen = joint(text_first)
    read = inputs(seen, source=WORDS)
    assert [str(each.name) for each in read] == ["step 0", "step 1", "step 2"]
    for number, each in enumerate(read):
        (group,) = each.groups
        (picture,) = group.pictures
        first = TEXT if text_first else 0
        assert (picture.grid, group.looks) == ((4, 4), "image")
        assert picture.cells == tuple(range(first, first + IMAGE))
        text = set(range(len(group.rows))) - set(picture.cells)
        assert [group.columns[at] for at in sorted(text)] == WORDS
        right = seen.kept_steps[number].map(1, 2)[0, 0]
        assert torch.equal(group.head("1.2").map[0, 0], right)


def test_cross_attention_has_a_grid_for_every_size() -> None:
    with torch.no_grad(), hw.watch(Across()) as seen:
        seen.model(torch.randn(2, 64, 8), torch.randn(2, TEXT, 8))
    (read,) = inputs(seen, source=WORDS, image=torch.rand(3, 8, 8), batch=1)
    names = [(group.id, str(group.name)) for group in read.groups]
    assert names == [
        ("image_16x16", "the picture to itself, 4 × 4 patches"),
        ("image_64x64", "the picture to itself, 8 × 8 patches"),
        ("cross", "the picture to the text"),
    ]
    main: Group = read.main
    assert (main.columns, main.pictures[0].axis, main.pictures[0].grid) == (
        tuple(WORDS), "rows", (8, 8),
    )  # fmt: skip
    right = seen.map(2, 0, batch=1)[0, 0, :, 2].reshape(8, 8)  # where "ball" is
    assert torch.equal(main.head("2.0").map[0, 0, :, 2].reshape(8, 8), right)
    assert "patch_distance_mean" in read.groups[0].heads[0].figures
    (wide,) = inputs(seen, grid=(4, 16))
    assert [group.pictures[0].grid for group in wide.groups] == [(2, 8), (4, 16), (4, 16)]
    (frames,) = inputs(seen, grid=(4, 4))  # of a video
    assert [len(group.pictures) for group in frames.groups] == [4, 4, 4]
    assert frames.groups[0].pictures[3].cells == (12, 13, 14, 15)
    with pytest.raises(ValueError, match="of a model that makes a picture, give image= or grid="):
        inputs(seen, source=WORDS)


def test_frames_of_a_video() -> None:
    seen = joint()
    (picture, second) = inputs(seen, grid=(2, 4))[0].main.pictures
    assert (picture.grid, second.grid) == ((2, 4), (2, 4))
    assert second.cells[0] == picture.cells[-1] + 1


def test_tokens_of_a_recording_are_made_of_their_numbers() -> None:
    gpt = hw.load("gpt")
    text = "to be or not"
    with torch.no_grad(), hw.watch(gpt.model) as seen:
        gpt.model(gpt.encode(text))
    (read,) = inputs(seen, gpt.tokeniser.pieces)
    assert list(read.main.rows) == gpt.pieces(text)
    with pytest.raises(ValueError, match="the numbers of the tokens are not known"):
        inputs(joint(), list)


def test_pictures_in_the_prompt_of_a_recorded_model() -> None:
    from tests.watching.test_image_tokens import built

    model, ids = built("Llava"), torch.arange(5, 22)[None].repeat(2, 1)
    ids[1, 3:9] = ids[1, 11:15] = 97
    with torch.no_grad(), hw.watch(model) as seen:
        model(input_ids=ids)
    (read,) = inputs(seen, image=[torch.rand(3, 4, 6), torch.rand(3, 5, 5)], batch=1)
    first, second = read.main.pictures
    assert (first.grid, first.cells) == ((2, 3), tuple(range(3, 9)))
    assert (second.grid, second.cells) == ((2, 2), tuple(range(11, 15)))
    assert len(read.images) == 2
    assert (read.main.looks, read.main.rows[2:5]) == ("text", (" 2", " 0,0", " 0,1"))
    (plain,) = inputs(seen, batch=1)  # 6 tokens are no square
    assert not plain.main.pictures


def test_the_tokens_of_a_text_are_not_those_of_a_vision_tower() -> None:
    from tests.watching.test_image_tokens import built, pictures

    model = built("Llava")
    ids, given = pictures("Llava", model)
    with torch.no_grad(), hw.watch(model) as seen:
        model(input_ids=ids, **given)
    (read,) = inputs(seen, lambda ids: [f" token {id}" for id in ids])
    assert read.main.rows[0] == f" token {int(ids[0, 0])}"
    assert read.main.pictures[0].cells == (2, 3, 4, 5)
    assert "another number of tokens: model.vision_tower" in str(read.notes[0])
    with pytest.raises(ValueError, match=r"1 tokens were given for .*which read 5"):
        inputs(seen, ["a"])


def test_requests_are_shown_one_by_one() -> None:
    pytest.importorskip("transformers", minversion="5.22")
    from tests.watching.test_continuous_batching import built, served

    model = built()
    with hw.watch(model) as seen:
        served(model)
    read = inputs(seen, lambda ids: [f" token {id}" for id in ids])
    assert [str(each.name) for each in read] == ["req_0", "req_1", "req_2"]
    for each, request in zip(read, seen.requests.values(), strict=True):
        assert len(each.main.rows) == len(request)
        assert each.main.rows[0] == f" token {int(request.tokens[0, 0])}"
        assert torch.equal(each.main.head("1.3").map[0, 0], request.map(1, 3)[0, 0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch": 1}, "batch=1: the last pass had 1, from 0"),
        ({"source": ["a"]}, "1 tokens were given for a text of 6"),
        ({"grid": (0, 4)}, "give the patches down and across"),
        ({"image": 5}, "image=int: give a file, a Pillow image, or a tensor"),
        ({"image": torch.rand(2, 2, 2)}, r"image=Tensor of shape \(2, 2, 2\): give"),
    ],
)
def test_what_does_not_fit_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inputs(joint(), **given)


def test_a_picture_without_image_tokens_is_refused(tmp_path: Path) -> None:
    model = hw.nn.MultiHeadAttention(8, 2)
    with torch.no_grad(), hw.watch(model) as seen:
        model(torch.randn(1, 9, 8))
    file = tmp_path / "picture.png"
    file.write_bytes(png(torch.rand(3, 6, 6)))
    with pytest.raises(ValueError, match="it is not known which tokens are those of the image"):
        inputs(seen, image=file)
