"""One model on several GPUs (tensor parallelism). CPUs stand in for the GPUs: one process each, over gloo.

Most workers are forked (forked.py). What rank 0 leaves behind is tested with workers as users have them.
"""
import errno
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from nanopaged import SamplingParams, StructuredOutputsParams, model
from nanopaged.cli.main import main
from nanopaged.features.tensor_parallel import parallel, workers
from nanopaged.features.tensor_parallel.peers import ExchangeStore, NcclPeers
from nanopaged.features.tensor_parallel.split import find_cuts, padded_part, split_config
from nanopaged.outputs import EngineDeadError
from nanopaged.tests import forked
from nanopaged.tests.helpers import (
    GOLDEN,
    GREEDY,
    MIXTURES,
    PROMPT,
    ROOT,
    assert_golden,
    complaint,
    expectations,
    from_one_pool,
    load,
    shared,
    texts,
    tokens_of,
)
from nanopaged.weights.checkpoint import read_config, read_tensors
from nanopaged.weights.families import read_model_config

VARIANTS = sorted({path.parent.name for path in GOLDEN.glob("*/config.json")} - {"olmo2", "olmo3", *MIXTURES})


@pytest.fixture(autouse=True)
def forked_workers(monkeypatch, request):
    if "gpu" not in request.node.name:
        monkeypatch.setattr(workers, "Popen", forked.ForkedWorker)
    monkeypatch.setattr(forked, "FAULT", "")


def split(model="qwen3", size=2, **options):
    return load(model, **dict(tensor_parallel_size=size, device="cpu", block_size=4, num_blocks=200) | options)


def configs_of(variant, **changes):
    """Of the whole model, and of one of two ranks."""
    whole = replace(read_model_config(read_config(GOLDEN / variant)), **changes)
    return whole, replace(split_config(whole, 2), vocab_size=padded_part(whole.vocab_size, 2))


def pid_of_worker(llm):
    return llm.runner.workers.processes[1].pid


def is_gone(pid):
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or before it was read
        return True


def wait_until(condition, *given):
    deadline = time.monotonic() + 10
    while not condition(*given):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def assert_as_on_one_device(llm, prompts, params, model="qwen3"):
    ours, theirs = ([[sample.token_ids for sample in output.outputs] for output in one.generate(prompts, params)]
                    for one in (llm, shared(model)))
    assert ours == theirs


# ---- The same tokens as on one device

@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_compute_what_transformers_computes(variant):
    assert_golden(split(variant), variant)


@pytest.mark.parametrize("options", [
    dict(num_blocks=14, swap_space=0.01, lookahead=1), dict(max_num_batched_tokens=5),
    dict(lookahead=1, enable_prefix_caching=False), dict(size=4), dict(model="mistral", num_blocks=14),
    dict(kv_cache_dtype="fp8")], ids=str)
def test_mixed_requests_generate_what_they_generate_on_one_device(options):
    """Chunks, prefix cache, n, penalties, log probabilities of both kinds, beams, preemptions of both kinds, a
    window, an fp8 cache. With four ranks each kv head is on two."""
    llm = split(**options)
    found, num_preempted = texts(llm)
    assert found == from_one_pool(**{name: options[name] for name in ("model", "kv_cache_dtype") if name in options})
    assert num_preempted or "num_blocks" not in options or "model" in options


def test_the_scales_of_an_fp8_cache_are_those_of_one_device():
    one, two = (split(size=size, kv_cache_dtype="fp8") for size in (1, 2))
    assert [layer[2:] for layer in two.runner.kv_cache] == [layer[2:] for layer in one.runner.kv_cache]


def test_random_weights_and_more_rows_of_logits_than_are_put_together_at_once():
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=4, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    one, two = (split("gpt2", size, load_format="dummy").generate([PROMPT * 4 + [i] for i in range(5)], params)
                for size in (1, 2))
    assert tokens_of(one) == tokens_of(two)
    for pair in zip(one, two):
        ours, theirs = ([{token: entry.logprob for token, entry in position.items()}
                         for position in output.prompt_logprobs[1:] + output.outputs[0].logprobs] for output in pair)
        assert ours == [pytest.approx(position, abs=1e-3) for position in theirs]


def test_drafts():
    """Also with log probabilities, penalties and several samples."""
    llm = split(speculative_config={"method": "ngram", "num_speculative_tokens": 3}, block_size=16)
    for settings in (dict(temperature=0), dict(temperature=0.8, seed=3, n=2, logprobs=2, repetition_penalty=1.2)):
        params = SamplingParams(max_tokens=20, ignore_eos=True, **settings)
        assert_as_on_one_device(llm, [PROMPT[:5] * 6, [7, 8, 9] * 10, PROMPT], params)


