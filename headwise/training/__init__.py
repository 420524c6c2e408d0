"""Data, tokenisers, the training loop and the presets behind the built-in models.

>>> from headwise.training import preset
>>> preset("language", "small").data
'enwik8'
"""

from headwise.training.data.tokenisers import Tokeniser
from headwise.training.evaluation import export, judge
from headwise.training.presets import PRESETS, preset
from headwise.training.ranks import TrainingRanks
from headwise.training.recipe import Recipe
from headwise.training.setups import LanguageSetup, TranslateSetup, VisionSetup
from headwise.training.start import train

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
