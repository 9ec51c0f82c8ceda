"""Makes the golden checkpoints: a tiny random model per family, with the outputs `transformers` computes from it.

Each directory beside this file with a config.json is a checkpoint in Hugging Face layout. Its config.json, and its
generation_config.json if it has one, are written by hand, as the family's published checkpoints spell them, old
spellings included. What stops a chat is often said in generation_config.json alone, and may be several ids. Made here
are the weights, and `expected.safetensors`, which holds for prompts i = 0, 1, 2 the ids `prompt.i` [length], the
float32 logits `logits.i` [length, vocab] of every prompt position, and the greedy `continuation.i` [24] (it does not
stop at EOS). The weights are random but loud: attention, positions, norms and biases all move the logits, so that an
engine that gets one of them wrong gives other tokens. A seed is kept only if the best logit leads the second by a clear
gap at every step, so that rounding cannot change the tokens. Multimodal checkpoints have a small vision tower, which no
text reaches. Those whose names end in -stacked have the tensors of transformers 5 (save_original_format=False). Those in int4 have weights of 4 bits (make_int4.py, which needs `compressed-tensors`).

These are the only files of the project that need `transformers` and `safetensors`; nothing else imports them. Two tests
compare with these packages where they are installed.

    python nanopaged/golden/make_models.py [VARIANT ...]
    python nanopaged/golden/make_models.py --reference DIR FILE.safetensors "[[1, 2], [3, 4]]" --length 300
"""
import argparse
import itertools
import json
import shutil
import tempfile
from pathlib import Path

import make_int4
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, LlamaConfig, Mxfp4Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

HERE = Path(__file__).parent
PROMPT_LENGTHS = (3, 17, 39)
CONTINUATION_LENGTH = 24
WANTED_GAP = 1e-2       # between the two best logits, in the goldens made here
NEEDED_GAP = 1e-3       # below this two correct implementations may pick different tokens
MIN_DISTINCT = 5        # tokens in the later half of a continuation; fewer means it collapsed into a short cycle
VISIBLE = 2e-3          # a config key counts as tested if changing it moves some logit by this much

STACKED = "-stacked", "qwen3.5-moe"  # published as transformers 5 has them: Qwen3.5's mixtures

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0, "beta_slow": 1.0}
BETA = YARN | {"factor": 16.0, "llama_4_scaling_beta": 1.5, "mscale": 1.0, "mscale_all_dim": 1.0,
               "original_max_position_embeddings": 8, "rope_theta": 1000.0}
