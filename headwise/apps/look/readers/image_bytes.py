"""Images in and out: a file's bytes as the tensor that a model reads, and back as a PNG."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor

from headwise.apps.look.readers.reader import Illustrated
from headwise.messages import say

MOST_PIXELS = 1 << 25
"""A larger image is refused before it is decoded."""

MOST_SIDE = 1024
"""A larger image is made smaller before the page shows it."""


def opened(what: str | bytes | Illustrated) -> Any:
    """The Pillow image of a PNG or JPEG file's bytes; ValueError if they are not one."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ModuleNotFoundError as missing:
        said = say("reading an image needs Pillow: pip install 'headwise[look]'")
        raise ValueError(said) from missing
    if not isinstance(what, bytes):
        said = say("this model reads images, and a text was given; use --image")
        raise ValueError(said)
    try:
        image = Image.open(io.BytesIO(what), formats=("PNG", "JPEG"))
        if image.width * image.height > MOST_PIXELS:
            raise ValueError(
                say(
                    "the image has {wide} × {high} pixels; use one of at most {most:,}",
                    wide=image.width,
                    high=image.height,
                    most=MOST_PIXELS,
                )
            )
        return image.convert("RGB")
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        said = say("this is not a PNG or JPEG image: {reason}", reason=error)
        raise ValueError(said) from error


def pixels(what: str | bytes | Illustrated, side: int, channels: int) -> Tensor:
    """The middle square of an image, scaled to a model's size: (channels, side, side), 0 to 1."""
    from PIL import Image

    image = opened(what)
    edge = min(image.size)
    left, top = (image.width - edge) // 2, (image.height - edge) // 2
    image = image.crop((left, top, left + edge, top + edge))
    image = image.resize((side, side), Image.Resampling.BICUBIC)
    image = image.convert("L" if channels == 1 else "RGB")
    return tensor(image)


def tensor(image: Any) -> Tensor:
    """The pixels of a Pillow image in RGB or grey, (C, H, W), 0 to 1."""
    content = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return content.reshape(image.height, image.width, -1).permute(2, 0, 1).float() / 255


def centred(image: Tensor) -> Tensor:
    """Subtract each channel's mean and divide by its deviation, (C, H, W).

    >>> centred(torch.tensor([[[0.0, 1.0]]]))
    tensor([[[-0.7071,  0.7071]]])
    """
    mean = image.mean((1, 2), keepdim=True)
    return (image - mean) / image.std((1, 2), keepdim=True).clamp_min(1e-3)


def png(image: Tensor) -> bytes:
    """Pixels (C, H, W) of 0 to 1 as a PNG file, at most MOST_SIDE of them long."""
    from PIL import Image

    content = (image.clamp(0, 1) * 255).round().to(torch.uint8).cpu()
    channels, height, width = content.shape
    mode = "L" if channels == 1 else "RGB"
    picture = Image.frombytes(mode, (width, height), content.permute(1, 2, 0).numpy().tobytes())
    picture.thumbnail((MOST_SIDE, MOST_SIDE))
    out = io.BytesIO()
    picture.save(out, "PNG")
    return out.getvalue()


def patch_names(first: int, rows: int, columns: int) -> list[str]:
    """Names of an image's tokens: `first` summary tokens, then the patches row by row.

    >>> patch_names(1, 1, 2)
    ['⟨class⟩', '0,0', '0,1']
    """
    before = ["⟨class⟩"][:first] + [f"⟨{number}⟩" for number in range(1, first)]
    return before + [f"{row},{column}" for row in range(rows) for column in range(columns)]
