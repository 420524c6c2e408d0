"""A small encoder of Chinese text that fills in masked characters, with any projections of Q and K.

One character is one token, so that a map of 「他打了自己」 has a row for 打.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.apps.lab.laboratory import Lab
from headwise.apps.train.data import pairs
from headwise.apps.train.data.corpora import QURAN_ZH
from headwise.apps.train.data.download_cache import path_of
from headwise.nn import GELU, Block, MultiHeadAttention, Projections, Separate, Shared

MASK, UNKNOWN = 0, 1
PROJECTIONS: dict[str, Projections] = {"separate": Separate(), "shared": Shared()}
SENTENCE = "他打了自己"
CHANGED = ("她打了自己", "他打了你们", "他说了自己", "我打了自己")
"""The sentence with words changed: who acts, on whom, and what happens."""
HELP = "libreoffice-help-en-zh"
"""LibreOffice's help: modern Chinese, but almost without people."""
TOY = "他打了自己。他打开了门，自己走了。我打了他，他也打了我。你自己打开门。"
"""A text for tests."""


def text_of(lab: Lab) -> str:
    """Chinese text: the other side of a corpus of pairs."""
    if lab.form == "tiny":
        return TOY * 20
    return "\n".join((*verses(), *(chinese for _, chinese in pairs.read(HELP))))


def verses() -> list[str]:
    """Chinese prose in which people act on others and on themselves."""
    chapters = json.loads(path_of(QURAN_ZH, "quran_zh.json").read_text(encoding="utf-8"))
    return [verse["translation"] for chapter in chapters for verse in chapter["verses"]]


class Characters:
    """The most frequent characters of a text as numbers; those of the sentences are among them."""

    def __init__(self, text: str, size: int) -> None:
        common = [letter for letter, _ in Counter(text).most_common(size)]
        looked_at = "".join((SENTENCE, *CHANGED, *common))
        self.known = {letter: 2 + n for n, letter in enumerate(dict.fromkeys(looked_at))}
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
    held_out, tokens = apart(tokens, 40 * context)
    torch.manual_seed(seed)
    model = Encoder(
        characters.size,
        width=lab.pick("width", tiny=16, quick=64, full=256),
        layers=lab.pick("layers", tiny=1, quick=2, full=4),
        heads=lab.pick("heads", tiny=2, quick=4, full=8),
        context=context,
        kind=kind,
    ).to(lab.device)
    steps = lab.pick("steps", tiny=2, quick=500, full=3000)
    rate = lab.pick("rate", tiny=1e-3, quick=3e-3, full=1e-3)
    batch = lab.pick("batch", tiny=8, quick=32, full=128)
    on_gpu = lab.device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=on_gpu)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps + 1, pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        loss = filling(model, tokens, context, batch, generator)
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
        sentences = {
            each: model.maps(characters.encode(each).to(lab.device)).flatten(0, 1).cpu()
            for each in (SENTENCE, *CHANGED)
        }
    maps = sentences[SENTENCE]
    return {
        "kind": kind,
        "seed": seed,
        "loss": sum(losses) / len(losses),
        "maps": [[[round(x, 4) for x in row] for row in head] for head in maps.tolist()],
        "moved": [
            {"sentence": each, "mean": moved(maps, sentences[each], each)} for each in CHANGED
        ],
    }


def apart(tokens: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Every twentieth block of a text, and the rest: each corpus is in both parts."""
    blocks = tokens.split(block)
    return torch.cat(blocks[::20]), torch.cat(
        [each for number, each in enumerate(blocks) if number % 20] or [tokens]
    )


def moved(maps: Tensor, changed: Tensor, sentence: str) -> float:
    """The share of weight (heads, N, N) that moves in the rows of characters that stayed."""
    same = [n for n, letter in enumerate(sentence) if letter == SENTENCE[n]]
    return float(((maps - changed).abs().sum(-1) / 2)[:, same].mean())


def filling(
    model: Encoder, tokens: Tensor, context: int, count: int, generator: torch.Generator
) -> Tensor:
    """The loss on windows of the text in which 15 % of the characters are masked."""
    device = next(model.parameters()).device
    starts = torch.randint(max(1, len(tokens) - context), (count,), generator=generator)
    windows = tokens[(starts[:, None] + torch.arange(context)).clamp_max(len(tokens) - 1)]
    hidden = torch.rand(windows.shape, generator=generator) < 0.15
    hidden[:, 0] |= ~hidden.any(-1)
    places = hidden.flatten().nonzero()[:, 0].to(device)
    with autocast(device):
        logits = model(windows.masked_fill(hidden, MASK).to(device)).flatten(0, 1)[places]
    return F.cross_entropy(logits.float(), windows[hidden].to(device))


def autocast(device: torch.device) -> AbstractContextManager[object]:
    """bf16 on a GPU, for models whose steps are launched by Python; float32 elsewhere."""
    if device.type != "cuda":
        return nullcontext()
    return torch.autocast("cuda", torch.bfloat16, cache_enabled=False)
