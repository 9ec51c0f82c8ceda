"""One model on several GPUs (tensor parallelism). On CPUs each rank is a process, and sums are messages. Most workers
are forked (forked.py). What rank 0 leaves behind is tested with workers as users have them."""
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

import nanopaged
from nanopaged import SamplingParams
from nanopaged.cli.main import main
from nanopaged.features.tensor_parallel import workers
from nanopaged.features.tensor_parallel.peers import ExchangeStore, GpuPeers, NcclPeers
from nanopaged.features.tensor_parallel.split import find_cuts
from nanopaged.outputs import EngineDeadError
from nanopaged.tests import forked, helpers
from nanopaged.tests.helpers import GOLDEN, GREEDY, PROMPT, assert_golden, complaint, load, needs_gpu, shared, texts
from nanopaged.weights.checkpoint import read_config, read_tensors
from nanopaged.weights.families import read_model_config

NUM_GPUS = torch.cuda.device_count()
needs_two_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs")


@pytest.fixture(autouse=True)
def workers_of_a_test(monkeypatch, request):
    """Forked ones, or on a machine with one GPU ones that share it."""
    monkeypatch.setattr(forked, "FAULT", "")
    if "gpu" not in request.node.name:
        monkeypatch.setattr(workers, "Popen", forked.ForkedWorker)
    elif NUM_GPUS == 1:
        for patch in (*forked.on_one_gpu(), (workers, "Popen", forked.worker_on_this_gpu)):
            monkeypatch.setattr(*patch)


def split(model="qwen3", size=2, **options):
    return load(model, **dict(tensor_parallel_size=size, device="cpu", block_size=4, num_blocks=200) | options)


def pids_of(llm):
    """Of the workers and the guard."""
    return [process.pid for process in (*llm.runner.workers.processes.values(), llm.runner.workers.guard)]


def assert_gone(*pids, within=10):
    deadline = time.monotonic() + within
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):  # gone before it was opened, or before it was read
            while "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
                assert time.monotonic() < deadline


def assert_as_on_one_device(llm, prompts, params, model="qwen3"):
    ours, theirs = ([[sample.token_ids for sample in output.outputs] for output in one.generate(prompts, params)]
                    for one in (llm, shared(model)))
    assert ours == theirs


@pytest.mark.parametrize("variant", sorted({path.parent.name for path in GOLDEN.glob("*/config.json")}
                                           - {"olmo2", "olmo3", *helpers.GEMMA4, *helpers.MIXTURES,
                                              *helpers.WITH_STATES}))
def test_two_ranks_compute_what_transformers_computes(monkeypatch, variant):
    """Also one text alone, on a CPU without Triton's interpreter, which would take minutes."""
    if fused := helpers.if_there("fused"):
        monkeypatch.setattr(fused, "few_rows_linear", None)
    llm = split(variant)
    for prompts in (slice(None), slice(1)):
        assert_golden(llm, variant, prompts, num_tokens=10)  # more than two blocks


@pytest.mark.parametrize("options", [
    dict(num_blocks=14, swap_space=0.01, lookahead=1), dict(max_num_batched_tokens=5),
    dict(lookahead=1, enable_prefix_caching=False), dict(size=4), dict(model="mistral", num_blocks=14),
    dict(kv_cache_dtype="fp8"), *(
        pytest.param(dict(device="cuda", block_size=16) | more, marks=marks, id=f"gpu {more}") for more, marks in (
            (dict(num_blocks=5, swap_space=0.01), needs_two_gpus), (dict(num_blocks=5, graphs=True), needs_gpu),
            (dict(max_num_batched_tokens=20, graphs=True), needs_two_gpus)))], ids=str)
