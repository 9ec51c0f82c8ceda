"""LFM2 in an engine, also with experts: the texts of transformers, and what goes together with recurrent states."""
import json
import re
from contextlib import closing
from functools import cache

import pytest
import torch

from nanopaged import BeamSearchParams, SamplingParams
from nanopaged.device import trial
from nanopaged.features import graphs
from nanopaged.tests.helpers import (
    BUNDLED,
    GOLDEN,
    GREEDY,
    PROMPT,
    assert_golden,
    complaint,
    expectations,
    load,
    needs,
    pools,
    prompt_logits,
    tokens_of,
)
from nanopaged.tests.test_graphs import SHORTAGES, record_graphs
from nanopaged.weights import families
from nanopaged.weights.checkpoint import read_safetensors

LFM2 = ["lfm2", "lfm2-moe"]


SMALL = dict(num_blocks=30, block_size=4, max_num_batched_tokens=7)
SNAPSHOTS = dict(block_size=1, num_blocks=900, snapshot_memory=0.9)


@pytest.mark.parametrize("variant, options", [
    *(("lfm2", dict(lookahead=lookahead) | options) for options in (SMALL, SNAPSHOTS) for lookahead in (0, 1)),
    ("lfm2", dict(lookahead=1, enable_prefix_caching=False)),
    ("lfm2", dict(lookahead=0, enforce_eager=True, max_num_seqs=3)),
    ("lfm2-moe", dict(lookahead=1) | SMALL)], ids=str)  # whose layers with states are the same
def test_texts_of_transformers(variant, options):
    """In chunks, with preemptions, and from snapshots."""
    llm = load(variant, device="cpu", **options)
    assert_golden(llm, variant, times=3)
    assert_golden(llm, variant)
    llm.scheduler.block_manager.check_idle()
    assert ("num_batched" in str(options)) == (llm.counts.num_preemptions > 0)


@pytest.mark.parametrize("variant", LFM2)
def test_logits_of_transformers(variant):
    prompts, _, logits = expectations(variant)
    found = prompt_logits(load(variant, device="cpu"), prompts[2].tolist())
    torch.testing.assert_close(found, logits[2], rtol=1e-4, atol=1e-4)


# ---- What goes together, and what does not

MIXED = [GREEDY, SamplingParams(temperature=0.9, seed=5, max_tokens=20, ignore_eos=True, repetition_penalty=1.3),
         SamplingParams(temperature=0.8, seed=6, n=3, max_tokens=12, ignore_eos=True, logprobs=2),
         SamplingParams(temperature=0, max_tokens=9, prompt_logprobs=1, presence_penalty=0.7)]
PROMPTS = [PROMPT[:n] + list(range(n)) for n in (3, 9, 15, 15, 4, 12)] + [PROMPT + PROMPT, [7], PROMPT]


def mixed_texts(**options):
    llm = pools(**dict(count=1, snapshot_memory=0.5) | options)
    outputs = llm.generate(PROMPTS, [MIXED[i % 4] for i in range(len(PROMPTS))])
    for one in llm.engines:
        one.scheduler.block_manager.check_idle()
    return [[sample.token_ids for sample in output.outputs] for output in outputs], llm.counts.num_preemptions


plain_texts = cache(lambda model: mixed_texts(model=model, enforce_eager=True, enable_prefix_caching=False)[0])


@pytest.mark.parametrize("variant, options", [
    *(("lfm2", options) for options in (
        dict(lookahead=1), dict(num_blocks=14), dict(num_blocks=16, lookahead=1), dict(count=2), dict(max_num_seqs=2),
        dict(max_num_batched_tokens=9, lookahead=1), dict(snapshot_memory=0))),
    ("lfm2-moe", dict(num_blocks=16, lookahead=1))], ids=str)
def test_mixed_requests_get_the_same_texts(variant, options):
    """Samples, penalties, log probabilities of both kinds; two pools."""
    found, num_preempted = mixed_texts(model=variant, **options)
    assert found == plain_texts(variant) and bool(num_preempted) == ("num_blocks" in options)


