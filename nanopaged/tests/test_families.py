"""Model families: configurations that cannot be run, and the weights of checkpoints that differ from their family's."""
import json
import math
import statistics
from functools import partial

import pytest
import torch

from nanopaged import SamplingParams
from nanopaged.rope import make_rope_table
from nanopaged.tests.helpers import (
    GEMMA4,
    GOLDEN,
    GREEDY,
    MIXTURES,
    PROMPT,
    WITH_STATES,
    assert_golden,
    expectations,
    load,
    prompt_logits,
    relative_error,
    rewritten,
    stack_experts,
    tokens_of,
    use_modules,
)
from nanopaged.tests.without import is_there
from nanopaged.weights.checkpoint import read_tensors
from nanopaged.weights.families import read_model_config

SECOND = slice(1, 2)  # of the prompts, where one is enough


# ---- Configurations

LLAMA = dict(architectures=["LlamaForCausalLM"], vocab_size=100, hidden_size=32, num_hidden_layers=1,
             num_attention_heads=4, num_key_value_heads=4, intermediate_size=64, max_position_embeddings=128)


@pytest.mark.parametrize("change, message", [
    (dict(architectures=["BloomForCausalLM"]), "unknown architecture 'BloomForCausalLM'; known are GPT2LMHeadModel, "),
    *((dict(architectures=[name]), f"{name} is {reason}.*, which nanopaged does not run; known are GPT2LMH")
      for name, reason in dict(
          MambaForCausalLM="a state-space model",
          DeepseekV3ForCausalLM="a mixture of experts with latent attention, as DeepSeek's",
          Qwen2MoeForCausalLM="a mixture of experts of another form", BertModel="an embedding model",
          Gemma3TextModel="an embedding model").items()),
    *((dict(architectures=[name], text_config=text), "multimodal model whose text model is not among these; known")
      for name, text in {"LlavaForConditionalGeneration": {}, "Qwen2AudioForConditionalGeneration": {},
                         "Mistral3ForConditionalGeneration": {"model_type": "mistral4"}}.items()),
    *((dict(architectures=["GraniteMoeHybridForCausalLM"], layer_types=["mamba"], **change), "no layer with attention")
      for change in ({}, dict(num_local_experts=0))),
    (dict(quantization_config={"quant_method": "hqq"}), "quantised with HQQ; use one with float32, float16 or"),
    (dict(rope_scaling={"rope_type": "yarn", "factor": 4}), "'yarn' needs original_max_position_embeddings"),
    (dict(rope_scaling={"rope_type": "cubic"}), "rope type 'cubic' is not supported; supported are default, linear, "),
    (dict(architectures=["Ministral3ForCausalLM"], rope_parameters=dict(rope_type="default", llama_4_scaling_beta=0.1)),
     "rope type 'default' needs original_max_position_embeddings"),
    (dict(rope_scaling={"rope_type": "dynamic", "factor": 1e9}), "max_position_embeddings must be .* not 128000000000"),
    (dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5 is not supported in this family"),
    (dict(architectures=["Phi3ForCausalLM"], partial_rotary_factor=0.4), "3 numbers of a head rotate; expected an eve"),
    (dict(architectures=["Phi3ForCausalLM"], max_position_embeddings=8192,
          rope_scaling=dict(type="su", short_factor=[1.0] * 4, long_factor=[1.0] * 3)), "no Phi3ForCausalLM can have"),
    (dict(architectures=["SmolLM3ForCausalLM"], num_hidden_layers=3, no_rope_layers=[1, 0]), "no SmolLM3ForCausalLM"),
    (dict(architectures=["GraniteForCausalLM"], logits_scaling=0), "logits_scaling must be a number above 0"),
    (dict(architectures=["Gemma3ForCausalLM"], final_logit_softcapping=30.0), "final_logit_softcapping=30.0 is not"),
    (dict(architectures=["Gemma3ForCausalLM"], rope_parameters=dict(rope_type="default", rope_theta=5.0)),
     "Gemma 3 needs rope_parameters of 'full_attention' and 'sliding_attention', not one for all layers"),
    (dict(rope_parameters=dict(full_attention=dict(rope_theta=5.0))), "of the kind 'full_attention' are not supported"),
    (dict(architectures=["Olmo3ForCausalLM"], layer_types=["linear_attention"]), "the kind 'linear_attention' are not"),
    (dict(num_attention_heads=4, num_key_value_heads=3), "4 query heads cannot share 3 kv heads"),
    (dict(head_dim=7), "head_dim 7 is odd"),
    (dict(hidden_act="mish"), "unknown activation 'mish'"),
    (dict(torch_dtype="float8_e4m3fn"), "weights of type float8_e4m3fn are not supported"),
    (dict(quantization_config="awq"), "quantised with AWQ"),
    (dict(num_hidden_layers="2"), "num_layers must be an integer from 1 to 1024, not '2'"),
    (dict(num_hidden_layers=0), "not 0"), (dict(intermediate_size=None), "not None"),
    (dict(rope_scaling="linear"), "no LlamaForCausalLM can have"),
    (dict(rope_theta=None), "rope_theta must be a number above 0 and below 1e15, not None"),
    (dict(rope_scaling={"rope_type": "linear", "factor": "x"}), "factor must be a number above 0 .*, not 'x'"),
    (dict(rms_norm_eps=-1), "epsilon must be a number above 0 .*, not -1"), (dict(rms_norm_eps=math.inf), "not inf"),
    (dict(architectures=True), "unknown architecture True"), (dict(architectures=[[]]), r"unknown architecture \[\]"),
    (dict(hidden_act=[]), r"unknown activation \[\]"),
    (dict(architectures=["MistralForCausalLM"], sliding_window=-1), r"windows of \[-1\]"),
    (dict(architectures=["Qwen2ForCausalLM"], layer_types=["full_attention"] * 2),
     r"each of the 1 layers, not windows of \[0, 0\]"),
    *((dict(architectures=[architecture], num_hidden_layers=2**31), "num_layers must be .* not 2147483648")
      for architecture in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")),
    *((LLAMA | {key: 10**18}, f"{name} must be .* not 10{'0' * 17}")
      for key, name in dict(head_dim="head_dim", hidden_size="hidden_size", vocab_size="vocab_size",
                            intermediate_size="intermediate_size", num_attention_heads="num_heads",
                            max_position_embeddings="max_position_embeddings").items()),
    *((dict(architectures=[architecture], **change), message) for architecture, change, message in (
        ("MixtralForCausalLM", dict(num_experts_per_tok=2), "must have 'num_local_experts', which is missing"),
        ("MixtralForCausalLM", dict(num_local_experts=10**9), "num_local_experts must be .* not 1000000000"),
        ("MixtralForCausalLM", dict(num_experts="5"), "num_experts must be .* not '5'"),
        ("MixtralForCausalLM", dict(num_local_experts=4, num_experts_per_tok=5), "per_tok must be .* not 5"),
        ("OlmoeForCausalLM", dict(clip_qkv=8.0), "OLMoE with clip_qkv=8.0 is not supported"),
        ("Qwen3MoeForCausalLM", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size="x"), "not 'x'"),
        ("Qwen3MoeForCausalLM", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
                                     decoder_sparse_step=0), "no Qwen3MoeForCausalLM can have"))),
    (dict(max_position_embeddings=10**9), "max_position_embeddings must be an integer from 1 to 8388608"),
    (dict(rope_theta=10**400), "rope_theta must be .* below 1e15"),
    (dict(architectures=["MistralForCausalLM"], sliding_window=10**29), r"below 2\^31.* windows of \[10"),
])
def test_unsupported_configurations_get_a_sentence(change, message):
    with pytest.raises(ValueError, match=message):
        read_model_config(LLAMA | change)