def test_mixed_requests_generate_what_they_generate_on_one_device(options):
    """Chunks, prefix cache, n, penalties, log probabilities of both kinds, beams, preemptions of both kinds, a
    window, an fp8 cache. With four ranks each kv head is on two."""
    llm = split(**options)
    found, num_preempted = texts(llm)
    same = {name: options[name] for name in ("model", "kv_cache_dtype") if name in options}
    assert found == helpers.from_one_pool(**same)
    assert num_preempted or "num_blocks" not in options or "model" in options


def test_random_weights_and_more_rows_of_logits_than_are_put_together_at_once():
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=4, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    one, two = (split("gpt2", size, load_format="dummy").generate([PROMPT * 4 + [i] for i in range(5)], params)
                for size in (1, 2))
    assert helpers.tokens_of(one) == helpers.tokens_of(two)
    ours, theirs = ([entry.logprob for output in outputs for position in output.prompt_logprobs[1:]
                     for _, entry in sorted(position.items())] for outputs in (one, two))
    assert ours == pytest.approx(theirs, abs=1e-3)


def test_drafts():
    """Also with log probabilities, penalties and several samples."""
    llm = split(speculative_config={"method": "ngram", "num_speculative_tokens": 3}, block_size=16)
    for settings in (dict(temperature=0), dict(temperature=0.8, seed=3, n=2, logprobs=2, repetition_penalty=1.2)):
        params = SamplingParams(max_tokens=20, ignore_eos=True, **settings)
        assert_as_on_one_device(llm, [PROMPT[:5] * 6, [7, 8, 9] * 10, PROMPT], params)


def test_grammars():
    pytest.importorskip("llguidance")
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=40,
                            structured_outputs=dict(regex="(I|We) am [a-z]{2}, and [0-9] years old"))
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
    for _ in range(2):  # the second time from the prefix cache
        assert_golden(llm, variant)
    params = SamplingParams(temperature=0.8, seed=6, n=3, max_tokens=9, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    assert_as_on_one_device(llm, [PROMPT, [7]], params, variant)
    assert llm.engine.lookahead == 1 and len({call.args for call in llm.runner._run.mock_calls}) > 3


def test_a_rank_has_its_part_and_a_part_of_a_tensor_is_a_view_of_the_file():
    ours, theirs = (llm.runner for llm in (split("llama2"), shared("llama2")))
    assert 2 * ours.pool.block_shape[1] == theirs.pool.block_shape[1]
    assert 2 * ours.model.layers[0].qkv_proj.weight.numel() == theirs.model.layers[0].qkv_proj.weight.numel()
    own_part = find_cuts(read_model_config(read_config(GOLDEN / "qwen2-window")), rank=0, size=2)
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
    (dict(swap_space=2**19), "more memory than the host has"),
    (dict(num_blocks=2**31 - 1), "lower num_blocks")], ids=str)
def test_what_cannot_be_is_said_in_a_sentence(options, message):
    assert re.search(message, complaint(split, **options))


def test_the_command_line(capsys, monkeypatch):
    monkeypatch.setattr(forked, "FAULT", "refuse_steps")
    assert main(["--prompt", "a", "--tensor-parallel-size", "2", "--device", "cpu"]) == 1
    assert re.search(r"^error: worker 1 \(process \d+\) failed", capsys.readouterr().err, re.M)


# ---- What goes wrong

def end(llm):
    """What the engine says when it computes a step, and when it is called later. It leaves no process behind."""
    pids = pids_of(llm)
    with pytest.raises(EngineDeadError) as first:
        llm.generate(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True))
    assert_gone(*pids, within=0)
    for call in (lambda: llm.generate(PROMPT), lambda: llm.add_request(PROMPT), llm.step, llm.reset_prefix_cache,
                 lambda: next(llm.stream(PROMPT)), lambda: llm.beam_search(PROMPT, nanopaged.BeamSearchParams(2))):
        with pytest.raises(EngineDeadError, match=f"^{re.escape(str(first.value))}$"):
            call()
    assert not llm.has_unfinished_requests() and not llm.scheduler.running
    return str(first.value).replace(f"(process {pids[0]})", "(its pid)")


