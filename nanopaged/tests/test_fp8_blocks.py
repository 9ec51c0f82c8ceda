"""Checkpoints in FP8 with scales of blocks of 128 x 128, whose matrices keep their bits on a GPU, in the kernels of
four_bits.py. (Products: test_four_bit_kernels.py; where they are converted: test_fp8.py)"""
import json

import pytest
import torch

from nanopaged.features import four_bit_kernels, four_bits
from nanopaged.tests.helpers import (
    DEVICE,
    GOLDEN,
    GREEDY,
    PROMPT,
    complaint,
    load,
    needs_gpu,
    prompt_logits,
    relative_error,
    tokens_of,
)
from nanopaged.tests.test_four_bit_kernels import keep, plain_linear
from nanopaged.tests.test_fp8 import FORMS, FP8, LLAMA, Q_PROJ, QWEN3, WHOLE, quantised, tensors_of, write
from nanopaged.weights.build import unmerge
from nanopaged.weights.checkpoint import read_tensors
from nanopaged.weights.families import read_model_config

PROMPTS = [PROMPT, PROMPT[:3], PROMPT[2:], PROMPT]
SMALL = dict(device="cpu", num_blocks=12, block_size=8, max_num_batched_tokens=16)


@pytest.fixture
def able(monkeypatch):
    """A CPU has the products."""
    monkeypatch.setattr(four_bits, "has_products", lambda device: True)
    monkeypatch.setattr(four_bit_kernels, "linear", plain_linear)


def is_matrix(name):
    """All but b and a of gated delta nets, which stay in 16 bits."""
    return "_proj" in name and "in_proj_a" not in name and "in_proj_b" not in name


def stored_and_meant(tmp_path, variant, form="Qwen3, blocks"):
    """Two checkpoints: in FP8, and what that means; and the first one's tensors."""
    config, tensors = LLAMA, None
    if variant:
        config = json.loads((GOLDEN / variant / "config.json").read_text())
        tensors = dict(unmerge(read_tensors(GOLDEN / variant), read_model_config(config)))  # a matrix of each expert
    stored, meant = quantised(tensors or tensors_of(config), form, is_matrix)
    tower = {f"{name}.layers.0.mlp.up_proj.{end}": torch.ones(1, 1).to(FP8 if end == "weight" else torch.float32)
             for name in ("mtp", "model.visual") for end in ("weight", "weight_scale_inv")}
    return (write(tmp_path / "stored", config, stored | tower, FORMS[form][0]),
            write(tmp_path / "meant", config, meant), stored)


def in_8_bits(llm):
    return {name for name, one in llm.runner.model.named_parameters() if one.dtype is FP8}


@pytest.mark.parametrize("form", ["Qwen3, blocks", "compressed, blocks"])
def test_texts_are_those_of_the_weights_times_their_scales(tmp_path, form, able, capfd):
    """No width is a multiple of 128. With prefix hits, chunks and preemption."""
    stored, meant, _ = stored_and_meant(tmp_path, None, form)
    plain, llm = load(meant, **SMALL), load(stored, **SMALL)
    names = {f"layers.{i}.{name}.weight" for i in range(2)
             for name in ("qkv_proj", "o_proj", "mlp.gate_up_proj", "mlp.down_proj")}
    assert in_8_bits(llm) == names and "converted" not in capfd.readouterr().err
    shapes = {name: list(one.shape) for name, one in llm.runner.model.named_parameters() if "layers.0.mlp" in name}
    assert shapes == {"layers.0.mlp.gate_up_proj.weight": [600, 160], "layers.0.mlp.gate_up_proj.scale": [600, 2],
                      "layers.0.mlp.down_proj.weight": [160, 304], "layers.0.mlp.down_proj.scale": [160, 3]}
    assert llm.runner.model.layers[0].o_proj.scale.dtype is torch.float32
    expected = tokens_of(plain.generate(PROMPTS, GREEDY))
    for lookahead in (0, 1):
        llm.engine.lookahead = lookahead
        assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected
    assert llm.counts.num_preemptions > 0


@pytest.mark.parametrize("variant", ["qwen3-moe", "qwen3.5-moe", "qwen3-next"])
def test_a_mixture_of_experts(tmp_path, variant, monkeypatch):
    """With fused modules, as on a GPU. Parts of in_proj with more bits are a matrix of their own."""
    stored, meant, _ = stored_and_meant(tmp_path, variant)
    plain, llm = load(meant, device="cpu", num_blocks=64), load(stored, device="cpu", num_blocks=64)
    assert not in_8_bits(llm)
    llm.config.fp8, llm.config.four_bits = None, "fp8"
    keep(monkeypatch, llm, stored)
    assert any(".experts.0.down_proj" in name for name in in_8_bits(llm))
    assert {name for name, one in llm.runner.model.named_parameters() if "_proj" in name and "bias" not in name
            and one.dtype is not FP8 and "scale" not in name} == {
                f"layers.{i}.in_proj_ba.weight" for i in llm.config.states.get("layers", [])}
    expected = tokens_of(plain.generate(PROMPTS, GREEDY))
    assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected


