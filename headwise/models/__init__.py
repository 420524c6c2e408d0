"""Whole models, one readable file each, a frozen configuration beside each."""

from headwise.models.bert import Bert, BertConfig
from headwise.models.generate import Beam, Greedy, Sample, Strategy
from headwise.models.gpt import GPT, GPTConfig
from headwise.models.transformer import Transformer, TransformerConfig
from headwise.models.vit import ViT, ViTConfig

__all__ = [
    "GPT",
    "Beam",
    "Bert",
    "BertConfig",
    "GPTConfig",
    "Greedy",
    "Sample",
    "Strategy",
    "Transformer",
    "TransformerConfig",
    "ViT",
    "ViTConfig",
]
