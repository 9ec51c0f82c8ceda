"""Makes the golden checkpoints: a tiny random model per family, with the outputs `transformers` computes from it.

Each directory beside this file is a checkpoint in Hugging Face layout plus `expected.safetensors`, which holds for
prompts i = 0, 1, 2 the ids `prompt.i` [length], the float32 logits `logits.i` [length, vocab] of every prompt position,
and the greedy `continuation.i` [24] (it does not stop at EOS). The weights are random but loud: attention, positions,
norms and biases all move the logits, so that an engine that gets one of them wrong gives other tokens. A seed is kept
only if the best logit leads the second by a clear gap at every step, so that rounding cannot change the tokens.

The config.json texts below are spelled as the families' published checkpoints spell them, old spellings included.
This is the one file of the project that needs `transformers` and `safetensors`; nothing else imports it. Two tests
compare with these packages where they are installed.

    python nanopaged/golden/make_models.py [VARIANT ...]
    python nanopaged/golden/make_models.py --reference DIR --output FILE.safetensors --length 300 --token-ids "1,2;3,4"
"""
import argparse
import itertools
import json
import shutil
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

HERE = Path(__file__).parent
PROMPT_LENGTHS = (3, 17, 39)
CONTINUATION_LENGTH = 24
WANTED_GAP = 1e-2       # between the two best logits, in the goldens made here
NEEDED_GAP = 1e-3       # below this two correct implementations may pick different tokens
MIN_DISTINCT = 5        # tokens in the later half of a continuation; fewer means it collapsed into a short cycle
VISIBLE = 2e-3          # a config key counts as tested if changing it moves some logit by this much

GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new",
    "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "initializer_range": 0.02, "layer_norm_epsilon": 1e-3,
    "n_ctx": 68, "n_positions": 68, "n_embd": 32, "n_head": 2, "n_layer": 2, "vocab_size": 201,
    "bos_token_id": 200, "eos_token_id": 200,
}
OPT = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "activation_function": "relu",
    "attention_dropout": 0.0, "dropout": 0.1, "layerdrop": 0.0, "init_std": 0.02, "do_layer_norm_before": True,
    "_remove_final_layer_norm": False, "ffn_dim": 64, "hidden_size": 32, "word_embed_proj_dim": 32,
    "max_position_embeddings": 72, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 200,
    "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1, "prefix": "</s>", "torch_dtype": "float16",
    "use_cache": True,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "initializer_range": 0.02,
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-2, "vocab_size": 200,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "use_cache": True,
}
LLAMA3_SCALING = {
    "rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 32,
}
MISTRAL = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu", "initializer_range": 0.02,
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0, "sliding_window": 8, "vocab_size": 200, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "attention_dropout": 0.0,
    "initializer_range": 0.02, "hidden_size": 56, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 128, "max_window_layers": 2,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "sliding_window": 128, "use_sliding_window": False,
    "vocab_size": 200, "bos_token_id": 198, "eos_token_id": 199, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "use_cache": True,
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "attention_dropout": 0.0,
    "hidden_act": "silu", "initializer_range": 0.02, "hidden_size": 32, "intermediate_size": 40,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 128, "max_window_layers": 2, "rms_norm_eps": 1e-6, "rope_scaling": None,
    "rope_theta": 1000000.0, "sliding_window": None, "use_sliding_window": False, "vocab_size": 200,
    "bos_token_id": 198, "eos_token_id": 199, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True,
}

GRANITE = {
    "architectures": ["GraniteForCausalLM"], "model_type": "granite", "attention_bias": False, "attention_dropout": 0.1,
    "attention_multiplier": 0.2, "embedding_multiplier": 3.0, "hidden_act": "silu", "hidden_size": 40,
    "initializer_range": 0.02, "intermediate_size": 24, "logits_scaling": 1.5, "max_position_embeddings": 128,
    "mlp_bias": False, "num_attention_heads": 10, "num_hidden_layers": 2, "num_key_value_heads": 2,
    "residual_multiplier": 0.4, "rms_norm_eps": 1e-2, "rope_scaling": None, "rope_theta": 1000.0, "vocab_size": 200,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True,
}
SMOLLM3 = {
    "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "attention_bias": False, "attention_dropout": 0.0,
    "hidden_act": "silu", "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 40,
    "layer_types": ["full_attention"] * 3, "max_position_embeddings": 128, "max_window_layers": 28, "mlp_bias": False,
    "no_rope_layer_interval": 4, "no_rope_layers": [1, 0, 1], "num_attention_heads": 4, "num_hidden_layers": 3,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000.0, "sliding_window": None,
    "use_sliding_window": False, "vocab_size": 200, "bos_token_id": 198, "eos_token_id": 199,
    "pad_token_id": 199, "torch_dtype": "bfloat16", "use_cache": True,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0, "beta_slow": 1.0}
