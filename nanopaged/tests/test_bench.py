"""bench.py, the program. No test depends on its figures."""
import sys

import pytest

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
