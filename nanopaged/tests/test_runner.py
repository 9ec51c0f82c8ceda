"""The runner: devices, types, memory, and what is compiled before the first request."""
import json
import os
import sys
import threading

import pytest
import torch

import kernel
from nanopaged import LLM, SamplingParams, tiles
from nanopaged.device import choices, runner
from nanopaged.device.choices import pick_dtype
from nanopaged.tests.helpers import (
    CUDA,
    DEVICE,
    GOLDEN,
    GREEDY,
    PROMPT,
    ROOT,
    assert_golden,
    load,
    needs,
    needs_gpu,
    needs_kernel,
    shared,
    tokens_of,
    without_notes,
)
from nanopaged.tests.programs import run_program


class RecordingKernel:
    """A kernel that notes the forms in which it is launched. In the interpreter it is noted only, since a launch would
    take seconds."""

    def __init__(self, kernel, forms):
        self.kernel, self.forms = kernel, forms

    def __getitem__(self, grid):
        def launch(*args, **constants):
            self.forms.add((self.kernel.__name__, *sorted(constants.items())))
            if CUDA:
                self.kernel[grid](*args, **constants)
        return launch


@needs_kernel
@pytest.mark.parametrize("variant, options", [
    ("qwen3", {}), ("mistral", dict(sliding_window=100)), ("qwen3", dict(max_num_seqs=1))], ids=str)
def test_kernels_are_compiled_before_the_first_request(tmp_path, monkeypatch, variant, options):
    from nanopaged.features import cascade, warmup
    config, max_num_seqs = json.loads((GOLDEN / variant / "config.json").read_text()), options.get("max_num_seqs", 8)
    (tmp_path / "config.json").write_text(json.dumps(
        config | dict(max_position_embeddings=512, num_hidden_layers=1, layer_types=None) | options))
    forms = set()
    for home, name in ((kernel, "paged_attention_kernel"), (kernel, "merge_splits_kernel"),
                       (kernel, "rotate_and_store_kernel"), (cascade, "cascade_kernel")):
        monkeypatch.setattr(home, name, RecordingKernel(getattr(home, name), forms))
    monkeypatch.setattr(tiles, "MANY_CONTEXTS", 8)
    dtype = "bfloat16" if CUDA else "float32"  # in float32 a GPU has no cascade
    llm = LLM(str(tmp_path), load_format="dummy", attention="triton", dtype=dtype, num_blocks=64,
              max_num_seqs=max_num_seqs, enforce_eager=True)
    monkeypatch.setattr(runner, "sample", lambda logits, *_: torch.ones(len(logits), dtype=torch.int64, device=DEVICE))
    forms.clear()
    warmup.start(llm.runner)
    for future in llm.runner.compiling:
        future.result()
    compiled = set(forms)
    suffixes = {dict(form[1:])["ONE_SPLIT"] for form in forms if dict(form[1:]).get("PREFIX") is False}
    assert suffixes == (set() if variant == "mistral" else {True} if max_num_seqs == 1 else {True, False})
    forms.clear()
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    llm.generate([[7] * 130], params)
    llm.generate([[8, i] for i in range(max_num_seqs)], params)
    assert {form[0] for form in forms} == {"paged_attention_kernel", "rotate_and_store_kernel", "merge_splits_kernel"}
    assert {dict(form[1:]).get("ONE_PROGRAM") for form in forms} == {True, False, None}
    assert forms <= compiled
    assert all(dict(form[1:])["enable_fp_fusion"] for form in forms)  # Triton's default differs between versions


def test_a_machine_without_triton_attends_with_torch(monkeypatch):
    """A machine with CUDA does so too, since Windows has no Triton."""
    monkeypatch.setattr(choices, "triton", None)
    llm = load("qwen3", enforce_eager=True)
    assert llm.runner.kernels is kernel.TORCH
    assert_golden(llm, "qwen3", num_tokens=8)


def test_the_type_of_the_weights_is_the_checkpoints_on_a_gpu_and_float32_on_a_cpu(monkeypatch):
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    for supported in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported)
        assert pick_dtype("auto", torch.bfloat16, cuda) is (torch.bfloat16 if supported else torch.float16)
        assert pick_dtype("auto", torch.float32, cuda) is torch.float32
        assert pick_dtype("auto", torch.bfloat16, cpu) is torch.float32
        assert pick_dtype("half", torch.bfloat16, cpu) is torch.float16
        assert pick_dtype(torch.float16, torch.float32, cuda) is torch.float16
    llm = LLM(str(GOLDEN / "qwen3"), device="cpu", num_blocks=8)  # a bfloat16 checkpoint
    assert llm.runner.dtype is torch.float32


