"""bench.py, the program. No test depends on its figures."""
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest
import torch

import bench
from nanopaged.tests.helpers import ROOT


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
    monkeypatch.setattr(bench, "scheduler_ms", lambda *_, **__: 1.0)
    bench.scheduler(True)
    assert bench.PEERS.keys() <= set(names)
    assert max(map(len, names)) <= 48  # the width of their column


def test_bench_says_what_it_runs_and_writes_figures(monkeypatch, capsys, tmp_path):
    """stdout has the figures alone. The machine's line names the packages that are there."""
    def version(package):
        if package == "transformers":
            raise PackageNotFoundError
        return "1.5"

    def small(quick):
        bench.row("name", 5, "tokens/s")

    monkeypatch.setattr(bench, "version", version)
    monkeypatch.setattr(bench, "ROWS", [])
    monkeypatch.setattr(bench, "ANYWHERE", [small])
    monkeypatch.setattr(sys, "argv", ["bench.py", "--only", "small", "--json", str(tmp_path / "figures.json")])
    bench.main()
    captured = capsys.readouterr()
    machine, figure = captured.out.splitlines()
    assert captured.err == "small is running ..\n" and figure.split() == ["name", "5", "tokens/s"]
    assert machine.endswith(", torch 1.5, triton 1.5")
    written = json.loads((tmp_path / "figures.json").read_text())
    assert written["machine"] == machine and [row["value"] for row in written["rows"]] == [5]


def test_bench_looks_for_the_place_of_its_figures_first(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench, "ANYWHERE", [lambda quick: pytest.fail("it runs")])
    monkeypatch.setattr(sys, "argv", ["bench.py", "--json", str(tmp_path / "no" / "figures.json")])
    with pytest.raises(SystemExit) as error:
        bench.main()
    captured = capsys.readouterr()
    assert error.value.code == 2 and captured.out == "" and "--json" in captured.err and "No such file" in captured.err


def test_the_help_of_bench_has_no_marks(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench.py", "--help"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "Workload 256 is" in (text := capsys.readouterr().out) and "**" not in text


def test_a_reader_of_bench_that_goes_away_sees_no_traceback():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, str(ROOT / "bench.py"), "--only", "scheduler"], stdout=write,
                          stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
