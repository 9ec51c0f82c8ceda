"""Checkpoints whose weights are stored in FP8, in the forms and with the spellings of published repositories: they
compute what the same model computes whose weights were multiplied by their scales beforehand. Where 8 bits are kept,
the difference is that of activations in 8 bits; a CPU pretends that its products are a card's."""
import json
import math
import sys
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from nanopaged import SamplingParams, model
from nanopaged.features import fp8, fused
from nanopaged.features.fp8 import in_fp8, multiply, quantize, read_weights
from nanopaged.tests.helpers import (
    CUDA,
    DEVICE,
    GOLDEN,
    GREEDY,
    PROMPT,
    complaint,
    load,
    needs_gpu,
    needs_kernel,
    prompt_logits,
    relative_error,
    tokens_of,
    use_modules,
)
from nanopaged.tests.pretended import fp8_weight, kept
from nanopaged.tests.test_checkpoint import write_index, write_safetensors
from nanopaged.weights import build
from nanopaged.weights.build import random_tensors
from nanopaged.weights.checkpoint import read_tensors
from nanopaged.weights.families import read_model_config

FP8 = torch.float8_e4m3fn
pytestmark = pytest.mark.filterwarnings("ignore:FP8 weights are turned into")


def compressed(strategy, block=None, **changes):
    """As llm-compressor writes it, which RedHatAI's models are made with."""
    shared = dict(actorder=None, group_size=None, num_bits=8, observer_kwargs={}, symmetric=True, type="float")
    weights = shared | dict(block_structure=block, dynamic=False, observer="minmax", strategy=strategy)
    activations = shared | dict(block_structure=None, dynamic=True, observer=None, strategy="token")
    group = dict(input_activations=activations, output_activations=None, targets=["Linear"], weights=weights | changes)
    return dict(config_groups={"group_0": group}, format="float-quantized", global_compression_ratio=None,
                ignore=["lm_head"], kv_cache_scheme=None, quant_method="compressed-tensors",
                quantization_status="compressed", sparsity_config={}, transform_config={})


QWEN3 = dict(activation_scheme="dynamic", fmt="e4m3", modules_to_not_convert=["lm_head"], quant_method="fp8",
             weight_block_size=[128, 128])
