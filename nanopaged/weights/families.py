"""Model families: the meaning of a checkpoint's config.json, and the names of its tensors.

`read_model_config` turns a config.json into a `ModelConfig`, the switches of the one decoder in model.py. Each family
has a function here, or an entry of FAMILIES, which knows the family's keys, defaults and tensor names. A setting that
the decoder does not implement raises a ValueError, and so does an impossible value.
"""
import re
import warnings
from pathlib import Path
from typing import Any, Callable

import torch

from nanopaged import model
from nanopaged.inputs import between, check_number
from nanopaged.options import feature
from nanopaged.rope import frequencies, rotary_dim
from nanopaged.weights.checkpoint import read_tensors

ROPE_TYPES: dict[str, tuple[str, ...]] = {  # type -> the keys that this type needs besides rope_theta
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "proportional": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("original_max_position_embeddings",),  # and two lists, of a number for each pair that rotates
}
OPTIONAL_NUMBERS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "partial_rotary_factor",
                    "llama_4_scaling_beta")
STRETCHED = {"yarn": "original_max_position_embeddings", "dynamic": "max_position_embeddings",
             "linear": "max_position_embeddings"}  # the trained length
FOUR_BITS = "(mxfp4|awq|gptq|modelopt) |compressed-tensors .*pack-quantized$"  # method and format, of four_bits.py
SLIDING, FULL = "sliding_attention", "full_attention"  # kinds of layers
# The largest that a config.json may name: several times those of any model, and no product overflows 64 bits.
MOST = dict(vocab_size=2**24, hidden_size=2**20, num_layers=2**10, num_heads=2**12, num_kv_heads=2**12, head_dim=2**12,
            intermediate_size=2**24, max_position_embeddings=2**23)


def read_model_config(hf: dict[str, Any]) -> model.ModelConfig:
    """The model.ModelConfig of a config.json. ValueError if the architecture or a setting is not supported."""
    architectures = hf.get("architectures") or ["none given"]
    architecture = architectures[0] if isinstance(architectures, list) else architectures
    if architecture not in [*FAMILIES, *OF_FEATURES]:  # a list, because the value from config.json may be unhashable
        architecture, hf = text_model(architecture, hf)
    read = FAMILIES.get(architecture)
    if read is None:
        file, name = OF_FEATURES[architecture].split(".")
        read = vars(feature(file, f"a model of the architecture {architecture}"))[name]
    fp8, four_bits, quantized = None, None, hf.get("quantization_config")
    given = quantized if isinstance(quantized, dict) else {}
    if re.match(FOUR_BITS, f"{given.get('quant_method')} {given.get('format')}"):
        four_bits = feature("four_bits", "a checkpoint in 4 bits").read_form(architecture, given)
    elif quantized is not None:
        fp8 = feature("fp8", "a checkpoint with a quantization_config").read_form(quantized)
    try:
        config = read(hf)
        check_config(config)
    except KeyError as missing:
        raise ValueError(f"config.json of a {architecture} must have {missing}, which is missing here") from None
    except (TypeError, AttributeError, ArithmeticError, IndexError, RuntimeError) as error:
        raise ValueError(f"config.json has a value that no {architecture} can have: {error}") from None
    for rope in config.ropes if read is not gemma3 else ():  # whose max_position_embeddings has the factor in it
        if trained := STRETCHED.get(rope["rope_type"]):  # as in vLLM, texts may be longer by the factor
            length = check_size("max_position_embeddings", int(rope["factor"] * rope[trained]))
            config.max_position_embeddings = max(config.max_position_embeddings, length)
    dtype = str(hf.get("dtype") or hf.get("torch_dtype") or config.torch_dtype).removeprefix("torch.")
    if dtype not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"weights of type {dtype} are not supported; float32, float16 and bfloat16 are")
    config.torch_dtype, config.fp8, config.four_bits = getattr(torch, dtype), fp8, four_bits
    return config