def test_grammars():
    pytest.importorskip("llguidance")
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=40,
                            structured_outputs=StructuredOutputsParams(regex="(I|We) am [a-z]{2}, and [0-9] years old"))
    plain = SamplingParams(temperature=0.9, seed=5, max_tokens=10, ignore_eos=True)
    for lookahead in (0, 1):
        llm = split("shakespeare", lookahead=lookahead)
        assert_as_on_one_device(llm, ["ROMEO: "] * 2, [params, plain], "shakespeare")


@pytest.mark.parametrize("variant", ["qwen3", "gpt2", "gemma3"])
def test_recorded_steps_and_products_that_norms_add_up(monkeypatch, variant):
    """On a CPU graphs are pretended, and the small kernels are in torch."""
    for patch in forked.pretended():
        monkeypatch.setattr(*patch)
    monkeypatch.setattr(forked, "FAULT", "pretend_graphs")
    llm = split(variant, max_num_batched_tokens=40, max_num_seqs=4)
    llm.runner._run = Mock(wraps=llm.runner._run)
    assert llm.engine.lookahead == 1
    for _ in range(2):  # the second time from the prefix cache
        assert_golden(llm, variant)
    params = SamplingParams(temperature=0.8, seed=6, n=3, max_tokens=9, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    assert_as_on_one_device(llm, [PROMPT, [7]], params, variant)
    assert len({call.args for call in llm.runner._run.mock_calls}) > 3


# ---- Weights and memory

def test_a_rank_has_its_part_of_the_weights():
    whole, own = configs_of("llama2", vocab_size=6400, intermediate_size=1280, hidden_size=256, head_dim=128)
    with torch.device("meta"):
        sizes = [sum(p.numel() for p in model.Transformer(config).parameters()) for config in (own, whole)]
    assert 0.5 <= sizes[0] / sizes[1] < 0.51
    llm = split("llama2")
    assert llm.runner.config.num_kv_heads == 1 and llm.runner.pool.blocks.shape[4] == 1


def test_a_part_of_a_tensor_is_a_view_of_the_file():
    own_part = find_cuts(*configs_of("qwen2-window"), rank=0, size=2)
    for name, tensor in read_tensors(GOLDEN / "qwen2-window"):
        part = own_part(name.removeprefix("model."), tensor)
        if "mlp" not in name:  # padded: 40 becomes 64
            assert part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    with pytest.raises(ValueError, match=r"tensor norm.weight has shape \[3\]; config.json implies \[32\]"):
        own_part("norm.weight", torch.ones(3))


def test_all_ranks_have_as_many_blocks_as_the_one_with_the_fewest(monkeypatch):
    monkeypatch.setattr(forked, "FAULT", "have_fewer_blocks")
    assert split(num_blocks=None).scheduler.block_manager.num_blocks == 17


@pytest.mark.parametrize("options, message", [
    (dict(model="qwen3", size=3), "cannot split 4 query heads and 2 kv heads evenly; sizes that can are 1, 2, 4$"),
    (dict(data_parallel_size=2), "data_parallel_size 2 and tensor_parallel_size 2 do not go together"),
    (dict(model="olmo3"), "^tensor_parallel_size 2 cannot split a model whose norms go over all heads"),
    (dict(model="mixtral"), "^tensor_parallel_size 2 cannot split experts; use data_parallel_size, or"),
    (dict(size=0), "tensor_parallel_size must be an integer from 1 to 64, not 0"),
    (dict(swap_space=2**19), "more memory than the host has"),
    (dict(num_blocks=2**31 - 1), "lower num_blocks")], ids=str)
def test_what_cannot_be_is_said_in_a_sentence(options, message):
    assert re.search(message, complaint(split, **options))


def test_a_worker_without_memory_says_so(monkeypatch):
    monkeypatch.setattr(forked, "FAULT", "lack_memory")
    with pytest.raises(ValueError, match="^no memory is left for the KV pool$"):
        split(num_blocks=None)


def test_the_command_line(capsys, monkeypatch):
    assert main(["--prompt", "a", "--tensor-parallel-size", "3", "--device", "cpu"]) == 2
    assert "cannot split" in capsys.readouterr().err
    monkeypatch.setattr(forked, "FAULT", "refuse_steps")
    assert main(["--prompt", "a", "--tensor-parallel-size", "2", "--device", "cpu"]) == 1
    assert re.search(r"^error: worker 1 \(process \d+\) failed", capsys.readouterr().err, re.M)


# ---- What goes wrong

@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_out_of_memory_on_one_rank_is_tried_again_with_less(monkeypatch, capsys, rank):
    expected = tokens_of(shared("llama2").generate([PROMPT] * 5, GREEDY))
    if rank:
        monkeypatch.setattr(forked, "FAULT", "run_out_of_memory")
    else:
        monkeypatch.setattr(parallel.RowParallelLinear, "forward", parallel.RowParallelLinear.forward)
        forked.run_out_of_memory()
    llm = split("llama2", max_num_batched_tokens=64)
    assert tokens_of(llm.generate([PROMPT] * 5, GREEDY)) == expected
    assert "at most 16 tokens" in capsys.readouterr().err
    llm.scheduler.block_manager.check_idle()


def end(llm):
    """What the engine says when it computes a step, and a later one. It leaves no process behind."""
    pid = pid_of_worker(llm)
    with pytest.raises(EngineDeadError) as first:
        llm.generate(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True))
    with pytest.raises(EngineDeadError, match=f"^{re.escape(str(first.value))}$"):
        llm.generate(PROMPT)
    assert not llm.has_unfinished_requests()
    wait_until(is_gone, pid)
    return str(first.value).replace(f"(process {pid})", "(its pid)")


