"""An alias of `headwise.apps.train`, where training moved; it goes with the next release."""

from headwise.apps.train import (
    PRESETS,
    LanguageSetup,
    Recipe,
    Tokeniser,
    TrainingRanks,
    TranslateSetup,
    VisionSetup,
    export,
    judge,
    preset,
    train,
)

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