def test_keys_that_are_null_or_missing():
    assert read_model_config(LLAMA | dict(quantization_config=None)) == read_model_config(LLAMA)
    with pytest.raises(ValueError, match="must have 'intermediate_size'"):
        read_model_config({key: value for key, value in LLAMA.items() if key != "intermediate_size"})


@pytest.mark.parametrize("is_used, windows", [(False, [0, 0]), (None, [0, 0]), (True, [0, 64])])
def test_qwens_windows_are_used_if_config_json_says_so(is_used, windows):
    qwen = dict(architectures=["Qwen2ForCausalLM"], num_hidden_layers=2, sliding_window=64, max_window_layers=1)
    assert read_model_config(LLAMA | qwen | dict(use_sliding_window=is_used)).sliding_windows == windows


@pytest.mark.parametrize("architecture, has_window", [
    *dict.fromkeys(("MistralForCausalLM", "MinistralForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM",
                    "Olmo3ForCausalLM", "Gemma3ForCausalLM"), True).items(),
    *dict.fromkeys(("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "SmolLM3ForCausalLM"),
                   False).items()])
def test_use_sliding_window_counts_in_the_families_that_know_it(architecture, has_window):
    """As in transformers. Where it is true, a missing sliding_window of Qwen means 4096 tokens."""
    given = LLAMA | dict(architectures=[architecture], sliding_window=64, use_sliding_window=False, max_window_layers=0,
                         no_rope_layers=[0], num_local_experts=4, num_experts=4, num_experts_per_tok=2,
                         moe_intermediate_size=8)
    assert read_model_config(given).sliding_windows == [64 * has_window]
    given["use_sliding_window"] = True
    assert read_model_config(given).sliding_windows == [64]
    del given["sliding_window"]
    if architecture.startswith("Qwen"):
        assert read_model_config(given).sliding_windows == [4096]


@pytest.mark.parametrize("architecture, expected", [
    ("MistralForCausalLM", dict(num_kv_heads=8, norm_eps=1e-6)), ("MinistralForCausalLM", dict(num_kv_heads=8)),
    ("MixtralForCausalLM", dict(num_kv_heads=8, norm_eps=1e-5)), ("Phi3ForCausalLM", dict(norm_eps=1e-5)),
    ("SmolLM3ForCausalLM", dict(num_kv_heads=4, norm_eps=1e-6)), ("OlmoeForCausalLM", dict(norm_eps=1e-5))])
def test_a_missing_key_has_its_family_s_default(architecture, expected):
    given = dict(architectures=[architecture], num_attention_heads=16, num_local_experts=4, num_experts=4,
                 num_experts_per_tok=2)
    config = read_model_config({key: LLAMA[key] for key in LLAMA if key != "num_key_value_heads"} | given)
    assert {name: getattr(config, name) for name in expected} == expected


OLMO3 = LLAMA | dict(architectures=["Olmo3ForCausalLM"], num_hidden_layers=4)
ROPE_YARN = dict(rope_type="yarn", rope_theta=1000.0, factor=4.0, original_max_position_embeddings=64)


@pytest.mark.parametrize("given, thetas, types", [
    (dict(rope_parameters=ROPE_YARN), (1000.0, 1000.0), ("yarn", "yarn")),  # as transformers 5.0 to 5.8 wrote them
    (dict(rope_parameters=dict(full_attention=ROPE_YARN)), (1000.0, 5e5), ("yarn", "default")),
    (dict(rope_parameters=dict(sliding_attention=ROPE_YARN)), (5e5, 1000.0), ("default", "yarn")),
    (dict(rope_scaling=ROPE_YARN), (1000.0, 5e5), ("yarn", "default")),
    ({}, (5e5, 5e5), ("default", "default"))], ids=str)
def test_ropes_of_olmo_3(given, thetas, types):
    ropes = read_model_config(OLMO3 | given).ropes
    assert tuple(rope["rope_theta"] for rope in ropes) == thetas
    assert tuple(rope["rope_type"] for rope in ropes) == types


def test_which_layers_have_experts():
    qwen = LLAMA | dict(architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=8, num_experts=4,
                        num_experts_per_tok=2, moe_intermediate_size=8)
    for change, dense in (({}, []), (dict(mlp_only_layers=[0, 5]), [0, 5]), (dict(decoder_sparse_step=2), [0, 2, 4, 6]),
                          (dict(decoder_sparse_step=3, mlp_only_layers=[2]), [0, 1, 2, 3, 4, 6, 7])):
        assert read_model_config(qwen | change).experts["dense_layers"] == dense


@pytest.mark.parametrize("case", json.loads((GOLDEN / "ropes" / "expected.json").read_text()),
                         ids=lambda case: f"{case['settings']['rope_type']} {case['length']}")
def test_angles_of_all_types_of_rope_equal_transformers(case):
    """head_dim 16. A type that depends on the length has that of the longest text."""
    settings = {"rope_theta": 1000.0, "max_position_embeddings": 64} | case["settings"]
    table = make_rope_table(settings, 16, case["length"])
    angles, num_pairs = torch.outer(torch.arange(case["length"]), torch.tensor(case["angles"])), len(case["angles"])
    assert num_pairs == int(8 * settings.get("partial_rotary_factor", 1))
    for half, function, rest in ((table[:, :8], torch.cos, 1.0), (table[:, 8:], torch.sin, 0.0)):
        torch.testing.assert_close(half[:, :num_pairs], function(angles) * case["factor"], atol=1e-5, rtol=1e-5)
        assert (half[:, num_pairs:] == rest).all()


def test_the_longest_text_of_scaled_ropes():
    def limit(**scaling):
        return read_model_config(LLAMA | dict(rope_scaling=scaling)).max_position_embeddings

    assert limit(rope_type="dynamic", factor=2.5) == 320 and limit(rope_type="linear", factor=2.5) == 320
    assert limit(rope_type="yarn", factor=4.0, original_max_position_embeddings=64) == 256
    assert limit(rope_type="yarn", factor=4.0, original_max_position_embeddings=16) == 128


# ---- Families with switches of their own. (Tests of logits, texts, drafts, Triton and two ranks go over all goldens.)

SWITCHED = ["arcee", "ernie4.5", "exaone4", "gemma3", "granite", "granite4", "ministral", "olmo2", "olmo3",
            "phi3", "smollm3", *GEMMA4, *MIXTURES]


@pytest.mark.parametrize("variant", [variant for variant in SWITCHED if variant not in WITH_STATES + GEMMA4])
def test_chunks_prefix_hits_preemptions_and_other_modules(variant, monkeypatch):
    """The fused modules get their weights as a checkpoint that is made of the plain ones' weights."""
    llm = load(variant, num_blocks=15, block_size=4, max_num_batched_tokens=7, device="cpu")
    assert_golden(llm, variant, times=2)
    books = vars(llm.scheduler.block_manager)
    has_window = "window" in books or "kinds" in books  # in all layers, or in some: blocks that left it are free
    assert ("window" in books) == (variant == "phi3" and is_there("swapping"))
    assert llm.counts.num_preemptions > 0 or llm.config.states  # whose chunks wait for room in a step
    assert ("kinds" in books) == bool((llm.config.groups or llm.config.states) and is_there("kinds"))
    assert llm.counts.num_cached_tokens > 0 or has_window
    from nanopaged.features import fused
    from nanopaged.tests.pretended import plain_kernels
    llm = load(variant, device="cpu", enforce_eager=True)
    for patch in plain_kernels():
        monkeypatch.setattr(*patch)
    use_modules(llm, fused.MODULES)
    assert_golden(llm, variant, times=2)


FLOAT32_NORMS = "gemma3", "gpt-oss", "gpt-oss-mxfp4", "olmo2", "olmo3", "qwen3-next", "qwen3.5-moe", *GEMMA4


@pytest.mark.parametrize("variant", SWITCHED)
def test_logits_in_bfloat16(variant):
    """Norms with weights in float32 return the type of the residual stream. In gpt-oss's golden checkpoints the experts
    are loud: where rounding makes a token take another one, that shows, so of their tokens the median counts. Gemma 4
    does not scale scores, so rounding shows more in its golden checkpoints, in transformers as much as here."""
    prompts, _, logits = expectations(variant)
    llm = load(variant, dtype="bfloat16", device="cpu", enable_prefix_caching=False)
    rows = zip(prompt_logits(llm, prompts[1].tolist()), logits[1]) if "gpt-oss" in variant else [
        (prompt_logits(llm, prompts[1].tolist()), logits[1])]
    assert statistics.median(relative_error(*row) for row in rows) < (0.3 if variant in GEMMA4 else 0.05)
    norms = {parameter.dtype for name, parameter in llm.runner.model.named_parameters() if "norm" in name}
    assert norms == {torch.float32 if variant in FLOAT32_NORMS else torch.bfloat16}


@pytest.mark.parametrize("variant", ["ernie4.5", "gemma3", "granite", "granite-moe-shared", "phi3", "qwen3-next",
                                     "qwen3-vl-moe", "qwen3.5-moe", *GEMMA4])
def test_random_weights_are_a_checkpoint_s(variant):
    llm = load(variant, load_format="dummy", device="cpu")
    assert len(llm.generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids) == 24
    assert (llm.runner.model.norm.weight == 1).all()


@pytest.mark.parametrize("variant, architecture", [
    ("gemma3", "Gemma3ForConditionalGeneration"), ("mistral", "Mistral3ForConditionalGeneration"),
    ("ministral3", "Mistral3ForConditionalGeneration")])
@pytest.mark.parametrize("body, head", [("language_model.model.", "language_model."), ("model.language_model.", "")])
def test_the_text_model_of_a_multimodal_checkpoint(tmp_path, variant, architecture, body, head):
    """The names have changed with transformers' versions. A vision tower has layers and norms, too."""
    def rename(name):
        return name.replace("model.", body) if name.startswith("model.") else head + name

    path = rewritten(tmp_path, variant, lambda tensors: {
        "vision_tower.layers.0.input_layernorm.weight": torch.ones(3), "model.vision_tower.norm.weight": torch.ones(3),
        "multi_modal_projector.norm.weight": torch.ones(3)} | {rename(name): one for name, one in tensors.items()})
    text = json.loads((GOLDEN / variant / "config.json").read_text())
    del text["architectures"]
    dtype = {key: text.pop(key) for key in ("dtype", "torch_dtype") if key in text}
    whole = dict(architectures=[architecture], text_config=text, **dtype,
                 vision_config=dict(hidden_size=7, num_hidden_layers=99))
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.warns(UserWarning, match=f"{architecture} is a multimodal model; its text model is loaded, and images"):
        llm = load(path, num_blocks=64)
    assert_golden(llm, variant, SECOND)


def test_keys_that_a_multimodal_gemma_leaves_out():
    """google/gemma-3-4b-it's text_config has these keys only."""
    text = dict(hidden_size=2560, intermediate_size=10240, model_type="gemma3_text", num_hidden_layers=34,
                rope_scaling=dict(factor=8.0, rope_type="linear"), sliding_window=1024)

    def read(**more):
        with pytest.warns(UserWarning, match="images are not read"):
            return read_model_config(dict(architectures=["Gemma3ForConditionalGeneration"], text_config=text) | more)

    config = read()
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.sliding_windows == [1024 * (i % 6 != 5) for i in range(34)] and config.tie_word_embeddings
    assert [(rope["rope_theta"], rope["rope_type"]) for rope in config.ropes] == [(1e6, "linear"), (1e4, "default")]
    assert config.attention_scale == 256 ** -0.5 and config.max_position_embeddings == 131072  # has the factor in it
    assert read(sliding_window=500).sliding_windows[0] == 500  # from hf_overrides


# ---- Weights

@pytest.mark.parametrize("variant", ["granite-moe", "granite-moe-shared", "olmoe", "qwen3-moe"])
@pytest.mark.parametrize("is_turned", [False, True])
def test_one_tensor_of_all_experts(tmp_path, variant, is_turned):
    """As transformers 5 stores them with save_original_format=False; turned, as Qwen3-VL's are published. It also
    writes num_local_experts in place of num_experts."""
    path = rewritten(tmp_path, variant, partial(stack_experts, is_turned=is_turned))
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"num_local_experts": config.pop("num_experts")} if "num_experts" in config else {
        "num_experts": config.pop("num_local_experts")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_golden(load(path, num_blocks=64, device="cpu"), variant, SECOND)


K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize("change, problem", [
    (lambda k_proj: {}, r"lacks 1 tensor.*layers\.1\.self_attn\.k_proj\.weight"),
    (lambda k_proj: {K_PROJ: k_proj[:3]}, rf"{K_PROJ} has shape \[3, 32\]; .* implies \[32, 32\]"),
    *((lambda k_proj, dtype=dtype: {K_PROJ: k_proj.to(dtype)},
       f"{K_PROJ} has the type {dtype}; weights must be floating-point numbers")
      for dtype in (torch.int32, torch.bool, torch.complex64))])
def test_tensors_that_do_not_fit_are_named(tmp_path, change, problem):
    path = rewritten(tmp_path, "llama3", lambda tensors: {
        name: tensor for name, tensor in tensors.items() if name != K_PROJ} | change(tensors[K_PROJ]))
    with pytest.raises(ValueError, match=problem):
        load(path, num_blocks=64)


@pytest.mark.parametrize("variant, embedding", [
    ("smollm2", "model.embed_tokens.weight"), ("gpt2", "transformer.wte.weight")])
def test_a_tied_matrix_may_be_stored_under_either_name_or_both(tmp_path, variant, embedding):
    """safetensors.torch.save_model keeps one name of two, the first in the alphabet: lm_head.weight."""
    tensors = {name: tensor.clone() for name, tensor in read_tensors(GOLDEN / variant)}
    rest = {name: tensor for name, tensor in tensors.items() if name != embedding}
    other = {"lm_head.weight": tensors[embedding].clone()}
    for stored in (rest | other, other | tensors, tensors | other):
        assert_golden(load(rewritten(tmp_path, variant, lambda _: stored), num_blocks=64, device="cpu"), variant,
                      SECOND)
    with pytest.raises(ValueError, match=r"lacks 1 tensor.* '(embed_tokens|wte)\.weight'"):
        load(rewritten(tmp_path, variant, lambda _: rest), num_blocks=64)


@pytest.mark.parametrize("size", [1, 2])
def test_a_tied_matrix_that_is_stored_with_other_numbers_is_not_tied(tmp_path, forks, size):
    """As in transformers 5. The head's rows are those of the embedding, moved by one: so are the tokens."""
    tied = load("smollm2", num_blocks=64, device="cpu")
    first = tied.generate(PROMPT, SamplingParams(temperature=0, max_tokens=1))[0].outputs[0].token_ids[0]
    path = rewritten(tmp_path, "smollm2", lambda tensors: tensors | {
        "lm_head.weight": tensors["model.embed_tokens.weight"].roll(1, 0)})
    untied = load(path, num_blocks=64, device="cpu", tensor_parallel_size=size)
    output = untied.generate(PROMPT, SamplingParams(temperature=0, max_tokens=1))
    assert tokens_of(output) == [[(first + 1) % tied.config.vocab_size]]


@pytest.mark.parametrize("variant, prefix", [("opt", "model."), ("llama2", "model."), ("gpt2", "transformer.")])
def test_old_checkpoints_without_the_key_prefix(tmp_path, variant, prefix):
    path = rewritten(tmp_path, variant, lambda tensors: {k.removeprefix(prefix): v for k, v in tensors.items()})
    assert_golden(load(path, num_blocks=64), variant, SECOND)


def test_settings_of_config_json_count_without_a_generation_config(tmp_path):
    path = rewritten(tmp_path, "llama2", lambda tensors: tensors)
    config = json.loads((tmp_path / "config.json").read_text()) | dict(repetition_penalty=1.5, num_beams=4)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="config.json has settings that change texts .* apply: num_beams$"):
        llm = load(path, num_blocks=64, device="cpu")
    assert llm.get_default_sampling_params() == SamplingParams(repetition_penalty=1.5)
