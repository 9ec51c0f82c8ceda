"""Qwen3-Next and Qwen3.5 (Qwen 2025 and 2026; Qwen3.6 and 3.8 have the same form): gated delta nets beside attention.

Three of four layers are gated delta nets (delta.py). The others attend, with what other families lack:

    output gate      q_proj computes a gate beside each head's q: o_proj gets attention * sigmoid(gate).
    rope             on a quarter of a head; mrope's three positions of a text token are equal, so it is rope
    norms            multiply by 1 + the stored weight, the one after a gated delta net by the weight itself

The MLP is dense, or a mixture of experts (experts.py) with a shared expert, which is multiplied by sigmoid(gate(x)). In
multimodal checkpoints this is the text model. Other parts (model.visual, mtp) are not read.
"""
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanopaged import kernel, model, tiles
from nanopaged.features.delta import NAMES, states_of
from nanopaged.optional_triton import jit, launch_options, tl
from nanopaged.options import feature
from nanopaged.weights import families

GATE_ROWS = 8  # of the router: the shared expert's gate and 7 of padding, because rows of 16 bytes are faster


# --------------------------------------------------------------------------------------------------
# Attention with an output gate
# --------------------------------------------------------------------------------------------------

class GatedLayer(model.Layer):
    """A layer whose qkv_proj computes q, k, v and the gate of each head."""
    is_short = False  # its `attention` returns the rows whose logits are read
    in_triton = False  # beside the small kernels of fused.py

    def __init__(self, config: model.ModelConfig, index: int, modules: model.Modules) -> None:
        super().__init__(config, index, modules)
        c, num_heads = config, 2 * config.num_heads + 2 * config.num_kv_heads
        self.qkv_proj = modules.linear(c.hidden_size, num_heads * c.head_dim, bias=c.qkv_bias)

    def attention(self, x: Tensor, rope: Tensor | None, batch: model.Batch, cache: model.LayerCache,
                  kernels: kernel.Kernels) -> Tensor:
        c, gate = self.config, x

        def rotate_and_store(qkv: Tensor, *args: Any) -> Tensor:
            nonlocal gate
            qkv, gate = qkv.split([c.num_heads + 2 * c.num_kv_heads, c.num_heads], dim=1)
            return kernels.rotate_and_store(qkv, *args)

        def attention(*args: Any, **options: Any) -> Tensor:
            o, rows = kernels.attention(*args, **options), model.select_rows(gate, batch) if self.is_short else gate
            return gate_output(o, rows) if self.in_triton else o * rows.sigmoid()

        return super().attention(x, rope, batch, cache, kernels._replace(
            rotate_and_store=rotate_and_store, attention=attention))


def with_output_gate(modules: model.Modules) -> model.Modules:
    """The modules with these layers, made of those of other models. Attention of a last layer selects rows first."""
    def gated(kind: type[model.Layer]) -> type[model.Layer]:
        switches = dict(is_short=kind.attention is not model.Layer.attention,  # as in last_layer.py
                        in_triton=modules.norm is not model.PLAIN.norm)
        return GatedLayer if kind is model.Layer else type(kind.__name__, (kind, GatedLayer), switches)

    return modules._replace(layer=gated(modules.layer), last_layer=gated(modules.last_layer))


def gate_output(o: Tensor, gate: Tensor) -> Tensor:
    """o * sigmoid(gate) in one launch: both [T, H, head_dim]; gate may be a part of longer rows."""
    (num_rows, *shape), out = o.shape, torch.empty_like(o)
    size = shape[0] * shape[1]
    tile = min(1024, tiles.next_power_of_2(size))
    gate_output_kernel[(num_rows, tiles.cdiv(size, tile))](
        o, gate, out, gate.stride(0), SIZE=size, TILE=tile, **launch_options(o.device))
    return out


