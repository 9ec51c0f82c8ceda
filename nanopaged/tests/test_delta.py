"""Gated delta nets in an engine: the texts of transformers, chunks and their bits, states in rings."""
import json
import re
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch

from nanopaged import LLM, SamplingParams
from nanopaged.features import fused, graphs, qwen3_5
from nanopaged.features.delta import Weights, chunk, delta_rule, gated_delta
from nanopaged.features.kinds.recurrent import Work, make_rounds, state_slots, with_states
from nanopaged.tests.helpers import (
    CUDA,
    DEVICE,
    GOLDEN,
    GREEDY,
    PROMPT,
    PROMPTS,
    SETTINGS,
    assert_golden,
    complaint,
    load,
    needs,
    needs_kernel,
    pools,
    prompt_logits,
    relative_error,
    rewritten,
    tokens_of,
    use_modules,
)
from nanopaged.tests.pretended import kept, plain_kernels
from nanopaged.tests.test_graphs import SHORTAGES, record_graphs
from nanopaged.weights import families
from nanopaged.weights.checkpoint import read_safetensors

VARIANTS = ["qwen3.5", "qwen3.5-moe", "qwen3-next"]


@pytest.mark.parametrize("variant, options", [
    *((variant, dict(num_blocks=24, block_size=4, max_num_batched_tokens=15, lookahead=0)) for variant in VARIANTS),
    *((variant, dict(enforce_eager=True, max_num_seqs=3)) for variant in VARIANTS[1:]),
    ("qwen3.5", dict(num_blocks=24, block_size=4, snapshot_memory=0.9, lookahead=1))], ids=str)
def test_texts_of_transformers(variant, options):
    """In chunks, with preemptions, and from snapshots. (test_more_families.py compares logits.)"""
    llm = load(variant, device="cpu", **options)
    assert_golden(llm, variant, times=2)
    assert_golden(llm, variant, slice(2))
    llm.scheduler.block_manager.check_idle()


@pytest.mark.parametrize("options", [
    {}, dict(max_num_batched_tokens=100, lookahead=1), dict(max_num_batched_tokens=50), dict(block_size=48),
    dict(num_blocks=20, max_num_batched_tokens=150, snapshot_memory=0.8, lookahead=1)], ids=str)
def test_texts_longer_than_a_chunk(options):
    """Whole, in steps, from snapshots in the middle and after preemptions: prompts of 90 and 200 tokens, and what
    transformers continues them with (make_models.py --reference)."""
    expected = dict(read_safetensors(GOLDEN / "qwen3.5" / "long.safetensors"))
    prompts, continuations = ([expected[f"{kind}.{i}"].tolist() for i in range(2)] for kind in (
        "prompt", "continuation"))
    llm = load("qwen3.5", device="cpu", **dict(snapshot_memory=0.5) | options)
    assert tokens_of(llm.generate(prompts * 2, GREEDY)) == continuations * 2
    again = llm.generate(prompts, GREEDY)
    assert tokens_of(again) == continuations
    if "num_blocks" not in options and options.get("max_num_batched_tokens") != 50:
        assert [output.num_cached_tokens for output in again] == [0 if "block_size" in options else 64, 192]
    llm.scheduler.block_manager.check_idle()
    assert bool(llm.counts.num_preemptions) == ("num_blocks" in options)


def test_a_second_turn_computes_its_new_tokens_alone():
    llm, fresh = (load("qwen3.5", device="cpu", snapshot_memory=0.5) for _ in range(2))
    prompt = [token % 190 for token in range(7, 450, 3)]
    first = llm.generate([prompt], GREEDY)[0].outputs[0].token_ids
    for _ in range(3):
        second, expected = (one.generate([prompt + first + [5, 6, 7]], GREEDY)[0] for one in (llm, fresh))
        assert second.outputs[0].token_ids == expected.outputs[0].token_ids
        assert second.num_cached_tokens == 128


def mixed_texts(**options):
    llm = pools(**dict(count=1, model="qwen3-next", snapshot_memory=0.5) | options)
    outputs = llm.generate(PROMPTS, [SETTINGS[i % 4] for i in range(len(PROMPTS))])
    for one in llm.engines:
        one.scheduler.block_manager.check_idle()
    return [[sample.token_ids for sample in output.outputs] for output in outputs], llm.counts.num_preemptions


plain_texts = cache(lambda: mixed_texts(enforce_eager=True, enable_prefix_caching=False)[0])