@pytest.mark.parametrize("fault, reason", [
    ("refuse_steps", "failed (KeyError('oops'))"), ("be_killed", "was ended by signal 9"),
    ("run_out_of_memory", "failed (OutOfMemoryError('CUDA out of memory'))")])
def test_a_worker_that_fails_ends_the_engine_with_its_name(monkeypatch, fault, reason):
    """The memory is free afterwards, and a new engine works."""
    monkeypatch.setattr(forked, "FAULT", fault)
    dead = split("llama2")
    assert end(dead) == f"worker 1 (its pid) {reason}; make a new LLM"
    dead = weakref.ref(dead.runner)
    # While another thread, which another test has left, collects garbage, gc.collect does nothing.
    helpers.wait_until(lambda: gc.collect() * 0 or dead() is None)
    forked.FAULT = ""
    assert_golden(split("llama2"), "llama2", num_tokens=3)


def test_a_step_that_fails_on_rank_0_ends_the_engine_unless_all_ranks_are_done_with_it(monkeypatch):
    llm = split()
    monkeypatch.setattr(llm.runner, "sample", Mock(side_effect=KeyError("oops")))
    with pytest.raises(KeyError):
        llm.generate(PROMPT)
    monkeypatch.undo()
    assert_golden(llm, "qwen3", num_tokens=3)
    monkeypatch.setattr(llm.runner.model.layers[1], "forward", Mock(side_effect=KeyError("oops")))
    assert end(llm) == "rank 0 failed in a step (KeyError('oops')); make a new LLM"


def test_workers_that_are_killed_between_two_steps_or_hang_end_the_engine_with_their_name(monkeypatch):
    for number, reason in ((signal.SIGKILL, "was ended by signal 9"), (signal.SIGSTOP, "has not answered for 2 s")):
        llm = split(size=4)
        monkeypatch.setattr(workers, "ANSWER_SECONDS", 2)
        llm.generate(PROMPT, SamplingParams(max_tokens=2))
        os.kill(pid := pids_of(llm)[1], number)
        assert end(llm).startswith(f"worker 2 (process {pid}) {reason}")


def test_no_request_is_taken_when_a_worker_has_died_since_the_last_step():
    llm = split()
    os.kill(pid := pids_of(llm)[0], signal.SIGKILL)
    assert llm.runner.workers.failed.wait(10)
    with pytest.raises(EngineDeadError, match=rf"^worker 1 \(process {pid}\) was ended by signal 9"):
        llm.add_request(PROMPT)
    assert not llm.has_unfinished_requests()


def test_a_worker_that_stops_in_the_middle_of_a_large_message_ends_the_engine_with_its_name(monkeypatch):
    """A socket holds some 200 KiB. Ctrl-C, which waits for the end of a step, comes then."""
    monkeypatch.setattr(workers, "ANSWER_SECONDS", 0.5)
    llm = split("shakespeare", num_blocks=8100, max_num_batched_tokens=32_000)
    os.kill(pids_of(llm)[0], signal.SIGSTOP)
    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt) as interrupted:
        llm.generate([[i + 1] * 1000 for i in range(32)], SamplingParams(max_tokens=1))
    assert "has not answered for 0.5 seconds" in str(interrupted.value.__context__) and not llm.requests
    assert_gone(*pids_of(llm), within=0)


def test_a_rank_0_that_was_stopped_goes_on(monkeypatch):
    """Ctrl-Z: nobody has kept it waiting."""
    monkeypatch.setattr(workers, "ANSWER_SECONDS", 2)
    llm, ours = split(), os.getpid()
    stopping = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -STOP {ours}; sleep 3; kill -CONT {ours}"])
    while stopping.poll() is None:
        llm.generate(PROMPT, GREEDY)


@pytest.mark.filterwarnings("error")  # an exception while it is freed is only a warning
def test_an_engine_that_is_dropped_leaves_no_process():
    for is_guarded in (True, False):
        llm = split()
        pids, guard = pids_of(llm), llm.runner.workers.guard
        llm.generate(PROMPT, GREEDY)
        if not is_guarded:
            guard.kill(), guard.wait()
        del llm
        assert_gone(*pids)