def text_model(architecture: Any, hf: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The text model's architecture and settings in a multimodal checkpoint. ValueError: it has none, or another."""
    known = f"known are {', '.join([*FAMILIES, *OF_FEATURES])}"
    models, text = MULTIMODAL.get(str(architecture)), hf.get("text_config") or hf  # older ones of Qwen2.5-VL are flat
    if models and isinstance(text, dict):
        kind = text.get("model_type") if text is not hf else None
        family, defaults = models.get(str(kind or [*models][0]), ("", {}))
        if family:
            warnings.warn(f"{architecture} is a multimodal model; its text model is loaded, and images are not read")
            return family, defaults | text | hf  # so that hf_overrides count
    for pattern, reason in REFUSED.items():
        if re.search(pattern, str(architecture)):
            raise ValueError(f"{architecture!s:.80} is {reason}, which nanopaged does not run; {known}")
    if "text_config" in hf or "vision_config" in hf:
        raise ValueError(f"{architecture!s:.80} is a multimodal model whose text model is not among these; {known}")
    raise ValueError(f"unknown architecture {architecture!r:.80}; {known}")


def check_config(config: model.ModelConfig) -> None:
    """Raise ValueError for a setting that no model can have, because a config.json may hold anything."""
    for name in MOST:
        check_size(name, getattr(config, name))
    numbers = [("the norm's epsilon", config.norm_eps), ("the factor of embeddings", config.embedding_multiplier),
               ("the scale of scores", config.attention_scale or 1), ("logits_scaling", config.logits_scaling)]
    numbers += [(key, rope[key]) for rope in config.ropes
                for key in ("rope_theta", *ROPE_TYPES[rope["rope_type"]], *filter(rope.get, OPTIONAL_NUMBERS))]
    for name, value in numbers:
        check_number(f"config.json: {name}", value, (int, float), lambda x: 0 < x < 1e15,
                     "a number above 0 and below 1e15")
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
    for rope in config.ropes:
        if (size := rotary_dim(rope, config.head_dim)) not in range(2, config.head_dim + 1, 2):
            raise ValueError(f"config.json: {size} numbers of a head rotate; expected an even number, at most "
                             f"{config.head_dim}")
        for num_positions in (1, 2**32):  # raises an error if its numbers do not go together
            frequencies(rope, size, num_positions)


def check_size(name: str, value: Any) -> int:
    """The size, if a model can have it."""
    return check_number(f"config.json: {name}", value, *between(int, 1, MOST[name]))


def untie(config: model.ModelConfig, path: Path) -> None:
    """As in transformers 5: a checkpoint that stores a head besides the embedding, with other numbers, has both,
    whatever tie_word_embeddings says."""
    if config.tie_word_embeddings:
        names = ("lm_head.weight", config.names.get("embed_tokens", "embed_tokens") + ".weight")
        stored = [tensor for name, tensor in read_tensors(path) if name.endswith(names)][:2]
        config.tie_word_embeddings = len(stored) < 2 or (
            stored[0].itemsize > 1  # equal FP8 numbers may have other scales
            and stored[0].dtype == stored[1].dtype and torch.equal(*stored))


def rope_settings(hf: dict[str, Any], can_be_partial: bool) -> dict[str, Any]:
    """rope_theta, rope_type and the numbers of that type.

    config.json has two spellings: rope_theta besides rope_scaling, and the newer rope_parameters, which holds both.
    """
    given = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = given.get("rope_type") or given.get("type") or "default"
    # Phi-3's first name of longrope; and Qwen2.5-VL's rope, whose three positions of a token are one in a text
    kind = {"su": "longrope", "mrope": "default"}.get(kind, kind)
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope type {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    if nested := [key for key, value in given.items() if isinstance(value, dict)]:
        raise ValueError(f"rope_parameters of layers of the kind {nested[0]!r:.80} are not supported in this family")
    beside = {key: hf[key] for key in ("rope_theta", "partial_rotary_factor", "max_position_embeddings",
                                       "original_max_position_embeddings") if key in hf}
    settings = {"rope_theta": 10000.0} | beside | given | {"rope_type": kind}
    needed = ROPE_TYPES[kind] + ("original_max_position_embeddings",) * ("llama_4_scaling_beta" in settings)
    if absent := [key for key in needed if key not in settings]:
        raise ValueError(f"rope type {kind!r} needs {', '.join(absent)} in config.json")
    if settings.get("partial_rotary_factor") not in (None, 1.0) and not can_be_partial:
        raise ValueError(f"partial_rotary_factor={settings['partial_rotary_factor']} is not supported in this family")
    return settings


def windows(hf: dict[str, Any], is_sliding: Callable[[int], bool] = lambda i: True) -> list[int]:
    """Each layer's window; 0: none. layer_types decides which layers have one, or else is_sliding(layer)."""
    default = [SLIDING if is_sliding(i) else FULL for i in range(check_size("num_layers", hf["num_hidden_layers"]))]
    kinds, window = hf.get("layer_types") or default, hf.get("sliding_window") or 0
    if other := [kind for kind in kinds if kind not in (SLIDING, FULL)]:
        raise ValueError(f"layers of the kind {other[0]!r:.80} are not supported; {FULL!r} and {SLIDING!r} are")
    return [window if kind == SLIDING else 0 for kind in kinds]


def optional_windows(hf: dict[str, Any], is_sliding: Callable[[int], bool] = lambda i: True) -> list[int]:
    """`windows` of Qwen and SmolLM3, whose layers have none unless use_sliding_window is true."""
    return windows(hf if hf.get("use_sliding_window") else hf | {"sliding_window": None}, is_sliding)


# --------------------------------------------------------------------------------------------------
# The families
# --------------------------------------------------------------------------------------------------

NAMES = {name: f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}


def llama(hf: dict[str, Any], can_be_partial: bool = False, **switches: Any) -> model.ModelConfig:
    """The settings under Llama's keys, which most families have. switches: those of one family, in place of Llama's"""
    heads, attention_bias = hf["num_attention_heads"], hf.get("attention_bias", False)
    return model.ModelConfig(**dict(
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        num_layers=hf["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
        intermediate_size=hf["intermediate_size"],
        max_position_embeddings=hf["max_position_embeddings"],
        tie_word_embeddings=hf.get("tie_word_embeddings", False),
        norm_eps=hf.get("rms_norm_eps", 1e-6),
        activation=hf.get("hidden_act", "silu"),
        ropes=switches["ropes"] if "ropes" in switches else [rope_settings(hf, can_be_partial)],
        names=NAMES,
        qkv_bias=attention_bias, o_bias=attention_bias, mlp_bias=hf.get("mlp_bias", False)) | switches)


# GPT-2 and OPT have layer norms, biases everywhere, an MLP without a gate, and positions from a table.
OLDER: dict[str, Any] = dict(norm="layer", gated_mlp=False, qkv_bias=True, o_bias=True, mlp_bias=True,
                             learned_positions=True, ropes=[])


def require(family: str, hf: dict[str, Any], supported: dict[str, Any], advice: str = "") -> None:
    """Raise ValueError if config.json has another value than the supported one for one of these keys."""
    for key, value in supported.items():
        if hf.get(key, value) != value:
            raise ValueError(f"{family} with {key}={hf[key]} is not supported{advice}")


def gpt2(hf: dict[str, Any]) -> model.ModelConfig:
    require("GPT-2", hf, dict(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False))
    sizes = dict(hidden_size=hf["n_embd"], num_hidden_layers=hf["n_layer"], num_attention_heads=hf["n_head"],
                 intermediate_size=hf.get("n_inner") or 4 * hf["n_embd"], max_position_embeddings=hf["n_positions"])
    return llama(
        {"tie_word_embeddings": True} | hf | sizes, **OLDER,
        norm_eps=hf.get("layer_norm_epsilon", 1e-5),
        activation=hf.get("activation_function", "gelu_new"),
        transposed=True,
        names={"embed_tokens": "wte", "embed_positions": "wpe", "layers": "h", "norm": "ln_f",
               "input_layernorm": "ln_1", "q_proj": "attn.q_proj", "k_proj": "attn.k_proj", "v_proj": "attn.v_proj",
               "o_proj": "attn.c_proj", "post_attention_layernorm": "ln_2", "gate_up_proj": "c_fc",
               "down_proj": "c_proj"},
        merged={"c_attn": dict.fromkeys(("q_proj", "k_proj", "v_proj"), hf["n_embd"])})


def opt(hf: dict[str, Any]) -> model.ModelConfig:
    require("OPT", hf, dict(do_layer_norm_before=True, _remove_final_layer_norm=False, enable_bias=True,
                            layer_norm_elementwise_affine=True, word_embed_proj_dim=hf["hidden_size"]),
            " (facebook/opt-350m is the only OPT with it)")
    return llama(
        {"tie_word_embeddings": True} | hf | {"intermediate_size": hf["ffn_dim"]}, **OLDER,
        norm_eps=1e-5,
        activation=hf.get("activation_function", "relu"),
        position_offset=2,
        names=NAMES | {"norm": "final_layer_norm", "input_layernorm": "self_attn_layer_norm",
                       "o_proj": "self_attn.out_proj", "post_attention_layernorm": "final_layer_norm",
                       "mlp": "", "gate_up_proj": "fc1", "down_proj": "fc2"})


def mistral(hf: dict[str, Any]) -> model.ModelConfig:
    hf = {"sliding_window": 4096, "num_key_value_heads": 8} | hf  # absent: 4096 tokens; null: no window
    return llama(hf, qkv_bias=False, o_bias=False, mlp_bias=False, sliding_windows=windows(hf))


def qwen(hf: dict[str, Any], **switches: Any) -> model.ModelConfig:
    """If use_sliding_window is true, the layers from max_window_layers on have a window."""
    hf = {"sliding_window": 4096, "max_window_layers": 28} | hf
    sliding_windows = optional_windows(hf, lambda i: i >= hf["max_window_layers"])
    return llama(hf, mlp_bias=False, sliding_windows=sliding_windows, **switches)


def granite(hf: dict[str, Any]) -> model.ModelConfig:
    """Granite adds m * result to x after a sublayer. Adding the result to x / m gives the same stream divided by m, and
    a norm cancels m. So embeddings are divided by m (residual_multiplier), and the norms' epsilon by m * m."""
    residual = hf.get("residual_multiplier", 1.0)
    return llama(
        hf,
        norm_eps=hf.get("rms_norm_eps", 1e-6) / residual ** 2,
        embedding_multiplier=hf.get("embedding_multiplier", 1.0) / residual,
        attention_scale=hf.get("attention_multiplier", 1.0),
        logits_scaling=hf.get("logits_scaling", 1.0))


def smollm3(hf: dict[str, Any]) -> model.ModelConfig:
    hf = {"rope_theta": 2e6, "tie_word_embeddings": True, "num_key_value_heads": 4} | hf
    num_layers, interval = check_size("num_layers", hf["num_hidden_layers"]), hf.get("no_rope_layer_interval", 4)
    rotates = hf.get("no_rope_layers") or [(i + 1) % interval for i in range(num_layers)]  # 0: no rope
    return llama(hf, layer_ropes=[0 if rotates[i] else -1 for i in range(num_layers)],
                 sliding_windows=optional_windows(hf, lambda i: not rotates[i]))


def phi3(hf: dict[str, Any]) -> model.ModelConfig:
    hf = {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5} | hf
    config = llama(hf, can_be_partial=True, mlp_bias=False, sliding_windows=windows(hf))
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    config.merged = {"qkv_proj": dict(q_proj=q, k_proj=kv, v_proj=kv),
                     "gate_up_proj": dict(gate_proj=config.intermediate_size, up_proj=config.intermediate_size)}
    return config


# OLMo and Gemma 3 have norms behind the sublayers.
POST: dict[str, Any] = dict(post_norm=True, float32_norms=True, names=NAMES | {
    "attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"})


def olmo2(hf: dict[str, Any], **switches: Any) -> model.ModelConfig:
    return llama({"rms_norm_eps": 1e-5} | hf, mlp_bias=False, pre_norm=False, all_heads_norm=True, **POST | switches)


def olmo3(hf: dict[str, Any]) -> model.ModelConfig:
    hf = {"rope_theta": 5e5, "sliding_window": 4096} | hf
    return olmo2(hf, **local_layers(hf, 4, hf["rope_theta"]))


def gemma3(hf: dict[str, Any]) -> model.ModelConfig:
    hf = GEMMA3 | {key: value for key, value in hf.items() if value is not None or key == "sliding_window"}
    require("Gemma 3", hf, dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"))
            | dict(use_bidirectional_attention=False))
    if (rope := hf.get("rope_parameters")) and FULL not in rope and SLIDING not in rope:
        raise ValueError(f"Gemma 3 needs rope_parameters of {FULL!r} and {SLIDING!r}, not one for all layers")
    return llama(
        hf, mlp_bias=False, qk_norm=True, norm_offset=1.0,
        **POST | dict(names=POST["names"] | {"post_attention_layernorm": "pre_feedforward_layernorm"}),
        activation=hf["hidden_activation"],
        embedding_multiplier=hf["hidden_size"] ** 0.5,
        attention_scale=hf["query_pre_attn_scalar"] ** -0.5,
        **local_layers(hf, hf["sliding_window_pattern"], hf["rope_local_base_freq"]))


def local_layers(hf: dict[str, Any], interval: int, local_theta: float) -> dict[str, Any]:
    """Most layers have a window and a rope of their own. Each interval-th layer attends to all tokens, and has the rope
    that rope_scaling scales. The newer rope_parameters has both ropes, by the layers' kinds, or one for all layers."""
    given = hf.get("rope_parameters") or {FULL: hf.get("rope_scaling")}
    given = given if FULL in given or SLIDING in given else dict.fromkeys((FULL, SLIDING), given)
    ropes = [rope_settings(hf | {"rope_theta": theta, "rope_scaling": given.get(kind), "rope_parameters": None}, False)
             for kind, theta in ((FULL, hf["rope_theta"]), (SLIDING, local_theta))]
    is_local = windows(hf | {"sliding_window": 1}, lambda i: (i + 1) % interval != 0)  # 1 or 0, as the place in ropes
    return dict(ropes=ropes, layer_ropes=is_local, sliding_windows=[(hf["sliding_window"] or 0) * i for i in is_local])


# config.json of a multimodal Gemma 3 names only what differs from these.
GEMMA3: dict[str, Any] = dict(
    vocab_size=262208, num_attention_heads=8, num_key_value_heads=4, head_dim=256, max_position_embeddings=131072,
    hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True, query_pre_attn_scalar=256, sliding_window=4096,
    sliding_window_pattern=6, rope_theta=1e6, rope_local_base_freq=1e4)
FAMILIES: dict[str, Callable[[dict[str, Any]], model.ModelConfig]] = {
    "GPT2LMHeadModel": gpt2, "OPTForCausalLM": opt, "LlamaForCausalLM": llama, "MistralForCausalLM": mistral,
    "MinistralForCausalLM": mistral,
    "Qwen2ForCausalLM": lambda hf: qwen(hf, qkv_bias=True, o_bias=False),
    "Qwen3ForCausalLM": lambda hf: qwen({"head_dim": 128} | hf, qk_norm=True),
    "GraniteForCausalLM": granite, "SmolLM3ForCausalLM": smollm3, "Phi3ForCausalLM": phi3, "Olmo2ForCausalLM": olmo2,
    "Olmo3ForCausalLM": olmo3, "Gemma3ForCausalLM": gemma3}
# Families that are features: an architecture -> its file in nanopaged/features, and the function there
OF_FEATURES = {
    "MixtralForCausalLM": "experts.mixtral", "Qwen3MoeForCausalLM": "experts.qwen3_moe",
    "OlmoeForCausalLM": "experts.olmoe", "GraniteMoeForCausalLM": "experts.granite_moe",
    "GraniteMoeSharedForCausalLM": "experts.granite_moe", "GptOssForCausalLM": "gpt_oss.gpt_oss",
    "Ministral3ForCausalLM": "more_families.ministral3", "Exaone4ForCausalLM": "more_families.exaone4",
    "CwmForCausalLM": "more_families.cwm", "Ernie4_5ForCausalLM": "more_families.ernie4_5",
    "Ernie4_5_ForCausalLM": "more_families.ernie4_5",  # the name in its first checkpoints
    "GraniteMoeHybridForCausalLM": "more_families.granite4", "SeedOssForCausalLM": "more_families.seed_oss",
    "ArceeForCausalLM": "more_families.arcee", "Lfm2ForCausalLM": "lfm2.lfm2",
    "Lfm2MoeForCausalLM": "lfm2.lfm2_moe",
    "Qwen3NextForCausalLM": "qwen3_5.qwen3_next", "Qwen3_5ForCausalLM": "qwen3_5.qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5.qwen3_5_moe", "Gemma4ForCausalLM": "gemma4.gemma4"}
# Multimodal architectures: the model_type of a text model inside (where none is given, the first) -> the architecture
# that it equals, and its own defaults. Other parts, such as a vision tower, have names that the decoder does not have.
MULTIMODAL: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": ("Gemma3ForCausalLM", {})},
    "Gemma4ForConditionalGeneration": {"gemma4_text": ("Gemma4ForCausalLM", {})},
    "Gemma4UnifiedForConditionalGeneration": {"gemma4_unified_text": ("Gemma4ForCausalLM", dict(
        hidden_size_per_layer_input=0, max_position_embeddings=262144, sliding_window=1024))},
    "Mistral3ForConditionalGeneration": {"mistral": ("MistralForCausalLM", {"tie_word_embeddings": True}),
                                         "ministral3": ("Ministral3ForCausalLM", {"tie_word_embeddings": True})},
    "Qwen2_5_VLForConditionalGeneration": {
        "qwen2_5_vl_text": ("Qwen2ForCausalLM", dict(
            rope_theta=1e6, rms_norm_eps=1e-5, num_key_value_heads=8, max_window_layers=80))},
    "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": ("Qwen3ForCausalLM", {"rope_theta": 5e5})},
    "Qwen3VLMoeForConditionalGeneration": {"qwen3_vl_moe_text": ("Qwen3MoeForCausalLM", {"rope_theta": 5e5})},
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": ("Qwen3_5ForCausalLM", {})},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", {})}}
REFUSED = {  # a part of an architecture's name -> the reason
    "Mamba|Jamba|Zamba|Bamba|Rwkv|FalconH1|NemotronH|RecurrentGemma": "a state-space model",
    "^(Deepseek|Kimi|LongcatFlash|Glm4MoeLite)": "a mixture of experts with latent attention, as DeepSeek's",
    "Moe|MoE|Mixtral": "a mixture of experts of another form",
    "(?<!LMHead)Model$|ForMaskedLM$|ForSequenceClassification$": "an embedding model or a classifier",
}