GRID = "a number for each block"
# quantization_config, the end of a scale's name, its shape for a weight [out, in], its type, other tensors of a layer
FORMS = {
    "compressed, per tensor": (compressed("tensor"), "_scale", lambda out: [1], torch.bfloat16, ["input_scale"]),
    "compressed, per channel": (compressed("channel"), "_scale", lambda out: [out, 1], torch.bfloat16, []),
    "compressed, per channel, older": (compressed("channel") | dict(format="naive-quantized"), "_scale",
                                       lambda out: [out], torch.float32, []),
    "compressed, blocks": (compressed("block", [128, 128]), "_scale", lambda out: GRID, torch.bfloat16, []),
    "Qwen3, blocks": (QWEN3, "_scale_inv", lambda out: GRID, torch.bfloat16, []),
    "DeepSeek, blocks": (dict(activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", scale_fmt="ue8m0",
                              weight_block_size=[128, 128]), "_scale_inv", lambda out: GRID, torch.float8_e8m0fnu, []),
    "Ministral, per tensor": (
        dict(activation_scheme="static", dequantize=False, modules_to_not_convert=["lm_head"], quant_method="fp8",
             weight_block_size=None), "_scale_inv", lambda out: [], torch.bfloat16, ["activation_scale"]),
    "AutoFP8, per tensor": (dict(activation_scheme="static", ignored_layers=["lm_head"], quant_method="fp8"), "_scale",
                            lambda out: [1], torch.float32, ["input_scale"]),
}
# No width of these is a multiple of 128, and two ranks cut the matrices inside of a block.
LLAMA = dict(architectures=["LlamaForCausalLM"], vocab_size=150, hidden_size=160, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, head_dim=40, intermediate_size=300,
             max_position_embeddings=128)
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def scale_of_each_number(scale, shape):
    """The definition, in indices: [out, in] float32."""
    rows, columns = torch.arange(shape[0])[:, None], torch.arange(shape[1])
    scale = scale.float()
    if scale.numel() > 1 and scale.dim() == 2 and scale.shape != (shape[0], 1):
        return scale[rows // 128, columns // 128]
    return (scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(1, 1)).expand(*shape)


def quantised(tensors, form, is_chosen=lambda name: "_proj" in name):
    """The stored tensors, and what they mean. Scales differ by factors, so that a wrong one shows."""
    _, ending, shape_of, dtype, others = FORMS[form]
    stored, meant = {}, {}
    for i, (name, weight) in enumerate(sorted(tensors.items())):
        if weight.dim() != 2 or not is_chosen(name):
            stored[name] = meant[name] = weight
            continue
        shape = shape_of(len(weight))
        shape = [math.ceil(n / 128) for n in weight.shape] if shape is GRID else shape
        scale = torch.randn(shape, generator=torch.Generator().manual_seed(i)).div(2).exp().div(200).to(dtype)
        factors = scale_of_each_number(scale, weight.shape)
        stored[name] = (weight.float() * 40 / 448 / factors.mean()).to(FP8)
        stored[name + ending] = scale
        stored |= {name.removesuffix("weight") + other: torch.tensor(7.0) for other in others}
        meant[name] = stored[name].float() * factors
    return stored, meant


def write(path, config, tensors, quantization=None, **changes):
    path.mkdir(exist_ok=True)
    config = config | changes | ({} if quantization is None else dict(quantization_config=quantization))
    (path / "config.json").write_text(json.dumps(config))
    write_safetensors(path / "model.safetensors", tensors)
    return str(path)


def tensors_of(config=LLAMA):
    tensors = random_tensors(read_model_config(config), torch.float32, torch.device("cpu"), 3)
    return {name if name.startswith("lm_head") else "model." + name: tensor.clone() for name, tensor in tensors}


def pair(tmp_path, form, config=LLAMA, tensors=None, **options):
    """An engine of the stored weights, one of what they mean, and the directory of the first."""
    stored, meant = quantised(tensors or tensors_of(config), form)
    paths = write(tmp_path / "stored", config, stored, FORMS[form][0]), write(tmp_path / "meant", config, meant)
    return *(load(path, **dict(device="cpu", num_blocks=64) | options) for path in paths), paths[0]


def assert_same_weights(llm, other):
    others = dict(other.runner.model.named_parameters())
    for name, parameter in llm.runner.model.named_parameters():
        assert torch.equal(parameter, others[name]), name


# What loads

@pytest.mark.parametrize("form, dtype", [
    *((form, "float32") for form in FORMS), ("compressed, per channel", "bfloat16"), ("Qwen3, blocks", "bfloat16")])
def test_logits_are_those_of_the_weights_times_their_scales(tmp_path, form, dtype):
    """Which are rounded once to the engine's type."""
    llm, plain, _ = pair(tmp_path, form, dtype=dtype)
    assert_same_weights(llm, plain)
    logits = prompt_logits(llm, PROMPT)
    assert logits.std() > 0.1
    torch.testing.assert_close(logits, prompt_logits(plain, PROMPT), rtol=1e-5, atol=1e-5)


def test_products_are_those_of_transformers():
    """transformers takes blocks that divide a matrix."""
    module = pytest.importorskip("transformers.integrations.finegrained_fp8", reason="compares with transformers")
    weight, scale = torch.randn(256, 384).mul(100).clamp(-448, 448).to(FP8), torch.rand(2, 3) + 0.01
    for scale in (scale, scale[:1, :1]):
        expected = module.Fp8Dequantize(None).convert({"weight": weight, "weight_scale_inv": scale})["weight"]
        expected = expected[0] if isinstance(expected, list) else expected  # a list in some versions
        torch.testing.assert_close(multiply("weight", weight, scale), expected, rtol=1e-6, atol=0)  # one rounding


@pytest.mark.parametrize("variant, form", [
    ("phi3", "compressed, per tensor"), ("phi3", "compressed, per channel"), ("gemma3", "Qwen3, blocks")])
def test_merged_matrices_and_other_families(tmp_path, variant, form):
    config = json.loads((GOLDEN / variant / "config.json").read_text())
    assert_same_weights(*pair(tmp_path, form, config, dict(read_tensors(GOLDEN / variant)))[:2])


def test_a_tied_matrix_in_8_bits(tmp_path):
    """Under either name. If both are stored, equal numbers may have other scales, so the matrices count as two."""
    config = json.loads((GOLDEN / "smollm2" / "config.json").read_text())
    stored, meant = quantised(dict(read_tensors(GOLDEN / "smollm2")), "compressed, per channel",
                              lambda name: "_proj" in name or "embed" in name)
    as_head = {name.replace("model.embed_tokens", "lm_head"): tensor for name, tensor in stored.items()}
    plain = load(write(tmp_path / "meant", config, meant), num_blocks=64, device="cpu")

    def load_stored(tensors):
        return load(write(tmp_path / "stored", config, tensors, compressed("channel")), num_blocks=64, device="cpu")

    for tensors in (stored, as_head):
        llm = load_stored(tensors)
        assert llm.config.tie_word_embeddings
        assert_same_weights(llm, plain)
    twice = load_stored(stored | as_head | {"lm_head.weight_scale": 2 * as_head["lm_head.weight_scale"]})
    assert torch.equal(twice.runner.model.lm_head.weight, 2 * plain.runner.model.lm_head.weight)


def test_two_ranks_cut_weights_that_were_multiplied(tmp_path, monkeypatch):
    fork_workers(monkeypatch)
    one, plain, path = pair(tmp_path, "compressed, per channel")
    expected = tokens_of(plain.generate(PROMPT, GREEDY))
    two = load(path, device="cpu", tensor_parallel_size=2)
    assert tokens_of(two.generate(PROMPT, GREEDY)) == tokens_of(one.generate(PROMPT, GREEDY)) == expected
    part = two.runner.model.layers[1].o_proj.weight  # the first columns
    assert torch.equal(part, plain.runner.model.layers[1].o_proj.weight[:, :part.shape[1]])


# Shards

@pytest.mark.parametrize("weights_first", [True, False])
def test_a_weight_and_its_scale_in_different_shards(tmp_path, weights_first):
    stored, meant = quantised(tensors_of(), "Qwen3, blocks")
    shards = [{}, {}]
    for name, tensor in stored.items():
        shards[name.endswith("_scale_inv") is weights_first][name] = tensor
    for i, shard in enumerate(shards):
        write_safetensors(tmp_path / f"{i}.safetensors", shard)
    write_index(tmp_path / "model.safetensors.index.json",
                {name: f"{i}.safetensors" for i, shard in enumerate(shards) for name in shard})
    read = dict(read_weights(tmp_path, "block"))
    assert read.keys() == meant.keys() and all(torch.equal(read[name], meant[name]) for name in meant)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_that_wait_take_no_memory_of_their_own(tmp_path):
    """36 MiB wait for the scales of blocks, which the last shard has. Memory that the system cannot drop grows by less,
    for the product, of which one is there at a time, and for what the allocator does not give back."""
    weight = torch.ones(1024, 1024).to(FP8)
    shards = [{f"{i}.{j}.weight": weight for j in range(12)} for i in range(3)]
    shards += [{f"{name}_scale": torch.ones(8, 8) for shard in shards for name in shard}]
    for i, shard in enumerate(shards):
        write_safetensors(tmp_path / f"{i}.safetensors", shard)
    write_index(tmp_path / "model.safetensors.index.json",
                {name: f"{i}.safetensors" for i, shard in enumerate(shards) for name in shard})

    def kib():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    before, most, count = kib(), 0, 0
    for _, tensor in read_weights(tmp_path, "block"):
        most, count = max(most, kib()), count + 1
        del tensor
    assert count == 36 and most - before < 28 * 1024


# What is refused

def with_scale(function, dtype=torch.float32):
    return lambda tensors: tensors | {f"{Q_PROJ}_scale": function(tensors[f"{Q_PROJ}_scale"].float()).to(dtype)}


def without(*names):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


IMPOSSIBLE = f"the scale of {Q_PROJ} has the type torch.{{}} and the shape {{}}; a weight [160, 160] needs"
BAD = f"the scale of {Q_PROJ} has numbers that are not above 0, or not finite; fetch the checkpoint again"


@pytest.mark.parametrize("change, problem", [
    (without(f"{Q_PROJ}_scale"), f"tensor {Q_PROJ} has FP8 numbers and lacks a scale ({Q_PROJ}_scale); fetch the chec"),
    (without(Q_PROJ), f"tensor {Q_PROJ} has a scale and lacks FP8 numbers; fetch the checkpoint again"),
    (lambda tensors: tensors | {Q_PROJ: tensors[Q_PROJ].bfloat16()}, f"tensor {Q_PROJ} has a scale and lacks FP8 num"),
    *((with_scale(function), IMPOSSIBLE.format("float32", shape)) for function, shape in (
        (lambda scale: scale[:3], "[3, 1]"), (torch.t, "[1, 160]"), (lambda scale: scale[..., None], "[160, 1, 1]"),
        (lambda scale: scale[:0], "[0, 1]"))),
    (with_scale(torch.ones_like, torch.uint8), IMPOSSIBLE.format("uint8", "[160, 1]")),
    *((with_scale(lambda scale, number=number: scale.index_fill(0, torch.tensor([7]), number)), BAD)
      for number in (math.nan, 0.0, -1.0, math.inf)),
    (lambda tensors: tensors | {Q_PROJ: tensors[Q_PROJ].float().to(torch.float8_e5m2)},
     f"tensor {Q_PROJ} [160, 160] has the type torch.float8_e5m2; of 8-bit numbers only matrices of float8_e4m3fn can"),
    (lambda tensors: tensors | {"model.norm.weight": torch.ones(160).to(FP8)}, "tensor model.norm.weight [160] has"),
    (without("model.norm.weight"), "lacks 1 tensor"),
    (lambda tensors: tensors_of(), "config.json says that weights are FP8, and no tensor is; if they are ordinary")])
def test_tensors_that_are_not_what_config_json_says(tmp_path, change, problem):
    stored, _ = quantised(tensors_of(), "compressed, per channel")
    path = write(tmp_path / "stored", LLAMA, change(stored), compressed("channel"))
    assert problem in complaint(load, path, device="cpu")


def test_tensors_and_a_quantization_config_without_each_other(tmp_path):
    stored, _ = quantised(tensors_of(), "Qwen3, blocks")
    message = complaint(load, write(tmp_path / "stored", LLAMA, stored), device="cpu")
    assert message.endswith("only matrices of float8_e4m3fn can be read, with a quantization_config in config.json")
    path = write(tmp_path / "plain", LLAMA, tensors_of(), QWEN3)
    llm = load(path, device="cpu", hf_overrides={"quantization_config": None})  # as the sentence for it advises
    assert not llm.config.fp8


@pytest.mark.parametrize("quantization, name", [
    ("awq", "AWQ"),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "BITSANDBYTES"),
    *((one, "an unnamed method") for one in ({}, [], {"quant_method": []})),
    (QWEN3 | dict(fmt="e5m2"), "FP8 E5M2"), (QWEN3 | dict(weight_block_size=[1, 32]), "FP8 E4M3"),
    (compressed("channel", type="int") | dict(format="int-quantized"), "COMPRESSED-TENSORS INT-QUANTIZED"),
    *((one, "COMPRESSED-TENSORS FLOAT-QUANTIZED") for one in (
        compressed("channel", type="int"), compressed("channel", num_bits=4), compressed("group", group_size=128),
        compressed("block", [64, 64]), compressed("channel") | dict(transform_config={"config_groups": {"R1": {}}}),
        compressed("channel") | dict(config_groups=[]), compressed("channel") | dict(config_groups={"group_0": 3})))],
    ids=str)
