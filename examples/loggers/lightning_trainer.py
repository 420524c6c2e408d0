"""Lightning: a callback logs the heads with `log_dict`, so that every logger gets them."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

import headwise as hw
from headwise.watching import callbacks


class Model(L.LightningModule):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        size = hw.models.GPTConfig(vocabulary=64, context=32, d_model=32, layers=2, heads=4)
        self.model = hw.models.GPT(size)

    def training_step(self, tokens: Tensor) -> Tensor:
        """The loss of predicting the next token."""
        logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, as usual."""
        return torch.optim.AdamW(self.parameters(), 1e-3)


torch.manual_seed(0)
data = torch.utils.data.DataLoader(torch.randint(64, (80, 33)), batch_size=4)  # type: ignore[var-annotated,arg-type]
heads = callbacks.lightning(every=5, run="runs/lightning/heads")
L.Trainer(
    max_epochs=1, accelerator="cpu", logger=CSVLogger("runs"), log_every_n_steps=5,
    enable_checkpointing=False, enable_progress_bar=False, callbacks=[heads],
).fit(Model(), data)  # fmt: skip
