"""gpt-oss: its config.json, and texts however the work is cut. (Tests of attention have cases with sinks, and tests of
logits, texts, drafts, kinds and cascades go over all golden checkpoints.)"""
import json

import pytest
import torch

from nanopaged import LLM, SamplingParams
from nanopaged.tests.helpers import (
    DEVICE,
    GOLDEN,
    PROMPT,
    assert_golden,
    complaint,
    expectations,
    load,
    prompt_logits,
    relative_error,
    tokens_of,
)
from nanopaged.weights.families import read_model_config


def test_what_config_json_says():
    """openai/gpt-oss-20b's says nothing of the type of its weights."""
    given = dict(architectures=["GptOssForCausalLM"], vocab_size=201088, hidden_size=2880, num_hidden_layers=4,
                 num_attention_heads=64, intermediate_size=2880, num_local_experts=32, num_experts_per_tok=4,
                 max_position_embeddings=131072)
    config = read_model_config(given)
    assert config.sliding_windows == [128, 0, 128, 0] and config.torch_dtype is torch.bfloat16 and config.sinks
    assert (config.num_kv_heads, config.head_dim, config.ropes[0]["rope_type"]) == (8, 64, "yarn")
    assert "swiglu_limit=9" in complaint(read_model_config, given | dict(swiglu_limit=9.0))


@pytest.mark.parametrize("variant", ["gpt-oss", "gpt-oss-mxfp4"])
@pytest.mark.parametrize("options", [
    dict(max_num_batched_tokens=7, block_size=4), dict(num_blocks=16, block_size=8), dict(lookahead=1)], ids=str)
def test_chunks_windows_prefix_hits_and_samples(variant, options):
    llm = load(variant, device="cpu", **options)
    assert_golden(llm, variant, times=3)
    prompt = expectations(variant)[0][1].tolist()
    pair = llm.generate(prompt, SamplingParams(n=2, seed=3, max_tokens=8, ignore_eos=True))[0].outputs
    alone = [llm.generate(prompt, SamplingParams(seed=seed, max_tokens=8, ignore_eos=True)) for seed in (3, 4)]
    assert [one.token_ids for one in pair] == [tokens_of(outputs)[0] for outputs in alone]


def test_experts_in_8_bits(tmp_path, keeps):
    """All matrices but the routers; biases and sinks stay, too."""
    config = json.loads((GOLDEN / "gpt-oss" / "config.json").read_text()) | dict(hidden_size=64, intermediate_size=48)
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = dict(load_format="dummy", dtype="float32", device=DEVICE, num_blocks=64, enforce_eager=True)
    plain, cut = LLM(str(tmp_path), **options), LLM(str(tmp_path), quantization="fp8", **options)
    parameters = dict(cut.runner.model.named_parameters())
    assert {name for name, one in parameters.items() if one.itemsize == 1} == {
        name for name, one in plain.runner.model.named_parameters() if name.startswith("layers.") and one.dim() == 2
        and "router" not in name}
    assert relative_error(prompt_logits(cut, PROMPT), prompt_logits(plain, PROMPT)) < 0.1