def test_other_quantisations_keep_their_sentence(quantization, name):
    message = complaint(read_model_config, LLAMA | dict(quantization_config=quantization))
    assert message.startswith(f"the checkpoint is quantised with {name}; use one with float32, float16 or bfloat16 wei")
    assert "or with FP8 weights (e4m3, a scale for each tensor, channel or block of 128 x 128; quant_method" in message


def test_older_blocks_are_written_as_a_string():
    assert read_model_config(LLAMA | dict(quantization_config=compressed("block", "128x128"))).fp8 == "block"


# ---- Weights that keep their 8 bits

# A matrix has whole blocks, also on each of two ranks.
WHOLE = LLAMA | dict(hidden_size=256, head_dim=64, intermediate_size=512, num_key_value_heads=2)


def fork_workers(monkeypatch):
    from nanopaged.features.tensor_parallel import workers
    from nanopaged.tests import forked
    monkeypatch.setattr(workers, "Popen", forked.ForkedWorker)


@pytest.fixture
def ordinary(tmp_path):
    return write(tmp_path / "ordinary", WHOLE, tensors_of(WHOLE))


@pytest.mark.parametrize("form", [form for form in FORMS if "blocks" not in form])  # those: test_fp8_blocks.py
def test_a_card_keeps_8_bits(tmp_path, form, keeps, recwarn):
    llm, plain, _ = pair(tmp_path, form, WHOLE, device=DEVICE)
    assert not [warning for warning in recwarn if "FP8" in str(warning.message)]
    expected, weights = dict(plain.runner.model.named_parameters()), kept(llm)
    assert len(weights) == 8
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=0)
    assert {p.dtype for name, p in llm.runner.model.named_parameters() if name not in weights} == {torch.float32}
    assert relative_error(prompt_logits(llm, PROMPT), prompt_logits(plain, PROMPT)) < 0.05