SLIDING, FULL = ["sliding_attention"], ["full_attention"]
# Edits of a config.json that must change the logits: an engine that ignored the edited key would be caught.
EDITS = {
    "gpt2": [{"activation_function": "gelu"}, {"layer_norm_epsilon": 1e-5}],
    "opt": [{"activation_function": "gelu"}],
    "llama2": [{"rope_theta": 10000.0}, {"rms_norm_eps": 1e-6}],
    "llama3": [{"rope_scaling": None}, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}],
    "llama-linear-bias": [{"rope_scaling": None}],
    "smollm2": [{"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}],
    "mistral": [{"sliding_window": None}, {"sliding_window": 9}],
    "qwen2": [{"rope_theta": 10000.0}],
    "qwen2-window": [{"layer_types": FULL * 3}, {"layer_types": SLIDING * 3}, {"sliding_window": 9}],
    "qwen2-groups": [{"layer_types": FULL * 6}, {"layer_types": SLIDING * 6}, {"sliding_window": 12}],
    "qwen3": [{"rope_theta": 10000.0}],
    "granite": [{"attention_multiplier": 0.5}, {"embedding_multiplier": 1.0}, {"logits_scaling": 1.0},
                {"residual_multiplier": 1.0}, {"rms_norm_eps": 1e-6}],
    "smollm3": [{"no_rope_layers": [1, 1, 1]}, {"no_rope_layers": [0, 0, 1]}],
    "smollm3-window": [{"no_rope_layers": [1, 1, 1, 1]}, {"layer_types": FULL * 4}, {"sliding_window": 11}],
    "ministral": [{"layer_types": SLIDING * 3}, {"rope_parameters": {"rope_theta": 1000.0}},
                  {"rope_parameters": YARN | {"rope_theta": 1000.0, "attention_factor": 1.0}},
                  {"rope_parameters": YARN | {"rope_theta": 1000.0, "factor": 2.0}}],
    "phi3": [{"original_max_position_embeddings": 64}, {"sliding_window": None}, {"rope_scaling": None},
             {"partial_rotary_factor": 1.0, "rope_scaling": {
                 "long_factor": [1.0, 1.5, 3.0, 3.0], "short_factor": [1.0] * 4, "type": "longrope"}}],
    "olmo2": [{"rope_theta": 10000.0}, {"rms_norm_eps": 1e-2}],
    "olmo3": [{"rope_scaling": None}, {"layer_types": FULL * 3}, {"sliding_window": 9}],
    "gemma3": [{"query_pre_attn_scalar": 16}, {"rope_local_base_freq": 1000.0}, {"rope_scaling": None},
               {"sliding_window": 9}, {"sliding_window_pattern": 2}, {"hidden_activation": "silu"}],
    "gemma3-groups": [{"sliding_window": 14}, {"sliding_window_pattern": 2}],
    "gemma4": [{"text_config": change} for change in (
        {"final_logit_softcapping": None}, {"sliding_window": 9}, {"rms_norm_eps": 1e-2}, {"rope_parameters": {
            SLIDING[0]: {"rope_theta": 100.0, "rope_type": "default"}, FULL[0]: {
                "partial_rotary_factor": 0.5, "rope_theta": 1000.0, "rope_type": "proportional"}}})],
    "gemma4-moe": [{"text_config": {"top_k_experts": 2}}, {"text_config": {"rms_norm_eps": 1e-2}}],
    "gemma4-e2b": [{"text_config": {"sliding_window": 9}}, {"text_config": {"rms_norm_eps": 1e-2}}],
    "gemma4-unified": [{"text_config": {"sliding_window": 9}}, {"text_config": {"final_logit_softcapping": 5.0}}],
    "mixtral": [{"num_experts_per_tok": 2}, {"rope_theta": 1e6}, {"sliding_window": 9}],
    "qwen3-moe": [{"norm_topk_prob": False}, {"num_experts_per_tok": 2}, {"rope_theta": 10000.0}],
    "olmoe": [{"norm_topk_prob": True}, {"num_experts_per_tok": 2}, {"rope_theta": 10000.0}],
    "granite-moe": [{"num_experts_per_tok": 2}, {"residual_multiplier": 1.0}],
    "granite-moe-shared": [{"num_experts_per_tok": 3}, {"residual_multiplier": 1.0}],
    **dict.fromkeys(("gpt-oss", "gpt-oss-mxfp4"), [
        {"num_experts_per_tok": 2}, {"sliding_window": 9}, {"layer_types": FULL * 3}, {"swiglu_limit": 6.0},
        {"swiglu_alpha": 1.0}, {"rope_scaling": None}, {"rope_scaling": YARN}, {"rms_norm_eps": 1e-2}]),
    "qwen3-vl": [{"text_config": {"rope_theta": 10000.0}}],
    "qwen3-vl-moe": [{"text_config": {"rope_theta": 10000.0}}, {"text_config": {"num_experts_per_tok": 1}}],
    "qwen2.5-vl": [{"rope_theta": 10000.0}],
    "ministral3": [{"rope_parameters": BETA | change} for change in (
        {"llama_4_scaling_beta": 0.0}, {"llama_4_scaling_beta": 1.0}, {"rope_theta": 100.0}, {"mscale": 2.0})],
    "seed-oss": [{"rope_theta": 10000.0}],
    "cwm": [{"sliding_window": 9}, {"layer_types": FULL * 3}, {"layer_types": SLIDING * 3}, {"rope_scaling": None}],
    "exaone4": [{"sliding_window": 9}, {"layer_types": FULL * 3}, {"layer_types": SLIDING * 3}, {"rope_scaling": None}],
    "arcee": [{"hidden_act": "relu"}, {"rope_scaling": None}],
    "ernie4.5": [{"rope_theta": 10000.0}, {"rms_norm_eps": 1e-2}],
    "granite4": [{"attention_multiplier": 0.5}, {"embedding_multiplier": 1.0}, {"logits_scaling": 1.0},
                 {"residual_multiplier": 1.0}, {"rms_norm_eps": 1e-6}, {"position_embedding_type": None}],
    "lfm2": [{"rope_theta": 10000.0}, {"norm_eps": 1e-5}],
    "lfm2-moe": [{"rope_theta": 10000.0}, {"norm_eps": 1e-5}, {"num_experts_per_tok": 3}, {"norm_topk_prob": False},
                 {"routed_scaling_factor": 1.0}],
    "granite4-h": [{"attention_multiplier": 0.5}, {"residual_multiplier": 1.0}, {"rms_norm_eps": 1e-6},
                   {"time_step_limit": [0.0, 0.5]}],
    "granite4-h-moe": [{"num_experts_per_tok": 3}, {"residual_multiplier": 1.0}, {"time_step_limit": [0.0, 0.5]}],
    "qwen3-next": [{"rope_theta": 100.0}, {"partial_rotary_factor": 0.5}, {"rms_norm_eps": 1e-2},
                   {"num_experts_per_tok": 2}, {"norm_topk_prob": False}],
    "qwen3.5": [{"text_config": {"rms_norm_eps": 1e-2}}, {"text_config": {"rope_parameters": {
        "partial_rotary_factor": 0.25, "rope_theta": 5000, "rope_type": "default"}}}],
    "qwen3.5-moe": [{"text_config": {"num_experts_per_tok": 1}}, {"text_config": {"rms_norm_eps": 1e-2}}],
    "mixtral-stacked": [{"num_experts_per_tok": 1}, {"rope_parameters": {"rope_theta": 1e6}}, {"sliding_window": 9}],
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


def read_json(path):
    return json.loads(path.read_text())


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


def edited(config, edit):
    """The config.json with other values; those of text_config are added to it."""
    return config | edit | ({"text_config": config["text_config"] | edit["text_config"]} if "text_config" in edit else {})


def auto_class(config):
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def eos_ids(directory):
    """Every id that ends a sequence, by either of the config files."""
    configs = [read_json(file) for file in directory.glob("*config.json")]
    values = [part.get("eos_token_id", []) for config in configs for part in (config, config.get("text_config", {}))]
    return {token for value in values for token in (value if isinstance(value, list) else [value])}


def random_weight(name, shape, hidden_size, generator):
    """One random weight, loud enough to matter: norm weights around 1, everything else around 0."""
    noise = torch.randn(shape, generator=generator)
    if name.endswith("sinks"):
        return 1.0 + 1.5 * noise
    if name.endswith("linear_attn.A_log"):
        return noise - 2.0  # some heads forget within a token, some keep what hundreds of tokens have said
    if name.endswith("experts.gate_up_proj"):
        return 4.0 / hidden_size**0.5 * noise  # so that gpt-oss clamps some
    if name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):  # Gemma 4's
        return 1.0 + 0.3 * noise
    if "norm" in name or "ln_" in name:
        return 0.3 * noise + (1.0 if name.endswith("weight") else 0.0)
    if name.endswith("bias"):
        return 0.3 * noise
    if any(part in name for part in ("embed", "wte", "wpe", "lm_head")):
        return 0.5 * noise
    if "conv" in name and len(shape) == 3:
        return 0.8 * noise
    return 1.4 / hidden_size**0.5 * noise


def random_state_dict(directory, seed):
    """Random weights under the names and in the dtype that the family's published checkpoints use."""
    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    shapes |= {name: p.shape for name, p in model.named_buffers() if name.endswith(("expert_bias", "layer_scalar"))}
    generator = torch.Generator().manual_seed(seed)
    text, spelled = config.get_text_config(), read_json(directory / "config.json").get("text_config", {})
    unsaid = {"gpt2": torch.float16, "gpt-oss-mxfp4": torch.bfloat16}  # their config.json says nothing of it
    dtype = unsaid.get(directory.name) or config.dtype or torch.float32
    dtype = getattr(torch, spelled["dtype"]) if "dtype" in spelled else dtype
    weights = {name: random_weight(name, shape, text.hidden_size, generator).to(
        torch.float32 if name.endswith("expert_bias") else dtype) for name, shape in shapes.items()}
    if directory.name == "gpt2-bare":
        # The Hub's gpt2 was saved from the model without its head, with its causal masks among the weights.
        weights = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
        mask = torch.ones(config.n_positions, config.n_positions).tril()[None, None]
        weights |= {f"h.{layer}.attn.bias": mask.clone() for layer in range(config.n_layer)}
    if config.model_type == "gpt_oss":  # published as transformers has them
        return in_mxfp4(weights, generator) if "quantization_config" in config.to_dict() else weights
    if "num_experts_per_tok" in text.to_dict() or text is not config:
        # transformers 5 has other names, and stores the published ones
        with tempfile.TemporaryDirectory() as folder:
            model.load_state_dict(weights, strict=False, assign=True)
            model.tie_weights()
            model.save_pretrained(folder, save_original_format=not directory.name.endswith(STACKED))
            weights = load_file(Path(folder, "model.safetensors"))
    if directory.parent.name == "int4":
        return make_int4.quantize(read_json(directory / "config.json")["quantization_config"], weights)
    if directory.name == "qwen3-vl-moe":  # its published experts are [experts, in, out], which transformers 5 turns
        weights = {name: weight.transpose(1, 2).contiguous() if ".experts." in name else weight
                   for name, weight in weights.items()}
    return weights


def in_mxfp4(weights, generator):
    """The weights, with random codes and scales in place of the experts' matrices [experts, in, out]."""
    result = {}
    for name, weight in weights.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            result[name] = weight
            continue
        count, size_in, size_out = weight.shape
        shape, loudest = (count, size_out, size_in // 32), 126 if "gate_up" in name else 125
        result[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator).byte()
        result[f"{name}_scales"] = torch.randint(loudest - 4, loudest, shape, generator=generator).byte()
    return result


def load_reference(directory):
    """The checkpoint in `transformers`, in float32 whatever its stored dtype. Refuses weights that do not fit it. Of
    those in int4 the weights are dequantised before."""
    config = read_json(Path(directory, "config.json"))
    is_quantized = config.get("quantization_config") is not None
    if is_quantized and config["quantization_config"]["quant_method"] != "mxfp4":
        with tempfile.TemporaryDirectory() as other:
            weights = load_file(Path(directory, "model.safetensors"))
            weights = make_int4.dequantize(config["quantization_config"], weights)
            save_file({name: weight.contiguous() for name, weight in weights.items()}, Path(other, "model.safetensors"),
                      metadata={"format": "pt"})
            write_json(Path(other, "config.json"), config | {"quantization_config": None})
            return load_reference(other)
    model, report = auto_class(AutoConfig.from_pretrained(directory)).from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True,
        quantization_config=Mxfp4Config(dequantize=True) if is_quantized else None)
    problems = {kind: keys for kind, keys in report.items() if keys}
    if problems:
        raise ValueError(f"{directory}: transformers does not read these weights cleanly: {problems}")
    return model.eval()


@torch.inference_mode()
def greedy(model, prompt, length):
    """Greedy continuation of `length` tokens, logits [len(prompt), vocab], smallest gap between the two best logits."""
    tokens = [*prompt]
    for _ in range(length):
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
        tokens.append(logits[-1].argmax().item())
    best = logits[len(prompt) - 1:].topk(2).values
    return tokens[len(prompt):], logits[:len(prompt)].clone(), (best[:, 0] - best[:, 1]).min().item()


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


def check_config_is_read(directory, tensors):
    """The old spelling means what transformers' own spelling means, and every key we rely on changes the logits."""
    def difference(config):
        return (logits_with_config(directory, config, tensors["prompt.2"].tolist()) - tensors["logits.2"]).abs().max()

    if (moved := difference(AutoConfig.from_pretrained(directory).to_dict())) > 1e-4:
        raise ValueError(f"{directory}: transformers' own spelling of config.json gives other logits ({moved:.1e})")
    for edit in EDITS.get(directory.name, []):
        if (moved := difference(edited(read_json(directory / "config.json"), edit))) < VISIBLE:
            raise ValueError(f"{directory}: {edit} hardly changes the logits ({moved:.1e}): no test would see it")


def make_variant(directory):
    """Writes one golden directory, with the first seed whose continuations are varied and clearly decided."""
    eos = eos_ids(directory)
    vocab_size = AutoConfig.from_pretrained(directory).get_text_config().vocab_size
    allowed = torch.tensor([i for i in range(vocab_size) if i not in eos])
    for seed in itertools.count():
        generator = torch.Generator().manual_seed(seed)
        prompts = [allowed[torch.randint(len(allowed), (n,), generator=generator)].tolist() for n in PROMPT_LENGTHS]
        save_file(random_state_dict(directory, seed), directory / "model.safetensors", metadata={"format": "pt"})
        tensors, gap = expectations(directory, prompts, CONTINUATION_LENGTH)
        continuations = [tensors[f"continuation.{i}"].tolist() for i in range(len(prompts))]
        varied = all(len(set(tokens[len(tokens) // 2:])) >= MIN_DISTINCT for tokens in continuations)
        if varied and gap >= WANTED_GAP and not eos & set(sum(continuations, [])):
            break
    check_config_is_read(directory, tensors)
    save_expectations(directory / "expected.safetensors", tensors, gap)
    print(f"{directory.name:18} seed {seed:3}  smallest gap {gap:.4f}")


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


def main():
    variants = sorted(str(file.parent.relative_to(HERE)) for place in ("*", "int4/*")
                      for file in HERE.glob(f"{place}/config.json"))
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=f"all unless given: {', '.join(variants)}")
    parser.add_argument("--reference", nargs=3, metavar=("DIR", "FILE", "PROMPTS"),
                        help="a checkpoint to compute expectations for, where to write them, and token ids in JSON")
    parser.add_argument("--length", type=int, default=CONTINUATION_LENGTH, help="greedy tokens of --reference")
    args = parser.parse_args()
    torch.set_num_threads(1)    # the same sums in the same order on every machine with as many cores or more
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if args.reference:
        directory, file, prompts = args.reference
        return make_reference(directory, file, args.length, json.loads(prompts))
    if not args.variants:
        make_ropes(HERE / "ropes" / "expected.json")
    for variant in args.variants or variants:
        make_variant(HERE / variant)


if __name__ == "__main__":
    main()
