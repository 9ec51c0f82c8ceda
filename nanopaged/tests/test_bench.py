"""bench.py, the program. No test depends on its figures."""
import sys

import pytest
import torch

import bench


def test_bench_leaves_out_what_a_card_is_too_small_for_and_nothing_else(monkeypatch, capsys):
    def large(quick):
        bench.random_llm("8B")

    def broken(quick):
        raise ValueError("a mistake")

    def too_large(*args, **kwargs):
        raise ValueError("the weights take 15.3 GiB")

    monkeypatch.setattr(bench, "LLM", too_large)
    monkeypatch.setattr(bench, "ON_CUDA", [])
    monkeypatch.setattr(sys, "argv", ["bench.py"])
    monkeypatch.setattr(bench, "ANYWHERE", [large, lambda quick: print("and on")])
    bench.main()
    assert capsys.readouterr().out.endswith("large is left out from here on: the weights take 15.3 GiB\nand on\n")
    monkeypatch.setattr(bench, "ANYWHERE", [broken])
    with pytest.raises(ValueError, match="a mistake"):
        bench.main()


@pytest.fixture
def tiny_bench(monkeypatch):
    """The engine of the benchmark's sections, on a CPU, with a step launched ahead as on a GPU."""
    shape = dict(hidden_size=8, head_dim=8, num_key_value_heads=1, num_hidden_layers=1, num_attention_heads=1,
                 intermediate_size=8)
    monkeypatch.setitem(bench.SHAPES, "tiny", bench.QWEN3 | shape)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    llm = bench.random_llm("tiny", max_model_len=128, device="cpu")
    llm.engine.lookahead = 1
    return llm


def test_bench_times_decode_steps_and_leaves_an_idle_engine(tiny_bench):
    assert bench.decode_ms(tiny_bench, 2, 8, steps=3) > 0
    assert tiny_bench.engine.is_idle and not tiny_bench.requests


def test_bench_times_prompts_that_arrive_while_others_decode(tiny_bench):
    gaps, first_tokens = bench.under_load(tiny_bench, num_decodes=2, context=8, num_arrivals=1, prompt_len=16, steps=20)
    assert len(gaps) == 20 and len(first_tokens) == 1 and 0 < first_tokens[0] < sum(gaps)
    assert tiny_bench.engine.is_idle and not tiny_bench.requests


def test_bench_knows_the_rows_that_it_has_peers_for(tiny_bench, monkeypatch):
    """A row whose name has changed would lose its peer."""
    names = []
    monkeypatch.setattr(bench, "row", lambda name, *_, **__: names.append(name))
    monkeypatch.setattr(bench, "random_llm", lambda *_, **__: tiny_bench)
    monkeypatch.setattr(bench, "first_token_after", lambda *_: 1.0)
    for name in ("attention_seconds", "decode_ms", "prefill_rate", "rate"):
        monkeypatch.setattr(bench, name, lambda *_, **__: 1.0)
    monkeypatch.setattr(bench, "warm_up", lambda *_: None)
    monkeypatch.setattr(bench.Limits, "__init__", lambda limits: vars(limits).update(copy=1e9, product=1e12))
    monkeypatch.setattr(bench.Limits, "tokens_per_second", lambda *_: 1.0)
    for section in (bench.start, bench.attention, bench.decode, bench.throughput, bench.large):
        section(bench.Limits(), False)
    assert bench.PEERS.keys() <= set(names)
