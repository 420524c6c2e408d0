"""Data, tokenisers, the loop and the presets: how the built-in models were made.

>>> from headwise.training import preset
>>> preset("language", "small").data
'enwik8'
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headwise.training.data.tokenisers import Tokeniser
    from headwise.training.evaluation import export, judge
    from headwise.training.presets import PRESETS, preset
    from headwise.training.recipe import Recipe
    from headwise.training.setups import LanguageSetup, TranslateSetup, VisionSetup
    from headwise.training.start import train

# Imported when they are first used: `headwise --help` needs no tokenisers.
_HOMES = {
    "PRESETS": "presets",
    "LanguageSetup": "setups",
    "Recipe": "recipe",
    "Tokeniser": "tokenisers",
    "TranslateSetup": "setups",
    "VisionSetup": "setups",
    "export": "judging",
    "judge": "judging",
    "preset": "presets",
    "train": "start",
}

__all__ = [
    "PRESETS",
    "LanguageSetup",
    "Recipe",
    "Tokeniser",
    "TranslateSetup",
    "VisionSetup",
    "export",
    "judge",
    "preset",
    "train",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(f"headwise.training.{_HOMES[name]}"), name)
    raise AttributeError(f"headwise.training has no {name!r}")
