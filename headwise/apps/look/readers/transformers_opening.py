"""Loads transformers models, and chooses the reader of each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from headwise.apps.look.readers.image_text_reader import TransformersImageTextReader
from headwise.apps.look.readers.reader import Reader
from headwise.apps.look.readers.transformers_reader import (
    TransformersImageReader,
    TransformersTextReader,
    TransformersTranslationReader,
)
from headwise.messages import say


def opened(what: str, device: torch.device, local: bool) -> Reader:
    """Load a transformers model by its folder or name on the hub; ValueError says what is wrong.

    Only safetensors are read, and no code that comes with the model is run. `local` means that it
    is on this machine, and that the hub is not asked.
    """
    try:
        import transformers
    except ModuleNotFoundError as missing:
        raise ValueError(
            f"{what} is read by transformers, which is not installed: pip install transformers"
        ) from missing
    auto: Any = transformers  # whose classes are partly untyped
    here = {"local_files_only": local, "trust_remote_code": False}
    talk = auto.utils.logging.get_verbosity()
    auto.utils.logging.set_verbosity_error()  # an unused output head is not worth a warning
    try:
        config = auto.AutoConfig.from_pretrained(what, **here)
        both, sees = bool(config.is_encoder_decoder), hasattr(config, "vision_config")
        kind = getattr(auto, _kind(config.architectures, both, sees))
        model = kind.from_pretrained(what, use_safetensors=True, dtype=torch.float32, **here)
        name, model = Path(what).name, model.to(device).eval()
        if kind is auto.AutoModelForImageTextToText:
            processor = auto.AutoProcessor.from_pretrained(what, **here)
            return TransformersImageTextReader(name, model, processor)
        if hasattr(config, "patch_size"):
            processor = auto.AutoImageProcessor.from_pretrained(what, **here)
            return TransformersImageReader(name, model.base_model, processor, model)
        tokeniser = auto.AutoTokenizer.from_pretrained(what, **here)
        if both:
            return TransformersTranslationReader(name, model, tokeniser)
        return TransformersTextReader(name, model.base_model, tokeniser, model)
    except Exception as error:  # a damaged folder may raise anything inside transformers
        reason = " ".join(str(error).split()) or type(error).__name__
        if "trust_remote_code" in reason:
            reason = "it needs code of its own, and headwise runs no code that comes with a model"
        said = say("transformers can't load {what}: {reason}", what=what, reason=reason)
        raise ValueError(said) from error
    finally:
        auto.utils.logging.set_verbosity(talk)


def _kind(architectures: Sequence[str] | None, both: bool = False, sees: bool = False) -> str:
    """The class that loads a model with its output layer, if headwise reads its predictions.

    `both` is an encoder with a decoder, `sees` a model with a vision tower.

    >>> _kind(["BertForMaskedLM"]), _kind(["BertModel"]), _kind(["LlavaForConditionalGeneration"],
    ...     sees=True)
    ('AutoModelForMaskedLM', 'AutoModel', 'AutoModelForImageTextToText')
    """
    if both:
        return "AutoModelForSeq2SeqLM"
    names = architectures or ()
    if sees and any(name.endswith("ForConditionalGeneration") for name in names):
        return "AutoModelForImageTextToText"
    for output in ("ForCausalLM", "ForMaskedLM", "ForImageClassification"):
        if any(name.endswith(output) for name in names):
            return f"AutoModel{output}"
    return "AutoModel"