@pytest.mark.parametrize("fault, reason", [
    ("refuse_steps", "failed (KeyError: 'oops')"), ("be_killed", "was ended by signal 9")])
def test_a_worker_that_fails_ends_the_engine_with_its_name(monkeypatch, fault, reason):
    monkeypatch.setattr(forked, "FAULT", fault)
    assert end(split()) == f"worker 1 (its pid) {reason}; make a new LLM"


def test_a_worker_that_hangs_ends_the_engine_with_its_name(monkeypatch):
    llm = split()
    monkeypatch.setattr(workers, "ANSWER_SECONDS", 0.3)
    os.kill(pid_of_worker(llm), signal.SIGSTOP)
    assert end(llm) == "worker 1 (its pid) has not answered for 0.3 seconds; make a new LLM"


def test_a_worker_that_stops_in_the_middle_of_a_large_message_ends_the_engine_with_its_name(monkeypatch):
    """A pipe holds 64 KiB. Ctrl-C, which waits for the end of a step, comes then."""
    llm = split("shakespeare", num_blocks=2100)
    monkeypatch.setattr(workers, "ANSWER_SECONDS", 0.5)
    pid = pid_of_worker(llm)
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt) as interrupted:
        llm.generate([[i + 1] * 1000 for i in range(8)], SamplingParams(max_tokens=1))
    error = interrupted.value.__context__
    assert str(error) == f"worker 1 (process {pid}) has not answered for 0.5 seconds; make a new LLM"
    wait_until(is_gone, pid)
    assert not llm.requests


def test_a_worker_that_is_killed_between_two_steps_ends_the_engine_with_its_name():
    llm = split()
    llm.add_request(PROMPT, SamplingParams(max_tokens=2))
    llm.step()
    os.kill(pid_of_worker(llm), signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=rf"worker 1 \(process {pid_of_worker(llm)}\)"):
        llm.step()
    llm.abort_request(*llm.requests)
    assert "worker 1 (its pid) " in end(llm)
    assert not llm.scheduler.running


@pytest.mark.filterwarnings("error")  # an exception while it is freed is only a warning
@pytest.mark.parametrize("is_guarded", [True, False])
def test_an_engine_that_is_dropped_leaves_no_process_and_no_file(is_guarded):
    """Nor if the guard was killed before."""
    llm = split()
    pid, folder, guard = pid_of_worker(llm), llm.runner.workers.folder, llm.runner.workers.guard
    llm.generate(PROMPT, GREEDY)
    if not is_guarded:
        guard.kill(), guard.wait()
    del llm
    wait_until(is_gone, pid)
    assert not os.path.exists(folder) and guard.returncode is not None


SCRIPT = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background inherits that Ctrl-C is ignored
from nanopaged import LLM, SamplingParams
llm = LLM({path!r}, tensor_parallel_size=2, device="cpu", dtype="float32", num_blocks=100)
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
print(llm.runner.workers.processes[1].pid, llm.generate([5, 6, 7], params)[0].outputs[0].token_ids, flush=True)
for turn in range(2):
    try:
        while True:
            llm.generate([5, 6, 7], params)
            print("going on", flush=True)
    except KeyboardInterrupt:
        print("interrupted", llm.generate([5, 6, 7], params)[0].outputs[0].token_ids, flush=True)
