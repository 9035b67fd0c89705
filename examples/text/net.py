"""Small transformers, trained from nothing: one reads a text and rates it, one writes the next character."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Self-attention of several heads."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.head_dim, self.causal = heads, width // heads, causal
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        n, length, _ = x.shape
        q, k, v = (
            layer(x).view(n, length, -1, self.head_dim).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a LayerNorm and around a shortcut."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Body(nn.Module):
    """Embeddings of tokens and positions, and blocks."""

    def __init__(self, num_tokens: int, length: int, width: int, depth: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(num_tokens, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x)


class Rating(nn.Module):
    """Token ids and mask [n, length] -> outputs [n, num_classes]."""

    def __init__(
        self, num_classes: int, in_shape: dict[str, tuple[int, ...]], num_tokens: int, width: int = 32, depth: int = 1
    ) -> None:
        super().__init__()
        self.body = Body(num_tokens, in_shape["input_ids"][0], width, depth, heads=4, causal=False)
        self.head = nn.Linear(width, num_classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.body(input_ids, attention_mask[:, None, None, :].bool())
        weights = attention_mask[..., None] / attention_mask.sum(1)[:, None, None]
        return self.head((x * weights).sum(1))


class Writer(nn.Module):
    """Characters [n, length] -> logits of the next ones [n, length, num_classes]."""

    def __init__(self, num_classes: int, in_shape: tuple[int, ...], width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.body = Body(num_classes, in_shape[0], width, depth, heads=4, causal=True)
        self.head = nn.Linear(width, num_classes)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(ids))
