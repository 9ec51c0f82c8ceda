"""Gemma 4 (Google 2026): heads of two sizes, K that is V as well, and norms on both sides of each sublayer.

What its layers have besides those of Gemma 3:

    heads            Layers with a window have other heads than those that attend to all tokens, in 31B 16 kv heads of
                     256 numbers and 4 of 512. Both share one pool (kinds/device.py).
    k and v          v goes through a norm without a weight. With attention_k_eq_v the layers that attend to all tokens
                     have no v_proj: v is what k_proj gives, before k's norm and rope.
    scores           are not scaled: the norms of q and k bound them.
    rope             Of layers that attend to all tokens a quarter of the pairs rotates ("proportional", rope.py).
    layer_scalar     multiplies what a layer returns.
    logits           cap * tanh(logits / cap), with cap = final_logit_softcapping
    experts          (26B-A4B) stand beside the dense MLP. Each has a norm before and behind it, and a third one has the
                     sum. The router has a norm of its own, and each expert's score a factor.

In multimodal checkpoints this is the text model. Other parts (vision and audio towers) are not read.
"""
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanopaged import kernel, model, tiles
from nanopaged.inputs import between, check_number
from nanopaged.optional_triton import jit, launch_options, tl
from nanopaged.options import feature
from nanopaged.weights import families

# --------------------------------------------------------------------------------------------------
# Layers
# --------------------------------------------------------------------------------------------------


class Gemma4Layer(model.Layer):
    """A layer with the heads of its kind."""

    def __init__(self, config: model.ModelConfig, index: int, modules: model.Modules) -> None:
        num_kv_heads, head_dim = (config.layer_heads or [(config.num_kv_heads, config.head_dim)])[
            index if config.layer_heads else 0]
        c = replace(config, num_kv_heads=num_kv_heads, head_dim=head_dim)
        super().__init__(c, index, modules)
        if not c.gemma4["has_v"][index]:
            self.qkv_proj = modules.linear(c.hidden_size, (c.num_heads + num_kv_heads) * head_dim, bias=c.qkv_bias)
        if c.experts:  # DenseAndExperts has norms in front
            self.post_attention_layernorm = nn.Identity()
        self.layer_scalar = nn.Parameter(torch.empty(1))

    def forward(self, x: Any, rope: Tensor | None, batch: model.Batch, cache: model.LayerCache,
                kernels: kernel.Kernels) -> Tensor:
        x = super().forward(x, rope, batch, cache, kernels)
        if not isinstance(x, Tensor):  # fused.py's Sum
            x = x.x + x.residual
        return x * self.layer_scalar

    def attention(self, x: Tensor, rope: Tensor | None, batch: model.Batch, cache: model.LayerCache,
                  kernels: kernel.Kernels) -> Tensor:
        store = rotate_and_store if kernels.in_triton else rotate_and_store_reference
        return super().attention(x, rope, batch, cache, kernels._replace(rotate_and_store=store))


def rotate_and_store_reference(qkv: Tensor, num_heads: int, rotation: Tensor | None, q_norm: Tensor, k_norm: Tensor,
                               eps: float, k_cache: Tensor, *more: Any) -> Tensor:
    """`kernel.rotate_and_store_reference` with a norm of v. Where qkv has no v, v is k before its norm."""
    num_kv_heads = k_cache.shape[2]
    v = qkv[:, -num_kv_heads:]
    v = kernel.rms_norm(v, torch.ones(v.shape[-1], device=v.device), eps)
    qkv = torch.cat([qkv[:, :num_heads + num_kv_heads], v], dim=1)
    return kernel.rotate_and_store_reference(qkv, num_heads, rotation, q_norm, k_norm, eps, k_cache, *more)


def rotate_and_store(qkv: Tensor, num_heads: int, rotation: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float,
                     k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, k_scale: float = 1.0,
                     v_scale: float = 1.0) -> Tensor:
    """`rotate_and_store_reference` in one launch."""
    (num_tokens, num_rows, head_dim), num_kv_heads = qkv.shape, k_cache.shape[2]
    q = qkv.new_empty(num_tokens, num_heads, head_dim)
    rotate_and_store_kernel[(num_tokens, 2)](
        qkv, q, rotation, q_norm, k_norm, eps, k_cache, v_cache, slot_mapping, 1 / k_scale, 1 / v_scale, qkv.stride(0),
        *k_cache.stride()[:3], *v_cache.stride()[:3], V_HEAD=num_rows - num_kv_heads,
        **tiles.store_constants(num_heads, num_kv_heads, head_dim, k_cache.shape[1]), **launch_options(qkv.device))
    return q