"""


def test_processes_of_a_users_script(tmp_path):
    """A script without `if __name__ == "__main__"` is not run again. Ctrl-C reaches rank 0 alone, which goes on. A
    worker ends when the script is killed, also one that is stopped."""
    (tmp_path / "script.py").write_text(SCRIPT.format(path=str(GOLDEN / "llama2")))
    script = subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True,
                              env=os.environ | dict(PYTHONPATH=str(ROOT)), start_new_session=True)
    pid, tokens = script.stdout.readline().split(" ", 1)
    assert "going on" in script.stdout.readline()
    os.killpg(script.pid, signal.SIGINT)
    line = next(line for line in script.stdout if "going on" not in line)
    assert line == f"interrupted {tokens}" and not is_gone(pid)
    assert "going on" in script.stdout.readline()
    os.kill(int(pid), signal.SIGSTOP)
    script.kill()
    wait_until(is_gone, pid)
    script.wait()


def test_a_process_that_is_killed_while_it_starts_leaves_no_worker_and_no_file(tmp_path):
    script = """
import signal
from nanopaged import LLM
from nanopaged.features.tensor_parallel import workers
def report(self):
    print(*[process.pid for process in self.processes.values()], self.folder, flush=True)
    signal.pause()
workers.Workers.wait = report
LLM({!r}, tensor_parallel_size=2, device="cpu")
""".format(str(GOLDEN / "llama2"))
    script = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True,
                              env=os.environ | dict(PYTHONPATH=str(ROOT), TMPDIR=str(tmp_path)))
    pid, folder = script.stdout.readline().split()
    assert list(tmp_path.iterdir()) == [Path(folder)]
    script.kill()
    script.wait()
    wait_until(is_gone, pid)
    wait_until(lambda: not list(tmp_path.iterdir()))


def test_a_full_disk_is_said_in_a_sentence(monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(ValueError, match="No space left on device.*set TMPDIR"):
        split()


def test_exchanges_are_counted_by_group(tmp_path):
    """Rank 0 has had another engine, so torch's number of its first exchange here is 17; that of the worker is 0."""
    def exchange(rank, first):
        own = ExchangeStore(dist.FileStore(f"{tmp_path}/store", 2))
        store, other = dist.PrefixStore("group", own), 1 - rank  # torch calls it, as it will in an engine
        for number in range(2):
            store.set(f"memory/{first + 3 * number}/{rank}", f"{number} of {rank}")
            store.wait([f"memory/{first + 3 * number}/{other}"])
            assert store.get(f"memory/{first + 3 * number}/{other}") == b"%d of %d" % (number, other)
            # From torch 2.13 on symmetric memory uses these, too.
            store.set(f"memory/{first + 3 * number + 1}/{rank}", "more")
            assert store.multi_get([f"memory/{first + 3 * number + 1}/{n}" for n in range(2)]) == [b"more"] * 2
            if hasattr(store, "barrier"):
                store.barrier(f"memory/{first + 3 * number + 2}", 2, timedelta(seconds=20))

    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(exchange, 0, 17), pool.submit(exchange, 1, 0)]:
            done.result()


def test_an_exchange_with_a_dead_peer_ends(tmp_path):
    store = ExchangeStore(dist.FileStore(f"{tmp_path}/store", 2))
    store.is_closed = True
    with pytest.raises(RuntimeError, match="a peer has died"):
        store.wait(["memory/0/1"])


def test_nccls_end_does_not_wait_for_graphs_that_live_longer(tmp_path, monkeypatch):
    """NCCL's abort returns when the graphs that recorded it are gone."""
    class Graph(threading.Event):
        reset = threading.Event.set

    graphs, ends = [Graph(), Graph()], []
    backend = Mock(_allgather_base=lambda gathered, own: Mock(wait=partial(gathered.copy_, own)),
                   abort=lambda: ends.append([graph.wait(20) for graph in graphs]))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Mock(return_value=backend), raising=False)
    peers = NcclPeers(0, 1, torch.device("cpu"), str(tmp_path))
    peers.connect()
    for graph in graphs:
        peers.note_graph(graph)
    peers.release()
    assert not ends
    peers.drain()
    assert ends == [[True, True]]