@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=needs_gpu)])
def test_logits_and_texts_are_those_of_transformers(tmp_path, graphs, keeps):
    """A product of one row has activations in the engine's type, so a single text is the same. In products of many rows
    8 bits cost 2% of the logits."""
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    form = "compressed, per channel"
    config = WHOLE | dict(hidden_size=512, head_dim=128, num_hidden_layers=3, max_position_embeddings=64)
    stored, meant = quantised(tensors_of(config), form)
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval().float()
    plain.load_state_dict(meant)
    llm = load(write(tmp_path / "stored", config, stored, FORMS[form][0]), device=DEVICE, graphs=graphs)
    assert len(kept(llm)) == 12
    with torch.no_grad():
        expected = plain(torch.tensor([PROMPT])).logits[0]
        tokens = PROMPT[:1]
        for _ in range(12):
            tokens.append(plain(torch.tensor([tokens])).logits[0, -1].argmax().item())
    assert 1e-3 < relative_error(prompt_logits(llm, PROMPT).cpu(), expected) < 0.05
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    assert tokens_of(llm.generate([PROMPT[:1]], greedy)) == [tokens[1:]]


def test_the_size_of_weights_in_8_bits(monkeypatch, capsys):
    """3.5 GiB of 8 bits in 32 layers, and 0.5 GiB of 16 bits in two matrices for the vocabulary. In 16 bits the weights
    take 7.5 GiB."""
    sizes = dict(vocab_size=2**15, hidden_size=2**12, num_attention_heads=32, num_key_value_heads=32, head_dim=128,
                 intermediate_size=2**12, num_hidden_layers=32, dtype="bfloat16")
    config = read_model_config(LLAMA | sizes)
    monkeypatch.setattr(build, "host_memory", lambda: 2**30)
    message = complaint(build.build_model, config, [], torch.bfloat16, "cpu", 16, fused.with_fp8(model.PLAIN))
    assert message.startswith("the weights take 4.0 GiB, and cpu has less free memory")
    for dtype, size in (("bfloat16", "7.0"), ("float32", "14.0")):
        blocks = read_model_config(LLAMA | sizes | dict(quantization_config=QWEN3))
        assert not fp8.keeps_8_bits(None, dtype, blocks, [torch.device("cpu")], 1)
        assert capsys.readouterr().err == (
            f"weights in FP8 blocks of 128 x 128 are converted to {dtype}: {size} GiB instead of 3.5 "
            "(they keep 8 bits on a GPU with Triton, without tensor_parallel_size; quantization='fp8' cuts them again, "
            "with a scale for each channel)\n")