@jit
def rotate_and_store_kernel(qkv, q_out, rotation, q_norm, k_norm, eps, k_cache, v_cache, slot_mapping, k_factor,
                            v_factor, qkv_token, kc_block, kc_slot, kc_head, vc_block, vc_slot, vc_head,
                            V_HEAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr,
                            KV_HEADS: tl.constexpr, HALF: tl.constexpr, HEADS_PADDED: tl.constexpr,
                            KV_PADDED: tl.constexpr, HALF_PADDED: tl.constexpr, PDL: tl.constexpr):
    """Grid (token, 2), as chapter 1's. V_HEAD: the place of v's first head in qkv"""
    token = tl.program_id(0).to(tl.int64)
    at, rotation = qkv + token * qkv_token, rotation + token * 2 * HALF
    i = tl.arange(0, HALF_PADDED)[None, :]
    if tl.program_id(1) == 0:
        head = tl.arange(0, HEADS_PADDED)[:, None]
        valid = (head < HEADS) & (i < HALF)
        a, b = kernel._norm_and_rope(at, head, i, valid, q_norm, rotation, eps, HALF, True, True, PDL)
        q_at = q_out + (token * HEADS + head) * 2 * HALF + i
        tl.store(q_at, a, mask=valid)
        tl.store(q_at + HALF, b, mask=valid)
    else:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        head = tl.arange(0, KV_PADDED)[:, None]
        written = (head < tl.where(slot >= 0, KV_HEADS, 0)) & (i < HALF)
        a, b = kernel._norm_and_rope(at + HEADS * 2 * HALF, head, i, written, k_norm, rotation, eps, HALF, True, True,
                                     PDL)
        k_at = k_cache + block * kc_block + offset * kc_slot + head * kc_head + i
        kernel._store(k_at, a, k_factor, written)
        kernel._store(k_at + HALF, b, k_factor, written)
        v = at + (V_HEAD + head) * 2 * HALF + i
        a = tl.load(v, mask=written, other=0.0).to(tl.float32)
        b = tl.load(v + HALF, mask=written, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        v_at = v_cache + block * vc_block + offset * vc_slot + head * vc_head + i
        kernel._store(v_at, a * scale, v_factor, written)
        kernel._store(v_at + HALF, b * scale, v_factor, written)


def capped(compute_logits: Callable[..., Tensor], cap: float, *args: Any) -> Tensor:
    logits = compute_logits(*args)
    return logits.div_(cap).tanh_().mul_(cap)


class DenseAndExperts(nn.Module):
    """Both MLPs of a layer of 26B-A4B: [T, D] -> [T, D], of what no norm has changed."""

    def __init__(self, make: Callable[..., nn.Module], config: model.ModelConfig, index: int,
                 modules: model.Modules) -> None:
        """make: with_experts's"""
        super().__init__()
        norm = partial(modules.norm, config, config.hidden_size)
        self.dense_norm, self.dense_post_norm = norm(), norm()
        self.router_norm, self.experts_norm, self.experts_post_norm = norm(), norm(), norm()
        self.dense = make(replace(config, experts=config.experts | {"dense_layers": [index]}), index, modules)
        self.mixture = make(config, index, modules)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mixture(self.experts_norm(x), self.router_norm(x))
        return self.dense_post_norm(self.dense(self.dense_norm(x))) + self.experts_post_norm(mixed)


def with_layers(modules: model.Modules, config: model.ModelConfig) -> model.Modules:
    """The modules with these layers and logits, made of those of other models."""
    layer, last_layer = (type(kind.__name__, (Gemma4Layer, kind), {}) for kind in (modules.layer, modules.last_layer))
    if config.experts:
        modules = modules._replace(mlp=partial(DenseAndExperts, modules.mlp))
    if cap := config.gemma4["softcap"]:
        modules = modules._replace(compute_logits=partial(capped, modules.compute_logits, cap))
    return modules._replace(layer=layer, last_layer=last_layer)


# --------------------------------------------------------------------------------------------------
# The families
# --------------------------------------------------------------------------------------------------

# config.json may name only what differs from these.
DEFAULTS: dict[str, Any] = dict(
    vocab_size=262144, hidden_size=2304, intermediate_size=9216, num_hidden_layers=30, num_attention_heads=8,
    num_key_value_heads=4, head_dim=256, global_head_dim=512, hidden_activation="gelu_pytorch_tanh",
    max_position_embeddings=131072, tie_word_embeddings=True, sliding_window=512, hidden_size_per_layer_input=256)
ROPES: dict[str, dict[str, Any]] = {
    families.FULL: dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1e6),
    families.SLIDING: dict(rope_type="default", rope_theta=1e4)}


