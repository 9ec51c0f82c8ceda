"""Gemma 4: its config.json, texts however the work is cut, and its kernels. (Tests of logits and of Triton are those of
test_more_families.py, tests of fused modules and of bfloat16 those of test_families.py.)"""
import json
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch

from nanopaged import LLM, SamplingParams, model, tiles
from nanopaged.device.pool import GIB
from nanopaged.features import fused, gemma4, graphs
from nanopaged.features.gemma4 import add_norms, kernel_forms, rotate_and_store, rotate_and_store_reference
from nanopaged.tests.helpers import (
    CUDA,
    DEVICE,
    GEMMA4,
    GOLDEN,
    PROMPT,
    assert_golden,
    complaint,
    expectations,
    load,
    needs_gpu,
    needs_kernel,
    pools,
    prompt_logits,
    relative_error,
    texts,
    tokens_of,
    use_modules,
)
from nanopaged.tests.pretended import PlainKernels, kept, plain_kernels
from nanopaged.tests.test_graphs import record_graphs
from nanopaged.weights.families import read_model_config

FULL, SLIDING = "full_attention", "sliding_attention"
# What the config.json of google/gemma-4-31B-it, 26B-A4B-it and E2B-it say of their layers.
TEXT_31B = dict(
    attention_k_eq_v=True, final_logit_softcapping=30.0, global_head_dim=512, head_dim=256, hidden_size=5376,
    hidden_size_per_layer_input=0, intermediate_size=21504, layer_types=([SLIDING] * 5 + [FULL]) * 10,
    max_position_embeddings=262144, model_type="gemma4_text", num_attention_heads=32, num_global_key_value_heads=4,
    num_hidden_layers=60, num_key_value_heads=16, num_kv_shared_layers=0, sliding_window=1024, vocab_size=262144,
    use_bidirectional_attention="vision")
TEXT_26B = TEXT_31B | dict(
    enable_moe_block=True, hidden_size=2816, intermediate_size=2112, layer_types=([SLIDING] * 5 + [FULL]) * 5,
    moe_intermediate_size=704, num_attention_heads=16, num_experts=128, num_global_key_value_heads=2,
    num_hidden_layers=30, num_key_value_heads=8, top_k_experts=8)
TEXT_E2B = TEXT_31B | dict(
    attention_k_eq_v=False, hidden_size=1536, hidden_size_per_layer_input=256, intermediate_size=6144,
    layer_types=([SLIDING] * 4 + [FULL]) * 7, max_position_embeddings=131072, num_attention_heads=8,
    num_global_key_value_heads=None, num_hidden_layers=35, num_key_value_heads=1, num_kv_shared_layers=20,
    sliding_window=512, use_bidirectional_attention=None, use_double_wide_mlp=True)


def read(text, **change):
    return read_model_config(dict(architectures=["Gemma4ForConditionalGeneration"], text_config=text | change,
                                  tie_word_embeddings=True, dtype="bfloat16"))


def test_what_config_json_says():
    with pytest.warns(UserWarning, match="multimodal model; its text model is loaded"):
        config = read(TEXT_31B)
    assert config.layer_heads == ([(16, 256)] * 5 + [(4, 512)]) * 10 and config.sliding_windows[4:6] == [1024, 0]
    assert config.gemma4["projections"][4:6] == [2, 1] and config.torch_dtype is torch.bfloat16
    assert [(rope["rope_type"], rope["rope_theta"], rope["head_dim"]) for rope in config.ropes] == [
        ("proportional", 1e6, 512), ("default", 1e4, 256)]
    newer = {str(i): dict(head_dim=512, num_key_value_heads=4) for i in range(5, 60, 6)}
    assert read(TEXT_31B, per_layer_config=newer, global_head_dim=None) == config
    assert read(TEXT_26B).experts["top_k"] == 8 and read(TEXT_26B).layer_heads[5] == (2, 512)
    config = read(TEXT_E2B)
    assert config.kv_sharing[:15] == [*range(15)] and config.kv_sharing[15:20] == [13] * 4 + [14]
    assert config.gemma4["mlp_sizes"][14:16] == [6144, 12288] and config.layer_heads[13:15] == [(1, 256), (1, 512)]


