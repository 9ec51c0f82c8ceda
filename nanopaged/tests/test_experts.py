"""Mixtures of experts: what is special about loading them, and their logits and texts. (Tests of drafts,
cascades and recorded steps go over all golden checkpoints, mixtures among them.)"""
import json

import pytest
import torch

import test_paged
from nanopaged import LLM
from nanopaged.tests.helpers import (
    CUDA,
    DEVICE,
    GOLDEN,
    MIXTURES,
    PROMPT,
    assert_golden,
    load,
    needs,
    needs_kernel,
    prompt_logits,
    relative_error,
    stack_experts,
    use_modules,
)
from nanopaged.tests.pretended import fused, kept
from nanopaged.weights.build import as_checkpoint


def test_all_experts_have_one_tensor():
    mixture = load("qwen3-moe", device="cpu").runner.model.layers[2].mlp
    assert {name: list(whole.shape) for name, whole in mixture.whole.items()} == {
        "gate_up_proj.weight": [7, 48, 32], "down_proj.weight": [7, 32, 24]}
    for expert, whole in zip(mixture.experts, mixture.whole["down_proj.weight"], strict=True):
        assert expert.down_proj.weight.data_ptr() == whole.data_ptr()


@needs("fp8", "fused")
@pytest.mark.parametrize("variant", ["qwen3-moe", "granite-moe-shared"])
def test_experts_in_8_bits(tmp_path, variant, keeps):
    """All matrices but the routers."""
    config = json.loads((GOLDEN / variant / "config.json").read_text()) | dict(
        hidden_size=64, num_attention_heads=8, intermediate_size=48, moe_intermediate_size=48,
        shared_intermediate_size=16)
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = dict(load_format="dummy", dtype="float32", device=DEVICE, num_blocks=64)
    plain = LLM(str(tmp_path), enforce_eager=True, **options)
    for enforce_eager in (True, False):
        llm = LLM(str(tmp_path), quantization="fp8", enforce_eager=enforce_eager, **options)
        if not (enforce_eager or CUDA):
            use_modules(llm, fused.with_fp8(fused.MODULES))
        names, expected = {*kept(llm)}, dict(plain.runner.model.named_parameters())
        assert names == {name for name, one in expected.items() if name.startswith("layers") and one.dim() == 2
                         and "router" not in name}
        for name, tensor in kept(llm).items():
            assert relative_error(tensor, expected[name]) < 0.03
        assert relative_error(prompt_logits(llm, PROMPT), prompt_logits(plain, PROMPT)) < 0.1
    # One tensor with all experts' matrices as [experts, in, out] is turned before its rows get their scales.
    tensors = dict(as_checkpoint(plain.runner.model.named_parameters(), plain.config))
    torch.save(stack_experts(tensors, is_turned=True), tmp_path / "pytorch_model.bin")
    stacked = LLM(str(tmp_path), quantization="fp8", enforce_eager=True, **options | dict(load_format="auto"))
    for name, tensor in kept(stacked).items():
        assert relative_error(tensor, expected[name]) < 0.03


@pytest.mark.parametrize("variant", MIXTURES)
def test_logits_and_texts_equal_transformers(variant):
    test_paged.test_logits_equal_transformers(variant)
    test_paged.test_greedy_continuations_equal_transformers(variant)


@needs_kernel
@pytest.mark.parametrize("variant", MIXTURES)
def test_the_triton_path_equals_transformers(variant):
    test_paged.test_the_triton_path_equals_transformers(variant)


@pytest.mark.parametrize("options", [
    dict(lookahead=1, max_num_batched_tokens=7, block_size=1), dict(num_blocks=9, block_size=8), dict(max_num_seqs=2)
], ids=str)
def test_texts_do_not_depend_on_how_the_work_is_cut(options):
    """Chunks, preemptions, and prefix hits of the second and third time."""
    assert_golden(load("qwen3-moe", **options), "qwen3-moe", times=3)
