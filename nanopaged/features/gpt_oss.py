"""gpt-oss (OpenAI 2025): a mixture of experts whose attention has sinks.

What it has besides features/experts.py:

    sinks            Each query head has a learned logit of no key. It stands in the softmax's denominator, so a
                     head whose keys do not matter to a token can give (almost) nothing (Xiao et al. 2023).
    windows          of 128 tokens in every second layer, from the first on
    biases           of all products: q, k, v, o, the router's and the experts'
    clamped SwiGLU   gate and up are clamped, and 1 is added to up
    MXFP4            The experts' matrices have 4 bits, see four_bits.py.

A layer's sinks are a parameter of the layer, which passes them on to attention in chapter 1.
"""
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanopaged import kernel, model
from nanopaged.features.experts import mixture
from nanopaged.weights import families

ALPHA, LIMIT = 1.702, 7.0  # of the activation, which vLLM calls "swigluoai"; fused.py's kernels have them, too
# rope of a config.json that says nothing of it
YARN = dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
            original_max_position_embeddings=4096)


def gpt_oss(hf: dict[str, Any]) -> model.ModelConfig:
    families.require("gpt-oss", hf, dict(swiglu_alpha=ALPHA, swiglu_limit=LIMIT))
    hf = dict(num_key_value_heads=8, head_dim=64, sliding_window=128, rms_norm_eps=1e-5, rope_theta=150000.0,
              attention_bias=True) | hf
    hf = hf if hf.get("rope_scaling") or hf.get("rope_parameters") else hf | {"rope_scaling": YARN}
    return families.llama(
        hf, mlp_bias=True, float32_norms=True, sinks=True, torch_dtype=torch.bfloat16,
        sliding_windows=families.windows(hf, lambda i: i % 2 == 0),
        names=families.NAMES | {"sinks": "self_attn.sinks"},
        experts=mixture(hf, "num_local_experts", "intermediate_size", True) | {"activation": "swigluoai"})


class SinksLayer(model.Layer):
    """A layer that passes its sinks to attention."""

    def __init__(self, config: model.ModelConfig, index: int, modules: model.Modules) -> None:
        super().__init__(config, index, modules)
        self.sinks = nn.Parameter(torch.empty(config.num_heads))

    def attention(self, x: Tensor, rope: Tensor | None, batch: model.Batch, cache: model.LayerCache,
                  kernels: kernel.Kernels) -> Tensor:
        attention = partial(kernels.attention, sinks=self.sinks)
        return super().attention(x, rope, batch, cache, kernels._replace(attention=attention))


class ClampedMLP(model.MLP):
    """An expert."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(clamped_swiglu(self.gate_up_proj(x)))


def clamped_swiglu(x: Tensor) -> Tensor:
    """[.., 2 * intermediate] -> [.., intermediate]"""
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (up + 1) * (gate * torch.sigmoid(ALPHA * gate))


def with_sinks(modules: model.Modules) -> model.Modules:
    """The modules with these layers and experts, made of those of other models."""
    layer, last_layer = (type(kind.__name__, (SinksLayer, kind), {}) for kind in (modules.layer, modules.last_layer))
    mlp = ClampedMLP if modules.mlp is model.MLP else modules.mlp  # on a GPU an expert only holds weights
    return modules._replace(layer=layer, last_layer=last_layer, mlp=mlp)


def split_experts(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors, with those of all experts as views for each expert. A checkpoint has the matrices as [experts, in,
    out], or in MXFP4 codes [experts, out, ..], and gate and up interleaved along `out`."""
    for name, tensor in tensors:
        path, _, last = name.rpartition(".")
        if not path.endswith(".experts"):
            yield name, tensor
            continue
        module = "gate_up_proj" if last.startswith("gate_up_proj") else "down_proj"
        kind = {"": "weight", "_bias": "bias", "_blocks": "weight_blocks", "_scales": "weight_scales"}.get(
            last.removeprefix(module), last)
        for i, one in enumerate(tensor.transpose(1, 2) if last == module else tensor):
            parts = {"gate_proj": one[::2], "up_proj": one[1::2]} if module == "gate_up_proj" else {module: one}
            yield from ((f"{path}.{i}.{part}.{kind}", rows) for part, rows in parts.items())