@pytest.mark.parametrize("options", [
    dict(num_blocks=16, lookahead=1), dict(count=2), dict(max_num_batched_tokens=20)], ids=str)
def test_mixed_requests_get_the_same_texts(options):
    """Samples (n = 3), penalties, log probabilities; two pools."""
    found, num_preempted = mixed_texts(**options)
    assert found == plain_texts() and bool(num_preempted) == ("num_blocks" in options)


@pytest.mark.parametrize("variant, options", [
    ("qwen3.5", SHORTAGES[0]), ("qwen3-next", SHORTAGES[3]), ("qwen3.5-moe", SHORTAGES[2])], ids=str)
def test_recorded_steps(monkeypatch, variant, options):
    """As in test_graphs.py: on a GPU real ones, else pretended ones. Experts and an output gate are among them."""
    monkeypatch.setattr(graphs, "DECODE_SIZES", [1, 2])
    llm = load(variant, graphs=True, **dict(max_num_seqs=8, max_num_batched_tokens=40) | options)
    replayed = record_graphs(llm, monkeypatch)
    assert_golden(llm, variant, times=2)
    assert replayed


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_fused_modules(variant, monkeypatch):
    """They get their weights as a checkpoint that is made of the plain ones' weights."""
    llm = load(variant, device="cpu", enforce_eager=True)
    for patch in plain_kernels():
        monkeypatch.setattr(*patch)
    use_modules(llm, fused.MODULES)
    assert_golden(llm, variant, times=2)


@needs_kernel
@needs("delta_kernels")
def test_the_kernels_in_an_engine():
    """Steps of several sequences, with chunks and without."""
    from nanopaged.features import delta_kernels
    llm = load("qwen3.5", attention="triton", enforce_eager=True)
    llm.runner.state_kernels = delta_kernels
    assert_golden(llm, "qwen3.5", **{} if CUDA else dict(prompts=slice(2), num_tokens=3))


@needs_kernel
@pytest.mark.parametrize("num_rows, heads, head_dim", [(1, 4, 16), (5, 3, 24), (3, 5, 256)])
def test_an_output_gate_in_triton(num_rows, heads, head_dim):
    o, qkv = torch.randn(num_rows, heads, head_dim, device=DEVICE), torch.randn(
        num_rows, heads + 2, head_dim, device=DEVICE)
    torch.testing.assert_close(qwen3_5.gate_output(o, qkv[:, 2:]), o * qkv[:, 2:].sigmoid())


# ---- The recurrence

K_HEADS, V_HEADS, K_DIM, V_DIM, TAPS = 2, 4, 3, 5, 4
CHANNELS = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM


def problem(num_tokens, seed=0):
    """qkv, z, b, a, weights; the states of 6 slots. All slots but that before all tokens hold noise."""
    generator = torch.Generator().manual_seed(seed)
    qkv, z, b, a = (torch.randn(num_tokens, *shape, generator=generator) for shape in (
        (CHANNELS,), (V_HEADS, V_DIM), (V_HEADS,), (V_HEADS,)))
    conv, A_log, dt_bias, norm = (torch.randn(shape, generator=generator) for shape in (
        (CHANNELS, TAPS), (V_HEADS,), (V_HEADS,), (V_DIM,)))
    states = [torch.randn(6, TAPS, CHANNELS, generator=generator), torch.randn(6, V_HEADS, K_DIM, V_DIM,
                                                                               generator=generator)]
    states[1][1] = 0
    return (qkv, z, b, a), Weights(conv, A_log - 2, dt_bias, norm, 1e-6, K_HEADS, V_HEADS, K_DIM, V_DIM, TAPS), states


def step(given, weights, states, *parts):
    """One step. parts: for each sequence its tokens (first and last in `given`), the source, the live slot, and marks
    (position, slot); the first token is at the position of the same number."""
    lens, ends = [end - start for start, end, *_ in parts], [end for _, end, *_ in parts]
    rounds = [tuple(torch.tensor(one, dtype=torch.int32) for one in group) for group in make_rounds(lens, ends, 64)]
    rounds = [(places, tokens.view(-1, 64), done) for places, tokens, done in rounds]
    rows = torch.tensor([[*row, *[0] * (6 - len(row))] for _, _, *row in parts], dtype=torch.int32)
    starts = torch.tensor([0, *lens]).cumsum(0, dtype=torch.int32)
    batch = SimpleNamespace(**dict.fromkeys(("positions", "slot_mapping", "block_tables", "logits_indices",
                                             "sampling_places", "metadata")), input_ids=torch.zeros(sum(lens)),
                            seq_lens=torch.tensor(ends, dtype=torch.int32), query_start_loc=starts)
    slots = with_states(batch, state_slots(starts, batch.seq_lens, rows, rounds=rounds), TAPS).states
    tokens = [torch.cat([one[start:end] for start, end, *_ in parts]) for one in given]
    return gated_delta(*tokens, weights, states, slots)