@pytest.mark.parametrize("change, message", [
    (dict(use_bidirectional_attention="all"), "attends to later ones"),
    (dict(final_logit_softcapping="x"), "final_logit_softcapping must be a number above 0"),
    (dict(num_kv_shared_layers=60), "num_kv_shared_layers must be an integer from 0 to 59, not 60"),
    (dict(num_kv_shared_layers=58), "none of the kind of layer 5 has K and V"),
    (dict(per_layer_config={"60": dict(head_dim=8)}), "of a layer's number, below 60, not '60'"),
    (dict(per_layer_config={"5": dict(sliding_window=8)}), "says head_dim and num_key_value_heads"),
    (dict(per_layer_config={"5": dict(head_dim=512), "11": dict(head_dim=256)}), "in layers with one rope"),
    (dict(rope_parameters=dict(rope_theta=1e4, rope_type="default")), "not one for all layers"),
    (dict(num_global_key_value_heads=3), "32 query heads cannot share 3 kv heads evenly"),
    (dict(hidden_size_per_layer_input=256, vocab_size_per_layer_input=9), "vocab_size_per_layer_input=9"),
    (dict(enable_moe_block=True), "top_k_experts"), (dict(global_head_dim=31), "head_dim 31 is odd")])
def test_what_is_refused(change, message):
    assert message in complaint(read, TEXT_31B, **change)


# ---- Texts

@pytest.mark.parametrize("variant, options", [
    *((variant, dict(num_blocks=num_blocks, block_size=4, max_num_batched_tokens=7, lookahead=i % 2))
      for i, (variant, num_blocks) in enumerate(zip(GEMMA4, (15, 18, 16, 9)))),
    ("gemma4", dict(block_size=8, lookahead=1, max_num_seqs=2)),
    ("gemma4-moe", dict(enable_prefix_caching=False, enforce_eager=True)),
    *((variant, dict(speculative_config={"num_speculative_tokens": 3}, block_size=4, max_num_batched_tokens=20))
      for variant in ("gemma4", "gemma4-e2b"))], ids=str)
def test_texts_of_transformers(variant, options):
    """In chunks, with preemptions, with drafts, and from cached blocks."""
    llm = load(variant, device="cpu", **options)
    assert_golden(llm, variant)
    assert_golden(llm, variant)
    llm.scheduler.block_manager.check_idle()
    assert llm.config.groups and (llm.counts.num_preemptions > 0) == ("num_blocks" in options)
    prompt = expectations(variant)[0][1].tolist()
    pair = llm.generate(prompt, SamplingParams(n=2, seed=3, max_tokens=8, ignore_eos=True))[0].outputs
    alone = [llm.generate(prompt, SamplingParams(seed=seed, max_tokens=8, ignore_eos=True)) for seed in (3, 4)]
    assert [one.token_ids for one in pair] == [tokens_of(outputs)[0] for outputs in alone]


@cache
def from_a_large_pool(variant):
    return texts(pools(1, model=variant))[0]


@pytest.mark.parametrize("variant", ["gemma4", "gemma4-e2b"])
def test_mixed_requests_do_not_depend_on_the_pool(variant):
    """Samples, beams, penalties and log probabilities, from blocks that windows gave back, and after preemptions."""
    found, num_preempted = texts(pools(count=1, model=variant, num_blocks=14, lookahead=1))
    assert num_preempted and found == from_a_large_pool(variant)


@pytest.mark.skipif(CUDA, reason="graphs are pretended, on a CPU")
@pytest.mark.parametrize("variant", GEMMA4)
def test_recorded_steps(variant, monkeypatch):
    """With fused modules."""
    monkeypatch.setattr(graphs, "TOKEN_SIZES", [16, 32])
    monkeypatch.setattr(graphs, "DECODE_SIZES", [1, 4])
    llm = load(variant, graphs=True, max_num_batched_tokens=40, device="cpu")
    for patch in plain_kernels():
        monkeypatch.setattr(*patch)
    use_modules(llm, fused.MODULES)
    replayed = record_graphs(llm, monkeypatch)
    assert_golden(llm, variant, times=2)
    assert {shape.num_tiles > 0 for shape in replayed} == {True, False}


def test_an_fp8_cache():
    """Layers that share K and V have one scale. Another text's tokens do not matter."""
    llm = load("gemma4-e2b", device="cpu", kv_cache_dtype="fp8")
    prompts = [prompt.tolist() for prompt in expectations("gemma4-e2b")[0]]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    assert tokens_of(llm.generate(prompts, params)) == [tokens_of(llm.generate(one, params))[0] for one in prompts]
    caches = llm.runner.kv_cache
    assert all(caches[i][2:] == caches[source][2:] for i, source in enumerate(llm.config.kv_sharing))