# ---- On two GPUs

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def on_gpus(model, **options):
    return load(model, **dict(tensor_parallel_size=2, num_blocks=200) | options)


@needs_two_gpus
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_gpu_outputs_of_golden_models(graphs):
    for variant in ("qwen3", "gpt2") if graphs else ("qwen3", "gpt2", "mistral", "llama-linear-bias"):
        prompts, continuations, _ = expectations(variant)
        llm = on_gpus(variant, graphs=graphs)
        for _ in range(2):  # the second time from the prefix cache
            outputs = llm.generate([prompt.tolist() for prompt in prompts], GREEDY)
            assert tokens_of(outputs) == [continuation.tolist() for continuation in continuations], variant


@needs_two_gpus
def test_gpu_outputs_over_nccl_where_the_cards_cannot_read_each_other(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import torch\ntorch.cuda.can_device_access_peer = lambda *pair: False\n")  # in the worker, too
    script = f"""if True:
        from nanopaged import LLM, SamplingParams
        for options in (dict(), dict(enforce_eager=True)):
            llm = LLM("shakespeare", tensor_parallel_size=2, num_blocks=200, dtype="float32", **options)
            outputs = llm.generate({[PROMPT] * 3!r}, SamplingParams(temperature=0, max_tokens=20))
            print(type(llm.runner.peers).__name__, [output.outputs[0].token_ids for output in outputs])
        """
    printed = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=os.environ | dict(PYTHONPATH=str(tmp_path)),
                             capture_output=True, text=True, check=True).stdout
    params = SamplingParams(temperature=0, max_tokens=20)
    expected = tokens_of(load("shakespeare").generate([PROMPT] * 3, params))
    assert printed.splitlines() == [f"NcclPeers {expected}"] * 2


@needs_two_gpus
def test_gpu_mixed_requests():
    expected, _ = texts(load("qwen3", block_size=16, num_blocks=50))
    for options in (dict(), dict(num_blocks=5, swap_space=0.01), dict(max_num_batched_tokens=20, graphs=True),
                    dict(num_blocks=5, graphs=True)):
        assert texts(on_gpus("qwen3", **dict(num_blocks=50) | options))[0] == expected, options


@needs_two_gpus
def test_gpu_fp8_cache_and_the_bundled_model_with_what_fits_as_a_pool():
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=100)
    for options in (dict(kv_cache_dtype="fp8"), dict(dtype="bfloat16", num_blocks=None, gpu_memory_utilization=0.2)):
        outputs = on_gpus("shakespeare", graphs=True, **options).generate(["ROMEO:", "JULIET:"] * 20, params)
        assert all(output.outputs[0].finish_reason in ("length", "stop") for output in outputs)


@needs_two_gpus
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_gpu_worker_that_is_killed_or_hangs_and_a_new_engine_afterwards(monkeypatch, graphs):
    for number, sentence in ((signal.SIGKILL, "was ended by signal 9"), (signal.SIGSTOP, "for 2 seconds")):
        llm = on_gpus("shakespeare", graphs=graphs)
        expected = tokens_of(llm.generate(PROMPT, GREEDY))
        monkeypatch.setattr(workers, "ANSWER_SECONDS", 2)
        pid = llm.runner.workers.processes[1].pid
        threading.Timer(0.3, os.kill, [pid, number]).start()
        with pytest.raises(EngineDeadError, match=rf"worker 1 \(process {pid}\) .*{sentence}"):
            while True:
                llm.generate([PROMPT] * 20, SamplingParams(max_tokens=200, ignore_eos=True))
        wait_until(is_gone, pid)
        del llm
        gc.collect()
        torch.cuda.synchronize()  # no barrier is left under way
        monkeypatch.undo()
    assert tokens_of(on_gpus("shakespeare", graphs=graphs).generate(PROMPT, GREEDY)) == expected


@needs_two_gpus
def test_gpu_step_out_of_memory_on_rank_0_is_tried_again_with_less(monkeypatch, capsys):
    monkeypatch.setattr(parallel.RowParallelLinear, "forward", parallel.RowParallelLinear.forward)
    expected = tokens_of(load("llama2").generate([PROMPT] * 5, GREEDY))
    llm = on_gpus("llama2", max_num_batched_tokens=64)
    forked.run_out_of_memory()
    assert tokens_of(llm.generate([PROMPT] * 5, GREEDY)) == expected
    assert "at most 16 tokens" in capsys.readouterr().err
