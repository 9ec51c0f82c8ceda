"""bench.py, the program. No test depends on its figures."""
import json
import time
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import bench
from nanopaged.tests.helpers import load
from nanopaged.text.tokenizer import load_tokenizer

TINY = bench.QWEN3 | dict.fromkeys(bench.SIZES, 1) | dict(hidden_size=8, head_dim=8, num_key_value_heads=1,
                                                         vocab_size=10_000)


def test_bench_leaves_out_what_a_card_is_too_small_for_and_nothing_else(capsys):
    def large(quick):
        bench.random_llm(bench.SHAPES["8B"], num_blocks=0)

    def broken(quick):
        raise ValueError("a mistake")

    bench.main([], [large, lambda quick: print("and on")], [])
    *_, left_out, last = capsys.readouterr().out.splitlines()
    assert left_out.startswith("large is left out from here on: num_blocks must be ") and last == "and on"
    with pytest.raises(ValueError, match="a mistake"):
        bench.main([], [broken], [])


def test_bench_times_steps_and_leaves_an_idle_engine():
    """Decode steps, prompts that arrive meanwhile, and drafts: all of them come true, or none."""
    guesses = SimpleNamespace(propose=lambda token_ids, k: [0] * k)
    tiny = bench.random_llm(TINY, max_model_len=256, device="cpu", speculative_config={"method": lambda: guesses})
    tiny.engine.lookahead = 1
    drafting, tiny.drafting = tiny.drafting, None
    started, num_tokens = time.perf_counter(), tiny.counts.num_generated_tokens
    gaps = bench.step_times(tiny, bench.random_prompts(1, [8, 8]), 20, arriving=bench.random_prompts(0, [16]))
    assert len(gaps) == 20 and min(gaps) > 0 and sum(gaps) / 1000 < time.perf_counter() - started
    assert tiny.counts.num_generated_tokens - num_tokens >= 2 * 20 + 1
    drafting.pays = 0
    for p, length in ((1, 6), (0, 1)):
        assert bench.draft_ms(tiny, drafting, p, 2, context=8, steps=3) > 0
        assert drafting.metrics.mean_acceptance_length == pytest.approx(length, abs=0.01)
    assert tiny.engine.is_idle and not tiny.requests


def test_bench_counts_experts(monkeypatch):
    monkeypatch.setattr(bench, "random_prompts", lambda seed, lengths: [[i] * 8 for i, _ in enumerate(lengths)])
    llm = load("qwen3-moe", device="cpu")
    assert bench.experts_chosen(llm, 1, 8) == 3 and 3 <= bench.experts_chosen(llm, 4, 8) <= 7
    assert llm.engine.is_idle


def test_bench_simulates_what_it_serves(monkeypatch, capsys):
    """On a CPU, where the figures mean nothing: it serves all requests, and notes their times."""
    monkeypatch.setattr(bench, "SHAPES", {"tiny": TINY})
    monkeypatch.setattr(bench, "STREAMS", {"tiny": 50})
    monkeypatch.setattr(bench, "FOR_STREAMS", dict(device="cpu", max_model_len=4096, num_blocks=1000))
    for name, value in dict(DECODES=(1, 32, 256), PREFILLS=(8192,), STEPS=2, SHORT=[8] * 4).items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench, "decode_ms", lambda llm, *_: llm.advance() or 1.0)
    monkeypatch.setattr(bench, "prefill_rate", lambda *_: 1e6)
    monkeypatch.setattr(bench, "workload_256", lambda: ([[1] * 20] * 8, [10] * 8))
    del bench.ROWS[:]
    bench.simulate(bench.Card(1e10, 1e10), False)
    names = [entry["name"] for entry in bench.ROWS]
    assert names == ["tiny workload 256, simulated", "tiny 1,024 x (128, 128), simulated",
                     "tiny 50 requests/s, each takes, simulated"]
    assert all(entry["value"] > 0 and "measured" in entry["note"] for entry in bench.ROWS)
    assert "first token" in capsys.readouterr().out


def test_bench_measures_gemma_4(monkeypatch):
    """On a CPU, where the figures mean nothing: tiny shapes, from steps that it serves. Limits are those of a step that
    is counted here by hand."""
    tiny = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=7, num_attention_heads=2, head_dim=16,
                num_key_value_heads=1, num_global_key_value_heads=1, global_head_dim=32, vocab_size=300)
    more = dict(num_experts=4, top_k_experts=2, moe_intermediate_size=16)
    monkeypatch.setattr(bench, "GEMMA4", {name: shape | tiny | (more if "26B" in name else {})
                                          for name, shape in bench.GEMMA4.items()})
    make, times = bench.random_llm, bench.step_times
    monkeypatch.setattr(bench, "step_times", lambda llm, prompts, _: times(llm, prompts, 2))
    monkeypatch.setattr(bench, "random_llm", lambda shape, **options: make(
        shape, **options | dict(device="cpu", dtype="float32", warm_up=False, num_blocks=1000)))
    monkeypatch.setattr(bench, "random_prompts", lambda _, lengths: [[7] * 9 for _ in [*lengths][:4]])
    monkeypatch.setattr(bench, "workload_256", lambda: ([[1] * 20 for _ in range(4)], [10] * 4))
    del bench.ROWS[:]
    bench.gemma4(bench.Card(1e10, 1e12), False)
    bench.gemma_26b(bench.Card(1e10, 1e12), False)
    assert [bool(entry["limit"]) for entry in bench.ROWS] == [True] * 5 + [False] * 5
    assert [entry["note"] for entry in bench.ROWS[4::5]] == ["4 at once at most, 0 preemptions"] * 2
    sizes = bench.gemma4_sizes(bench.read_model_config(bench.GEMMA4["31B"]))
    assert sum(sizes.values()) == 8 and {key[1:]: count for key, count in sizes.items()} == {
        (0, 0, 0, 0): 1, (2, 1, 16, 1024): 5, (2, 1, 32, 0): 2}
    # Weights, then K and V of 2,000 tokens, and of 1,025 behind a window
    num_bytes = sum(2 * key[0] * count for key, count in sizes.items()) + 4 * (2 * 32 * 2000 + 5 * 16 * 1025)
    assert bench.Gemma4Limits(1e10, 1e20).step_seconds(sizes, [1], [2000], 1) == pytest.approx(num_bytes / 1e10)
    flops = 2 * 8000 * sum(key[0] * count for key, count in sizes.items() if key[1]) + 2 * 300 * 32
    flops += 4 * 2 * (2 * 32 * 8000 * 8001 / 2 + 5 * 16 * 8000 * 1024)
    assert bench.Gemma4Limits(1e20, 1e12).step_seconds(sizes, [8000], [8000], 1) == pytest.approx(flops / 1e12)


