"""`python -m tests.published [NAME ...]`: published architectures, compiled, against eager.

Needs `transformers` (`pip install transformers`), which the tests do not: this is for a change that
might touch what they leave out. Every architecture is built small, without weights from elsewhere,
and run in inference and in training. Outputs and gradients are compared with float64: they may be a
few times as far from it as eager's are.
"""

from __future__ import annotations

import argparse
import collections
import copy
import functools
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tilewright import config

SENTENCES = [
    "albert", "bert", "big_bird", "biogpt", "bloom", "codegen", "cohere", "convbert", "dbrx",
    "deberta-v2", "distilbert", "electra", "ernie", "falcon", "fnet", "gemma", "gemma2",
    "gemma3_text", "glm", "gpt2", "gpt_neo", "gpt_neox", "gptj", "granite", "layoutlm", "llama",
    "longformer", "mamba", "megatron-bert", "mistral", "mixtral", "mobilebert", "nemotron",
    "nystromformer", "olmo", "olmo2", "olmoe", "opt", "persimmon", "phi", "phi3", "qwen2",
    "qwen2_moe", "qwen3", "roberta", "roformer", "stablelm", "starcoder2", "xlnet",
]  # fmt: skip
PICTURES = ["beit", "clip_vision_model", "dinov2", "vit"]
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 203,
    "max_position_embeddings": 64,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "d_model": 64,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "num_layers": 2,
    "num_heads": 4,
    "d_ff": 96,
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 96,
    "embedding_size": 32,
    "ffn_dim": 96,
    "n_inner": 96,
    "ffn_hidden_size": 96,
    "attention_types": [[["global", "local"], 1]],
    "attention_layers": ["global", "local"],
    "rotary_dim": 8,
    "word_embed_proj_dim": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "moe_intermediate_size": 48,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 48,
    "sliding_window": 8,
    "state_size": 8,
    "query_pre_attn_scalar": 16,
    "pad_token_id": 0,
    "image_size": 32,
    "patch_size": 8,
}
FACTOR, LEAST = 8, 3e-4  # times eager's error; an error that is always allowed
Inputs = dict[str, Tensor]


def built(name: str) -> nn.Module:
    from transformers import AutoConfig, AutoModel

    wanted = AutoConfig.for_model(name)
    for key, value in SMALL.items():
        if hasattr(wanted, key):
            setattr(wanted, key, value)
    if getattr(wanted, "layer_types", None):
        wanted.layer_types = wanted.layer_types[:2]
    wanted.use_cache = False
    torch.manual_seed(0)
    made: Any = AutoModel
    return made.from_config(wanted)


def inputs(name: str) -> Inputs:
    if name in PICTURES:
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.manual_seed(5))}
    return {"input_ids": torch.arange(2 * 17).reshape(2, 17) % 199}


def results(model: nn.Module, given: Inputs, train: bool,
            compiler: Callable[[nn.Module], Any]) -> list[Tensor]:  # fmt: skip
    """Outputs, and gradients of all parameters in training."""
    mine = copy.deepcopy(model).train(train)
    torch._dynamo.reset()
    torch.manual_seed(1)
    with torch.set_grad_enabled(train):
        found = [t for t in tree_leaves(compiler(mine)(**given)) if isinstance(t, Tensor)]
    if train:
        sum(t.float().pow(2).mean() for t in found if t.requires_grad).backward()  # type: ignore[union-attr]
        found += [p.grad for p in mine.parameters() if p.grad is not None]
    return [t.detach() for t in found]


def compared(name: str, train: bool, options: argparse.Namespace) -> str:
    """The largest error, as text; raises where it is too large."""
    model = built(name).float().to(options.device)
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    given = {k: v.to(options.device) for k, v in inputs(name).items()}
    eager = results(model, given, train, lambda m: m)
    with config.patch(fallback_random=True):
        compiler = functools.partial(torch.compile, backend="tilewright", dynamic=options.dynamic)
        ours = results(model, given, train, compiler)
    wide = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
    exact = results(model.double(), wide, train, lambda m: m)
    assert len(eager) == len(ours), f"{len(eager)} results of eager's, {len(ours)} of ours"
    worst = 0.0
    for e, o, x in zip(eager, ours, exact, strict=True):
        assert e.shape == o.shape and e.dtype == o.dtype
        scale = x.abs().max().clamp_min(1e-6)
        theirs, mine = (float((t.double() - x).abs().max() / scale) for t in (e, o))
        assert mine <= max(FACTOR * theirs, LEAST), (
            f"{mine:.1e} from float64 where eager is {theirs:.1e}, in a result of {tuple(e.shape)}"
        )
        worst = max(worst, mine)
    return f"at most {worst:.1e} from float64"


def outcomes(options: argparse.Namespace) -> Iterator[bool]:
    for name in options.names or (*SENTENCES, *PICTURES):
        for train in (False, True):
            start = time.perf_counter()
            try:
                said, good = compared(name, train, options), True
            except Exception as error:
                said, good = f"FAILED {type(error).__name__}: {str(error)[:300]}", False
            what = "training" if train else "inference"
            print(f"{name} {what}: {said} ({time.perf_counter() - start:.1f} s)", flush=True)
            yield good


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.published", description=__doc__)
    parser.add_argument("names", nargs="*", help="as transformers calls them; all by default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dynamic", action="store_true", default=None)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    count = collections.Counter(outcomes(options))
    print(f"{count[True]} passed, {count[False]} failed")
    return 1 if count[False] else 0


if __name__ == "__main__":
    raise SystemExit(main())
