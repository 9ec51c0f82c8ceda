"""LFM2: most layers have a short convolution in place of attention (Liquid AI 2025).

    a, b, u = in_proj(norm(x))
    u = a * u
    x = x + out_proj(b * (weight[0] * u[2 tokens before] + weight[1] * u[1 token before] + weight[2] * u))

The state of such a layer is a * u of the last two tokens (conv_L_cache - 1).
"""
from typing import Any

from torch import Tensor

from nanopaged import model
from nanopaged.features.kinds.recurrent import Convolution, StateLayer, StateSlots, convolve
from nanopaged.inputs import between, check_number
from nanopaged.options import feature
from nanopaged.weights import families


class ShortConvolution(StateLayer):
    def make(self, config: model.ModelConfig, modules: model.Modules) -> None:
        c, m, bias = config, modules, config.states["bias"]
        self.in_proj = m.linear(c.hidden_size, 3 * c.hidden_size, bias=bias)
        self.conv = Convolution(c.hidden_size, c.states["length"], bias)
        self.out_proj = m.residual_linear(c.hidden_size, c.hidden_size, bias=bias)

    def mix(self, x: Tensor, states: list[Tensor], slots: StateSlots) -> Tensor:
        a, b, u = self.in_proj(x).chunk(3, dim=1)
        return b * convolve(a * u, self.conv.weight, self.conv.bias, states[0], slots)


NAMES = {"q_proj": "self_attn.q_proj", "k_proj": "self_attn.k_proj", "v_proj": "self_attn.v_proj",
         "o_proj": "self_attn.out_proj", "q_norm": "self_attn.q_layernorm", "k_norm": "self_attn.k_layernorm",
         "input_layernorm": "operator_norm", "post_attention_layernorm": "ffn_norm", "norm": "embedding_norm",
         "mlp": "feed_forward", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2",
         "in_proj": "conv.in_proj", "conv": "conv.conv", "out_proj": "conv.out_proj"}


def lfm2(hf: dict[str, Any]) -> model.ModelConfig:
    size, num_layers = hf.get("block_ff_dim", hf.get("intermediate_size", 12288)), hf["num_hidden_layers"]
    if hf.get("block_auto_adjust_ff_dim", True):
        size = int(hf.get("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
        multiple = hf.get("block_multiple_of", 256)
        size = -(-size // multiple) * multiple
    indices = hf.get("full_attn_idxs")
    kinds = hf.get("layer_types") or [families.FULL if indices is None or index in indices else "conv"
                                      for index in range(families.check_size("num_layers", num_layers))]
    if len(kinds) != num_layers or not {*kinds} <= {families.FULL, "conv"} or families.FULL not in kinds:
        raise ValueError(f"config.json: layer_types must say of each of the {num_layers} layers whether it is "
                         f"'conv' or 'full_attention', and name one of the latter, not {kinds!r:.80}")
    length = check_number("config.json: conv_L_cache", hf.get("conv_L_cache", 3), *between(int, 2, 64))
    return families.llama(
        {"rope_theta": 1e6, "tie_word_embeddings": hf.get("tie_embedding", True)} | hf | {"intermediate_size": size},
        norm_eps=hf.get("norm_eps", 1e-5), qk_norm=True, names=NAMES,
        states=dict(layers=[i for i, kind in enumerate(kinds) if kind == "conv"], layer=ShortConvolution,
                    length=length, unit=1, shapes=[(length - 1, hf["hidden_size"])], bias=hf.get("conv_bias", False)))


def lfm2_moe(hf: dict[str, Any]) -> model.ModelConfig:
    """LFM2 with a mixture of experts in the layers from num_dense_layers on."""
    hf = {"intermediate_size": 7168, "moe_intermediate_size": 1792, "num_experts": 32, "num_experts_per_tok": 4,
          "num_dense_layers": 2, "routed_scaling_factor": 1.0} | hf | {"block_auto_adjust_ff_dim": False}
    config, experts = lfm2(hf), feature("experts", "a mixture of experts")
    num_dense = check_number("config.json: num_dense_layers", hf["num_dense_layers"],
                             *between(int, 0, config.num_layers - 1))
    factor = check_number("config.json: routed_scaling_factor", hf["routed_scaling_factor"], (int, float),
                          lambda x: 0 < x < 1e15, "a number above 0 and below 1e15")
    config.names = config.names | {"router": "gate"}
    config.experts = experts.mixture(
        hf, "num_experts", "moe_intermediate_size", hf.get("norm_topk_prob", True), range(num_dense),
        sigmoid=float(factor), has_bias=bool(hf.get("use_expert_bias", True)))
    config.merged = experts.merged_experts(config)
    return config
