"""Architectures of transformers, of configurations written here: nothing is downloaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bench.real.zoo import Inputs, Made, Model, of_size, tokens

# What configurations call their sizes; an architecture is given those that it has.
WIDTHS: dict[str, tuple[Any, Any, Any]] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size",
                     "word_embed_proj_dim"), (64, 256, 768)),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "hidden_dim",
                     "encoder_ffn_dim", "decoder_ffn_dim"), (128, 1024, 3072)),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers",
                     "decoder_layers", "num_decoder_layers"), (2, 2, 6)),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads",
                     "encoder_attention_heads", "decoder_attention_heads"), (4, 4, 12)),
    "num_key_value_heads": (2, 2, 4),
    "head_dim": (16, 64, 64),
    "d_kv": (16, 64, 64),
    "vocab_size": (203, 4000, 32000),
    "max_position_embeddings": (64, 512, 2048),
    "n_positions": (64, 512, 2048),
    "num_experts": (4, 4, 8),
    "num_local_experts": (4, 4, 8),
    "num_experts_per_tok": (2, 2, 2),
    "moe_intermediate_size": (48, 256, 1024),
    "shared_expert_intermediate_size": (48, 256, 1024),
    "state_size": (8, 16, 16),
    "query_pre_attn_scalar": (16, 64, 64),
    "sliding_window": (8, 128, 512),
    "image_size": (32, 64, 224),
    "patch_size": (8, 8, 16),
}  # fmt: skip


@dataclass(frozen=True)
class Published:
    """An architecture by the name transformers has for it. `given` goes before WIDTHS."""

    name: str
    field: str
    inputs: str = "sentence"
    given: dict[str, Any] = field(default_factory=dict[str, Any])
    head: str = "AutoModel"
    trains: bool = True


def _sizes(**given: tuple[Any, Any, Any]) -> dict[str, Any]:
    return given


LM = "AutoModelForCausalLM"
WAVES = _sizes(conv_dim=([16] * 7, [64] * 7, [512] * 7), num_conv_pos_embeddings=(16, 32, 128),
               num_conv_pos_embedding_groups=(4, 8, 16))  # fmt: skip
ALL = (
    Published("gpt2", "decoder", head=LM, given=_sizes(vocab_size=(203, 4000, 50257))),
    Published("llama", "decoder", head=LM),
    Published("qwen3", "decoder", head=LM),
    Published("gemma2", "decoder", head=LM),
    Published("phi3", "decoder", head=LM),
    Published("opt", "decoder", head=LM),
    Published("bloom", "decoder", head=LM),
    Published("falcon", "decoder", head=LM),
    Published("gpt_neox", "decoder", head=LM),
    Published("starcoder2", "decoder", head=LM),
    Published("mixtral", "mixture of experts", head=LM),
    Published("qwen2_moe", "mixture of experts", head=LM),
    Published("olmoe", "mixture of experts", head=LM),
    Published("bert", "encoder", head="AutoModelForMaskedLM"),
    Published("roberta", "encoder", given=_sizes(max_position_embeddings=(66, 514, 2050))),
    Published("distilbert", "encoder"),
    Published("electra", "encoder"),
    Published("albert", "encoder"),
    Published("modernbert", "encoder"),
    Published("deberta-v2", "encoder"),
    Published("t5", "encoder-decoder", "pair"),
    Published("bart", "encoder-decoder", "pair"),
    Published("mamba", "state space", head=LM),
    Published("mamba2", "state space", head=LM,
              given=_sizes(num_heads=(8, 8, 24), head_dim=(16, 64, 64), n_groups=(1, 1, 1),
                           chunk_size=(8, 64, 128), state_size=(8, 32, 64))),
    Published("vit", "vision transformer", "picture"),
    Published("dinov2", "vision transformer", "picture"),
    Published("beit", "vision transformer", "picture"),
    Published("swin", "vision transformer", "picture",
              _sizes(embed_dim=(16, 48, 96), depths=([1, 1], [2, 2], [2, 2, 6, 2]),
                     window_size=(2, 4, 7), patch_size=(4, 4, 4),
                     num_heads=([2, 4], [3, 6], [3, 6, 12, 24]))),
    Published("segformer", "vision transformer", "picture",
              _sizes(hidden_sizes=([8, 16, 24, 32], [16, 32, 80, 128], [32, 64, 160, 256]),
                     num_attention_heads=([1, 2, 3, 4], [1, 2, 5, 8], [1, 2, 5, 8]),
                     patch_size=(16, 16, 16), patch_sizes=([7, 3, 3, 3],) * 3)),
    Published("convnext", "convolution net", "picture",
              _sizes(hidden_sizes=([8, 16, 24, 32], [32, 64, 96, 128], [96, 192, 384, 768]),
                     depths=([1, 1, 1, 1], [1, 1, 2, 1], [3, 3, 9, 3]), patch_size=(4, 4, 4))),
    Published("convnextv2", "convolution net", "picture",
              _sizes(hidden_sizes=([8, 16, 24, 32], [32, 64, 96, 128], [96, 192, 384, 768]),
                     depths=([1, 1, 1, 1], [1, 1, 2, 1], [3, 3, 9, 3]), patch_size=(4, 4, 4))),
    Published("resnet", "convolution net", "picture",
              _sizes(embedding_size=(8, 32, 64), hidden_sizes=([16, 32], [64, 128, 256],
                                                               [256, 512, 1024, 2048]),
                     depths=([1, 1], [1, 1, 1], [3, 4, 6, 3]))),
    Published("mobilenet_v2", "convolution net", "picture"),
    Published("clip", "vision and language", "picture and sentence",
              _sizes(text_config=({"hidden_size": 64, "intermediate_size": 128, "vocab_size": 203,
                                   "num_hidden_layers": 2, "num_attention_heads": 4},
                                  {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 4000,
                                   "num_hidden_layers": 2, "num_attention_heads": 4}, {}),
                     vision_config=({"hidden_size": 64, "intermediate_size": 128,
                                     "num_hidden_layers": 2, "num_attention_heads": 4,
                                     "image_size": 32, "patch_size": 8},
                                    {"hidden_size": 256, "intermediate_size": 512, "image_size": 64,
                                     "num_hidden_layers": 2, "num_attention_heads": 4,
                                     "patch_size": 8}, {}))),
    Published("whisper", "speech", "spectrum",
              _sizes(max_source_positions=(32, 128, 1500), max_target_positions=(64, 128, 448))),
    Published("wav2vec2", "speech", "wave", WAVES),
    Published("hubert", "speech", "wave", WAVES),
)  # fmt: skip


def models() -> list[Model]:
    if importlib.util.find_spec("transformers") is None:
        return []
    return [Model(p.name, p.field, "transformers", _maker(p), p.trains) for p in ALL]


def _maker(published: Published) -> Callable[[str], Made]:
    def make(size: str) -> Made:
        module = _module(published, size)
        return Made(module, INPUTS[published.inputs](module.config, size))

    return make


def _module(published: Published, size: str) -> nn.Module:
    import transformers
    from transformers import AutoConfig

    transformers.logging.set_verbosity_error()  # type: ignore[attr-defined]
    plain: Any = AutoConfig.for_model(published.name)
    wanted = {k: of_size(size, *v) for k, v in WIDTHS.items() if _is_own(plain, k)}
    wanted |= {k: of_size(size, *v) for k, v in published.given.items()}
    wanted |= {k: 0 for k in ("pad_token_id", "bos_token_id", "eos_token_id") if _is_own(plain, k)}
    kinds: Any = getattr(plain, "layer_types", None)
    if _is_own(plain, "layer_types") and kinds and "attention" in kinds[0]:
        wanted["layer_types"] = None  # made anew for this many layers
    config = AutoConfig.for_model(published.name, **wanted)
    config.use_cache = False
    made: Any = getattr(transformers, published.head)
    return made.from_config(config)


def _is_own(config: Any, name: str) -> bool:
    """Whether a configuration is given a value by this name: not one that it works out, nor another
    name for one of its values."""
    kind = type(config)
    worked_out = isinstance(getattr(kind, name, None), property)
    return hasattr(config, name) and not worked_out and name not in kind.attribute_map


def _sentence(config: Any, size: str) -> Inputs:
    batch, length = of_size(size, (2, 16), (2, 128), (8, 1024))
    return {"input_ids": tokens(config.vocab_size, batch, length)}


def _pair(config: Any, size: str) -> Inputs:
    batch, length = of_size(size, (2, 16), (2, 96), (8, 512))
    return {
        "input_ids": tokens(config.vocab_size, batch, length),
        "decoder_input_ids": tokens(config.vocab_size, batch, length // 2),
    }


def _picture(config: Any, size: str) -> Inputs:
    batch = of_size(size, 2, 4, 32)
    side = of_size(size, *WIDTHS["image_size"])
    return {"pixel_values": torch.randn(batch, 3, side, side)}


def _picture_and_sentence(config: Any, size: str) -> Inputs:
    batch = of_size(size, 2, 4, 32)
    side, vocabulary = config.vision_config.image_size, config.text_config.vocab_size
    ids = tokens(vocabulary, batch, of_size(size, 8, 32, 77))
    return {"pixel_values": torch.randn(batch, 3, side, side), "input_ids": ids}


def _spectrum(config: Any, size: str) -> Inputs:
    batch = of_size(size, 1, 2, 8)
    frames = torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions)
    ids = tokens(config.vocab_size, batch, of_size(size, 8, 32, 128))
    return {"input_features": frames, "decoder_input_ids": ids}


def _wave(config: Any, size: str) -> Inputs:
    return {"input_values": torch.randn(*of_size(size, (1, 4000), (2, 16000), (8, 160000)))}


INPUTS: dict[str, Callable[[Any, str], Inputs]] = {
    "sentence": _sentence,
    "pair": _pair,
    "picture": _picture,
    "picture and sentence": _picture_and_sentence,
    "spectrum": _spectrum,
    "wave": _wave,
}