def peak_memory(device, function):
    """What the function returns, and the most bytes that it had in torch's memory at a time."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        return function(), torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = function()
    events = sorted((event.start_ns(), event.nbytes()) for event in profile.profiler.kineto_results.events()
                    if event.name() == "[memory]")
    return result, max(accumulate(size for _, size in events))


def test_one_tensor_is_cut_at_a_time():
    """Beside the weights in 8 bits memory has of one matrix the numbers as they are stored (on a GPU; a CPU maps them),
    their absolute values or quotients in float32, and 8 bits; a GPU still has the matrix before, and rounds sizes."""
    config = WHOLE | dict(hidden_size=512, num_hidden_layers=8)
    tensors = tensors_of(config).items()
    device, modules = torch.device(DEVICE), fused.with_fp8(model.PLAIN)
    built, peak = peak_memory(device, lambda: build.build_model(
        read_model_config(config), in_fp8(tensors, device), torch.float32, device, 16, modules))
    weights = sum(parameter.nbytes for parameter in built.parameters())
    largest = 4 * 512 * 512  # bytes of a matrix in float32; the layers have 36 of them
    assert weights < peak < weights + (3 if CUDA else 1.5) * largest


@pytest.mark.parametrize("form", ["compressed, per tensor", "compressed, per channel"])
def test_merged_matrices_keep_8_bits(tmp_path, form, keeps):
    """Phi-3's. Its rope is partial, so rows of q and k change places."""
    config = json.loads((GOLDEN / "phi3" / "config.json").read_text())
    config |= dict(hidden_size=64, num_attention_heads=8, intermediate_size=48)
    tensors = tensors_of(config)
    for merged, parts in {"self_attn.qkv_proj": "qkv", "mlp.gate_up_proj": ("gate", "up")}.items():
        for i in range(2):
            names = [f"model.layers.{i}.{merged.split('.')[0]}.{part}_proj.weight" for part in parts]
            tensors[f"model.layers.{i}.{merged}.weight"] = torch.cat([tensors.pop(name) for name in names])
    llm, plain, _ = pair(tmp_path, form, config, tensors, device=DEVICE)
    expected, weights = dict(plain.runner.model.named_parameters()), kept(llm)
    assert weights and all(torch.allclose(weights[name], expected[name], rtol=1e-6, atol=0) for name in weights)


