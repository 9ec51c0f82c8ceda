"""CUDA graphs: which steps are replayed, and that their outputs are those of steps launched kernel by kernel.

On a CPU a pretended graph does again what was done while it was recorded."""

import threading
from importlib import import_module

import pytest
import torch

import engine
from nanopaged import SamplingParams
from nanopaged.api.assemble import runner_class
from nanopaged.device.runner import Runner
from nanopaged.device.step_input import StepInput
from nanopaged.features import graphs
from nanopaged.features.graphs import GraphRunner
from nanopaged.tests.helpers import (
    CUDA,
    GREEDY,
    PROMPT,
    expectations,
    if_there,
    load,
    needs_gpu,
    tokens_of,
)
from nanopaged.tests.pretended import PretendedGraph, plain_kernels, pretend_to_record


def record_graphs(llm, monkeypatch):
    """Do what the engine does at its start on a GPU, with pretended graphs on a CPU. The returned list gets the shapes
    that are replayed."""
    runner, replayed = llm.runner, []
    if not CUDA:
        cascade, grammar = if_there("cascade"), if_there("grammar")
        mixins = [import_module("nanopaged.features.kinds.device").KindsRunner] if runner.config.groups else []
        mixins += [import_module("nanopaged.features.kinds.recurrent").StatesRunner] if runner.config.states else []
        mixins += [cascade.CascadeRunner] if cascade else []
        runner.__class__, runner.graphs = runner_class([*mixins, GraphRunner]), {}
        for kind in [GraphRunner, grammar.Masks] if grammar else [GraphRunner]:
            monkeypatch.setattr(kind, "_static_step", pretend_to_record(kind._static_step))
        for patch in plain_kernels():
            monkeypatch.setattr(*patch)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", PretendedGraph)
        with torch.inference_mode():
            runner.prepare()
        llm.engine.lookahead = 1
    replay = runner._replay
    monkeypatch.setattr(runner, "_replay", lambda shape, *args: replayed.append(shape) or replay(shape, *args))
    return replayed


SHORTAGES = [{}, dict(max_num_batched_tokens=7), dict(max_num_seqs=2, max_num_batched_tokens=20),
             dict(num_blocks=9, block_size=8), dict(enable_prefix_caching=False)]


@pytest.mark.parametrize("variant, options", [
    *(("qwen3", options) for options in SHORTAGES), ("gpt2", SHORTAGES[3]), ("mistral", SHORTAGES[1]),
    ("gemma3-groups", SHORTAGES[1]), ("qwen2-groups", dict(num_blocks=12, block_size=8)),
    *((variant, {}) for variant in ("gpt2", "mistral", "phi3", "smollm3", "olmo3", "gemma3", "qwen3-moe", "olmoe",
                                 "granite-moe-shared"))], ids=str)
def test_outputs_of_replayed_steps(monkeypatch, variant, options):
    """The steps are with prompts and without, padded and full, and in some of them not all sequences sample."""
    monkeypatch.setattr(graphs, "TOKEN_SIZES", [4, 16, 32])
    monkeypatch.setattr(graphs, "DECODE_SIZES", [1, 2, 4])
    prompts, continuations, _ = expectations(variant)
    llm = load(variant, graphs=True, **dict(max_num_batched_tokens=100) | options)
    replayed = record_graphs(llm, monkeypatch)
    monkeypatch.setattr(Runner, "_compute", None)  # nothing is launched kernel by kernel
    prompts = [prompt.tolist() for prompt in prompts] * 2
    assert tokens_of(llm.generate(prompts, GREEDY)) == [c.tolist() for c in continuations] * 2
    assert {shape.num_tiles > 0 for shape in replayed} == {True, False}
    if variant != "qwen3":  # what follows logits is the same for all
        return
    drawn = SamplingParams(temperature=1.0, top_k=20, seed=1, max_tokens=9, repetition_penalty=1.1, logprobs=2)
    settings = (drawn, SamplingParams(seed=2, max_tokens=9))
    seen = [tokens_of(llm.generate(prompts, params)) for params in settings]
    monkeypatch.undo()
    monkeypatch.setattr(llm.runner, "graph_shape", lambda *_: None)
    assert seen == [tokens_of(llm.generate(prompts, params)) for params in settings]


