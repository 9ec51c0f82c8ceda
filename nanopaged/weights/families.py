"""Model families: the meaning of a checkpoint's config.json, and the names of its tensors.

`read_model_config` turns a config.json into a `ModelConfig`, the switches of the one decoder in model.py. Each family
has one function here, which knows the family's keys, defaults and tensor names. A setting that the decoder does not
implement raises a ValueError, and so does an impossible value.
"""
from pathlib import Path
from typing import Any, Callable

import torch

from nanopaged import model
from nanopaged.weights.checkpoint import read_tensors

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ROPE_TYPES: dict[str, tuple[str, ...]] = {  # type -> the keys that this type needs besides rope_theta
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
# The largest that a config.json may name: several times those of any model, and no product overflows 64 bits.
MOST = dict(vocab_size=2**24, hidden_size=2**20, num_layers=2**10, num_heads=2**12, num_kv_heads=2**12, head_dim=2**12,
            intermediate_size=2**24, max_position_embeddings=2**23)


def read_model_config(hf: dict[str, Any]) -> model.ModelConfig:
    """The model.ModelConfig of a config.json. ValueError if the architecture or a setting is not supported."""
    if (quantization := hf.get("quantization_config")) is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ValueError(f"the checkpoint is quantised ({method}); use one with float32, float16 or bfloat16 weights")
    architectures = hf.get("architectures") or ["none given"]
    architecture = architectures[0] if isinstance(architectures, list) else architectures
    if architecture not in list(FAMILIES):  # a list, because the value from config.json may be unhashable
        raise ValueError(f"unknown architecture {architecture!r:.80}; known are {', '.join(FAMILIES)}")
    try:
        config = FAMILIES[architecture](hf)
    except KeyError as missing:
        raise ValueError(f"config.json of a {architecture} must have {missing}, which is missing here") from None
    except (TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"config.json has a value that no {architecture} can have: {error}") from None
    check_config(config)
    dtype = str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueError(f"weights of type {dtype} are not supported; float32, float16 and bfloat16 are")
    config.torch_dtype = DTYPES[dtype]
    return config


def check_config(config: model.ModelConfig) -> None:
    """Raise ValueError for a setting that no model can have, because a config.json may hold anything."""
    for name in MOST:
        check_size(name, getattr(config, name))
    numbers = {"the norm's epsilon": config.norm_eps}
    if config.rope:
        numbers |= {key: config.rope[key] for key in ("rope_theta", *ROPE_TYPES[config.rope["rope_type"]])}
    for name, value in numbers.items():
        if type(value) not in (int, float) or not 0 < value < 1e15:
            raise ValueError(f"config.json: {name} must be a number above 0 and below 1e15, not {value!r:.80}")
    windows = config.sliding_windows
    if len(windows) not in (0, config.num_layers) or any(
            type(window) is not int or not 0 <= window < 2**31 for window in windows):
        raise ValueError("config.json: a sliding window must be a number of tokens below 2^31, given for "
                         f"each of the {config.num_layers} layers, not windows of {windows!r:.80}")
    if config.activation not in list(model.ACTIVATIONS):
        raise ValueError(f"unknown activation {config.activation!r:.80}; known are {', '.join(model.ACTIVATIONS)}")
    if config.num_heads % config.num_kv_heads:
        raise ValueError(f"{config.num_heads} query heads cannot share {config.num_kv_heads} kv heads evenly")
    if config.head_dim % 2:
        raise ValueError(f"head_dim {config.head_dim} is odd, and the kernels work on halves of a head")


def check_size(name: str, value: Any) -> int:
    """The size, if a model can have it."""
    if type(value) is not int or not 1 <= value <= MOST[name]:
        raise ValueError(f"config.json: {name} must be an integer from 1 to {MOST[name]}, not {value!r:.80}")
    return value


def untie(config: model.ModelConfig, path: Path) -> None:
    """As in transformers 5: a checkpoint that stores a head besides the embedding, with other numbers, has both,
    whatever tie_word_embeddings says."""
    if config.tie_word_embeddings:
        names = ("lm_head.weight", config.names.get("embed_tokens", "embed_tokens") + ".weight")
        stored = [tensor for name, tensor in read_tensors(path) if name.endswith(names)][:2]
        config.tie_word_embeddings = len(stored) < 2 or stored[0].dtype == stored[1].dtype and torch.equal(*stored)


def rope_settings(hf: dict[str, Any]) -> dict[str, Any]:
    """rope_theta, rope_type and the numbers of that type.

    config.json has two spellings: rope_theta besides rope_scaling, and the newer rope_parameters, which holds both.
    """
    given = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope type {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    absent = [key for key in ROPE_TYPES[kind] if key not in given]
    if absent:
        raise ValueError(f"rope type {kind!r} needs {', '.join(absent)} in config.json")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor={given['partial_rotary_factor']} is not supported")
    theta = {"rope_theta": hf["rope_theta"]} if "rope_theta" in hf else {}
    return {"rope_theta": 10000.0} | theta | given | {"rope_type": kind}


# --------------------------------------------------------------------------------------------------
# The families
# --------------------------------------------------------------------------------------------------

def decoder(hf: dict[str, Any], **settings: Any) -> model.ModelConfig:
    """The settings that all families have, under Llama's keys, with those of one family."""
    heads = hf["num_attention_heads"]
    return model.ModelConfig(
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        num_layers=hf["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
        intermediate_size=hf["intermediate_size"],
        max_position_embeddings=hf["max_position_embeddings"],
        tie_word_embeddings=hf.get("tie_word_embeddings", False),
        **settings)


ATTENTION = {name: f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
# GPT-2 and OPT have layer norms, biases everywhere, an MLP without a gate, and positions from a table.
OLDER = dict(norm="layer", gated_mlp=False, qkv_bias=True, o_bias=True, mlp_bias=True, learned_positions=True)


def require(family: str, hf: dict[str, Any], supported: dict[str, Any], advice: str = "") -> None:
    """Raise ValueError if config.json has another value than the supported one for one of these keys."""
    for key, value in supported.items():
        if hf.get(key, value) != value:
            raise ValueError(f"{family} with {key}={hf[key]} is not supported{advice}")


def gpt2(hf: dict[str, Any]) -> model.ModelConfig:
    require("GPT-2", hf, dict(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False))
    sizes = dict(hidden_size=hf["n_embd"], num_hidden_layers=hf["n_layer"], num_attention_heads=hf["n_head"],
                 intermediate_size=hf.get("n_inner") or 4 * hf["n_embd"], max_position_embeddings=hf["n_positions"])
    return decoder(
        {"tie_word_embeddings": True} | hf | sizes, **OLDER,
        norm_eps=hf.get("layer_norm_epsilon", 1e-5),
        activation=hf.get("activation_function", "gelu_new"),
        transposed=True,
        names={"embed_tokens": "wte", "embed_positions": "wpe", "layers": "h", "norm": "ln_f",
               "input_layernorm": "ln_1", "qkv_proj": "attn.c_attn", "o_proj": "attn.c_proj",
               "post_attention_layernorm": "ln_2", "gate_up_proj": "mlp.c_fc", "down_proj": "mlp.c_proj"})


def opt(hf: dict[str, Any]) -> model.ModelConfig:
    require("OPT", hf, dict(do_layer_norm_before=True, _remove_final_layer_norm=False, enable_bias=True,
                            layer_norm_elementwise_affine=True, word_embed_proj_dim=hf["hidden_size"]),
            " (facebook/opt-350m is the only OPT with it)")
    return decoder(
        {"tie_word_embeddings": True} | hf | {"intermediate_size": hf["ffn_dim"]}, **OLDER,
        norm_eps=1e-5,
        activation=hf.get("activation_function", "relu"),
        position_offset=2,
        names=ATTENTION | {"norm": "final_layer_norm", "input_layernorm": "self_attn_layer_norm",
                           "o_proj": "self_attn.out_proj", "post_attention_layernorm": "final_layer_norm",
                           "gate_up_proj": "fc1", "down_proj": "fc2"})


def llama(hf: dict[str, Any], **switches: Any) -> model.ModelConfig:
    attention_bias = hf.get("attention_bias", False)
    biases = dict(qkv_bias=attention_bias, o_bias=attention_bias, mlp_bias=hf.get("mlp_bias", False))
    return decoder(
        hf,
        norm_eps=hf.get("rms_norm_eps", 1e-6),
        activation=hf.get("hidden_act", "silu"),
        rope=rope_settings(hf),
        names=ATTENTION | {name: f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
        **biases | switches)


def mistral(hf: dict[str, Any]) -> model.ModelConfig:
    window = hf.get("sliding_window", 4096) or 0  # absent: 4096 tokens; null: no window
    windows = [window] * check_size("num_layers", hf["num_hidden_layers"])
    return llama(hf, qkv_bias=False, o_bias=False, mlp_bias=False, sliding_windows=windows)


def qwen2(hf: dict[str, Any]) -> model.ModelConfig:
    return llama(hf, qkv_bias=True, o_bias=False, mlp_bias=False, sliding_windows=qwen_windows(hf))


def qwen3(hf: dict[str, Any]) -> model.ModelConfig:
    return llama({"head_dim": 128} | hf, mlp_bias=False, qk_norm=True, sliding_windows=qwen_windows(hf))


def qwen_windows(hf: dict[str, Any]) -> list[int]:
    """The window of each layer. If use_sliding_window is true, the layers from max_window_layers on have a window."""
    window = hf.get("sliding_window") or 0 if hf.get("use_sliding_window") else 0
    first, num_layers = hf.get("max_window_layers", 28), check_size("num_layers", hf["num_hidden_layers"])
    kinds = hf.get("layer_types") or [
        "sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


FAMILIES: dict[str, Callable[[dict[str, Any]], model.ModelConfig]] = {
    "GPT2LMHeadModel": gpt2, "OPTForCausalLM": opt, "LlamaForCausalLM": llama, "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2, "Qwen3ForCausalLM": qwen3,
}
