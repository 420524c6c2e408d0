"""Trained models in folders: their files, their subwords, and `hw.load`."""

from headwise.models.trained import checkpoint_parts, checkpoints
from headwise.models.trained.loading import (
    ASSETS,
    CONFIGS,
    Classifier,
    LanguageModel,
    Translator,
    build,
    built_in,
    find_model,
    holds_trained_model,
    is_on_disk,
    load,
)
from headwise.models.trained.run_folder import Run
from headwise.models.trained.tokenisers import Tokeniser, chunks, whole_characters
from headwise.models.trained.translating import translate

__all__ = [
    "ASSETS",
    "CONFIGS",
    "Classifier",
    "LanguageModel",
    "Run",
    "Tokeniser",
    "Translator",
    "build",
    "built_in",
    "checkpoint_parts",
    "checkpoints",
    "chunks",
    "find_model",
    "holds_trained_model",
    "is_on_disk",
    "load",
    "translate",
    "whole_characters",
]