def test_memory_of_layers_that_share():
    """The pool has K and V of five layers, and of the others nothing."""
    llm = load("gemma4-e2b", device="cpu")
    pool, caches = llm.runner.pool, llm.runner.kv_cache
    assert pool.block_bytes == 16 * 4 * 2 * sum(heads * size for heads, size in llm.config.layer_heads[:5])
    assert {cache[0].data_ptr() for cache in caches} == {cache[0].data_ptr() for cache in caches[:5]}
    assert "heads of one size" in complaint(load, "gemma4-e2b", device="cpu", tensor_parallel_size=2)


@pytest.mark.parametrize("variant", ["gemma4-e2b", "gemma4-moe"])
def test_matrices_in_8_bits(tmp_path, keeps, variant):
    """All of layers but the routers."""
    config = json.loads((GOLDEN / variant / "config.json").read_text())
    text = config["text_config"]
    size = 2 * text["hidden_size_per_layer_input"]
    text |= dict(hidden_size=64, intermediate_size=48, hidden_size_per_layer_input=size)
    text |= dict(moe_intermediate_size=32) if text["enable_moe_block"] else {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = dict(load_format="dummy", dtype="float32", device=DEVICE, num_blocks=64, enforce_eager=True)
    plain, cut = LLM(str(tmp_path), **options), LLM(str(tmp_path), quantization="fp8", **options)
    parameters = dict(cut.runner.model.named_parameters())
    assert {name for name, one in parameters.items() if one.itemsize == 1} == {
        name for name, one in plain.runner.model.named_parameters() if name.startswith("layers.") and one.dim() == 2
        and "router" not in name and "vectors" not in name}
    plain.runner.model.load_state_dict(kept(cut), strict=False)
    assert relative_error(prompt_logits(cut, PROMPT[:1]), prompt_logits(plain, PROMPT[:1])) < 1e-4


@pytest.mark.parametrize("variant", GEMMA4)
def test_hits_behind_windows(variant):
    """A prompt whose first blocks the windows gave back, the same one again, other ends, and a second turn: all full
    blocks are found, and what follows is what an engine without a cache generates."""
    options = dict(device="cpu", block_size=4, max_num_batched_tokens=16)
    llm, plain = load(variant, **options), load(variant, enable_prefix_caching=False, **options)
    common, params = [i * 7 % 140 for i in range(40)], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    tables: list[int] = []
    llm.add_request(common + [1, 2], params)
    while llm.has_unfinished_requests():
        llm.step()
        tables += [part.num_null_blocks for seq in llm.scheduler.running for part in seq.parts.values()]
    assert max(tables) == (51 - 13) // 4
    texts = [common + [1, 2], common + [3] * 5, common]
    texts.append(texts[0] + tokens_of(plain.generate(texts[0], params))[0] + [5] * 6)
    for text, num_cached in zip(texts, (40, 40, 40, 48)):
        (output,) = llm.generate(text, params)
        assert output.num_cached_tokens == num_cached
        assert tokens_of([output]) == tokens_of(plain.generate(text, params))
    llm.scheduler.block_manager.check_idle()


# ---- The second table of embeddings on the host

@pytest.mark.parametrize("free, utilization, is_on_host", [
    (16.0, 0.9, False), (11.0, 0.9, True), (24.0, 0.9, False), (24.0, 0.5, True)])
def test_where_the_second_table_lies(monkeypatch, free, utilization, is_on_host):
    """E2B's weights take 9.5 GiB, on cards of some sizes."""
    with torch.device("meta"):
        built = SimpleNamespace(layers=[SimpleNamespace(vectors=gemma4.LayerVectors(read(TEXT_E2B), model.PLAIN))])
    table = built.layers[0].vectors.embed_tokens_per_layer.weight
    others = torch.nn.Parameter(torch.empty(2_740_000_000, device="meta"))
    types, made = {table: torch.bfloat16, others: torch.bfloat16}, []
    monkeypatch.setattr(gemma4, "triton", True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free * GIB), int((free + 0.3) * GIB)))
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: made.append((*shape, options)))
    find = partial(gemma4.tables_on_host, types, built, "cuda:0", utilization)
    if not is_on_host:
        assert find() == {}
        return
    with pytest.warns(UserWarning, match="for each layer, 4.4 GiB, stays in the host's memory"):
        assert find() == {table: None}
    assert made == [((262144, 35 * 256), dict(dtype=torch.bfloat16, pin_memory=True))]