def test_a_prompt_has_the_same_bits_however_it_is_cut():
    """At multiples of the chunk, beside another sequence, and from a mark."""
    *given, states = problem(200)
    whole = step(*given, states, (0, 200, 1, 2, 128, 4))
    in_parts = torch.cat([step(*given, states, part) for part in ((0, 128, 1, 3), (128, 192, 3, 3), (192, 200, 3, 3))])
    assert torch.equal(whole, in_parts)
    assert torch.equal(states[0][2, 1:], states[0][3, 1:])  # where the positions 197 to 199 are
    assert torch.equal(states[1][2], states[1][3]) and not states[1][1].any()
    assert torch.equal(step(*given, states, (128, 200, 4, 5)), whole[128:])
    assert torch.equal(states[1][5], states[1][2])


def test_chunks_equal_the_recurrence_in_any_slots():
    """Token by token, each from another slot into another one: inputs of the tokens before move along."""
    *given, states = problem(70)
    whole = step(*given, states, (0, 70, 1, 2))
    slot, single = 1, []
    for token in range(70):
        target = 3 + token % 2
        single.append(step(*given, states, (token, token + 1, slot, target)))
        slot = target
    torch.testing.assert_close(torch.cat(single), whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states[1][slot], states[1][2], rtol=1e-4, atol=1e-4)
    both = step(*given, states, (0, 2, 1, 5), (69, 70, 3, 3), (0, 67, 1, 2))  # 2, 1 and 67 tokens, one step
    torch.testing.assert_close(both, torch.cat([whole[:2], whole[69:], whole[:67]]), rtol=1e-4, atol=1e-4)


