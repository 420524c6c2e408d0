"""Transformers' Trainer: a callback adds the heads to its logs, and its loss to the run folder."""

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from headwise.watching import callbacks

torch.manual_seed(0)
config = GPT2Config(
    vocab_size=64, n_layer=2, n_embd=32, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0
)
tokens = torch.randint(64, (64, 32))
data: list[dict[str, Tensor]] = [{"input_ids": row, "labels": row} for row in tokens]
arguments = TrainingArguments(
    "runs/trainer", max_steps=20, logging_steps=5, report_to=[], save_strategy="no", use_cpu=True
)
heads = callbacks.trainer(every=5, run="runs/trainer/heads")
trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data, callbacks=[heads])  # type: ignore[arg-type]
heads.first(trainer).train()  # before its reporters, so that they get the heads too