MINISTRAL = MISTRAL | {
    "architectures": ["MinistralForCausalLM"], "model_type": "ministral", "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": YARN | {"rope_theta": 1000.0},
}
del MINISTRAL["rope_theta"]
PHI3 = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "attention_bias": False, "attention_dropout": 0.0,
    "embd_pdrop": 0.0, "hidden_act": "silu", "hidden_size": 48, "initializer_range": 0.02, "intermediate_size": 40,
    "max_position_embeddings": 128, "num_attention_heads": 6, "num_hidden_layers": 2, "num_key_value_heads": 2,
    "original_max_position_embeddings": 2, "partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rms_norm_eps": 1e-5,
    "rope_scaling": {"long_factor": [1.0, 1.5, 3.0], "short_factor": [1.0, 1.0, 1.0], "type": "longrope"},
    "rope_theta": 100.0, "sliding_window": 24, "vocab_size": 200, "bos_token_id": 198, "eos_token_id": 199,
    "pad_token_id": 199, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
}
OLMO2 = {
    "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "attention_bias": False, "attention_dropout": 0.0,
    "hidden_act": "silu", "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 40,
    "max_position_embeddings": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000.0, "vocab_size": 200, "bos_token_id": 199,
    "eos_token_id": 199, "pad_token_id": 198, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True,
}
OLMO3 = OLMO2 | {
    "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 8,
    "rope_theta": 500000, "rope_scaling": YARN | {"attention_factor": 1.3},
}
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attention_bias": False,
    "attention_dropout": 0.0, "attn_logit_softcapping": None, "cache_implementation": "hybrid",
    "final_logit_softcapping": None, "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 40,
    "initializer_range": 0.02, "intermediate_size": 24, "max_position_embeddings": 128, "num_attention_heads": 4,
    "num_hidden_layers": 3, "num_key_value_heads": 2, "query_pre_attn_scalar": 40, "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 100.0, "rope_scaling": {"factor": 4.0, "rope_type": "linear"}, "rope_theta": 1000.0,
    "sliding_window": 8, "sliding_window_pattern": 3, "vocab_size": 200, "bos_token_id": 2,
    "eos_token_id": [1, 106], "pad_token_id": 0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True,
}