@pytest.mark.parametrize("options", [dict(tensor_parallel_size=2), dict(data_parallel_size=2)], ids=str)
def test_cards_convert_blocks(tmp_path, options, pretends, monkeypatch, capsys):
    """Ranks cut matrices inside of a block."""
    fork_workers(monkeypatch)
    llm, plain, _ = pair(tmp_path, "Qwen3, blocks", **options)
    assert capsys.readouterr().err.count("weights in FP8 blocks of 128 x 128 are converted to float32: 0.0 GiB") == 1
    assert_same_weights(llm, plain)
    assert tokens_of(llm.generate([PROMPT] * 2, GREEDY)) == tokens_of(plain.generate([PROMPT] * 2, GREEDY))


@pytest.mark.parametrize("form", [None, "Qwen3, blocks"])
def test_an_ordinary_checkpoint_and_blocks_are_cut_to_8_bits(tmp_path, form, keeps):
    tensors = tensors_of(WHOLE)
    stored, meant = quantised(tensors, form) if form else (tensors, tensors)
    plain = load(write(tmp_path / "meant", WHOLE, meant), device=DEVICE)
    llm = load(write(tmp_path / "stored", WHOLE, stored, QWEN3 if form else None), device=DEVICE, quantization="fp8")
    expected, weights = dict(plain.runner.model.named_parameters()), kept(llm)
    for name in ("embed_tokens.weight", "lm_head.weight", "norm.weight"):
        assert name not in weights and torch.equal(llm.runner.model.get_parameter(name), expected[name])
    assert len(weights) == 8
    for name, tensor in weights.items():
        assert 0.01 < relative_error(tensor, expected[name]) < 0.03  # 3 bits behind the point
    assert relative_error(prompt_logits(llm, PROMPT), prompt_logits(plain, PROMPT)) < 0.1


