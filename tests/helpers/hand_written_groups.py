"""Sizes of permutation groups in closed form, worked out by hand.

A size is log2 of the number of permutations, at each of three levels: ``paper`` (hidden units;
query-key dimensions per head; one permutation of value dimensions for all heads), ``heads`` (value
dimensions per head; the order of heads) and ``residual`` (residual streams too).
"""

from __future__ import annotations

import math
from typing import NamedTuple


def symmetric(n: int) -> float:
    """All orders of n things."""
    return math.lgamma(n + 1) / math.log(2)


def wreath(inner: int, outer: int) -> float:
    """All orders within each block and of blocks."""
    return symmetric(outer) + outer * symmetric(inner)


class Size(NamedTuple):
    """log2 of the group's order at each level; NaN where a level's meaning is a matter of taste."""

    paper: float
    heads: float
    residual: float

    def __add__(self, other: Size) -> Size:  # type: ignore[override]
        return Size(*map(float.__add__, map(float, self), map(float, other)))

    def __mul__(self, times: int) -> Size:  # type: ignore[override]
        return Size(*(times * level for level in self))


def everywhere(bits: float) -> Size:
    """A group that every level has."""
    return Size(bits, bits, bits)


def units(*sizes: int) -> Size:
    """Hidden units or channels, for each layer of the given size."""
    return everywhere(sum(map(symmetric, sizes)))


def stream(*sizes: int) -> Size:
    """Residual streams."""
    return Size(0, 0, sum(map(symmetric, sizes)))


def only_residual(bits: float) -> Size:
    """A size that is clear at the highest level alone."""
    return Size(math.nan, math.nan, bits)


def attention(
    heads: int, qk: int, value: int, *, kv_heads: int | None = None, ordered: bool = False
) -> Size:
    """An attention layer with so many free dimensions per head; ``ordered`` heads stay."""
    kv_heads = kv_heads or heads
    order = 0 if ordered else symmetric(kv_heads) + kv_heads * symmetric(heads // kv_heads)
    dimensions = kv_heads * (symmetric(qk) + symmetric(value))
    return Size(kv_heads * symmetric(qk) + symmetric(value), order + dimensions, order + dimensions)


# Of every zoo
# ------------------------------------------------------------------------------------------

DENSE = {
    "mlp": units(64, 48),
    "gated_linear_units": units(9),
    "maxout": everywhere(wreath(3, 5)),
    "autoencoder_with_one_matrix": units(9),
    "low_rank_adapter": only_residual(symmetric(4) + symmetric(9)),
    "siamese": units(9, 6),
    "ensemble": everywhere(wreath(6, 4)),
    "mixture_of_experts": everywhere(wreath(6, 4)),
}

IMAGES = {
    "conv_net": everywhere(wreath(4, 4) + wreath(6, 4)) + units(40),
    "conv_net_with_other_norms": units(8, 6, 10),
    "batch_norm": units(8, 12),
    "grouped_conv": everywhere(symmetric(2)) + units(4, 4, 6, 6),
    "resnet": everywhere(2 * wreath(4, 4) + 2 * wreath(8, 4))
    + Size(0, 0, wreath(4, 4) + wreath(8, 4)),
    "unet": units(8, 12, 7, 6),
    "dense_net": units(5, 6, 4),
    "squeeze_and_excitation": units(8, 4),
    "pixel_shuffle": units(6),
    "text_cnn": units(8, 6, 5),
    "lstm": only_residual(symmetric(6) + 2 * symmetric(8)),
    "gru": only_residual(symmetric(6) + symmetric(8)),
}

TABLE = attention(4, 8, 8) + units(64)  # a layer of the table of known groups: width 32
SMALL = attention(4, 4, 4) + units(24)

TRANSFORMERS = {
    "torch_encoder_post_norm": TABLE * 2 + stream(32),
    "torch_encoder_pre_norm": TABLE * 2 + stream(32),
    "opacus_encoder": TABLE * 2 + stream(32),
    # In cross-attention one packed matrix reads both streams, so its columns can only move
    # together.
    "torch_encoder_decoder": SMALL * 2 + attention(4, 4, 4) + stream(16),
    "timm_vit": SMALL * 2 + stream(16),
    "nano_gpt": SMALL * 2 + stream(16),
    "grouped_queries_by_expanding": (attention(4, 6, 4, kv_heads=2) + units(24)) * 2 + stream(16),
    "multi_query": (attention(4, 4, 5, kv_heads=1) + units(24)) * 2 + stream(16),
    "llama_by_hand": (attention(4, 0, 4, kv_heads=2) + units(24)) * 2 + stream(16),
    "einsum_attention": (attention(4, 5, 3) + units(24)) * 2 + stream(16),
    "alibi": (attention(4, 4, 4, ordered=True) + units(24)) * 2 + stream(16),
    "sinusoidal_positions": SMALL * 2 + stream(16),
    "attention_pooling": units(16, 7),
    "mlp_mixer": units(7, 24) * 2 + stream(16),
}

ROTARY = attention(4, 0, 8, kv_heads=2) + units(64)
LLAMA = ROTARY * 2 + stream(32)
GPT2 = (attention(4, 8, 8) + units(128)) * 2 + stream(32)

HUGGING_FACE = {
    "BertForSequenceClassification": TABLE * 2 + stream(32) + units(32),
    "BertForMaskedLM": TABLE * 2 + stream(32),
    "DistilBertForSequenceClassification": TABLE * 2 + stream(32) + units(32),
    "ViTForImageClassification": TABLE * 2 + stream(32),
    "GPT2LMHeadModel": GPT2,
    "LlamaForCausalLM": LLAMA,
    "GPTNeoXForCausalLM": (attention(4, 4, 8) + units(64)) * 2 + stream(32),
    "ElectraForSequenceClassification": TABLE * 2 + stream(32, 16) + units(32),
    "AlbertForSequenceClassification": TABLE + stream(32, 16) + units(32),
    # The first layer's relative position biases serve both layers: one order of heads for both. The
    # output is the stream.
    # The encoder's stream is an output, and the shared embeddings hold the decoder's to it.
    "T5ForConditionalGeneration": TABLE * 2 + attention(4, 8, 8),
    "BloomForCausalLM": (attention(4, 8, 8, ordered=True) + units(128)) * 2 + stream(32),
    # Its fused projection is taken apart by lists of positions along the heads, so heads and their
    # dimensions stay: the full group has attention(4, 0, 8, kv_heads=1) besides in each layer.
    "FalconForCausalLM": units(64) * 2 + stream(32),
    "Qwen3ForCausalLM": LLAMA,
    "SwinForImageClassification": attention(2, 4, 4)
    + units(32)
    + attention(4, 4, 4)
    + units(64)
    + stream(8, 16),
    "ConvNextForImageClassification": units(32, 48, 64, 96) + stream(8, 12, 16, 24),
}

SIZES = DENSE | IMAGES | TRANSFORMERS | HUGGING_FACE

# Real configurations: the size at each level and the share of entries that move at the lowest.
BASE = (attention(12, 64, 64) + units(3072)) * 12 + stream(768)
VIT_B, BERT_BASE, GPT2_SMALL = BASE, BASE + units(768), BASE
