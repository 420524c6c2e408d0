"""Vision–language models of transformers as readers of an image and a question about it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from headwise.apps.look.head_groups import groups, left_out
from headwise.apps.look.predictions import Predictor
from headwise.apps.look.readers import image_bytes as images
from headwise.apps.look.readers.picture_places import Prompt, pictures
from headwise.apps.look.readers.reader import (
    Given,
    Illustrated,
    Report,
    check_length,
    running,
    silent,
    title,
)
from headwise.apps.look.readers.transformers_reader import from_config, naming, pieces
from headwise.apps.look.scene import Description, Input
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
        """Run the model on images and a question about them."""
        files, question = what if isinstance(what, Illustrated) else ((what,), QUESTION)
        opened = [images.opened(file) for file in files]
        if self.processor.image_token in question:
            raise ValueError(
                say(
                    "the text holds {token}, which stands for the image; leave it out",
                    token=self.processor.image_token,
                )
            )
        asked, begin = self._asked(question, len(opened)), self.processor.tokenizer.bos_token
        # A template that writes the token that begins a sequence leaves none to be added.
        own = {"add_special_tokens": False} if begin and asked.startswith(begin) else {}
        given = self.processor(images=opened, text=asked, return_tensors="pt", **own)
        given = given.to(self.whole.device)
        ids = given["input_ids"][0].tolist()
        check_length(len(ids), self.whole.device.type)
        inside, prompt = self._inside(), Prompt(ids, given, self.whole, self.processor, opened)
        watching = watch(self.whole, layers=f"{inside}.*")
        with watching as seen, running(self.model, report), prompt.packing():
            self.whole(**given)
        shown = pictures(prompt)
        tokens = pieces(self.processor.tokenizer, ids)
        for picture in shown:
            names = images.patch_names(0, *picture.grid)
            for place, name in zip(picture.cells, names, strict=True):
                tokens[place] = f" {name}"

        def logits(row: int) -> Tensor:
            return self.whole(**given).logits[0, row]  # type: ignore[no-any-return]

        predictor = Predictor(self.whole, logits, naming(self.processor.tokenizer))
        # All patches have the number of one token, and none of them is a repetition of another.
        places = set(prompt.places)
        apart = [-1 - at if at in places else id for at, id in enumerate(ids)]
        made = groups(seen, {"self": (tokens, tokens)}, apart)
        made = tuple(replace(group, pictures=shown, looks="text") for group in made)
        notes = (*tower(inside, seen), *left_out(seen))
        return Input(title(question), "text", made, notes, predictor)

    def _inside(self) -> str:
        """The name of the language model among the modules of the whole one."""
        inside = self.model
        name: str = next(name for name, module in self.whole.named_modules() if module is inside)
        return name

    def _asked(self, question: str, count: int) -> str:
        """The question as the model was trained to be asked, with places for so many images."""
        if getattr(self.processor, "chat_template", None) is None:
            return f"{self.processor.image_token}\n" * count + question
        content = [*({"type": "image"} for _ in range(count)), {"type": "text", "text": question}]
        asked = [{"role": "user", "content": content}]
        prompt: str = self.processor.apply_chat_template(asked, add_generation_prompt=True)
        return prompt
