"""Latent attention (MLA) as DeepSeek writes it, without transformers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS, PLAIN, ROTARY, VALUE, RANK, WIDTH = 4, 6, 4, 5, 8, 32


class Latent(nn.Module):
    """MLA with q_b_proj and kv_b_proj; absorbed, queries meet the latent keys themselves."""

    def __init__(self, absorbed: bool) -> None:
        super().__init__()
        self.absorbed, self.num_heads = absorbed, HEADS
        self.qk_nope_head_dim, self.qk_rope_head_dim = PLAIN, ROTARY
        self.q_a_proj = nn.Linear(WIDTH, RANK, bias=False)
        self.q_a_layernorm = nn.RMSNorm(RANK)
        self.q_b_proj = nn.Linear(RANK, HEADS * (PLAIN + ROTARY), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(WIDTH, RANK + ROTARY, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(RANK)
        self.kv_b_proj = nn.Linear(RANK, HEADS * (PLAIN + VALUE), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1])[:, None] / 10.0 ** torch.arange(ROTARY // 2)
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.unflatten(-1, (-1, PLAIN + ROTARY)).transpose(1, 2)  # a rank has some of the heads
        q, q_turned = q.split([PLAIN, ROTARY], -1)
        latent, k_turned = self.kv_a_proj_with_mqa(x)[:, None].split([RANK, ROTARY], -1)
        latent, scale = self.kv_a_layernorm(latent), (PLAIN + ROTARY) ** -0.5
        q_turned, k_turned = (torch.cat((y[..., :2] * angles.cos() - y[..., 2:] * angles.sin(),
                                         y[..., :2] * angles.sin() + y[..., 2:] * angles.cos()), -1)
                              for y in (q_turned, k_turned))  # fmt: skip
        if self.absorbed:
            raised = self.kv_b_proj.weight.view(HEADS, -1, RANK)
            to_keys, to_values = raised.split([PLAIN, VALUE], 1)
            q = torch.cat((q @ to_keys, q_turned), -1)
            k = torch.cat((latent, k_turned), -1)
            out = F.scaled_dot_product_attention(
                q, k, latent, is_causal=True, scale=scale, enable_gqa=True
            )
            return out @ to_values.mT
        k, v = (
            self.kv_b_proj(latent[:, 0])
            .unflatten(-1, (-1, PLAIN + VALUE))
            .transpose(1, 2)
            .split([PLAIN, VALUE], -1)
        )
        q = torch.cat((q, q_turned), -1)
        k = torch.cat((k, k_turned.expand(-1, k.shape[1], -1, -1)), -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
