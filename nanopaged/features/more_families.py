"""More families, each as a function of nanopaged/weights/families.py: those that fewer people load."""
from typing import Any

from nanopaged import model
from nanopaged.options import feature
from nanopaged.weights import families


def with_rope(hf: dict[str, Any], **rope: Any) -> dict[str, Any]:
    """The settings, with this rope if config.json has none."""
    return hf if hf.get("rope_parameters") or hf.get("rope_scaling") else hf | {"rope_parameters": rope}


def ministral3(hf: dict[str, Any]) -> model.ModelConfig:
    """Its queries grow with their position (features/query_scale.py)."""
    hf = {"sliding_window": None, "head_dim": 128, "rms_norm_eps": 1e-5} | hf
    return families.mistral(with_rope(
        hf, rope_type="yarn", rope_theta=1e6, factor=16.0, original_max_position_embeddings=16384, mscale=1.0,
        mscale_all_dim=1.0, llama_4_scaling_beta=0.1))


def exaone4(hf: dict[str, Any]) -> model.ModelConfig:
    """If some layers have a window, the others have no rope."""
    hf = {"sliding_window": 4096, "sliding_window_pattern": 4, "rms_norm_eps": 1e-5} | hf
    pattern = hf["sliding_window_pattern"] or 1
    interval = len(pattern) if isinstance(pattern, str) else pattern
    sizes = families.windows(hf, lambda i: bool(hf["sliding_window"]) and (i + 1) % interval != 0)
    return families.llama(
        hf, qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=True, pre_norm=False, sliding_windows=sizes,
        layer_ropes=[-1 if hf["sliding_window"] and not size else 0 for size in sizes],
        **families.POST | dict(float32_norms=False))


def cwm(hf: dict[str, Any]) -> model.ModelConfig:
    hf = dict(sliding_window=8192, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, rope_theta=1e6) | hf
    hf = with_rope(hf, rope_type="llama3", rope_theta=1e6, factor=16.0, high_freq_factor=4.0, low_freq_factor=1.0,
                   original_max_position_embeddings=8192)
    return families.llama(hf, qkv_bias=False, o_bias=False, sliding_windows=families.windows(hf, lambda i: i % 4 != 0))


def ernie4_5(hf: dict[str, Any]) -> model.ModelConfig:
    hf = dict(rope_theta=5e5, num_key_value_heads=2, head_dim=128, rms_norm_eps=1e-5, tie_word_embeddings=True) | hf
    config = families.llama(hf, **dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), hf.get("use_bias", False)))
    config.ropes[0]["is_interleaved"] = True  # weights/build.py reorders the heads
    return config


def granite4(hf: dict[str, Any]) -> model.ModelConfig:
    """Granite 4: a mixture of experts, or what that calls the shared expert alone."""
    kinds = hf.get("layer_types") or hf.get("layers_block_type") or ["mamba"]
    size = hf.get("shared_intermediate_size", 1024)
    if hf.get("num_local_experts", 8):
        config = feature("experts", "Granite 4 with experts").granite_moe(
            {"num_local_experts": 8, "num_experts_per_tok": 2} | hf | {"shared_intermediate_size": size,
                                                                       "mlp_bias": False})
    else:
        config = families.granite(hf | {"intermediate_size": size, "mlp_bias": False})
        config.merged = {"shared_mlp.input_linear": {"mlp.gate_proj": size, "mlp.up_proj": size},
                         "shared_mlp.output_linear": {"mlp.down_proj": config.hidden_size}}
    config.layer_ropes = [0 if hf.get("position_embedding_type") == "rope" else -1] * config.num_layers
    if not {*kinds} <= {"attention", families.FULL}:
        feature("mamba", "Granite 4 with state-space layers").add_states(config, hf, kinds)
    return config


def seed_oss(hf: dict[str, Any]) -> model.ModelConfig:
    return families.llama({"head_dim": 128, "num_key_value_heads": 8, "attention_bias": True} | hf,
                          o_bias=hf.get("attention_out_bias", False))


def arcee(hf: dict[str, Any]) -> model.ModelConfig:
    return families.llama({"hidden_act": "relu2", "rms_norm_eps": 1e-5} | hf, gated_mlp=False,
                          names=families.NAMES | {"gate_up_proj": "up_proj"})
