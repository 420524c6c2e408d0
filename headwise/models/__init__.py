"""Whole models, one readable file per model, each with a frozen configuration."""

from headwise.models.bert import Bert, BertConfig
from headwise.models.conv import Conv, ConvConfig, GatedConvolution
from headwise.models.generate import Beam, Greedy, Sample, Strategy
from headwise.models.gpt import GPT, FixedGPT, FixedGPTConfig, GPTConfig
from headwise.models.lstm import LSTM, LSTMConfig
from headwise.models.lstm import State as LSTMState
from headwise.models.transformer import Transformer, TransformerConfig
from headwise.models.vit import ViT, ViTConfig

__all__ = [
    "GPT",
    "LSTM",
    "Beam",
    "Bert",
    "BertConfig",
    "Conv",
    "ConvConfig",
    "FixedGPT",
    "FixedGPTConfig",
    "GPTConfig",
    "GatedConvolution",
    "Greedy",
    "LSTMConfig",
    "LSTMState",
    "Sample",
    "Strategy",
    "Transformer",
    "TransformerConfig",
    "ViT",
    "ViTConfig",
]