def test_a_part_in_16_bits(tmp_path, able, capfd):
    """k_proj is ordinary, so what it is merged with is converted."""
    stored, meant = quantised(tensors_of(LLAMA), "Qwen3, blocks", lambda name: "_proj" in name and "k_proj" not in name)
    llm = load(write(tmp_path / "stored", LLAMA, stored, QWEN3), device="cpu", num_blocks=64)
    plain = load(write(tmp_path / "meant", LLAMA, meant), device="cpu", num_blocks=64)
    assert capfd.readouterr().err.startswith(
        "4 matrices in 8 bits are converted to float32, the first being model.layers.0.self_attn.q_proj: 0.0 GiB")
    assert len(in_8_bits(llm)) == 6
    assert torch.equal(*(one.runner.model.layers[1].qkv_proj.weight for one in (llm, plain)))
    assert tokens_of(llm.generate(PROMPT, GREEDY)) == tokens_of(plain.generate(PROMPT, GREEDY))


def test_options_beside_blocks(tmp_path, able, pretends, capfd):
    """quantization="fp8" cuts the matrices for channels; random weights are cut, too; int4 is refused."""
    stored, *_ = stored_and_meant(tmp_path, None)
    llm = load(stored, device="cpu", num_blocks=64, load_format="dummy")
    assert len(in_8_bits(llm)) == 8 and llm.runner.model.layers[0].mlp.down_proj.scale.shape == (160, 3)
    assert "cut" not in capfd.readouterr().err
    assert "does not go with a checkpoint in FP8" in complaint(load, stored, device="cpu", quantization="int4")
    whole = write(tmp_path / "whole", WHOLE, quantised(tensors_of(WHOLE), "Qwen3, blocks")[0], QWEN3)
    llm = load(whole, device="cpu", num_blocks=64, quantization="fp8")
    assert llm.runner.model.layers[0].mlp.down_proj.scale.shape == (256, 1)


@pytest.mark.parametrize("change, problem", [
    (lambda t: {name: one for name, one in t.items() if name != f"{Q_PROJ}_scale_inv"},
     f"the checkpoint has {Q_PROJ} and lacks {Q_PROJ}_scale; fetch it again"),
    (lambda t: t | {f"{Q_PROJ}_scale_inv": torch.ones(2, 3)}, f"the scale of {Q_PROJ} has the type torch.float32 and"),
    (lambda t: t | {Q_PROJ: t[Q_PROJ].float()}, f"_scale and lacks {Q_PROJ}; fetch it again"),
    (lambda t: t | {Q_PROJ: t[Q_PROJ].float().to(torch.float8_e5m2)}, f"tensor {Q_PROJ} [160, 160] has the type torch"),
    (lambda t: t | {"lm_head.weight": torch.ones(2, 2, 2).to(FP8)}, "tensor lm_head.weight [2, 2, 2] has the type to"),
    (lambda t: t | {"layers.0.mlp.experts.down_proj": torch.ones(2, 2, 2).to(FP8)},
     "tensor layers.0.mlp.experts.down_proj [2, 2, 2] has the")])
def test_tensors_that_do_not_fit(tmp_path, change, problem, able):
    stored, _ = quantised(tensors_of(LLAMA), "Qwen3, blocks")
    assert problem in complaint(load, write(tmp_path / "stored", LLAMA, change(stored), QWEN3), device="cpu")


@needs_gpu
@pytest.mark.parametrize("variant", [None, "qwen3-moe", "qwen3.5-moe", "qwen3-next"])
def test_a_gpu_keeps_blocks(tmp_path, variant):
    stored, meant, _ = stored_and_meant(tmp_path, variant)
    expected = prompt_logits(load(meant, dtype="float32", num_blocks=64), PROMPT).to(DEVICE)
    for options in (dict(graphs=True), dict(enforce_eager=True)):
        llm = load(stored, dtype="bfloat16", enable_prefix_caching=False, **options)
        assert in_8_bits(llm)
        errors = [relative_error(*row) for row in zip(prompt_logits(llm, PROMPT), expected)]
        assert sorted(errors)[len(errors) // 2] < 0.05
        assert len(llm.generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids) == 24
