"""Transformers of the zoo: one stack of blocks, many ways to write attention."""

import math
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from opacus.validators import ModuleValidator
from torch import nn

from helpers.model_zoo import BATCH, Builder, Wired, collect

TRANSFORMERS: dict[str, Builder] = {}
VOCABULARY, TOKENS, WIDTH, HEADS, HIDDEN = 30, 6, 16, 4, 24

network = collect(TRANSFORMERS)


class Attention(nn.Module):
    """Linear projections around a method that mixes heads (batch, head, token, dimension)."""

    def __init__(
        self, *, kv_heads: int = HEADS, qk: int = 4, value: int = 4, packed: bool = False
    ) -> None:
        super().__init__()
        self.kv_heads = kv_heads
        if packed:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.q, self.k = nn.Linear(WIDTH, HEADS * qk), nn.Linear(WIDTH, kv_heads * qk)
            self.v = nn.Linear(WIDTH, kv_heads * value)
        self.out = nn.Linear(HEADS * value, WIDTH)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        heads = (HEADS, self.kv_heads, self.kv_heads)
        return tuple(
            layer(x).unflatten(-1, (h, -1)).transpose(1, 2)
            for layer, h in zip((self.q, self.k, self.v), heads, strict=True)
        )

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), -1) @ v

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.mix(*self.project(x)).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm attention and perceptron."""

    def __init__(
        self,
        attention: nn.Module,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
        mlp: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = norm(WIDTH), attention, norm(WIDTH)
        self.mlp = mlp or nn.Sequential(
            nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Classifier(nn.Module):
    """Token and position embeddings, blocks, the mean over tokens, a linear head."""

    def __init__(self, *blocks: nn.Module, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Parameter(torch.randn(TOKENS, WIDTH)),
        )
        self.blocks, self.norm, self.head = nn.Sequential(*blocks), norm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.positions)).mean(1))


def sentences() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, TOKENS))


def stack(attention: Callable[[], nn.Module]) -> tuple[nn.Module, torch.Tensor]:
    return Classifier(Block(attention()), Block(attention())), sentences()


# nn.MultiheadAttention and its twin in Opacus
# ------------------------------------------------------------------------------------------


class TorchEncoder(nn.Module):
    """nn.TransformerEncoder between embeddings and a head; sizes as in the table of groups."""

    def __init__(
        self, *, norm_first: bool = False, batch_first: bool = True, opacus: bool = False
    ) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.tokens, self.positions = nn.Embedding(50, 32), nn.Parameter(torch.randn(1, 11, 32))
        layer = nn.TransformerEncoderLayer(
            32, 4, 64, dropout=0.0, batch_first=batch_first, norm_first=norm_first
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        if opacus:
            self.encoder = ModuleValidator.fix(self.encoder)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions
        x = self.encoder(x) if self.batch_first else self.encoder(x.transpose(0, 1)).transpose(0, 1)
        return self.head(self.norm(x).mean(1))


def torch_encoder(**options: bool) -> tuple[nn.Module, torch.Tensor]:
    return TorchEncoder(**options), torch.randint(0, 50, (BATCH, 11))


@network
def torch_encoder_post_norm():
    return torch_encoder()


@network
def torch_encoder_pre_norm():
    return torch_encoder(norm_first=True)


@network
def opacus_encoder():
    return torch_encoder(opacus=True, batch_first=False)


@network
def torch_encoder_decoder():
    def wiring(m, source, target):
        memory = m.encoder(m.source(source))
        causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
        return m.head(m.decoder(m.target(target), memory, tgt_mask=causal))

    options = {
        "d_model": WIDTH,
        "nhead": HEADS,
        "dim_feedforward": HIDDEN,
        "dropout": 0.0,
        "batch_first": True,
        "norm_first": True,
    }
    parts = {
        "source": nn.Embedding(VOCABULARY, WIDTH),
        "target": nn.Embedding(20, WIDTH),
        "head": nn.Linear(WIDTH, 20),
    }
    parts["encoder"] = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(**options), 1, nn.LayerNorm(WIDTH), enable_nested_tensor=False
    )
    parts["decoder"] = nn.TransformerDecoder(
        nn.TransformerDecoderLayer(**options), 1, nn.LayerNorm(WIDTH)
    )
    return Wired(wiring, **parts), (sentences(), torch.randint(0, 20, (BATCH, 5)))


# Ways to pack query, key and value
# ------------------------------------------------------------------------------------------


class UnboundAttention(Attention):
    """As in timm: one projection seen as (3, head, dimension), unbound."""

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        b, n, d = x.shape
        return self.qkv(x).reshape(b, n, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4).unbind(0)


class SplitAttention(Attention):
    """As in nanoGPT: one projection split in three, causal fused attention."""

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(
            part.view(*x.shape[:2], HEADS, -1).transpose(1, 2)
            for part in self.qkv(x).split(WIDTH, dim=2)
        )

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class LayerScaled(Block):
    """A block whose branches end in a learned factor per channel."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__(attention)
        self.scale1, self.scale2 = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.scale1 * self.attention(self.norm1(x))
        return x + self.scale2 * self.mlp(self.norm2(x))