# variant -> config.json, the dtype the weights are stored in, and config edits that must change the logits: an engine
# that ignored the edited key would be caught by this variant.
VARIANTS = {
    "gpt2": (GPT2, torch.float16, [{"activation_function": "gelu"}, {"layer_norm_epsilon": 1e-5}]),
    "gpt2-bare": (GPT2 | {"n_inner": 64}, torch.float32, []),
    "opt": (OPT, torch.float16, [{"activation_function": "gelu"}]),
    "llama2": (
        LLAMA | {"pretraining_tp": 1, "rope_theta": 500.0, "rope_scaling": None, "torch_dtype": "float16"},
        torch.float16, [{"rope_theta": 10000.0}, {"rms_norm_eps": 1e-6}]),
    "llama3": (
        LLAMA | {"num_attention_heads": 4, "head_dim": 16, "attention_bias": False, "mlp_bias": False,
                 "rope_theta": 500.0, "rope_scaling": LLAMA3_SCALING, "torch_dtype": "bfloat16"},
        torch.bfloat16, [{"rope_scaling": None}, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}]),
    "llama-linear-bias": (
        LLAMA | {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True, "rope_theta": 10000.0,
                 "rope_scaling": {"type": "linear", "factor": 4.0}, "torch_dtype": "float16"},
        torch.float16, [{"rope_scaling": None}]),
    "smollm2": (
        LLAMA | {"hidden_size": 48, "intermediate_size": 32, "num_attention_heads": 6, "num_key_value_heads": 2,
                 "head_dim": 8, "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
                 "tie_word_embeddings": True, "dtype": "bfloat16"},
        torch.bfloat16, [{"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}]),
    "mistral": (MISTRAL, torch.bfloat16, [{"sliding_window": None}, {"sliding_window": 9}]),
    "qwen2": (QWEN2, torch.bfloat16, [{"rope_theta": 10000.0}]),
    "qwen2-window": (
        QWEN2 | {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 3,
                 "max_window_layers": 1,
                 "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
                 "rope_theta": 10000.0, "sliding_window": 8, "use_sliding_window": True},
        torch.bfloat16,
        [{"layer_types": ["full_attention"] * 3}, {"layer_types": ["sliding_attention"] * 3}, {"sliding_window": 9}]),
    "qwen3": (QWEN3, torch.bfloat16, [{"rope_theta": 10000.0}]),
    "granite": (GRANITE, torch.bfloat16, [
        {"attention_multiplier": 0.5}, {"embedding_multiplier": 1.0}, {"logits_scaling": 1.0},
        {"residual_multiplier": 1.0}, {"rms_norm_eps": 1e-6}]),
    "smollm3": (SMOLLM3, torch.bfloat16, [{"no_rope_layers": [1, 1, 1]}, {"no_rope_layers": [0, 0, 1]}]),
    "ministral": (MINISTRAL, torch.bfloat16, [
        {"layer_types": ["sliding_attention"] * 3}, {"rope_parameters": {"rope_theta": 1000.0}},
        {"rope_parameters": YARN | {"rope_theta": 1000.0, "attention_factor": 1.0}},
        {"rope_parameters": YARN | {"rope_theta": 1000.0, "factor": 2.0}}]),
    "phi3": (PHI3, torch.bfloat16, [
        {"original_max_position_embeddings": 64}, {"sliding_window": None}, {"rope_scaling": None},
        {"partial_rotary_factor": 1.0,
         "rope_scaling": {"long_factor": [1.0, 1.5, 3.0, 3.0], "short_factor": [1.0] * 4, "type": "longrope"}}]),
    "olmo2": (OLMO2, torch.bfloat16, [{"rope_theta": 10000.0}, {"rms_norm_eps": 1e-2}]),
    "olmo3": (OLMO3, torch.bfloat16, [
        {"rope_scaling": None}, {"layer_types": ["full_attention"] * 3}, {"sliding_window": 9}]),
    "gemma3": (GEMMA3, torch.bfloat16, [
        {"query_pre_attn_scalar": 16}, {"rope_local_base_freq": 1000.0}, {"rope_scaling": None}, {"sliding_window": 9},
        {"sliding_window_pattern": 2}, {"hidden_activation": "silu"}]),
}
# Settings of rope, with the longest text that the engine accepts. transformers makes a table for a text of this length.
ROPES = [
    (dict(rope_type="default"), 40), (dict(rope_type="linear", factor=3.0), 40),
    (dict(rope_type="llama3", factor=8.0, high_freq_factor=4.0, low_freq_factor=1.0,
          original_max_position_embeddings=32), 40),
    (dict(rope_type="dynamic", factor=2.0), 64), (dict(rope_type="dynamic", factor=2.0), 100),
    (YARN, 40), (YARN | dict(attention_factor=1.25, truncate=False), 40),
    (YARN | dict(mscale=1.0, mscale_all_dim=0.7), 40), (YARN | dict(beta_fast=None, factor=1.0), 40),
    *((dict(rope_type="longrope", short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5], original_max_position_embeddings=32,
            long_factor=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], partial_rotary_factor=0.75, **more), length)
      for length, more in ((32, {}), (33, {}), (33, dict(factor=8.0)), (33, dict(attention_factor=1.3)))),
]
# What stops a chat is often said in generation_config.json alone, and may be several ids.
GENERATION_CONFIGS = {
    "llama3": {"bos_token_id": 1, "do_sample": True, "eos_token_id": [2, 5, 7], "temperature": 0.6, "top_p": 0.9},
    "smollm2": {"bos_token_id": 1, "eos_token_id": 2},
    "gemma3": {"bos_token_id": 2, "do_sample": True, "eos_token_id": [1, 106], "pad_token_id": 0, "top_k": 64},
    "qwen2": {"bos_token_id": 198, "do_sample": True, "eos_token_id": [197, 198], "pad_token_id": 198, "top_k": 20},
    "qwen3": {"bos_token_id": 198, "do_sample": True, "eos_token_id": [197, 198], "pad_token_id": 198, "top_k": 20},
}


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