@needs_gpu
def test_the_second_table_on_the_host(monkeypatch):
    """Steps are recorded, and read it there."""
    monkeypatch.setattr(gemma4, "MOST_WEIGHTS", 0)
    monkeypatch.setattr(graphs, "DECODE_SIZES", [1, 4])
    with pytest.warns(UserWarning, match="stays in the host's memory"):
        llm = load("gemma4-e2b", graphs=True, max_num_batched_tokens=40)
    places = {name: (one.device.type, one.is_pinned()) for name, one in llm.runner.model.named_parameters()}
    assert places.pop("layers.0.vectors.embed_tokens_per_layer.weight") == ("cpu", True)
    assert {*places.values()} == {("cuda", False)}
    replayed = record_graphs(llm, monkeypatch)
    assert_golden(llm, "gemma4-e2b", times=2)
    assert {shape.num_tiles > 0 for shape in replayed} == {True, False}


@needs_kernel
def test_gather_rows():
    """More numbers than a tile has."""
    table, ids = torch.randn(9, 1500), torch.tensor([3, 0, 8, 3], dtype=torch.int32)
    ours = gemma4.gather_rows(table.pin_memory() if CUDA else table, ids.to(DEVICE))
    assert ours.device.type == DEVICE and torch.equal(ours.cpu(), table[ids])


# ---- Kernels

@needs_kernel
@pytest.mark.skipif(CUDA, reason="test_more_families.py runs all kernels there")
def test_small_kernels():
    """Fused modules with their kernels, and those that compile ahead, in the interpreter."""
    llm = load("gemma4-moe", attention="triton", device="cpu")
    use_modules(llm, fused.MODULES)
    llm.runner.modules = fused.MODULES
    for task in kernel_forms(llm.runner):
        task()
    assert_golden(llm, "gemma4-moe", slice(1), num_tokens=2)


def test_a_gpu_with_too_little_shared_memory(monkeypatch):
    runner = SimpleNamespace(config=read(TEXT_31B), dtype=torch.float16, device=torch.device("cpu"))
    monkeypatch.setattr(tiles, "shared_memory", lambda device: 65536)
    assert "need 96 KiB of shared memory for a block, and cpu has 64" in complaint(list, kernel_forms(runner))


@needs_kernel
@pytest.mark.parametrize("kv_rows", [2, 1, 0])
@pytest.mark.parametrize("num_heads, num_kv_heads, head_dim", [(4, 2, 16), (3, 1, 24)])
def test_rotate_and_store(kv_rows, num_heads, num_kv_heads, head_dim):
    """q, k and v; q and k, which is v as well; q alone."""
    torch.manual_seed(0)
    make = [torch.randn(*shape, device=DEVICE) for shape in (
        (3, num_heads + kv_rows * num_kv_heads, head_dim), (3, head_dim), (head_dim,), (head_dim,))]
    qkv, rotation, q_norm, k_norm = make
    slots, found = torch.tensor([5, -1, 2], dtype=torch.int32, device=DEVICE), []
    for function in (rotate_and_store, rotate_and_store_reference):
        caches = torch.zeros(2, 2, 4, num_kv_heads, head_dim, device=DEVICE)
        q = function(qkv, num_heads, rotation, q_norm, k_norm, 1e-5, *caches, slots)
        found.append((q, caches))
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert bool(found[1][1].any()) == bool(kv_rows)


@needs_kernel
@pytest.mark.parametrize("count, scalar", [(0, None), (1, 0.7), (3, 0.7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_norms_on_both_sides_of_an_addition(dtype, count, scalar):
    torch.manual_seed(0)
    x = torch.randn(*[count] * (count > 0), 3, 40, device=DEVICE).to(dtype)
    residual = torch.randn(3, 40, device=DEVICE).to(dtype)
    post, weight = (1 + torch.randn(40, device=DEVICE) / 4 for _ in range(2))
    scalar = None if scalar is None else torch.tensor([scalar], dtype=dtype, device=DEVICE)
    given = residual, scalar, weight, 1e-6
    found = add_norms(x, post, *given)
    for ours, exact in zip(found, PlainKernels.add_norms(x, post, *given)):
        torch.testing.assert_close(ours, exact, rtol=3e-3 if dtype is torch.float16 else 1e-5, atol=1e-3)
