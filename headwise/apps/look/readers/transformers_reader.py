"""transformers models as readers of text, translations and images."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headwise.apps.look.head_groups import groups, left_out
from headwise.apps.look.predictions import Predictor
from headwise.apps.look.readers import image_bytes as images
from headwise.apps.look.readers.reader import (
    SAMPLE_SENTENCE,
    SAMPLE_TEXT,
    Given,
    Report,
    check_length,
    checked_text,
    described,
    running,
    silent,
    title,
    too_long,
)
from headwise.apps.look.scene import Description, Input, Picture
from headwise.messages import say
from headwise.models.trained import whole_characters
from headwise.watching import watch

MOST_ANSWER = 128
"""The most tokens that an encoder–decoder answers with."""


@dataclass(frozen=True)
class TransformersTextReader:
    """A language model or an encoder that reads a text."""

    name: str
    model: Any
    tokeniser: Any
    whole: Any = None  # the model with its output layer, if it predicts tokens
    sample: str = SAMPLE_TEXT

    @property
    def description(self) -> Description:
        return from_config(self.name, self.model)

    def count(self, text: str) -> int:
        tokens, places = (
            len(self.tokeniser(text, verbose=False)["input_ids"]),
            positions(self.model),
        )
        return tokens if places is None else min(tokens, places)

    def read(self, what: Given, report: Report = silent) -> Input:
        """Run the model on a text, or on its beginning if there are no positions for the rest."""
        text = checked_text(what)
        ids = self.tokeniser(text, verbose=False)["input_ids"]
        if not ids:
            raise ValueError(say("there is no word to look at in {text!r}", text=text[:20]))
        notes = too_long(len(ids), self.description.context)
        places = positions(self.model)
        if places is not None and len(ids) > places:
            said = say(
                "the first {places:,} of {tokens:,} tokens: the model has no more positions",
                places=places,
                tokens=len(ids),
            )
            notes = (said,)
            ids = ids[:places]
        check_length(len(ids), self.model.device.type)
        given = torch.tensor([ids], device=self.model.device)
        with watch(self.model) as seen, running(self.model, report):
            self.model(given)
        tokens = pieces(self.tokeniser, ids)
        made = groups(seen, {"self": (tokens, tokens)}, ids)
        notes = (*notes, *left_out(seen))
        return Input(title(text), "text", made, notes, predictor=self._predictor(given))

    def _predictor(self, ids: torch.Tensor) -> Predictor | None:
        """The predictions of tokens; None if the model has no output layer."""
        if self.whole is None or self.whole is self.model:
            return None
        kept = "logits_to_keep" in inspect.signature(self.whole.forward).parameters

        def logits(row: int) -> torch.Tensor:
            if not kept:
                return self.whole(ids).logits[0, row]  # type: ignore[no-any-return]
            rows = torch.tensor([row], device=ids.device)
            return self.whole(ids, logits_to_keep=rows).logits[0, 0]  # type: ignore[no-any-return]

        masked = type(self.whole).__name__.endswith("ForMaskedLM")
        return Predictor(self.model, logits, naming(self.tokeniser), "same" if masked else "next")


@dataclass(frozen=True)
class TransformersTranslationReader:
    """An encoder–decoder that reads a text, and then its own answer to it."""

    name: str
    model: Any
    tokeniser: Any
    sample: str = SAMPLE_SENTENCE

    @property
    def description(self) -> Description:
        return from_config(self.name, self.model)

    def count(self, text: str) -> int:
        return len(self.tokeniser(text, verbose=False)["input_ids"])

    def read(self, what: Given, report: Report = silent) -> Input:
        """Let the model answer and run it on both sides."""
        text = checked_text(what)
        source = self.tokeniser(text, return_tensors="pt", verbose=False)["input_ids"]
        check_length(source.shape[1], self.model.device.type)
        source = source.to(self.model.device)
        report("running the model", None)
        with torch.no_grad():
            target = self.model.generate(
                source, max_new_tokens=MOST_ANSWER, num_beams=1, do_sample=False
            )
        with watch(self.model) as seen, running(self.model, report):
            self.model(source, decoder_input_ids=target)
        theirs, ours = (pieces(self.tokeniser, x[0].tolist()) for x in (target, source))
        axes = {"encoder": (ours, ours), "decoder": (theirs, theirs), "cross": (theirs, ours)}
        said = self.tokeniser.decode(target[0], skip_special_tokens=True)

        def logits(row: int) -> torch.Tensor:
            return self.model(source, decoder_input_ids=target).logits[0, row]  # type: ignore[no-any-return]

        predictor = Predictor(
            self.model, logits, naming(self.tokeniser), groups=("decoder", "cross")
        )
        made = groups(seen, axes)
        notes = (f"→ {said}", *left_out(seen))
        return Input(title(text), "translation", made, notes, predictor=predictor)


@dataclass(frozen=True)
class TransformersImageReader:
    """A vision transformer that reads an image."""

    name: str
    model: Any
    processor: Any
    whole: Any = None  # the model with its output layer, if it tells classes
    sample: None = None

    @property
    def description(self) -> Description:
        return from_config(self.name, self.model)

    def count(self, text: str) -> int:
        return 0

    def read(self, what: Given, report: Report = silent) -> Input:
        """Run the model on an image, cropped and scaled by its processor."""
        values = self.processor(images=images.opened(what), return_tensors="pt")["pixel_values"]
        given = values.to(self.model.device)
        with watch(self.model) as seen, running(self.model, report):
            self.model(given)
        patch = self.model.config.patch_size
        high, wide = (patch, patch) if isinstance(patch, int) else patch
        grid = values.shape[2] // high, values.shape[3] // wide
        first = seen.layers[0].map().shape[3] - grid[0] * grid[1]
        if first < 0:
            raise ValueError(
                say(
                    "{name} does not keep its {high} × {wide} patches as tokens; use a ViT",
                    name=self.name,
                    high=grid[0],
                    wide=grid[1],
                )
            )
        tokens = images.patch_names(first, *grid)
        cells = tuple(range(first, first + grid[0] * grid[1]))
        shown = Picture(grid, cells, png=images.png(unscaled(self.processor, values[0])))
        made = tuple(each.in_patches(shown) for each in groups(seen, {"self": (tokens, tokens)}))
        return Input("image", "image", made, left_out(seen), self._predictor(given))

    def _predictor(self, values: torch.Tensor) -> Predictor | None:
        """The predictions of the image's class; None if the model has no output layer."""
        if self.whole is None or self.whole is self.model:
            return None
        names = self.whole.config.id2label
        return Predictor(
            self.model, lambda row: self.whole(values).logits[0], lambda id: names[id], "class"
        )