@jit
def gate_output_kernel(o, gate, out, gate_row, SIZE: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr):
    """Grid (token, tile of its row)."""
    kernel.wait_for_previous_kernel(PDL)
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = tl.load(o + row * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    y = x * tl.sigmoid(tl.load(gate + row * gate_row + i, mask=i < SIZE, other=0.0).to(tl.float32))
    tl.store(out + row * SIZE + i, y.to(out.dtype.element_ty), mask=i < SIZE)


def kernel_forms(r: Any) -> Iterator[Callable[[], Any]]:
    """For warmup.py."""
    o = torch.empty(0, r.config.num_heads, r.config.head_dim, dtype=r.dtype, device=r.device)
    yield partial(gate_output, o, o)


# --------------------------------------------------------------------------------------------------
# The families
# --------------------------------------------------------------------------------------------------

def qwen3_5(hf: dict[str, Any], **switches: Any) -> model.ModelConfig:
    families.require("Qwen3.5", hf, dict(hidden_act="silu", attn_output_gate=True))
    hf = {"num_key_value_heads": 4, "head_dim": 256, "partial_rotary_factor": 0.25} | hf
    num_layers, interval = families.check_size("num_layers", hf["num_hidden_layers"]), hf.get(
        "full_attention_interval", 4)
    kinds = hf.get("layer_types") or ["linear_attention" if (i + 1) % interval else families.FULL
                                      for i in range(num_layers)]
    if len(kinds) != num_layers or not {*kinds} <= {families.FULL, "linear_attention"} or families.FULL not in kinds:
        raise ValueError(f"config.json: layer_types must say of each of the {num_layers} layers whether it is "
                         f"'linear_attention' or 'full_attention', and name one of the latter, not {kinds!r:.80}")
    states = states_of(hf, [i for i, kind in enumerate(kinds) if kind != families.FULL])
    config = families.llama(
        hf, can_be_partial=True, mlp_bias=False, qk_norm=True, norm_offset=1.0, float32_norms=True, output_gate=True,
        names=families.NAMES | NAMES | {
            name: f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")},
        states=states if states["layers"] else {}, **switches)
    channels, values = states["shapes"][0][1], states["v_heads"] * states["v_dim"]
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    heads = torch.arange(2 * (q + kv)).view(-1, config.head_dim)  # stored: q, gate, q, gate, .., k, v
    gates = slice(1, 2 * config.num_heads, 2)
    config.parts = {
        "qkv_proj": dict(q_proj=2 * q, k_proj=kv, v_proj=kv),
        "in_proj": dict(in_proj_qkv=channels, in_proj_z=values),
        "in_proj_ba": dict(in_proj_b=states["v_heads"], in_proj_a=states["v_heads"])}
    if not hf.get("quantization_config"):  # with one, b and a may have more bits than q, k, v and z
        config.parts["in_proj"] |= config.parts.pop("in_proj_ba")
    config.orders = {"qkv_proj": torch.cat([
        heads[:2 * config.num_heads:2], heads[2 * config.num_heads:], heads[gates]]).flatten().tolist()}
    return config


def qwen3_5_moe(hf: dict[str, Any], **more: Any) -> model.ModelConfig:
    """more: settings of the experts"""
    hf = {"num_key_value_heads": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512} | hf
    hf = {"intermediate_size": hf["moe_intermediate_size"]} | hf
    experts = feature("experts", "a mixture of experts")
    settings = experts.mixture(hf, "num_experts", "moe_intermediate_size", True,
                               shared_size=hf["shared_expert_intermediate_size"], gate_rows=GATE_ROWS) | more
    config = qwen3_5(hf, experts=settings)
    config.names |= {"shared": "shared_expert"}
    config.parts["router"] = {"gate": settings["count"], "shared_expert_gate": 1, "": GATE_ROWS - 1}
    config.merged = experts.merged_experts(config)
    return config


def qwen3_next(hf: dict[str, Any]) -> model.ModelConfig:
    """Its projections are stored by key heads: q, k, and v and z of the value heads that share it; b and a of these."""
    num_layers, dense = hf["num_hidden_layers"], hf.get("mlp_only_layers") or []
    config = qwen3_5_moe(
        hf, normalized=bool(hf.get("norm_topk_prob", True)),
        dense_layers=[i for i in range(families.check_size("num_layers", num_layers))
                      if i in dense or (i + 1) % hf.get("decoder_sparse_step", 1)])
    config.names |= {name: f"linear_attn.{name}" for name in ("in_proj_qkvz", "in_proj_ba")}
    *_, b, _ = sizes = [size for module, of in config.parts.items() if "in_proj" in module for size in of.values()]
    apart, qkvz, ba = "in_proj_ba" in config.parts, dict(in_proj_qkvz=sum(sizes) - 2 * b), dict(in_proj_ba=2 * b)
    config.parts |= dict(in_proj=qkvz, in_proj_ba=ba) if apart else dict(in_proj=qkvz | ba)
    if s := config.states:
        group = s["v_heads"] // s["k_heads"]
        rows = torch.arange(sum(sizes))
        qkvz, ba = (part.view(s["k_heads"], -1) for part in rows.split([sum(sizes) - 2 * b, 2 * b]))
        parts = [*qkvz.split([s["k_dim"], s["k_dim"], group * s["v_dim"], group * s["v_dim"]], dim=1),
                 *ba.split(group, dim=1)]
        order = torch.cat([part.flatten() for part in parts])
        count = len(order) - 2 * b * apart
        config.orders["in_proj"] = order[:count].tolist()
        if apart:
            config.orders["in_proj_ba"] = (order[count:] - count).tolist()
    return config