def test_weights_larger_than_the_memory_get_a_sentence(tmp_path):
    config = json.loads((GOLDEN / "qwen3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | dict(hidden_size=2**20, intermediate_size=2**24)))
    problem = r"the weights take \d{6}.\d GiB, and (cpu|cuda:0) has .*; use a smaller model"
    with pytest.raises(ValueError, match=problem):
        LLM(str(tmp_path), load_format="dummy")
    assert shared().generate(PROMPT, GREEDY)[0].finished


LITTLE_MEMORY = """
import json, os, resource, sys
from nanopaged.cli.main import main
from nanopaged.tests.helpers import load
load(device="cpu")
for path, mib, *options in json.loads(sys.argv[1]):
    in_use = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (in_use + mib * 2**20, -1))
    common = "--load-format dummy --dtype float32 --device cpu --num-blocks 20 --skip-tokenizer-init --prompt x".split()
    print(main(["--model", path, *common, *options]))
"""


@needs("fp8_cache")
@pytest.mark.skipif(CUDA or sys.platform != "linux", reason="needs /proc, a limit on a process's memory that holds, "
                    "and a torch that takes as little memory at its start as one without CUDA")
def test_whatever_lacks_memory_at_the_start_gets_a_sentence(tmp_path):
    """Weights of 146 MiB fit, and beside them no random tensor of 49 MiB. Rope's table takes 128 MiB, and what it is
    computed from as much again."""
    runs, problems = [], []
    for i, (change, mib, options, problem) in enumerate([
            (dict(max_position_embeddings=16), 30, ["--max-num-seqs", "1048576"], "cpu has no memory for the block"),
            (dict(intermediate_size=200_000), 100, [], "the weights take 0.1 GiB, and cpu has less free memory than"),
            (dict(intermediate_size=200_000), 170, [], "the weights take 0.1 GiB, and cpu has less free memory than"),
            (dict(max_position_embeddings=2**20), 70, [], "rope's angles of 1048576 positions take 0.1 GiB"),
            (dict(max_position_embeddings=2**20), 250, [], "rope's angles of 1048576 positions take 0.1 GiB"),
            (dict(intermediate_size=200_000), 400, ["--kv-cache-dtype", "fp8"], "the step that finds the scales")]):
        path = tmp_path / str(i)
        path.mkdir()
        (path / "config.json").write_text(json.dumps(json.loads((GOLDEN / "qwen3" / "config.json").read_text())
                                                     | change))
        runs.append([str(path), mib, *options])
        problems.append(problem)
    run = run_program(LITTLE_MEMORY, json.dumps(runs), cwd=ROOT)
    sentences = without_notes(run.stderr).splitlines()
    assert run.stdout.split() == ["2"] * len(runs), run.stderr
    assert len(sentences) == len(problems)
    assert all(sentence.startswith(f"error: {problem}") for sentence, problem in zip(sentences, problems))


def test_random_weights_follow_the_seed_and_leave_the_users_random_numbers_alone():
    states = torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if CUDA else [])
    engines = [load("qwen3", load_format="dummy", seed=seed) for seed in (5, 5, 6)]
    first, same, other = (llm.runner.model.embed_tokens.weight for llm in engines)
    assert torch.equal(first, same) and not torch.equal(first, other)
    after = torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if CUDA else [])
    assert all(map(torch.equal, states, after))


@needs_gpu
@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="other processes take memory of the card")
def test_the_pool_takes_the_cards_memory():
    free, total = torch.cuda.mem_get_info()
    llm = LLM("shakespeare", gpu_memory_utilization=0.5)
    blocks, size = llm.scheduler.block_manager.num_blocks, llm.runner.pool.block_bytes
    assert 0.3 * total < blocks * size < 0.5 * total
    with pytest.raises(ValueError, match="no memory is left for the KV pool"):
        LLM("shakespeare", gpu_memory_utilization=0.001, enforce_eager=True)


@pytest.mark.skipif(torch.cuda.device_count() < 2,
                    reason="needs two GPUs; on one, and on a CPU, any thread computes steps in other tests")
def test_engines_on_two_gpus_and_steps_from_another_thread():
    expected = tokens_of(load().generate([PROMPT] * 3, GREEDY))
    engines = [load(device=f"cuda:{i}", enforce_eager=eager) for i in (1, 0) for eager in (False, True)]
    for llm in engines:
        assert tokens_of(llm.generate([PROMPT] * 3, GREEDY)) == expected
    results = []
    threads = [threading.Thread(target=lambda llm=llm: results.append(tokens_of(llm.generate([PROMPT] * 3, GREEDY))))
               for llm in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4 and torch.cuda.current_device() == 0