def test_a_chunk_is_its_steps():
    generator = torch.Generator().manual_seed(0)

    def noise(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    n, length, heads = 2, 9, 3
    q, k, v, state = noise(n, length, heads, K_DIM), noise(n, length, heads, K_DIM), noise(n, length, heads, V_DIM), \
        noise(n, heads, K_DIM, V_DIM)
    g, beta = -noise(n, length, heads).abs(), noise(n, length, heads).sigmoid()
    g[1, 7:] = beta[1, 7:] = 0  # no tokens
    o, last = chunk(q, k, v, g, beta, state)
    for i in range(length):
        expected, state = delta_rule(*(one[:, i] for one in (q, k, v, g, beta)), state)
        torch.testing.assert_close(o[:, i], expected)
    torch.testing.assert_close(last, state)


# ---- Checkpoints

def test_parts_of_other_models_are_left_out(tmp_path):
    """A head that predicts several tokens has layers, too."""
    def more(tensors):
        return tensors | {name.replace("model.language_model.", "mtp."): torch.ones(3) for name in tensors
                          if "layers" in name}

    with pytest.warns(UserWarning, match="multimodal"):
        llm = load(rewritten(tmp_path, "qwen3.5", more), device="cpu")
    assert_golden(llm, "qwen3.5")


@needs("fp8", "fused")
def test_matrices_in_8_bits(tmp_path, keeps):
    """All of the layers' but routers and convolutions."""
    config = json.loads((GOLDEN / "qwen3-next" / "config.json").read_text()) | dict(
        hidden_size=64, linear_num_value_heads=8, intermediate_size=48, moe_intermediate_size=32,
        shared_expert_intermediate_size=32)
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = dict(load_format="dummy", dtype="float32", device=DEVICE, num_blocks=64, enforce_eager=True)
    plain, llm = LLM(str(tmp_path), **options), LLM(str(tmp_path), quantization="fp8", **options)
    expected = dict(plain.runner.model.named_parameters())
    assert {*kept(llm)} == {name for name, one in expected.items() if name.startswith("layers") and one.dim() == 2
                            and "router" not in name and "shared_gate" not in name}
    for name, tensor in kept(llm).items():
        assert relative_error(tensor, expected[name]) < 0.03
    assert relative_error(prompt_logits(llm, PROMPT), prompt_logits(plain, PROMPT)) < 0.1


@needs("fp8")
def test_a_checkpoint_in_fp8_blocks(tmp_path):
    """It becomes one in the engine's type. b, a, routers and convolutions are not stored in FP8."""
    def cut(tensors):
        for name in [name for name in tensors if re.search(r"layers.*(proj|proj_qkv|proj_z)\.weight$", name)]:
            stored = (tensors[name].float() / 0.01).to(torch.float8_e4m3fn)
            meant[name], tensors[name] = stored.float() * 0.01, stored
            tensors[f"{name}_scale_inv"] = torch.full([-(-size // 128) for size in stored.shape], 0.01)
        return tensors

    meant: dict = {}
    llm = load(rewritten(tmp_path, "qwen3.5", cut), device="cpu", hf_overrides=dict(quantization_config=dict(
        quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128])))
    found = prompt_logits(llm, PROMPT)
    plain = load(rewritten(tmp_path, "qwen3.5", lambda tensors: tensors | meant), device="cpu")
    assert len(meant) > 15 and relative_error(found, prompt_logits(plain, PROMPT)) < 1e-5


def test_types_of_parameters():
    """What the recurrence multiplies many times stays in float32."""
    llm = load("qwen3.5", device="cpu", dtype="bfloat16")
    types = {name.split(".")[2]: parameter.dtype for name, parameter in llm.runner.model.named_parameters()
             if name.startswith("layers.0")}
    assert {name for name, dtype in types.items() if dtype is torch.float32} == {
        "A_log", "dt_bias", "gated_norm", "input_layernorm", "post_attention_layernorm"}
    assert len(llm.generate([PROMPTS[0]], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3


@pytest.mark.parametrize("change", [
    dict(layer_types=["linear_attention"] * 4), dict(layer_types=["mamba"] * 4), dict(linear_conv_kernel_dim=1),
    dict(linear_num_value_heads=3), dict(hidden_act="gelu"), dict(attn_output_gate=False)], ids=str)
def test_what_a_config_cannot_say(change):
    hf = json.loads((GOLDEN / "qwen3-next" / "config.json").read_text())
    assert any(word in complaint(families.read_model_config, hf | change) for word in ("config.json", "Qwen3.5"))


@needs_kernel
def test_the_kernel_of_decode_keeps_the_state_after_each_draft():
    """A place with a draft of two tokens, the places of these, and a place without: as in plain torch."""
    from nanopaged.features import delta_kernels
    sizes = dict(k_heads=1, v_heads=2, k_dim=16, v_dim=32)
    channels, generator = 96, torch.Generator().manual_seed(0)
    shapes = (channels, 4), (2,), (2,), (32,), (4, channels), (4, 2, 32), (4, 2), (4, 2)
    conv, A_log, dt_bias, norm, qkv, z, b, a, *states = (torch.randn(one, generator=generator).to(DEVICE) for one in (
        *shapes, (12, 4, channels), (12, 2, 16, 32)))
    weights = Weights(conv, A_log, dt_bias, norm, 1e-6, *sizes.values(), 4)
    rows = [[3, 6, 0, 0, 0, 0, 9, 3, 10, 5], [7, 8, 0, 0, 0, 0, 0, 0, 0, 0]]  # after 9 tokens in 3, 10 in 5, 11 in 6
    rows, ints = torch.tensor(rows, dtype=torch.int32, device=DEVICE), partial(
        torch.tensor, dtype=torch.int32, device=DEVICE)
    batch = SimpleNamespace(**dict.fromkeys(("positions", "slot_mapping", "block_tables", "logits_indices",
                                             "sampling_places", "metadata")), input_ids=torch.zeros(4, device=DEVICE),
                            seq_lens=ints([9, 10, 11, 3]), query_start_loc=ints([0, 1, 2, 3, 4]))
    places, copies = ints([0, 0, 0, 1]), [one.clone() for one in states]
    slots = state_slots(batch.query_start_loc, batch.seq_lens, rows[places], places, most=3, work=Work(4))
    expected = gated_delta(qkv, z, b, a, weights, states, with_states(batch, slots, 4).states)
    assert slots.lens.tolist() == [3, 0, 0, 1] and slots.first.tolist() == [0, 3, 3, 3]
    found = delta_kernels.gated_delta(qkv, z, b, a, weights, copies, slots)
    assert relative_error(found, expected) < 1e-5
    for ours, theirs in zip(copies, states):
        torch.testing.assert_close(ours[3:], theirs[3:], rtol=1e-4, atol=1e-4)
