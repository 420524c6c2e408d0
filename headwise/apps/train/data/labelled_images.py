"""Labelled images as tensors."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headwise.apps.train.data import corpora
from headwise.apps.train.data.download_cache import Corpus, path_of

VALID = 5000
"""Images at the end of the training part that are kept for validation."""


@dataclass(frozen=True)
class Images:
    """Images (N, C, H, W) uint8 and labels (N,) int64, in three parts."""

    train: tuple[Tensor, Tensor]
    valid: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def read_images(source: str) -> Images:
    """The images of a corpus by name."""
    if source == corpora.MNIST.name:
        names = ("images-idx3-ubyte", "labels-idx1-ubyte")
        train, test = (
            tuple(idx(path_of(corpora.MNIST, f"{part}-{name}")) for name in names)
            for part in ("train", "t10k")
        )
        return parts((train[0][:, None], train[1].long()), (test[0][:, None], test[1].long()))
    if source == corpora.CIFAR_10.name:
        batches = [f"data_batch_{number}.png" for number in range(1, 6)]
        return parts(
            sheets(corpora.CIFAR_10, batches, "train_lables.json"),
            sheets(corpora.CIFAR_10, ["test_batch.png"], "test_lables.json"),
        )
    raise ValueError(
        f"there are no images {source!r}; the corpora of images are "
        f"{corpora.MNIST.name}, {corpora.CIFAR_10.name}"
    )


def parts(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> Images:
    """Split the last training images off for validation."""
    images, labels = train
    return Images((images[:-VALID], labels[:-VALID]), (images[-VALID:], labels[-VALID:]), test)


def idx(path: Path) -> Tensor:
    """A file in MNIST's format: two zeros, a type, a rank, the sizes, then the bytes."""
    content = bytearray(path.read_bytes())
    rank = content[3]
    shape = [int.from_bytes(content[4 + 4 * axis : 8 + 4 * axis], "big") for axis in range(rank)]
    return torch.frombuffer(content, dtype=torch.uint8, offset=4 + 4 * rank).reshape(shape)


def sheets(corpus: Corpus, names: list[str], labels: str) -> tuple[Tensor, Tensor]:
    """Images from sheets with one image of 1024 pixels per row, and their labels."""
    from PIL import Image

    rows = []
    for name in names:
        # A sheet of 10,000 rows is not a decompression bomb: its hash was checked.
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            with Image.open(path_of(corpus, name)) as sheet:
                pixels = bytearray(sheet.convert("RGB").tobytes())
        finally:
            Image.MAX_IMAGE_PIXELS = limit
        rows.append(torch.frombuffer(pixels, dtype=torch.uint8).reshape(-1, 32, 32, 3))
    numbers = json.loads(path_of(corpus, labels).read_text())
    images = torch.cat(rows).permute(0, 3, 1, 2).contiguous()  # (N, 3, 32, 32)
    return images, torch.tensor(numbers)
