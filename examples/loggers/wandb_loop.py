"""A plain loop with Weights & Biases, offline: `wandb sync` sends the run later."""

import torch
import torch.nn.functional as F
import wandb

import headwise as hw

torch.manual_seed(0)
model = hw.models.GPT(hw.models.GPTConfig(vocabulary=64, context=32, d_model=32, layers=2, heads=4))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
watch = hw.watch(model, every=5, rows=16, alarms=True)
with watch, wandb.init(project="heads", mode="offline", dir="runs") as run:
    for step in range(20):
        tokens = torch.randint(64, (4, 33))
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen = watch.scalars() if step % watch.options.every == 0 else {}
        run.log({"loss": loss.item(), **seen}, step=step)