@pytest.mark.skipif(CUDA and torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with fp8")
def test_replayed_steps_over_an_fp8_cache(monkeypatch):
    """Replayed steps give the tokens of the same steps launched kernel by kernel."""
    monkeypatch.setattr(graphs, "TOKEN_SIZES", [16])
    monkeypatch.setattr(graphs, "DECODE_SIZES", [1])
    llm = load(graphs=True, kv_cache_dtype="fp8", max_num_seqs=2, max_num_batched_tokens=32,
               enable_prefix_caching=False)
    replayed = record_graphs(llm, monkeypatch)
    seen = tokens_of(llm.generate([PROMPT, PROMPT[:5]], GREEDY))
    assert {shape.num_tiles > 0 for shape in replayed} == {True, False}
    monkeypatch.setattr(llm.runner, "graph_shape", lambda *_: None)
    replayed.clear()
    assert tokens_of(llm.generate([PROMPT, PROMPT[:5]], GREEDY)) == seen and not replayed


def test_which_steps_are_replayed(monkeypatch):
    llm = load(graphs=True, max_num_batched_tokens=8192, max_num_seqs=128)
    if not CUDA:  # they are not replayed here
        monkeypatch.setattr(GraphRunner, "_static_step", lambda self, shape: (torch.empty(0), torch.empty(0)))
    record_graphs(llm, monkeypatch)
    shape = llm.runner.graph_shape
    assert shape([1] * 5, [100] * 5)[:3] == (8, 8, 0) and shape([1] * 128, [20] * 128)[:2] == (128, 128)
    assert shape([1] * 129, [20] * 129) is None
    assert shape([1, 3], [100, 3])[:2] == (64, 16) and shape([65], [65])[:2] == (256, 16)
    assert shape([1] * 16 + [3], [20] * 17)[:2] == (64, 64) and shape([1] * 100 + [30], [30] * 101)[:2] == (256, 128)
    assert shape([1030], [1030])[:2] == (2048, 16)  # launching takes longer than computing so much padding
    assert shape([2049], [2049]) is None and shape([3600], [3600])[:2] == (4096, 16)  # and so much, not
    assert shape([8192], [8192])[:2] == (8192, 16)
    # Few long contexts are cut among programs.
    few, many = [1] * 15 + [20], [1] * 70 + [20]
    assert shape(few, [5000] * 16)[:2] == (64, 16) and shape(many, [4096] * 71)[:2] == (256, 128)
    assert shape(many, [5000] * 71) is None


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"),
                                   torch.AcceleratorError("CUDA error: previous error during capture\nmore")], ids=str)
def test_a_size_that_cannot_be_recorded_is_launched_kernel_by_kernel(monkeypatch, error):
    """The first step of that size says so, and its request goes on."""
    if not CUDA:
        monkeypatch.setattr(GraphRunner, "_static_step", lambda self, shape: (torch.empty(0), torch.empty(0)))
    llm = load(graphs=True)
    record_graphs(llm, monkeypatch)

    def fail(*_):
        raise error

    monkeypatch.setattr(llm.runner, "_record", fail)
    llm.runner.graphs = dict.fromkeys(llm.runner.graphs)
    with pytest.warns(UserWarning, match=r"tokens could not be recorded \(CUDA [a-z :]*\)") as warned:
        outputs = llm.generate([PROMPT] * 3, GREEDY)
    assert tokens_of(outputs) == tokens_of(load().generate([PROMPT] * 3, GREEDY))
    assert len({str(warning.message) for warning in warned}) == len(warned) == 2  # with prompts, and without


@needs_gpu
def test_recording_while_another_thread_uses_the_device():
    llm, is_done, failures = load(graphs=True), threading.Event(), []

    def work():
        try:
            while not is_done.is_set():
                a = torch.ones(512, 512, device="cuda")
                (a @ a).sum().item()
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        outputs = [llm.generate([PROMPT] * n, GREEDY)[0].outputs[0].token_ids for n in (1, 2, 4, 8, 16, 24, 32)]
    finally:
        is_done.set()
        thread.join()
    assert not failures and all(tokens == outputs[0] for tokens in outputs)


def test_a_short_chunk_as_rows_of_one_token_each():
    seqs = [engine.Sequence([0] * 20, engine.Order(0, i, 0), 30) for i in range(3)]
    batch = StepInput(seqs, [1, 1, 3], [7, -1, 4, 5, 6], [9, 3, 4, 5, 6], [90, 30, 44, 45, 46], [0, 1, 2, 5],
                             [10, 4, 7], [2, 0, 1], [0, 2])
    rows = graphs.one_token_places(batch)
    assert rows.seqs == [seqs[0], seqs[1], seqs[2], seqs[2], seqs[2]] and rows.num_tokens == [1] * 5
    assert rows.lists == [batch.input_ids, batch.positions, batch.slot_mapping, [0, 1, 2, 3, 4, 5], [10, 4, 5, 6, 7],
                          [2, 0, 1, 1, 1]]
    assert rows.sampling_places == [0, 4]