@pytest.mark.parametrize("variant, options", [*(("lfm2", options) for options in SHORTAGES), ("lfm2-moe", {})], ids=str)
def test_recorded_steps(monkeypatch, variant, options):
    """As in test_graphs.py: on a GPU real ones, else pretended ones."""
    monkeypatch.setattr(graphs, "TOKEN_SIZES", [16, 32])
    monkeypatch.setattr(graphs, "DECODE_SIZES", [1, 2])
    llm = load(variant, graphs=True, **dict(max_num_seqs=8, max_num_batched_tokens=40) | options)
    replayed = record_graphs(llm, monkeypatch)
    assert_golden(llm, variant, times=2)
    assert_golden(llm, variant)
    assert {shape.num_tiles > 0 for shape in replayed} == {True, False}


def test_forced_tokens_stay_one_place(monkeypatch):
    """A grammar forces tokens. In a recorded step these are a chunk, because a token's state follows the one before."""
    pytest.importorskip("llguidance")
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=40, structured_outputs=dict(
        regex=r"(I|We) am [a-z]{2,5}, and never was [0-9] years old"))

    def generate(record):
        llm = load("lfm2", graphs=record, load_format="dummy", tokenizer=str(BUNDLED), max_num_seqs=4,
                   hf_overrides=dict(vocab_size=1024, eos_token_id=1023), max_num_batched_tokens=64)
        for name, parameter in llm.runner.model.named_parameters():
            if "norm" not in name:
                parameter.mul_(12)
        replayed = record_graphs(llm, monkeypatch) if record else []
        return tokens_of(llm.generate([PROMPT[:5], PROMPT[:9]], params)), replayed

    (expected, _), (found, replayed) = generate(False), generate(True)
    assert found == expected and replayed


def test_over_an_fp8_cache():
    llm = load("lfm2", device="cpu", kv_cache_dtype="fp8", block_size=4)
    first, second = tokens_of(llm.generate([list(range(20))] * 2, GREEDY))
    assert first == second and all(0 < scale <= 1 for cache in llm.runner.kv_cache for scale in cache[2:])


@pytest.mark.parametrize("option, word", [
    (dict(tensor_parallel_size=2), "tensor_parallel_size"), (dict(swap_space=1), "swap_space")], ids=str)
def test_options_without_states(option, word):
    assert word in complaint(load, "lfm2", device="cpu", **option)


def test_beams_are_refused():
    llm = load("lfm2", device="cpu")
    assert "n samples" in complaint(llm.beam_search, [PROMPT], BeamSearchParams(beam_width=2, max_tokens=3))
    assert_golden(llm, "lfm2")


def test_a_failed_step_loses_no_slot():
    llm = load("lfm2", device="cpu", block_size=4, max_num_batched_tokens=16)
    launch, count = llm.runner.launch, [0]

    def fail(step):
        count[0] += 1
        if count[0] % 5 == 0:
            launch(step)  # the states are advanced
            raise OSError("gone")
        return launch(step)

    llm.runner.launch = fail
    prompts, continuations, _ = expectations("lfm2")
    requests, done = [llm.add_request(prompt.tolist(), GREEDY) for prompt in prompts], {}
    while llm.has_unfinished_requests():
        try:
            done |= {output.request_id: output for output in llm.step() if output.finished}
        except OSError:
            pass
    assert tokens_of([done[request] for request in requests]) == [text.tolist() for text in continuations]
    llm.scheduler.block_manager.check_idle()
    assert count[0] > 10


# ---- Memory

def test_live_slots_take_half_of_the_memory_at_most(capsys, monkeypatch):
    """A slot of the golden: 3 layers of 2 * 32 numbers of 4 bytes. A block: 2 layers, K and V of 16 tokens, 2 * 8."""
    monkeypatch.setattr(trial, "DEFAULT_CPU_POOL", memory := 200_000)
    llm = load("lfm2", device="cpu", num_blocks=None, max_num_seqs=256)
    pool, slot, block = llm.runner.pool, 3 * 2 * 32 * 4, 2 * 2 * 16 * 2 * 8 * 4
    assert pool.slot_bytes == slot and pool.block_bytes == block
    kind = llm.scheduler.block_manager.kinds["states"]
    assert kind.num_texts == llm.scheduler.max_num_seqs == memory // 2 // slot
    assert f"{kind.num_texts} texts run at once" in capsys.readouterr().err
    num_blocks = llm.scheduler.block_manager.num_blocks
    assert num_blocks == int((memory - kind.num_texts * slot) * 0.9) // block
    assert memory - block - 2 * slot < kind.num_blocks * slot + num_blocks * block <= memory
    assert_golden(llm, "lfm2", times=100)
    llm = load("lfm2", device="cpu", num_blocks=None, max_num_seqs=8)
    assert llm.scheduler.max_num_seqs == 8 and not capsys.readouterr().err


