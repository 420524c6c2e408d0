"""Data, tokenisers, the training loop and the presets behind the built-in models.

>>> from headwise.apps.train import preset
>>> preset("language", "small").data
'enwik8'
"""

from headwise.apps.train.presets import PRESETS, preset
from headwise.apps.train.ranks import TrainingRanks
from headwise.apps.train.recipe import Recipe
from headwise.apps.train.runs import export, judge, train
from headwise.apps.train.setups import LanguageSetup, TranslateSetup, VisionSetup
from headwise.models.trained import Tokeniser

__all__ = [
    "PRESETS",
    "LanguageSetup",
    "Recipe",
    "Tokeniser",
    "TrainingRanks",
    "TranslateSetup",
    "VisionSetup",
    "export",
    "judge",
    "preset",
    "train",
]
