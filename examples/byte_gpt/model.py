"""A GPT over bytes: 256 symbols, learned positions, pre-norm blocks, tied embedding, dropout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class ModelSize:
    """`context`: bytes that the model sees at once. The default has 12.8 million parameters."""

    context: int = 128
    width: int = 512
    layers: int = 4
    heads: int = 8
    dropout: float = 0.1


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each behind a layer norm and beside the residual stream."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.dropout = size.dropout
        self.attention_norm = nn.LayerNorm(size.width)
        self.queries_keys_values = nn.Linear(size.width, 3 * size.width)
        self.attention_out = nn.Linear(size.width, size.width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(size.width),
            nn.Linear(size.width, 4 * size.width),
            nn.GELU(),
            nn.Linear(4 * size.width, size.width),
            nn.Dropout(size.dropout),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same shape."""
        x = x + self._attend(self.attention_norm(x))
        out: torch.Tensor = x + self.mlp(x)
        return out

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.queries_keys_values(x).view(batch, length, 3, self.heads, width // self.heads)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=True)
        out: torch.Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return functional.dropout(out, self.dropout, self.training)


class ByteGPT(nn.Module):
    """Next-byte logits. The input embedding and the output layer are one tensor under two names."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.dropout = nn.Dropout(size.dropout)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, 256, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """int64 bytes (batch, length) to float logits (batch, length, 256)."""
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.dropout(self.embedding(inputs) + self.positions(positions))
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits
