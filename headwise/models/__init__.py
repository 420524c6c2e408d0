"""Whole models, one readable file each, a frozen configuration beside each."""

from headwise.models.generate import Beam, Greedy, Sample, Strategy
from headwise.models.gpt import GPT, GPTConfig
from headwise.models.transformer import Transformer, TransformerConfig

__all__ = [
    "GPT",
    "Beam",
    "GPTConfig",
    "Greedy",
    "Sample",
    "Strategy",
    "Transformer",
    "TransformerConfig",
]
