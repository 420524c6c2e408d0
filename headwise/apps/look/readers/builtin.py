"""headwise's own models as readers: a language model, a translator, a ViT."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

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
from headwise.models.trained import Classifier, LanguageModel, Translator
from headwise.watching import watch


@dataclass(frozen=True)
class TextReader:
    """A language model that reads a text."""

    name: str
    loaded: LanguageModel
    sample: str = SAMPLE_TEXT

    @property
    def model(self) -> nn.Module:
        return self.loaded.model

    @property
    def description(self) -> Description:
        model, config = self.loaded.model, self.loaded.model.config
        context = getattr(config, "context", None)  # a rival architecture may have no limit
        return described(self.name, model, config.layers, config.heads, context)

    def count(self, text: str) -> int:
        return len(self.loaded.tokeniser.encode(text)) + 1  # the start

    def read(self, what: Given, report: Report = silent) -> Input:
        """Run the model on a text.

        >>> import headwise as hw
        >>> read = TextReader("gpt", hw.load("gpt")).read("to be or not to be")
        >>> len(read.main.heads), read.main.rows[1:4]
        (48, ('to', ' be', ' or'))
        """
        text, loaded = checked_text(what), self.loaded
        tensor = loaded.encode(text)
        ids = tensor[0].tolist()
        check_length(len(ids), tensor.device.type)
        with watch(loaded.model) as seen, running(loaded.model, report):
            loaded.model.features(
                tensor
            )  # without logits: those of a long text would fill the memory
        tokens = loaded.tokeniser.pieces(ids)
        notes = too_long(len(ids), self.description.context)

        def logits(row: int) -> Tensor:
            return loaded.model.logits(loaded.model.features(tensor)[:, row])[0]

        predictor = Predictor(loaded.model, logits, lambda id: loaded.tokeniser.pieces([id])[0])
        made = groups(seen, {"self": (tokens, tokens)}, ids)
        return Input(title(text), "text", made, (*notes, *left_out(seen)), predictor=predictor)


@dataclass(frozen=True)
class TranslationReader:
    """A translator that reads a text, and then its own translation of it."""

    name: str
    loaded: Translator
    sample: str = SAMPLE_SENTENCE

    @property
    def model(self) -> nn.Module:
        return self.loaded.model

    @property
    def description(self) -> Description:
        model, config = self.loaded.model, self.loaded.model.config
        layers = config.encoder_layers + 2 * config.decoder_layers
        return described(self.name, model, layers, config.heads)

    def count(self, text: str) -> int:
        return len(self.loaded.tokeniser.encode(text)) + 1  # the end

    def read(self, what: Given, report: Report = silent) -> Input:
        """Translate a text and run the model on both sides of it.

        >>> import headwise as hw
        >>> read = TranslationReader("translate", hw.load("translate")).read("Let's see.")
        >>> [group.id for group in read.groups], read.notes
        (['encoder', 'decoder', 'cross'], ('→ Voyons !',))
        """
        text, loaded = checked_text(what), self.loaded
        source = loaded.encode(text)
        check_length(source.shape[1], source.device.type)
        report("running the model", None)
        (said,) = loaded.translate(text)
        target = loaded.encode_target(said)
        with watch(loaded.model) as seen, running(loaded.model, report):
            loaded.model(source, target)
        theirs, ours = (loaded.tokeniser.pieces(x[0].tolist()) for x in (target, source))
        axes = {"encoder": (ours, ours), "decoder": (theirs, theirs), "cross": (theirs, ours)}

        def logits(row: int) -> Tensor:
            return loaded.model(source, target)[0, row]  # type: ignore[no-any-return]

        predictor = Predictor(
            loaded.model,
            logits,
            lambda id: loaded.tokeniser.pieces([id])[0],
            groups=("decoder", "cross"),
        )
        made = groups(seen, axes)
        return Input(title(text), "translation", made, (f"→ {said}",), predictor=predictor)


@dataclass(frozen=True)
class ImageReader:
    """A ViT that reads an image."""

    name: str
    loaded: Classifier
    sample: None = None

    @property
    def model(self) -> nn.Module:
        return self.loaded.model

    @property
    def description(self) -> Description:
        model, config = self.loaded.model, self.loaded.model.config
        return described(self.name, model, config.layers, config.heads)

    def count(self, text: str) -> int:
        return 0

    def read(self, what: Given, report: Report = silent) -> Input:
        """Run the model on an image, cropped and scaled to the size it was trained on."""
        model, config = self.loaded.model, self.loaded.model.config
        pixels = images.pixels(what, config.image, config.channels)  # (C, H, W), 0 to 1
        device = model.summary.device
        given = self._scaled(pixels).to(device)[None]
        with watch(model) as seen, running(model, report):
            model(given)
        side = config.image // config.patch
        tokens = images.patch_names(1, side, side)
        cells = tuple(range(1, 1 + side * side))
        shown = Picture((side, side), cells, png=images.png(pixels))
        own = say(
            "pixels are scaled by this image's own mean and deviation: the run has saved no others"
        )
        notes = () if self.loaded.mean else (own,)
        predictor = Predictor(model, lambda row: model(given)[0], str, "class")
        made = tuple(each.in_patches(shown) for each in groups(seen, {"self": (tokens, tokens)}))
        return Input("image", "image", made, notes, predictor)

    def _scaled(self, pixels: Tensor) -> Tensor:
        """Normalise pixels (C, H, W) as in training; by their own mean if the run kept none."""
        if not self.loaded.mean:
            return images.centred(pixels)
        mean, deviation = (
            torch.tensor(x)[:, None, None] for x in (self.loaded.mean, self.loaded.deviation)
        )
        return (pixels - mean) / deviation
