"""What `headwise look MODEL` means: a model by its name or its folder, ready to read."""

from __future__ import annotations

from pathlib import Path

import torch

from headwise.loading import Classifier, LanguageModel, load
from headwise.look import sample
from headwise.look.own import ImageReader, TextReader, TranslationReader
from headwise.look.reading import Reader


def opened(what: str, device: str | None = None) -> Reader:
    """The model of this name or folder, ready to read; ValueError says what would work.

    >>> opened("gpt").description
    Description(name='gpt', parameters=5573888, layers=6, heads=48, context=4096)
    """
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    loaded, name = load(what, place), Path(what).name
    if isinstance(loaded, LanguageModel):
        return TextReader(name, loaded, sample.TEXT)
    if isinstance(loaded, Classifier):
        return ImageReader(name, loaded)
    return TranslationReader(name, loaded, sample.ENGLISH)