def test_ordinary_matrices_of_an_fp8_checkpoint(tmp_path, keeps):
    """A vision tower's matrices are not loaded, so no word of them."""
    stored, meant = quantised(tensors_of(WHOLE), "compressed, per channel", lambda name: "mlp" in name)
    tower = {"vision_tower.layers.0.self_attn.q_proj.weight": torch.randn(60, 70)}
    path = write(tmp_path / "stored", WHOLE, {name: tensor.bfloat16() if "o_proj" in name else tensor
                                              for name, tensor in (stored | tower).items()},
                 compressed("channel"))
    with pytest.warns(UserWarning, match="^8 matrices of the FP8 checkpoint are stored in 16 or 32 bits and are cut "
                                         "to FP8, the first being model.layers.0.self_attn.k_proj.weight$"):
        llm = load(path, device=DEVICE)
    plain = load(write(tmp_path / "meant", WHOLE, meant), device=DEVICE)
    assert relative_error(prompt_logits(llm, PROMPT), prompt_logits(plain, PROMPT)) < 0.1
    expected, weights = dict(plain.runner.model.named_parameters()), kept(llm)
    assert all(relative_error(tensor, expected[name]) < 0.03 for name, tensor in weights.items())


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_two_ranks_cut_weights_with_their_scales(tmp_path, pretends, monkeypatch, enforce_eager):
    fork_workers(monkeypatch)
    stored, _ = quantised(tensors_of(WHOLE), "compressed, per channel")
    path = write(tmp_path / "stored", WHOLE, stored, compressed("channel"))
    one, two = (load(path, device="cpu", tensor_parallel_size=size, enforce_eager=enforce_eager) for size in (1, 2))
    whole, part = kept(one)["layers.1.o_proj.weight"], kept(two)["layers.1.o_proj.weight"]
    assert torch.equal(part, whole[:, :part.shape[1]]) and 2 * part.shape[1] == whole.shape[1]
    assert relative_error(prompt_logits(two, PROMPT), prompt_logits(one, PROMPT)) < 0.05


def test_two_pools_have_the_same_8_bits(ordinary, pretends):
    llm = load(ordinary, device="cpu", data_parallel_size=2, quantization="fp8")
    first, second = (dict(runner.model.named_parameters()) for runner in llm.runners)
    assert any(tensor.dtype is FP8 for tensor in first.values())
    assert all(torch.equal(first[name].float(), second[name].float()) for name in first)


def test_the_fused_modules_take_8_bits(ordinary, pretends):
    llm = load(ordinary, device="cpu", quantization="fp8")
    plain = prompt_logits(llm, PROMPT)
    use_modules(llm, fused.with_fp8(fused.MODULES))
    assert relative_error(prompt_logits(llm, PROMPT), plain) < 0.05


@pytest.mark.parametrize("changes, options, reason", [
    ({}, {}, "products of 8 bits need Triton and a GPU of Nvidia of compute capability 8.9 or more"),
    (dict(intermediate_size=300), dict(keeps=True), "the model has matrices that 8-bit products cannot have")])
def test_what_is_said_where_8_bits_are_not_kept(tmp_path, changes, options, reason, monkeypatch):
    monkeypatch.setattr(fp8, "has_fp8_products", lambda device: bool(options))
    path = write(tmp_path / "ordinary", WHOLE | changes, tensors_of(WHOLE | changes))
    with pytest.warns(UserWarning, match=f"quantization 'fp8' has no effect, and weights keep the .*: {reason}"):
        llm = load(path, device="cpu", quantization="fp8")
    assert not kept(llm)
    stored, _ = quantised(tensors_of(WHOLE | changes), "compressed, per channel")
    with pytest.warns(UserWarning, match=f"FP8 weights are turned into the engine's type .* the memory: {reason}"):
        assert not kept(load(write(tmp_path / "stored", WHOLE | changes, stored, compressed("channel")), device="cpu"))


def test_matrices_that_ranks_cannot_divide(tmp_path, pretends):
    config = WHOLE | dict(num_attention_heads=2, head_dim=24)
    path = write(tmp_path / "ordinary", config, tensors_of(config))
    message = complaint(load, path, device="cpu", tensor_parallel_size=2, quantization="fp8")
    assert message == ("tensor_parallel_size 2 cuts matrices in FP8 into parts of 24 columns, and parts must be "
                       "multiples of 16; use data_parallel_size, or one GPU")


def test_scales_of_another_form_than_config_json_says(tmp_path, pretends):
    stored, _ = quantised(tensors_of(WHOLE), "Qwen3, blocks")
    message = complaint(load, write(tmp_path / "stored", WHOLE, stored, compressed("channel")), device="cpu")
    assert "down_proj.scale has shape [256, 4]; config.json implies [256, 1]" in message