@network
def timm_vit():
    def wiring(m, images):
        x = m.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([m.cls_token.expand(len(x), -1, -1), x], dim=1) + m.positions
        return m.head(m.norm(m.blocks(x))[:, 0])

    blocks = nn.Sequential(*[LayerScaled(UnboundAttention(packed=True)) for _ in range(2)])
    parts = {
        "patches": nn.Conv2d(3, WIDTH, 4, 4),
        "cls_token": torch.randn(1, 1, WIDTH),
        "positions": torch.randn(1, 5, WIDTH),
    }
    return Wired(
        wiring, **parts, blocks=blocks, norm=nn.LayerNorm(WIDTH), head=nn.Linear(WIDTH, 4)
    ), torch.randn(BATCH, 3, 8, 8)


@network
def nano_gpt():
    def wiring(m, ids):
        x = m.tokens(ids) + m.positions(torch.arange(ids.shape[1]))
        return m.head(m.norm(m.blocks(x)))

    blocks = nn.Sequential(*[Block(SplitAttention(packed=True)) for _ in range(2)])
    parts = {
        "tokens": nn.Embedding(VOCABULARY, WIDTH),
        "positions": nn.Embedding(TOKENS, WIDTH),
        "head": nn.Linear(WIDTH, VOCABULARY),
    }
    model = Wired(wiring, **parts, blocks=blocks, norm=nn.LayerNorm(WIDTH))
    model.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    model.head.weight = model.tokens.weight
    return model, sentences()


# Other shapes of heads
# ------------------------------------------------------------------------------------------


class ExpandingAttention(Attention):
    """Grouped queries by a view that stays a view until heads are flattened."""

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (
            x.unsqueeze(2).expand(-1, -1, HEADS // self.kv_heads, -1, -1).flatten(1, 2)
            for x in (k, v)
        )
        return F.scaled_dot_product_attention(q, k, v)


class RotaryAttention(ExpandingAttention):
    """Queries and keys turned by angles that depend on the dimension."""

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        half = q.shape[-1] // 2
        angles = torch.outer(torch.arange(q.shape[2]), 100.0 ** (-torch.arange(half) / half)).to(q)
        cos, sin = (torch.cat([f(angles), f(angles)], -1) for f in (torch.cos, torch.sin))
        q, k = (x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin for x in (q, k))
        return super().mix(q, k, v)


class EinsumAttention(nn.Module):
    """Weights with an axis of their own for heads."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk = (nn.Parameter(torch.randn(HEADS, WIDTH, 5)) for _ in range(2))
        self.wv, self.wo = (
            nn.Parameter(torch.randn(HEADS, WIDTH, 3)),
            nn.Parameter(torch.randn(HEADS, 3, WIDTH)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (torch.einsum("btd,hdk->bhtk", x, w) for w in (self.wq, self.wk, self.wv))
        weights = torch.softmax(torch.einsum("bhtk,bhsk->bhts", q, k), -1)
        return torch.einsum("bhts,bhsk,hkd->btd", weights, v, self.wo)


class AlibiAttention(Attention):
    """A constant slope per head: heads are told apart."""

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        at = torch.arange(TOKENS)
        bias = -(at[:, None] - at).abs() * 2.0 ** -torch.arange(1, HEADS + 1)[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q))


class RMSNorm(nn.Module):
    """Written by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class GatedMLP(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(a, b, bias=False)
            for a, b in ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


@network
def grouped_queries_by_expanding():
    return stack(lambda: ExpandingAttention(kv_heads=2, qk=6))


@network
def multi_query():
    return stack(lambda: Attention(kv_heads=1, value=5))


@network
def llama_by_hand():
    blocks = [Block(RotaryAttention(kv_heads=2), RMSNorm, GatedMLP()) for _ in range(2)]
    return Classifier(*blocks, norm=RMSNorm), sentences()


@network
def einsum_attention():
    return stack(EinsumAttention)


@network
def alibi():
    return stack(AlibiAttention)


# Streams and tokens
# ------------------------------------------------------------------------------------------


def sinusoids() -> torch.Tensor:
    angles = torch.outer(torch.arange(TOKENS), 100.0 ** (-torch.arange(WIDTH // 2) / WIDTH))
    return torch.cat([angles.sin(), angles.cos()], -1)


@network
def sinusoidal_positions():
    model, ids = stack(Attention)
    del model.positions
    model.register_buffer("positions", sinusoids())
    return model, ids


@network
def attention_pooling():
    def wiring(m, ids):
        x = m.tokens(ids)
        weights = torch.softmax(m.score(torch.tanh(m.hidden(x))), dim=1)
        return m.head((weights * x).sum(1))

    parts = {
        "tokens": nn.Embedding(VOCABULARY, WIDTH),
        "hidden": nn.Linear(WIDTH, 7),
        "score": nn.Linear(7, 1),
    }
    return Wired(wiring, **parts, head=nn.Linear(WIDTH, 3)), sentences()


class Mixer(nn.Module):
    """Perceptrons across tokens and across channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.tokens = nn.Sequential(nn.Linear(4, 7), nn.GELU(), nn.Linear(7, 4))
        self.channels = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


@network
def mlp_mixer():
    def wiring(m, images):
        return m.head(m.blocks(m.patches(images).flatten(2).transpose(1, 2)).mean(1))

    parts = {
        "patches": nn.Conv2d(3, WIDTH, 4, 4),
        "blocks": nn.Sequential(Mixer(), Mixer()),
        "head": nn.Linear(WIDTH, 4),
    }
    return Wired(wiring, **parts), torch.randn(BATCH, 3, 8, 8)