def test_the_tokenizer_of_random_words_is_one(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(bench.random_tokenizer(100)))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("Who is it?")) == "Who is it?" and tokenizer.vocab_size > 300
    assert tokenizer.special_token_ids() == {tokenizer.eos_token_id}


def test_bench_knows_the_rows_that_it_has_peers_for(monkeypatch):
    """A row whose name has changed would lose its peer."""
    names, metrics = [], SimpleNamespace(mean_acceptance_length=1.0)
    weights = SimpleNamespace(parameters=lambda: [SimpleNamespace(nbytes=1)])
    llm = SimpleNamespace(generate=lambda *_: None, drafting=SimpleNamespace(metrics=metrics),
                          runner=SimpleNamespace(cascade=None, model=weights),
                          scheduler=SimpleNamespace(max_num_seqs=1), engine=SimpleNamespace(launch=None),
                          counts=SimpleNamespace(num_preemptions=0))
    monkeypatch.setattr(bench, "row", lambda name, *_, **__: names.append(name))
    monkeypatch.setattr(bench, "random_llm", lambda *_, **__: llm)
    monkeypatch.setattr(bench, "random_prompts", lambda *_: [[0]])
    monkeypatch.setattr(bench, "workload_256", lambda *_: ([[0]], [1]))
    for name in ("attention_seconds", "delta_seconds", "decode_ms", "draft_ms", "prefill_rate", "rate",
                 "first_token_after", "experts_chosen"):
        monkeypatch.setattr(bench, name, lambda *_, **__: 1.0)
    monkeypatch.setattr(bench, "step_times", lambda *_, **__: [1.0] * 3)
    monkeypatch.setattr(bench, "product_us", lambda *_: [1.0] * 3)
    monkeypatch.setattr(bench, "rate_and_host_ms", lambda *_: (1.0, 1.0))
    monkeypatch.setattr(bench, "tokens_per_second", lambda *_: 1.0)
    monkeypatch.setattr(bench, "calibrated", lambda limits, *_: limits)
    monkeypatch.setattr(bench, "simulated", lambda *_: SimpleNamespace(
        num_new_tokens=1, clock=SimpleNamespace(now=1), times=[bench.Times(1, 1, 1)]))
    monkeypatch.setattr(bench, "served", lambda *_: [bench.Times(1, 1, 1)])
    for section in bench.ON_CUDA:
        if section is not bench.structured or find_spec("llguidance"):
            section(bench.Card(1e9, 1e12), False)
    assert bench.VLLM.keys() <= set(names) and len(names) > 70
    assert max(map(len, names)) <= 48  # the width of their column


def test_bench_says_what_it_runs_and_writes_figures(monkeypatch, capsys, tmp_path):
    """stdout has the figures alone. The machine's line names the packages that are there."""
    def small(quick):
        bench.row("name", 5, "tokens/s", limit=10)

    monkeypatch.setattr(bench, "version", Mock(side_effect=["1.5", PackageNotFoundError] * 2))  # torch, triton
    bench.main(["--only", "small", "--json", str(tmp_path / "figures.json")], [small], [])
    captured = capsys.readouterr()
    machine, figure = captured.out.splitlines()
    assert captured.err == "small is running ..\n" and figure.split() == "name 5 tokens/s limit 10, 50% of it".split()
    assert machine.endswith(", torch 1.5")
    written = json.loads((tmp_path / "figures.json").read_text())
    assert written["machine"] == machine and written["rows"][-1]["value"] == 5


@pytest.mark.parametrize("argv, words", [
    (["--json", "nowhere/figures.json"], ["--json", "No such file"]),
    (["--only", "scheduler,nosuch"], ["'scheduler,nosuch'", "scheduler, fragmentation, batching, server"])])
def test_bench_refuses_first_what_it_cannot_do_and_has_a_plain_help(monkeypatch, capsys, argv, words):
    monkeypatch.setattr(bench, "machine", lambda: pytest.fail("it runs"))
    with pytest.raises(SystemExit, match="2"):
        bench.main(argv)
    captured = capsys.readouterr()
    assert captured.out == "" and all(word in captured.err for word in words)
    with pytest.raises(SystemExit):
        bench.main(["--help"])
    assert "Workload 256 is" in (text := capsys.readouterr().out) and "**" not in text  # a terminal has no bold type