def test_processes_of_a_users_script(tmp_path):
    """A script without `if __name__ == "__main__"` is not run again. Ctrl-C reaches rank 0 alone, which goes on. A
    worker ends when the script is killed, also one that is stopped."""
    script = """if True:
        import signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background Ctrl-C is ignored
        from nanopaged import LLM, SamplingParams
        llm = LLM(sys.argv[1], tensor_parallel_size=2, device="cpu", dtype="float32", num_blocks=100)
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        print(llm.runner.workers.processes[1].pid, llm.generate([5, 6, 7], params)[0].outputs[0].token_ids, flush=True)
        while True:
            try:
                print(llm.generate([5, 6, 7], params)[0].outputs[0].token_ids, flush=True)
            except KeyboardInterrupt:
                print("interrupted", flush=True)
        """
    (tmp_path / "script.py").write_text(script)
    script = subprocess.Popen([sys.executable, "script.py", GOLDEN / "llama2"], stdout=subprocess.PIPE, text=True,
                              cwd=tmp_path, env=os.environ | dict(PYTHONPATH=str(helpers.ROOT)), start_new_session=True)
    pid, tokens = script.stdout.readline().split(" ", 1)
    assert script.stdout.readline() == tokens
    os.killpg(script.pid, signal.SIGINT)
    assert [next(line for line in script.stdout if line != tokens), next(script.stdout)] == ["interrupted\n", tokens]
    os.kill(int(pid), signal.SIGSTOP)
    script.kill(), script.wait()
    assert_gone(pid)


# ---- Parts that only GPUs use

def meet(run):
    barrier, given = threading.Barrier(2, timeout=20), [None] * 2

    def exchange(rank, value):
        given[rank] = value
        barrier.wait()
        values = [*given]
        barrier.wait()
        return values

    with ThreadPoolExecutor() as pool:
        return [*pool.map(lambda rank: run(rank, partial(exchange, rank)), range(2))]


def test_symmetric_memory_exchanges_by_numbers_that_differ():
    """Rank 0 has had another engine, so torch's number of its first exchange here is 17; that of the worker is 0."""
    def run(rank, exchange):
        own = ExchangeStore()
        own.exchange, store = exchange, dist.PrefixStore("group", own)  # torch calls it, as it will in an engine
        for n in range(0 if rank else 17, 6 if rank else 23, 3):
            store.set(f"memory/{n}/{rank}", f"of {rank}")
            store.wait([f"memory/{n}/{1 - rank}"])
            assert store.get(f"memory/{n}/{1 - rank}") == b"of %d" % (1 - rank)
            store.set(f"memory/{n + 1}/{rank}", "more")  # torch 2.13 has these, too
            assert store.multi_get([f"memory/{n + 1}/{i}" for i in range(2)]) == [b"more"] * 2
            if hasattr(store, "barrier"):
                store.barrier(f"memory/{n + 2}", 2, timedelta(seconds=20))

    meet(run)


def test_symmetric_memory_finds_its_group_and_barriers_with_the_dead_end(monkeypatch):
    for name in ("Stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: nullcontext())
    other, peers = (GpuPeers(1, 3, torch.device("cpu"), None) for _ in range(2))
    found = torch._C._distributed_c10d._resolve_process_group(peers.name)
    assert (found.group_name, found.rank(), found.size()) == (peers.name, 1, 3) and other.name != peers.name
    pads = torch.full((3, 3), 7, dtype=torch.int32)
    peers.handles = [Mock(get_signal_pad=lambda rank, *_: pads[rank])]
    peers.release()
    assert pads.tolist() == [[0] * 3, [1] * 3, [0] * 3]


def test_nccl_connects_by_a_store_without_a_path_and_ends_once(monkeypatch):
    """The destructor of a FileStore opens its path, and an error there ends the process."""
    def connect(store, rank, size, options):
        assert type(store) is dist.TCPStore
        store.set(str(rank), "here")
        store.wait([str(1 - rank)])
        return Mock()

    def run(rank, exchange):
        peers = NcclPeers(rank, 2, torch.device("cpu"), exchange)
        group = peers.group
        peers.release(), peers.drain()
        return group._allgather_base.call_count, group.abort.call_count

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Mock(side_effect=connect, Options=Mock), raising=False)
    assert meet(run) == [(1, 1)] * 2


