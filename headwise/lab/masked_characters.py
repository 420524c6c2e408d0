"""A small encoder of Chinese text that fills in masked characters, with any projections of Q and K.

One character is one token, so that a map of 「他打了自己」 has a row for 打.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.lab.laboratory import Lab
from headwise.nn import GELU, Block, MultiHeadAttention, Projections, Separate, Shared
from headwise.training.data import pairs

MASK, UNKNOWN = 0, 1
PROJECTIONS: dict[str, Projections] = {"separate": Separate(), "shared": Shared()}
SENTENCE = "他打了自己"
HELP = "libreoffice-help-en-zh"
"""The corpus of the quick form: LibreOffice's help."""
TOY = "他打了自己。他打开了门，自己走了。我打了他，他也打了我。你自己打开门。"
"""A text for tests."""


def text_of(lab: Lab) -> str:
    """Chinese text: the other side of a corpus of pairs."""
    if lab.form == "tiny":
        return TOY * 20
    return "\n".join(chinese for _, chinese in pairs.read(HELP))


class Characters:
    """The most frequent characters of a text as numbers; those of the sentence are among them."""

    def __init__(self, text: str, size: int) -> None:
        common = [letter for letter, _ in Counter(text).most_common(size)]
        self.known = {
            letter: 2 + n for n, letter in enumerate(dict.fromkeys(SENTENCE + "".join(common)))
        }
        self.size = 2 + len(self.known)

    def encode(self, text: str) -> Tensor:
        """The numbers (N,) of a text."""
        return torch.tensor([self.known.get(letter, UNKNOWN) for letter in text])


class Encoder(nn.Module):
    """tokens (B, N) -> logits (B, N, vocabulary) of the characters at masked places."""

    def __init__(
        self, vocabulary: int, width: int, layers: int, heads: int, context: int, kind: str
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            Block(
                width,
                MultiHeadAttention(width, heads, projections=PROJECTIONS[kind]),
                GELU(4 * width).build(width),
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        for table in (self.embedding, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)

    def maps(self, tokens: Tensor) -> Tensor:
        """The weights (layers, heads, N, N) for tokens (N,)."""
        x = self.embedding(tokens[None]) + self.positions.weight[: len(tokens)]
        found = []
        for block in self.blocks:
            assert isinstance(block, Block) and isinstance(block.attention, MultiHeadAttention)
            normed = block.around_attention.norm(x)
            found.append(block.attention.attention_map(normed).to_tensor()[0])
            x = block(x)
        return torch.stack(found)


def read_sentence(lab: Lab, folder: Path | None, kind: str, seed: int) -> dict[str, Any]:
    """Train an encoder; its weights on the sentence, and how well it fills in characters."""
    text, context = text_of(lab), lab.pick(tiny=16, quick=32, full=64)
    characters = Characters(text, lab.pick(tiny=50, quick=1500, full=4000))
    tokens = characters.encode(text)
    held_out, tokens = tokens[: len(tokens) // 20], tokens[len(tokens) // 20 :]
    torch.manual_seed(seed)
    model = Encoder(
        characters.size,
        width=lab.pick(tiny=16, quick=64, full=256),
        layers=lab.pick(tiny=1, quick=2, full=6),
        heads=lab.pick(tiny=2, quick=4, full=8),
        context=context,
        kind=kind,
    ).to(lab.device)
    steps, rate = (
        lab.pick(tiny=2, quick=500, full=20_000),
        lab.pick(tiny=1e-3, quick=3e-3, full=1e-3),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps + 1, pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        loss = filling(model, tokens, context, 32, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            lab.report(f"{kind}, seed {seed}, step", step, steps)
    model.eval()
    with torch.no_grad():
        test = torch.Generator().manual_seed(0)
        losses = [float(filling(model, held_out, context, 32, test)) for _ in range(10)]
        maps = model.maps(characters.encode(SENTENCE).to(lab.device)).cpu()
    return {
        "kind": kind,
        "seed": seed,
        "loss": sum(losses) / len(losses),
        "maps": [
            [[round(x, 4) for x in row] for row in head] for head in maps.flatten(0, 1).tolist()
        ],
    }


def filling(
    model: Encoder, tokens: Tensor, context: int, count: int, generator: torch.Generator
) -> Tensor:
    """The loss on windows of the text in which 15 % of the characters are masked."""
    device = next(model.parameters()).device
    starts = torch.randint(max(1, len(tokens) - context), (count,), generator=generator)
    windows = tokens[(starts[:, None] + torch.arange(context)).clamp_max(len(tokens) - 1)]
    hidden = torch.rand(windows.shape, generator=generator) < 0.15
    hidden[:, 0] |= ~hidden.any(-1)
    logits = model(windows.masked_fill(hidden, MASK).to(device))
    return F.cross_entropy(logits[hidden.to(device)], windows[hidden].to(device))