# The kernels

TYPES = [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])]  # the interpreter lies about bfloat16


@needs_kernel
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 8, 9])
@pytest.mark.parametrize("size_in, size_out", [(5, 3), (384, 70), (1500, 6), (2048, 40)])
def test_product_of_few_rows(dtype, rows, size_in, size_out):
    torch.manual_seed(0)
    x, shift = torch.randn(rows, size_in, device=DEVICE).to(dtype), torch.randn(size_out, device=DEVICE).to(dtype)
    weight, scale = quantize(torch.randn(size_out, size_in, device=DEVICE) / size_in ** 0.5)
    quantized = rows > fused.MOST_16_BIT_ROWS
    seen = fp8_weight(*fp8.quantize_rows(x)) if quantized else x
    exact = seen.double() @ fp8_weight(weight, scale).double().T
    # A GPU's tensor cores add up 8-bit products with about 14 bits.
    tolerance = 4 * torch.finfo(dtype).eps + (2e-3 if CUDA and quantized else 2e-6)
    assert relative_error(fused.few_rows_linear(x, weight, shift, scale=scale), exact + shift) < tolerance
    if size_out % 2 == 0:
        gate, up = exact.to(dtype).double().chunk(2, 1)
        y = fused.few_rows_linear(x, weight, None, None, "silu", True, scale=scale)
        assert relative_error(y, torch.nn.functional.silu(gate) * up) < tolerance
    if rows > 1 and size_in % 512 == 0:
        assert relative_error(fused.few_rows_linear(x, weight, None, count=4, scale=scale).double().sum(0),
                              exact) < tolerance


@needs_kernel
def test_small_and_large_numbers_beside_weights_in_8_bits():
    """x becomes float16, whose range is smaller than bfloat16's."""
    torch.manual_seed(0)
    weight, scale = quantize(torch.randn(64, 256, device=DEVICE))
    x = torch.randn(3, 256, device=DEVICE) * torch.tensor([[1e-4], [1.0], [2e5]], device=DEVICE)
    y = fused.few_rows_linear(x.bfloat16(), weight, None, scale=scale)
    exact = x.bfloat16().double() @ fp8_weight(weight, scale).double().T
    assert all(relative_error(*rows) < 0.01 for rows in zip(y, exact))


@needs_kernel
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 7), (2, 1500), (0, 64)])
def test_rows_in_8_bits(dtype, shape):
    x = torch.randn(*shape, device=DEVICE).mul(100).to(dtype)
    x[1:2] = 0
    (ours, scale), (expected, exact) = fp8.quantize_rows(x), quantize(x)
    torch.testing.assert_close(scale, exact, rtol=1e-6, atol=0)  # a GPU's division of float32 may be rounded otherwise
    assert ours.shape == expected.shape
    assert (ours.float() != expected.float()).sum() <= 1 + x.numel() / 20  # the interpreter rounds some up to half


@pytest.mark.parametrize("rows", [1, 2, 9, 17, 300])
def test_a_products_error(rows, keeps):
    """At most 1.1 times that of the operands in 8 bits, multiplied in float32."""
    torch.manual_seed(0)
    x, ordinary = torch.randn(rows, 512, device=DEVICE).bfloat16(), torch.randn(256, 512, device=DEVICE)
    weight, scale = quantize(ordinary)
    layer = fused.FusedLinear(512, 256, False, True).to(DEVICE).requires_grad_(False)
    layer.weight.copy_(weight), layer.scale.copy_(scale)
    exact, ideal = x.float() @ ordinary.T, x
    if rows > fused.MOST_16_BIT_ROWS or not fused.has_few_rows(x, weight):
        ideal = fp8_weight(*quantize(x))
    limit = 1.1 * relative_error(ideal.float() @ fp8_weight(weight, scale).T, exact)
    y = layer(x)
    assert y.shape == exact.shape and relative_error(y, exact) < limit < 0.05
    out = torch.empty_like(y)
    assert fused.linear(x, layer.weight, y[0], out, layer.scale) is out
    assert relative_error(out, y.float() + y[0].float()) < 0.01