def eos_ids(variant):
    """Every id that ends a sequence of this variant, by either of its config files."""
    sources = VARIANTS[variant][0], GENERATION_CONFIGS.get(variant, {})
    values = [source.get("eos_token_id", []) for source in sources]
    return {token for value in values for token in (value if isinstance(value, list) else [value])}


def random_weight(name, shape, hidden_size, generator):
    """One random weight, loud enough to matter: norm weights around 1, everything else around 0."""
    noise = torch.randn(shape, generator=generator)
    if "norm" in name or "ln_" in name:
        return 0.3 * noise + (1.0 if name.endswith("weight") else 0.0)
    if name.endswith("bias"):
        return 0.3 * noise
    if any(part in name for part in ("embed", "wte", "wpe", "lm_head")):
        return 0.5 * noise
    return 1.4 / hidden_size**0.5 * noise


def random_state_dict(variant, directory, seed):
    """Random weights under the names and in the dtype that the variant's published checkpoints use."""
    _, dtype, _ = VARIANTS[variant]
    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in AutoModelForCausalLM.from_config(config).named_parameters()}
    generator = torch.Generator().manual_seed(seed)
    weights = {name: random_weight(name, shape, config.hidden_size, generator).to(dtype)
               for name, shape in shapes.items()}
    if variant == "gpt2-bare":
        # The Hub's gpt2 was saved from the model without its head, with its causal masks among the weights.
        weights = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
        mask = torch.ones(config.n_positions, config.n_positions).tril()[None, None]
        weights |= {f"h.{layer}.attn.bias": mask.clone() for layer in range(config.n_layer)}
    return weights


def load_reference(directory):
    """The checkpoint in `transformers`, in float32 whatever its stored dtype. Refuses weights that do not fit it."""
    model, report = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    problems = {kind: keys for kind, keys in report.items() if keys}
    if problems:
        raise ValueError(f"{directory}: transformers does not read these weights cleanly: {problems}")
    return model.eval()