def gemma4(hf: dict[str, Any]) -> model.ModelConfig:
    hf = DEFAULTS | {key: value for key, value in hf.items() if value is not None}
    if hf.get("use_bidirectional_attention") == "all":
        raise ValueError("Gemma 4 with use_bidirectional_attention='all' is not supported: it generates no text")
    if hf["hidden_size_per_layer_input"] or hf.get("num_kv_shared_layers"):
        raise ValueError("Gemma 4 with embeddings for each layer, or with layers that share a cache (E2B, E4B), is not "
                         "supported")
    kinds = hf.get("layer_types") or []
    hf["layer_types"] = [*kinds[:-1], families.FULL] if kinds else None  # the last one attends to all tokens
    is_local = families.windows(hf | {"sliding_window": 1}, lambda i: (i + 1) % 6 != 0 and i + 1 < hf[
        "num_hidden_layers"])
    given = ROPES | (hf.get("rope_parameters") or {})
    kinds = families.FULL, families.SLIDING  # as is_local counts
    config = families.llama(
        hf, mlp_bias=False, qk_norm=True, **families.POST | dict(names=families.POST["names"] | {
            "post_attention_layernorm": "pre_feedforward_layernorm"}),
        activation=hf["hidden_activation"], embedding_multiplier=hf["hidden_size"] ** 0.5, attention_scale=1.0,
        ropes=[families.rope_settings(hf | {"rope_parameters": given[kind]}, True) for kind in kinds],
        layer_ropes=is_local, sliding_windows=[hf["sliding_window"] * i for i in is_local])
    shares, cap = bool(hf.get("attention_k_eq_v")), hf.get("final_logit_softcapping")
    if cap is not None:
        check_number("config.json: final_logit_softcapping", cap, (int, float), lambda x: 0 < x < 1e15,
                     "a number above 0 and below 1e15")
    config.gemma4 = dict(softcap=cap, has_v=[bool(i) or not shares for i in is_local])
    full = dict(head_dim=hf["global_head_dim"])
    if shares and hf.get("num_global_key_value_heads"):
        full["num_key_value_heads"] = hf["num_global_key_value_heads"]
    layers = hf.get("per_layer_config") or {str(i): full for i, local in enumerate(is_local) if not local}
    config.layer_heads = [(config.num_kv_heads, config.head_dim)] * config.num_layers
    for index, heads in layers.items():
        unknown = {*heads} - {"head_dim", "num_key_value_heads"}
        if unknown or not 0 <= int(index) < config.num_layers:
            raise ValueError(f"config.json: per_layer_config gives head_dim and num_key_value_heads of some of the "
                             f"{config.num_layers} layers, not {min(unknown, default=index)!r:.80}")
        num_kv_heads, head_dim = (heads.get(key, other) for key, other in (
            ("num_key_value_heads", config.num_kv_heads), ("head_dim", config.head_dim)))
        families.check_config(replace(config, num_kv_heads=num_kv_heads, head_dim=head_dim))
        config.layer_heads[int(index)] = num_kv_heads, head_dim
    for local, rope in enumerate(config.ropes):
        if sizes := {heads[1] for heads, i in zip(config.layer_heads, is_local) if i == local}:
            (rope["head_dim"],) = sizes
    if len({*config.layer_heads}) == 1:
        (config.num_kv_heads, config.head_dim), config.layer_heads = config.layer_heads[0], []
    return config