# ---- On two GPUs, or on one for both ranks

on_gpus = partial(split, device="cuda", block_size=16)


@needs_two_gpus
def test_gpu_outputs_over_nccl_where_the_cards_cannot_read_each_other(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import torch\ntorch.cuda.can_device_access_peer = lambda *pair: False\n")  # in the worker, too
    params = dict(temperature=0, max_tokens=20)
    script = f"""if True:
        from nanopaged import LLM, SamplingParams
        for options in (dict(), dict(enforce_eager=True)):
            llm = LLM("shakespeare", tensor_parallel_size=2, num_blocks=200, dtype="float32", **options)
            outputs = llm.generate({[PROMPT] * 3!r}, SamplingParams(**{params}))
            print(type(llm.runner.peers).__name__, [output.outputs[0].token_ids for output in outputs])
        """
    variables = os.environ | dict(PYTHONPATH=str(tmp_path), NCCL_NVLS_ENABLE="0")  # which not every machine can do
    printed = subprocess.check_output([sys.executable, "-c", script], cwd=helpers.ROOT, env=variables, text=True)
    expected = helpers.tokens_of(load("shakespeare").generate([PROMPT] * 3, SamplingParams(**params)))
    assert printed.splitlines() == [f"NcclPeers {expected}"] * 2


@pytest.mark.parametrize("variant, graphs", [
    pytest.param("qwen3", True, marks=needs_gpu), pytest.param("mistral", False, marks=needs_gpu),
    pytest.param("gpt2", True, marks=needs_two_gpus), pytest.param("gpt2", False, marks=needs_two_gpus)])
def test_gpu_golden_models(variant, graphs):
    assert_golden(on_gpus(variant, graphs=graphs), variant, times=2)


@needs_two_gpus
def test_gpu_bundled_model():
    share = helpers.share_of_cards(gib=4)
    for options in (dict(kv_cache_dtype="fp8"),
                    dict(dtype="bfloat16", num_blocks=None, gpu_memory_utilization=share)):
        outputs = on_gpus("shakespeare", graphs=True, **options).generate(["ROMEO:", "JULIET:"] * 20)
        assert all(output.outputs[0].finish_reason in ("length", "stop") for output in outputs)


@pytest.mark.parametrize("graphs", [pytest.param(False, marks=needs_two_gpus), pytest.param(True, marks=needs_gpu)])
def test_gpu_worker_that_is_killed_or_hangs_and_a_new_engine_afterwards(monkeypatch, graphs):
    monkeypatch.setattr(workers, "ANSWER_SECONDS", 5)
    for number, sentence in ((signal.SIGKILL, "was ended by signal 9"), (signal.SIGSTOP, "for 5 seconds"), (0, "")):
        llm = on_gpus("shakespeare", graphs=graphs)
        tokens = helpers.tokens_of(llm.generate(PROMPT, GREEDY))
        if number:
            expected, pid = tokens, pids_of(llm)[0]
            threading.Timer(0.3, os.kill, [pid, number]).start()
            with pytest.raises(EngineDeadError, match=rf"worker 1 \(process {pid}\) .*{sentence}"):
                while True:
                    llm.generate([PROMPT] * 20, SamplingParams(max_tokens=200, ignore_eos=True))
            torch.cuda.synchronize()  # no barrier is left under way
    assert tokens == expected