@torch.inference_mode()
def greedy(model, prompt, length):
    """Greedy continuation of `length` tokens, logits [len(prompt), vocab], smallest gap between the two best logits.

    The continuation is grown with transformers' KV cache and then proven without it: one forward pass over the whole
    text must prefer each of its tokens, and that pass gives the logits and the gaps.
    """
    step, cache, continuation = torch.tensor([prompt]), None, []
    for _ in range(length):
        output = model(step, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        step = output.logits[:, -1:].argmax(-1)
        continuation.append(step.item())
    logits = model(torch.tensor([prompt + continuation[:-1]]), use_cache=False).logits[0]
    best = logits[len(prompt) - 1:].topk(2)
    if best.indices[:, 0].tolist() != continuation:
        return continuation, logits[:len(prompt)].clone(), 0.0
    return continuation, logits[:len(prompt)].clone(), (best.values[:, 0] - best.values[:, 1]).min().item()


def expectations(directory, prompts, length):
    """(tensors of an expectation file, smallest gap over all prompts and steps) for any checkpoint directory."""
    model = load_reference(directory)
    tensors, gaps = {}, []
    for i, prompt in enumerate(prompts):
        continuation, logits, gap = greedy(model, prompt, length)
        tensors[f"prompt.{i}"] = torch.tensor(prompt)
        tensors[f"continuation.{i}"] = torch.tensor(continuation)
        tensors[f"logits.{i}"] = logits
        gaps.append(gap)
    return tensors, min(gaps)


def save_expectations(path, tensors, gap):
    # One entry only: safetensors writes metadata in random order, and the same run should give the same bytes.
    save_file(tensors, path, metadata={"made_by": f"transformers {transformers.__version__}, smallest gap {gap:.2e}"})


def logits_with_config(directory, config, prompt):
    """Logits [len(prompt), vocab] of the checkpoint's weights under another config.json."""
    with tempfile.TemporaryDirectory() as other:
        shutil.copy(directory / "model.safetensors", other)
        write_json(Path(other, "config.json"), config)
        with torch.inference_mode():
            return load_reference(other)(torch.tensor([prompt])).logits[0]


def check_config_is_read(variant, directory, tensors):
    """The old spelling means what transformers' own spelling means, and every key we rely on changes the logits."""
    config, _, edits = VARIANTS[variant]
    prompt, expected = tensors["prompt.2"].tolist(), tensors["logits.2"]
    own_spelling = AutoConfig.from_pretrained(directory).to_dict()
    difference = (logits_with_config(directory, own_spelling, prompt) - expected).abs().max()
    if difference > 1e-5:
        raise ValueError(f"{variant}: transformers' own spelling of config.json gives other logits ({difference:.1e})")
    for edit in edits:
        difference = (logits_with_config(directory, config | edit, prompt) - expected).abs().max()
        if difference < VISIBLE:
            raise ValueError(f"{variant}: {edit} hardly changes the logits ({difference:.1e}): no test would see it")


def make_variant(variant, directory):
    """Writes one golden directory, with the first seed whose continuations are varied and clearly decided."""
    config, _, _ = VARIANTS[variant]
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", config)
    if variant in GENERATION_CONFIGS:
        write_json(directory / "generation_config.json", GENERATION_CONFIGS[variant])
    allowed = torch.tensor([token for token in range(config["vocab_size"]) if token not in eos_ids(variant)])
    for seed in itertools.count():
        generator = torch.Generator().manual_seed(seed)
        prompts = [allowed[torch.randint(len(allowed), (n,), generator=generator)].tolist() for n in PROMPT_LENGTHS]
        weights = random_state_dict(variant, directory, seed)
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        tensors, gap = expectations(directory, prompts, CONTINUATION_LENGTH)
        continuations = [tensors[f"continuation.{i}"].tolist() for i in range(len(prompts))]
        varied = all(len(set(tokens[len(tokens) // 2:])) >= MIN_DISTINCT for tokens in continuations)
        if varied and gap >= WANTED_GAP and not eos_ids(variant) & set(sum(continuations, [])):
            break
    check_config_is_read(variant, directory, tensors)
    save_expectations(directory / "expected.safetensors", tensors, gap)
    size = sum(file.stat().st_size for file in directory.iterdir())
    distinct = min(len(set(tokens)) for tokens in continuations)
    print(f"{variant:18} seed {seed:3}  smallest gap {gap:.4f}  at least {distinct:2} distinct tokens  {size:7,} bytes")


def make_ropes(file):
    """Writes the ropes' settings, with the angle per position of each pair, and the factor of cosines and sines."""
    entries = []
    for settings, length in ROPES:
        config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=64,
                             rope_parameters={"rope_theta": 1000.0, **settings})
        if settings["rope_type"] == "default":
            angles, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
        else:
            angles, factor = ROPE_INIT_FUNCTIONS[settings["rope_type"]](config, "cpu", seq_len=length)
        entries.append(dict(settings=settings, length=length, angles=angles.tolist(), factor=factor))
    file.parent.mkdir(exist_ok=True)
    write_json(file, entries)


def make_reference(directory, output, length, prompts):
    """Writes an expectation file for an existing checkpoint; refuses one whose tokens rounding could change."""
    tensors, gap = expectations(directory, prompts, length)
    print(f"smallest gap between the two best logits: {gap:.2e}")
    if gap < NEEDED_GAP:
        raise SystemExit(f"error: that is below {NEEDED_GAP}, where rounding may pick another token; choose other "
                         f"prompts or a shorter --length. {output} was not written")
    save_expectations(output, tensors, gap)


def parse_prompts(text):
    """"1,2,3;4,5,6" -> [[1, 2, 3], [4, 5, 6]]"""
    return [[int(token) for token in prompt.split(",")] for prompt in text.split(";")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=f"all unless given: {', '.join(VARIANTS)}")
    parser.add_argument("--reference", type=Path, metavar="DIR", help="a checkpoint to compute expectations for")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where --reference writes them")
    parser.add_argument("--length", type=int, default=CONTINUATION_LENGTH, help="greedy tokens of --reference")
    parser.add_argument("--token-ids", type=parse_prompts, metavar='"1,2;3,4"', help="the prompts of --reference")
    args = parser.parse_args()
    torch.set_num_threads(1)    # the same sums in the same order on every machine with as many cores or more
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if args.reference:
        if not args.output or not args.token_ids:
            parser.error("--reference needs --output and --token-ids")
        return make_reference(args.reference, args.output, args.length, args.token_ids)
    if unknown := set(args.variants) - set(VARIANTS):
        parser.error(f"unknown variant {', '.join(sorted(unknown))}; there are {', '.join(VARIANTS)}")
    if not args.variants:
        make_ropes(HERE / "ropes" / "expected.json")
    for variant in args.variants or VARIANTS:
        make_variant(variant, HERE / variant)


if __name__ == "__main__":
    main()