def unscaled(processor: Any, values: torch.Tensor) -> torch.Tensor:
    """The pixels (C, H, W) that a model was given, before its processor normalised them."""
    if not getattr(processor, "do_normalize", False):
        return values
    mean, deviation = processor.image_mean, processor.image_std
    return values * torch.tensor(deviation)[:, None, None] + torch.tensor(mean)[:, None, None]


def from_config(name: str, model: Any) -> Description:
    """A model in a few numbers, from its configuration."""
    config = model.config.get_text_config()
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    if config.is_encoder_decoder:
        layers = config.encoder_layers if hasattr(config, "encoder_layers") else layers
        layers += 2 * getattr(
            config, "decoder_layers", getattr(config, "num_decoder_layers", layers)
        )
    context = getattr(config, "max_position_embeddings", None)
    return described(name, model, layers, heads, context)


def positions(model: nn.Module) -> int | None:
    """The number of learnt positions of a model; None if it has no such table."""
    context = getattr(model.config, "max_position_embeddings", None)
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and ("position" in last or last in ("wpe", "pos_emb")):
            return min(context or module.num_embeddings, module.num_embeddings)
    return None


def naming(tokeniser: Any) -> Callable[[int], str]:
    """The names of single tokens; a model may have more of them than its tokeniser."""
    return lambda id: pieces(tokeniser, [id])[0] or f"⟨{id}⟩"


def pieces(tokeniser: Any, ids: Sequence[int]) -> list[str]:
    """Each token as people read it: a tokeniser's sign for a space becomes a space."""
    decode: Callable[[list[int]], str] = tokeniser.decode
    raw = [token or "" for token in tokeniser.convert_ids_to_tokens(ids)]
    if any(x.startswith("▁") for x in raw):  # SentencePiece's sign for a space
        return [
            x.replace("▁", " ") if x.startswith("▁") else decode([id]) or x
            for id, x in zip(ids, raw, strict=True)
        ]
    backend = getattr(tokeniser, "backend_tokenizer", None)
    if type(getattr(backend, "model", None)).__name__ == "WordPiece":
        # It marks the pieces that continue a word: all others but the first come after a space.
        return [
            x.removeprefix("##") if x.startswith("##") or at == 0 else f" {x}"
            for at, x in enumerate(raw)
        ]
    return whole_characters(ids, decode)
