"""Vision–language models of transformers as readers of an image and a question about it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from headwise.apps.look.head_groups import groups, left_out
from headwise.apps.look.predictions import Predictor
from headwise.apps.look.readers import image_bytes as images
from headwise.apps.look.readers.reader import (
    Given,
    Illustrated,
    Report,
    check_length,
    running,
    silent,
    title,
)
from headwise.apps.look.readers.transformers_reader import from_config, naming, pieces, unscaled
from headwise.apps.look.scene import Description, Image, Input
from headwise.messages import say
from headwise.watching import Watch, watch

QUESTION = "Describe this image."
"""The text that stands beside an image if none is given."""


def tower(shown: str, seen: Watch) -> tuple[str, ...]:
    """A note on the layers that run before the module that is shown, under the same numbering."""
    first = min((layer.number for layer in seen.layers), default=0)
    if not first:
        return ()
    said = say(
        "layers 0 to {last} are not shown: they see the image before it is among the tokens; "
        "shown are those of {module}, numbered as in hw.watch(model)",
        last=first - 1,
        module=shown,
    )
    return (said,)


@dataclass(frozen=True)
class TransformersImageTextReader:
    """A language model that sees an image among the tokens of its prompt."""

    name: str
    whole: Any
    processor: Any
    sample: None = None

    @property
    def model(self) -> Any:
        """The language model inside: its heads are looked at, not those of the vision tower."""
        return self.whole.get_decoder()

    @property
    def description(self) -> Description:
        return from_config(self.name, self.whole)

    def count(self, text: str) -> int:
        return 0

    def read(self, what: Given, report: Report = silent) -> Input:
        """Run the model on an image and a question about it."""
        image, question = what if isinstance(what, Illustrated) else (what, QUESTION)
        opened = images.opened(image)
        if self.processor.image_token in question:
            raise ValueError(
                say(
                    "the text holds {token}, which stands for the image; leave it out",
                    token=self.processor.image_token,
                )
            )
        prompt, begin = self._prompt(question), self.processor.tokenizer.bos_token
        # A template that writes the token that begins a sequence leaves none to be added.
        own = {"add_special_tokens": False} if begin and prompt.startswith(begin) else {}
        given = self.processor(images=opened, text=prompt, return_tensors="pt", **own)
        given = given.to(self.whole.device)
        ids = given["input_ids"][0].tolist()
        check_length(len(ids), self.whole.device.type)
        inside = self._inside()
        with watch(self.whole, layers=f"{inside}.*") as seen, running(self.model, report):
            self.whole(**given)
        first, count = self._place(ids)
        grid = self._grid(given, count)
        names = images.patch_names(0, *grid)
        tokens = pieces(self.processor.tokenizer, ids)
        tokens = [*tokens[:first], *(f" {name}" for name in names), *tokens[first + count :]]

        def logits(row: int) -> Tensor:
            return self.whole(**given).logits[0, row]  # type: ignore[no-any-return]

        predictor = Predictor(self.whole, logits, naming(self.processor.tokenizer))
        shown = Image(self._shown(given, opened), grid, first)
        # All patches have the number of one token, and none of them is a repetition of another.
        apart = [-1 - at if first <= at < first + count else id for at, id in enumerate(ids)]
        made = groups(seen, {"self": (tokens, tokens)}, apart)
        notes = (*tower(inside, seen), *left_out(seen))
        return Input(title(question), "text", made, notes, shown, predictor)

    def _inside(self) -> str:
        """The name of the language model among the modules of the whole one."""
        inside = self.model
        name: str = next(name for name, module in self.whole.named_modules() if module is inside)
        return name

    def _prompt(self, question: str) -> str:
        """The question as the model was trained to be asked, with a place for the image."""
        if getattr(self.processor, "chat_template", None) is None:
            return f"{self.processor.image_token}\n{question}"
        content = [{"type": "image"}, {"type": "text", "text": question}]
        asked = [{"role": "user", "content": content}]
        prompt: str = self.processor.apply_chat_template(asked, add_generation_prompt=True)
        return prompt

    def _place(self, ids: list[int]) -> tuple[int, int]:
        """The first of the image's tokens and their number; ValueError if others are between."""
        config = self.whole.config
        token = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", -1)
        places = [place for place, id in enumerate(ids) if id == token]
        if not places or places[-1] - places[0] + 1 != len(places):
            raise ValueError(
                say(
                    "{name} puts the image into {count} tokens that do not stand in a row, and the "
                    "page draws one image; hw.watch has its figures",
                    name=self.name,
                    count=len(places),
                )
            )
        return places[0], len(places)

    def _grid(self, given: Any, count: int) -> tuple[int, int]:
        """The patches down and across that the image's tokens are."""
        sizes = given.get("image_grid_thw")
        if sizes is not None:  # before neighbouring patches are merged
            _, high, wide = sizes[0].tolist()
            merged = math.isqrt(high * wide // count)
            return high // merged, wide // merged
        side = math.isqrt(count)
        if side * side != count:
            raise ValueError(
                say(
                    "{name} reads the image as {count} tokens, which are not the patches of one "
                    "square; hw.watch has its figures",
                    name=self.name,
                    count=count,
                )
            )
        return side, side

    def _shown(self, given: Any, image: Any) -> bytes:
        """The image as the model saw it; where it is cut into patches already, as it was given."""
        values = given["pixel_values"]
        if values.ndim == 4:
            return images.png(unscaled(self.processor.image_processor, values[0].cpu()))
        return images.png(images.tensor(image))
