"""Image classification."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.apps.train.data.batches import Shuffled, generator
from headwise.apps.train.data.labelled_images import Images
from headwise.models import ViT, ViTConfig


class ImageBatch(NamedTuple):
    """images (B, C, H, W) and their classes as shares (B, classes) that sum to one."""

    images: Tensor
    shares: Tensor


@dataclass
class Vision:
    """Learn to classify these images; all are shifted, photographs also mirrored and mixed."""

    images: Images
    config: ViTConfig
    classes: int
    size: int
    seed: int
    photographs: bool
    unit: ClassVar[str] = "images"
    order: Shuffled = field(init=False, repr=False)
    mean: Tensor = field(init=False, repr=False)
    deviation: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        pixels, labels = self.images.train
        if not len(labels):
            raise ValueError("there are no training images: the corpus is empty")
        self.order = Shuffled(len(labels), self.size, self.seed)
        some = pixels[:5000].float() / 255
        self.mean, self.deviation = (
            measure((0, 2, 3))[:, None, None] for measure in (some.mean, some.std)
        )

    @property
    def pixels(self) -> dict[str, list[float]]:
        """Mean and deviation of each channel, for pixels from 0 to 1, which any use needs."""
        return {
            "mean": self.mean.flatten().tolist(),
            "deviation": self.deviation.flatten().tolist(),
        }

    def build(self) -> nn.Module:
        """A new ViT."""
        return ViT(self.config)

    def _to(self, device: torch.device) -> None:
        if self.mean.device != device:
            self.mean, self.deviation = self.mean.to(device), self.deviation.to(device)
            parts = (self.images.train, self.images.valid, self.images.test)
            self.images = Images(*((x.to(device), y.to(device)) for x, y in parts))

    def scaled(self, pixels: Tensor) -> Tensor:
        """Bytes, normalised by mean and deviation."""
        return (pixels.float() / 255 - self.mean) / self.deviation

    def batch(self, number: int, device: torch.device) -> ImageBatch:
        """Shifted images; photographs also mirrored and mixed."""
        self._to(device)
        random = generator(self.seed, number, 2)
        chosen = self.order.batch(number).to(device)
        pixels, labels = self.images.train
        images = self.scaled(pixels[chosen])
        margin = images.shape[-1] // 8
        images = shifted(images, torch.randint(2 * margin + 1, (len(chosen), 2), generator=random))
        shares = F.one_hot(labels[chosen], self.classes).float()
        if not self.photographs:
            return ImageBatch(images, shares)
        mirror = torch.rand(len(chosen), generator=random).lt(0.5).to(device)
        images = torch.where(mirror[:, None, None, None], images.flip(-1), images)
        return ImageBatch(*patched(images, shares, torch.rand(4, generator=random).tolist()))

    def count(self, batch: ImageBatch) -> int:
        """One prediction per image."""
        return len(batch.images)

    def sizes(self, batch: ImageBatch) -> dict[str, int]:
        """An image has as many patches as any other."""
        return {"batch": len(batch.images)}

    def loss(self, model: nn.Module, batch: ImageBatch, smoothing: float) -> Tensor:
        """Cross-entropy in nats, summed."""
        return F.cross_entropy(
            model(batch.images).float(), batch.shares, label_smoothing=smoothing, reduction="sum"
        )

    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        """The accuracy on the validation images."""
        self._to(device)
        return {"valid_accuracy": self.accuracy(model, *self.images.valid)}

    def judge(self, model: nn.Module, device: torch.device) -> dict[str, Any]:
        """The accuracy on the test images."""
        self._to(device)
        images, labels = self.images.test
        return {"accuracy": self.accuracy(model, images, labels), "images": len(labels)}

    def accuracy(self, model: nn.Module, images: Tensor, labels: Tensor) -> float:
        """The share of images whose likeliest class is the right one."""
        right = sum(
            int((model(self.scaled(some)).argmax(-1) == classes).sum())
            for some, classes in zip(images.split(1000), labels.split(1000), strict=True)
        )
        return right / len(labels)


def shifted(images: Tensor, by: Tensor) -> Tensor:
    """Shift each image (B, C, H, W) within an empty margin, by its own offset (B, 2).

    >>> shifted(torch.ones(1, 1, 8, 8), torch.tensor([[0, 1]]))[0, 0].sum()
    tensor(56.)
    """
    height, width = images.shape[-2:]
    margin = width // 8
    padded = F.pad(images, (margin,) * 4)
    by = by.to(images.device)
    rows = by[:, :1] + torch.arange(height, device=images.device)  # (B, H)
    columns = by[:, 1:] + torch.arange(width, device=images.device)  # (B, W)
    each = torch.arange(len(images), device=images.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[each, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)


def patched(images: Tensor, shares: Tensor, random: list[float]) -> tuple[Tensor, Tensor]:
    """CutMix, in every second batch: a rectangle of each image, and that share of its class, comes
    from another image.
    """
    coin, area, top, left = random
    if coin < 0.5:
        return images, shares
    height, width = images.shape[-2:]
    side = area**0.5
    rows, columns = int(height * side), int(width * side)
    y, x = int(top * (height - rows)), int(left * (width - columns))
    images = images.clone()
    images[:, :, y : y + rows, x : x + columns] = images.flip(0)[
        :, :, y : y + rows, x : x + columns
    ]
    share = rows * columns / (height * width)
    return images, shares * (1 - share) + shares.flip(0) * share
