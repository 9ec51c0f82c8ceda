"""Model families: configurations that cannot be run, and the weights of checkpoints that differ from their family's."""
import math

import pytest
import torch

from model import Transformer
from nanopaged import SamplingParams
from nanopaged.tests.helpers import GOLDEN, GREEDY, PROMPT, expectations, load, rewritten, tokens_of
from nanopaged.weights.checkpoint import read_tensors
from nanopaged.weights.families import read_model_config

# --------------------------------------------------------------------------------------------------
# Configurations
# --------------------------------------------------------------------------------------------------

LLAMA = dict(architectures=["LlamaForCausalLM"], vocab_size=100, hidden_size=32, num_hidden_layers=1,
             num_attention_heads=4, intermediate_size=64, max_position_embeddings=128)


@pytest.mark.parametrize("change, message", [
    (dict(architectures=["MambaForCausalLM"]), "unknown architecture 'MambaForCausalLM'; known are GPT2LMHeadModel, "),
    (dict(quantization_config={"quant_method": "gptq"}), "quantised .gptq."),
    (dict(rope_scaling={"rope_type": "yarn", "factor": 4}), "rope type 'yarn' is not supported"),
    (dict(rope_scaling={"rope_type": "linear"}), "needs factor"),
    (dict(num_attention_heads=4, num_key_value_heads=3), "4 query heads cannot share 3 kv heads"),
    (dict(hidden_act="mish"), "unknown activation 'mish'"),
    (dict(torch_dtype="float8_e4m3fn"), "weights of type float8_e4m3fn are not supported"),
    (dict(quantization_config="awq"), "quantised .awq."),
    (dict(num_hidden_layers="2"), "num_layers must be an integer from 1 to 1024, not '2'"),
    (dict(num_hidden_layers=0), "not 0"), (dict(vocab_size=-1), "not -1"), (dict(intermediate_size=None), "not None"),
    (dict(num_attention_heads=0), "a value that no LlamaForCausalLM can have"),
    (dict(hidden_size=None), "no LlamaForCausalLM can have"),
    (dict(rope_scaling="linear"), "no LlamaForCausalLM can have"),
    (dict(rope_scaling={"rope_type": ["x"]}), "no LlamaForCausalLM can have"),
    (dict(rope_theta=None), "rope_theta must be a number above 0 and below 1e15, not None"),
    (dict(rope_theta=0), "rope_theta .* not 0"),
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
    (dict(max_position_embeddings=10**9), "max_position_embeddings must be an integer from 1 to 8388608"),
    (dict(rms_norm_eps=10**29), "epsilon must be .* below 1e15, not 10"), (dict(rope_theta=10**400), "rope_theta"),
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


def test_both_spellings_of_rope_settings_mean_the_same():
    llama3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
    old = LLAMA | dict(rope_theta=5e5, rope_scaling=dict(rope_type="llama3", **llama3))
    new = LLAMA | dict(rope_parameters=dict(rope_type="llama3", rope_theta=5e5, **llama3))
    oldest, newest = LLAMA | dict(rope_scaling=dict(type="linear", factor=2.0)), LLAMA | dict(
        rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0))
    tables = []
    for config in (old, new, oldest, newest, LLAMA | dict(rope_theta=5e5)):
        with torch.device("meta"):
            transformer = Transformer(read_model_config(config))
        transformer.make_rope_table("cpu", 9)
        tables.append(transformer.rope_table)
    assert torch.equal(tables[0], tables[1]) and torch.equal(tables[2], tables[3])
    assert not torch.allclose(tables[0], tables[4])


# --------------------------------------------------------------------------------------------------
# Weights
# --------------------------------------------------------------------------------------------------

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
    prompts, continuations, _ = expectations(variant)

    def assert_loads(change):
        llm = load(rewritten(tmp_path, variant, change), num_blocks=64, device="cpu")
        assert tokens_of(llm.generate(prompts[1].tolist(), GREEDY)) == [continuations[1].tolist()]

    assert_loads(lambda tensors: {
        "lm_head.weight" if name == embedding else name: tensor for name, tensor in tensors.items()})
    other = {"lm_head.weight": dict(read_tensors(GOLDEN / variant))[embedding].clone()}
    assert_loads(lambda tensors: other | tensors)
    assert_loads(lambda tensors: tensors | other)
    neither = rewritten(tmp_path, variant, lambda tensors: {
        name: tensor for name, tensor in tensors.items() if name != embedding})
    with pytest.raises(ValueError, match=r"lacks 1 tensor.* '(embed_tokens|wte)\.weight'"):
        load(neither, num_blocks=64)


@pytest.mark.parametrize("size", [1, 2])
def test_a_tied_matrix_that_is_stored_with_other_numbers_is_not_tied(tmp_path, size):
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
    prompts, continuations, _ = expectations(variant)
    llm = load(path, num_blocks=64)
    assert tokens_of(llm.generate(prompts[1].tolist(), GREEDY)) == [continuations[1].tolist()]
