"""Permutation groups worked out by hand: their sizes in closed form, and random elements of some, entry by entry.

A size is log2 of the number of permutations, at each of three levels: ``paper`` (hidden units;
query-key dimensions per head; one permutation of value dimensions for all heads), ``heads`` (value
dimensions per head; the order of heads) and ``residual`` (residual streams too).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn


def symmetric(n: int) -> float:
    """All orders of n things."""
    return math.lgamma(n + 1) / math.log(2)


def wreath(inner: int, outer: int) -> float:
    """All orders within each block and of blocks."""
    return symmetric(outer) + outer * symmetric(inner)


class Size(NamedTuple):
    """log2 of the group's order at each level; NaN where what a level means for such a network is a matter of taste."""

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
    """Hidden units of a perceptron or channels of a convolution, for each layer of the given size."""
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
    """One attention layer with so many free query-key and value dimensions per head; ``ordered`` heads keep their order."""
    kv_heads = kv_heads or heads
    order = 0 if ordered else symmetric(kv_heads) + kv_heads * symmetric(heads // kv_heads)
    dimensions = kv_heads * (symmetric(qk) + symmetric(value))
    return Size(kv_heads * symmetric(qk) + symmetric(value), order + dimensions, order + dimensions)


# Of every zoo
# -----------------------------------------------------------------------------------------------------------------

DENSE = {
    "mlp": units(64, 48),
    "mlp_without_biases": units(10, 8),
    "mlp_with_normalised_hidden_units": units(10, 8),
    "gated_linear_units": units(9),
    "maxout": everywhere(wreath(3, 5)),
    "mean_over_the_major_axis": everywhere(wreath(3, 5)),
    "outer_product": units(5, 3),
    "autoencoder_with_one_matrix": units(9),
    "symmetric_matrix": units(9),
    "layer_used_again_and_again": units(9),
    "highway": units(6, 7) + stream(9),
    "low_rank_adapter": only_residual(symmetric(4) + symmetric(9)),
    "weight_normalised": units(9),
    "unused_parameter": units(9),
    "hidden_layer_returned": units(6),
    "siamese": units(9, 6),
    "hypernetwork": units(6, 5),
    "graph_convolution": units(9),
    "ensemble": everywhere(wreath(6, 4)),
    "mixture_of_experts": everywhere(wreath(6, 4)),
    "sorted_units": units(9, 6),
    "neighbours_meet": units(6, 7),
    "pieces_mixed_alike": only_residual(sum(map(symmetric, (6, 7, 4, 3)))),
    "places_rolled": units(3),
    "places_less_their_surroundings": only_residual(sum(map(symmetric, (6, 7, 3)))),
    "units_paired_with_each_other": everywhere(wreath(2, 2)),
    "bilinear": units(6, 7, 5, 6, 8),
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
    "pixel_shuffle": units(6, 5),
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
    "latent_queries": only_residual(symmetric(3) + 2 * symmetric(16) + attention(4, 4, 4).residual),
    "timm_vit": SMALL * 2 + stream(16),
    "nano_gpt": SMALL * 2 + stream(16),
    "interleaved": SMALL * 2 + stream(16),
    "grouped_queries_by_repeating": (attention(4, 4, 4, kv_heads=2) + units(24)) * 2 + stream(16),
    "grouped_queries_by_expanding": (attention(4, 6, 4, kv_heads=2) + units(24)) * 2 + stream(16),
    "multi_query": (attention(4, 4, 5, kv_heads=1) + units(24)) * 2 + stream(16),
    "llama_by_hand": (attention(4, 0, 4, kv_heads=2) + units(24)) * 2 + stream(16),
    "einsum_attention": (attention(4, 5, 3) + units(24)) * 2 + stream(16),
    "cosine_attention": SMALL * 2 + stream(16),
    "alibi": (attention(4, 4, 4, ordered=True) + units(24)) * 2 + stream(16),
    "queries_and_keys_with_a_shared_norm": (attention(4, 0, 4) + units(4, 24)) * 2 + stream(16),
    "sinusoidal_positions": SMALL * 2 + stream(16),
    "sinusoidal_positions_outside_the_state": SMALL * 2,
    "attention_pooling": units(16, 7),
    "mlp_mixer": units(7, 24) * 2 + stream(16),
}

ROTARY = attention(4, 0, 8, kv_heads=2) + units(64)
LLAMA = ROTARY * 2 + stream(32)
GPT2 = (attention(4, 8, 8) + units(128)) * 2 + stream(32)

HUGGING_FACE = {
    "BertForSequenceClassification": TABLE * 2 + stream(32) + units(32),
    "BertForMaskedLM": TABLE * 2 + stream(32),
    "RobertaForSequenceClassification": TABLE * 2 + stream(32) + units(32),
    "DistilBertForSequenceClassification": TABLE * 2 + stream(32) + units(32),
    "ViTForImageClassification": TABLE * 2 + stream(32),
    "GPT2LMHeadModel": GPT2,
    "GPT2ForSequenceClassification": GPT2,
    "LlamaForCausalLM": LLAMA,
    "GPTNeoXForCausalLM": (attention(4, 4, 8) + units(64)) * 2 + stream(32),
    "ElectraForSequenceClassification": TABLE * 2 + stream(32, 16) + units(32),
    "AlbertForSequenceClassification": TABLE + stream(32, 16) + units(32),
    # The first layer's relative position biases serve both layers: one order of heads for both. The
    # output is the stream.
    "T5EncoderModel": TABLE * 2 + Size(0, -symmetric(4), -symmetric(4)),
    # The encoder's stream is an output, and the shared embeddings hold the decoder's to it.
    "T5ForConditionalGeneration": TABLE * 2 + attention(4, 8, 8),
    "OPTForCausalLM": TABLE * 2 + stream(32),
    "BloomForCausalLM": (attention(4, 8, 8, ordered=True) + units(128)) * 2 + stream(32),
    # Its fused projection is taken apart by lists of positions along the heads, so heads and their
    # dimensions stay: the full group has attention(4, 0, 8, kv_heads=1) besides in each layer.
    "FalconForCausalLM": units(64) * 2 + stream(32),
    "MistralForCausalLM": LLAMA,
    "Qwen2ForCausalLM": LLAMA,
    "Qwen3ForCausalLM": LLAMA,
    "GemmaForCausalLM": LLAMA,
    "PhiForCausalLM": (attention(4, 4, 8, kv_heads=2) + units(64)) * 2 + stream(32),
    "DeiTForImageClassification": TABLE * 2 + stream(32),
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


# Elements, entry by entry
# -----------------------------------------------------------------------------------------------------

Moves = dict[str, dict[int, torch.Tensor]]
"""Per parameter and axis, where each index comes from."""


class HandMade:
    """Collects the moves of one random element of a network's full group, layer by layer."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.moves: Moves = defaultdict(dict)

    def order(self, n: int) -> torch.Tensor:
        return torch.randperm(n, generator=self.generator)

    def blocks(self, inner: int, outer: int) -> torch.Tensor:
        """A random element of the wreath product: an order of blocks, an order within each."""
        return torch.cat(
            [block * inner + self.order(inner) for block in self.order(outer).tolist()]
        )

    def heads(self, count: int, qk: int, value: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of query-key rows and of value rows: heads in one order, dimensions per head."""
        order = self.order(count).tolist()
        return (
            torch.cat([head * qk + self.order(qk) for head in order]),
            torch.cat([head * value + self.order(value) for head in order]),
        )

    def axis(self, index: torch.Tensor, axis: int, *names: str) -> None:
        for name in names:
            self.moves[name][axis] = index

    def layer(
        self,
        name: str,
        *,
        out: torch.Tensor | None = None,
        into: torch.Tensor | None = None,
        turned: bool = False,
    ) -> None:
        """A Linear, convolution or norm; ``turned`` for weights stored as (in, out)."""
        if out is not None:
            self.axis(out, 1 if turned else 0, f"{name}.weight")
            self.axis(out, 0, f"{name}.bias")
        if into is not None:
            self.axis(into, 0 if turned else 1, f"{name}.weight")


def mlp(module: nn.Sequential, hand: HandMade) -> None:
    """Hidden units of both layers."""
    for unit, reader in (("0", "2"), ("2", "4")):
        order = hand.order(module.get_submodule(unit).out_features)
        hand.layer(unit, out=order)
        hand.layer(reader, into=order)


def resnet(module: nn.Module, hand: HandMade) -> None:
    """One wreath product per stage and one inside each block."""
    groups = module.norm.num_groups
    stage = hand.blocks(module.stem.out_channels // groups, groups)
    hand.layer("stem", out=stage)
    hand.layer("norm", out=stage)
    for number, block in enumerate(module.blocks):
        name, before = f"blocks.{number}", stage
        inside = hand.blocks(block.conv1.out_channels // groups, groups)
        if not isinstance(block.skip, nn.Identity):
            stage = hand.blocks(block.conv2.out_channels // groups, groups)
            hand.layer(f"{name}.skip.0", out=stage, into=before)
            hand.layer(f"{name}.skip.1", out=stage)
        hand.layer(f"{name}.conv1", out=inside, into=before)
        hand.layer(f"{name}.norm1", out=inside)
        hand.layer(f"{name}.conv2", out=stage, into=inside)
        hand.layer(f"{name}.norm2", out=stage)
    hand.layer("fc", into=stage)


def bert_body(module: nn.Module, hand: HandMade) -> torch.Tensor:
    """Embeddings and layers; the residual stream's order."""
    config = module.config
    width, heads = config.hidden_size, config.num_attention_heads
    residual = hand.order(width)
    embeddings = [
        f"bert.embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type")
    ]
    hand.axis(residual, 1, *embeddings)
    hand.layer("bert.embeddings.LayerNorm", out=residual)
    for number in range(config.num_hidden_layers):
        name = f"bert.encoder.layer.{number}"
        qk, value = hand.heads(heads, width // heads, width // heads)
        for port, index in (("query", qk), ("key", qk), ("value", value)):
            hand.layer(f"{name}.attention.self.{port}", out=index, into=residual)
        hand.layer(f"{name}.attention.output.dense", out=residual, into=value)
        hidden = hand.order(config.intermediate_size)
        hand.layer(f"{name}.intermediate.dense", out=hidden, into=residual)
        hand.layer(f"{name}.output.dense", out=residual, into=hidden)
        for norm in ("attention.output.LayerNorm", "output.LayerNorm"):
            hand.layer(f"{name}.{norm}", out=residual)
    return residual


def bert_classifier(module: nn.Module, hand: HandMade) -> None:
    """The pooler's units are hidden units of their own."""
    residual = bert_body(module, hand)
    pooled = hand.order(module.config.hidden_size)
    hand.layer("bert.pooler.dense", out=pooled, into=residual)
    hand.layer("classifier", into=pooled)


def bert_masked_lm(module: nn.Module, hand: HandMade) -> None:
    """The head's matrix is that of the embeddings, so what it reads has the stream's order."""
    residual = bert_body(module, hand)
    hand.layer("cls.predictions.transform.dense", out=residual, into=residual)
    hand.layer("cls.predictions.transform.LayerNorm", out=residual)


def gpt2(module: nn.Module, hand: HandMade) -> None:
    """Matrices stored as (in, out), query, key and value side by side, the head tied."""
    config = module.config
    width, heads = config.n_embd, config.n_head
    residual = hand.order(width)
    hand.axis(residual, 1, "transformer.wte.weight", "transformer.wpe.weight")
    for number in range(config.n_layer):
        name = f"transformer.h.{number}"
        qk, value = hand.heads(heads, width // heads, width // heads)
        hand.layer(
            f"{name}.attn.c_attn",
            out=torch.cat([qk, width + qk, 2 * width + value]),
            into=residual,
            turned=True,
        )
        hand.layer(f"{name}.attn.c_proj", out=residual, into=value, turned=True)
        hidden = hand.order(4 * width)
        hand.layer(f"{name}.mlp.c_fc", out=hidden, into=residual, turned=True)
        hand.layer(f"{name}.mlp.c_proj", out=residual, into=hidden, turned=True)
        for norm in ("ln_1", "ln_2"):
            hand.layer(f"{name}.{norm}", out=residual)
    hand.layer("transformer.ln_f", out=residual)


ELEMENTS: dict[str, Callable[[nn.Module, HandMade], None]] = {
    "mlp": mlp,
    "resnet": resnet,
    "BertForSequenceClassification": bert_classifier,
    "BertForMaskedLM": bert_masked_lm,
    "GPT2LMHeadModel": gpt2,
}


def random_element(name: str, module: nn.Module, seed: int) -> Moves:
    """One element of the full group of a zoo entry."""
    hand = HandMade(seed)
    ELEMENTS[name](module, hand)
    return hand.moves


def apply(moves: Moves, module: nn.Module) -> None:
    """Permutes parameters in place; moves of parameters that a layer lacks are ignored."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            for axis, index in moves.get(name, {}).items():
                parameter.copy_(parameter.index_select(axis, index))
