"""Tiny Hugging Face transformers: real code, random weights, a mask that hides something."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from helpers.model_zoo import BATCH, Builder

HUGGING_FACE: dict[str, Builder] = {}
TOKENS, WIDTH = 11, 32

BERT = {
    "vocab_size": 60,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 24,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
GPT2 = {
    "vocab_size": 60,
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 24,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "pad_token_id": 0,
}
LLAMA = {
    "vocab_size": 60,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 24,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
NEOX = {
    "vocab_size": 60,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 24,
    "rotary_pct": 0.5,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
DISTILBERT = {
    "vocab_size": 60,
    "dim": WIDTH,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 64,
    "max_position_embeddings": 24,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "seq_classif_dropout": 0.0,
}
T5 = {
    "vocab_size": 60,
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
}
BLOOM = {
    "vocab_size": 60,
    "hidden_size": WIDTH,
    "n_layer": 2,
    "n_head": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
FALCON = {
    "vocab_size": 60,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "ffn_hidden_size": 64,
    "max_position_embeddings": 24,
}
SWIN = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [1, 1],
    "num_heads": [2, 4],
    "window_size": 4,
    "drop_path_rate": 0.0,
}
CONVNEXT = {
    "image_size": 32,
    "hidden_sizes": [8, 12, 16, 24],
    "depths": [1, 1, 1, 1],
    "num_labels": 5,
}


def tokens(**more: Any) -> dict[str, Any]:
    ids = torch.randint(5, 60, (BATCH, TOKENS))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    return {"input_ids": ids, "attention_mask": mask, **more}


def causal() -> dict[str, Any]:
    return tokens(use_cache=False)


def images(size: int = 16) -> dict[str, Any]:
    return {"pixel_values": torch.randn(BATCH, 3, size, size)}


def translation() -> dict[str, Any]:
    return tokens(decoder_input_ids=torch.randint(5, 60, (BATCH, 5)), use_cache=False)


def entry(
    model: str,
    config: str,
    options: dict[str, Any],
    sample: Callable[[], dict[str, Any]] = tokens,
    name: str = "",
) -> None:
    """Adds one model class of transformers, which is imported only when it is built."""

    def builder() -> tuple[nn.Module, dict[str, Any]]:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**options)), sample()

    HUGGING_FACE[name or model] = builder


entry("BertForSequenceClassification", "BertConfig", BERT)
entry("BertForMaskedLM", "BertConfig", BERT)
entry("DistilBertForSequenceClassification", "DistilBertConfig", DISTILBERT)
entry(
    "ViTForImageClassification",
    "ViTConfig",
    BERT | {"image_size": 16, "patch_size": 4, "num_labels": 5},
    images,
)
entry("GPT2LMHeadModel", "GPT2Config", GPT2, causal)
entry("LlamaForCausalLM", "LlamaConfig", LLAMA, causal)
entry("GPTNeoXForCausalLM", "GPTNeoXConfig", NEOX, causal)
entry("ElectraForSequenceClassification", "ElectraConfig", BERT | {"embedding_size": 16})
entry("AlbertForSequenceClassification", "AlbertConfig", BERT | {"embedding_size": 16})
entry("T5ForConditionalGeneration", "T5Config", T5 | {"num_layers": 1}, translation)
entry("BloomForCausalLM", "BloomConfig", BLOOM, causal)
entry("FalconForCausalLM", "FalconConfig", FALCON, causal)
entry("Qwen3ForCausalLM", "Qwen3Config", LLAMA | {"head_dim": 8}, causal)
entry(
    "SwinForImageClassification",
    "SwinConfig",
    SWIN | {"hidden_dropout_prob": 0.0, "num_labels": 5},
    images,
)
entry("ConvNextForImageClassification", "ConvNextConfig", CONVNEXT, lambda: images(32))
