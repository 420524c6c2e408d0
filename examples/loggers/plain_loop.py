"""A plain loop: the loss and the heads go into a run folder."""

import torch
import torch.nn.functional as F

import headwise as hw

torch.manual_seed(0)
model = hw.models.GPT(hw.models.GPTConfig(vocabulary=64, context=32, d_model=32, layers=2, heads=4))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
watch = hw.watch(model, every=5, rows=16, alarms=True)
with watch, watch.record("runs/plain"):
    for _ in range(20):
        tokens = torch.randint(64, (4, 33))
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.log(loss=loss)  # read later: a GPU is not waited for