def test_states_are_float32():
    llm = load("lfm2", device="cpu", dtype="bfloat16")
    assert {state.dtype for layer in llm.config.states["layers"] for state in llm.runner.kv_cache[layer][0]} == {
        torch.float32}
    assert {llm.runner.kv_cache[layer][0].dtype for layer in (1, 3)} == {torch.bfloat16}


def test_the_bias_of_a_choice_is_float32():
    llm = load("lfm2-moe", device="cpu", dtype="bfloat16")
    biases = [layer.mlp.expert_bias for layer in llm.runner.model.layers[2:]]
    stored = dict(read_safetensors(GOLDEN / "lfm2-moe" / "model.safetensors"))
    assert not hasattr(llm.runner.model.layers[1].mlp, "expert_bias")
    for i, bias in enumerate(biases):
        assert torch.equal(bias, stored[f"model.layers.{i + 2}.feed_forward.expert_bias"])  # of the same type


@needs("experts")
@pytest.mark.parametrize("change, message", [
    (dict(num_dense_layers=5), "num_dense_layers must be an integer from 0 to 4"),
    (dict(num_experts_per_tok=7), "num_experts_per_tok"),
    (dict(routed_scaling_factor=0), "routed_scaling_factor must be a number above 0")], ids=str)
def test_what_a_config_with_experts_cannot_say(change, message):
    hf = json.loads((GOLDEN / "lfm2-moe" / "config.json").read_text())
    assert message in complaint(families.read_model_config, hf | change)


@pytest.mark.parametrize("change", [
    dict(layer_types=["conv"] * 5), dict(layer_types=["conv", "full_attention"]), dict(conv_L_cache=1),
    dict(layer_types=["mamba"] * 5)], ids=str)
def test_what_a_config_cannot_say(change):
    hf = json.loads((GOLDEN / "lfm2" / "config.json").read_text())
    assert "config.json" in complaint(families.read_model_config, hf | change)


def test_the_trace_shows_the_slots():
    from nanopaged.features.trace import Trace
    lines = []
    llm = load("lfm2", device="cpu", block_size=4, num_blocks=20, max_num_seqs=3)
    with closing(Trace(llm, lines.append)):
        assert_golden(llm, "lfm2", prompts=slice(1, 2))
        assert_golden(llm, "lfm2", prompts=slice(1, 2))
    strips = [line.split(None, 1)[1] for line in lines if line.startswith("  states      ")]
    assert "snapshot" in strips[0] and len(strips) > 30
    assert strips[1] == "A_____" and "." in strips[-1] and not re.search("[A-Z]", strips[-1])
    assert any(re.search(r"B.*\.|\..*B", strip) for strip in strips)


def test_metrics_count_slots():
    from nanopaged.features.server.metrics import Metrics
    llm = load("lfm2", device="cpu", max_num_seqs=3)
    assert_golden(llm, "lfm2")
    found = dict(re.findall(r"^nanopaged:(state_\w+){.*} (\d+)$", Metrics(llm).text("x"), re.M))
    assert int(found["state_snapshots_total"]) > 0 == int(found["state_shortened_hits_total"])
    kind = llm.scheduler.block_manager.kinds["states"]
    assert f'num_state_slots{{model_name="x",state="free"}} {kind.num_blocks}' in Metrics(llm).text("x")
    for end in (150, 151):  # the second text finds blocks of its first 32 tokens, and no snapshot there
        llm.generate([*range(40), *[end] * 30], GREEDY)
    assert 'state_shortened_hits_total{model_name="x"} 1' in Metrics(llm).text("x")
    llm.add_request(PROMPT, GREEDY)
    llm.step()
    assert 'num_state_slots{model_name="x",state="held"} 1' in Metrics(llm).text("x")
