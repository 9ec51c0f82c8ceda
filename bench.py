"""Measure the engine on this machine; on a GPU, beside what limits it.

    python bench.py                 everything that this machine can run
    python bench.py --quick         about a minute
    python bench.py --only decode   sections whose name contains the word (a,b: one of them)
    python bench.py --json FILE     write the figures, too

Random weights in the shapes of Qwen3 stand for a model on a GPU; the bundled model on a CPU. The limit of a row is
computed from the copy rate and the matrix-product rate measured in the same run: matrix products at the larger of
weight bytes / copy rate and FLOPs / product rate, attention at K and V bytes / copy rate or its FLOPs. Machines are
noisy: compare within a run. Peers' figures were taken by others on one H200, in another hour (README).
"""
import argparse
import gc
import itertools
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import kernel
import torch  # after kernel.py, as in engine.py
from engine import BlockManager, Sampled, Scheduler, SchedulerOutput, Sequence
from nanopaged import LLM
from kernel import cdiv, paged_attention
from nanopaged import SamplingParams

QWEN3 = dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=151936, num_key_value_heads=8, head_dim=128,
             max_position_embeddings=40960, rope_theta=1e6, rms_norm_eps=1e-6, torch_dtype="bfloat16")
SHAPES = {
    "0.6B": QWEN3 | dict(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, intermediate_size=3072,
                         tie_word_embeddings=True),
    "8B": QWEN3 | dict(hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, intermediate_size=12288,
                       tie_word_embeddings=False),
}
ROWS: list[dict] = []


def row(name: str, value: float, unit: str, limit: float | None = None, peer: str = "") -> None:
    """Print one figure, the limit in the same unit, and the fraction of it that was reached."""
    ROWS.append(dict(name=name, value=value, unit=unit, limit=limit, peer=peer))
    text = f"{name:48} {_number(value):>10} {unit:14}"
    if limit:
        reached = limit / value if unit.startswith(("ms", "s")) else value / limit
        text += f" limit {_number(limit):>9}, {reached:4.0%} of it"
    print(text + (f"   [{peer}]" if peer else ""), flush=True)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# --------------------------------------------------------------------------------------------------
# On any machine
# --------------------------------------------------------------------------------------------------

def rate(function, amount: float) -> float:
    """amount per second of one call."""
    started = time.perf_counter()
    function()
    return amount / (time.perf_counter() - started)


def batching(quick: bool) -> None:
    """The bundled model, prompts one by one and 32 at once, beside `transformers` on a CPU where that is installed."""
    rng, num_new = random.Random(0), 32 if quick else 128
    prompts = [[rng.randrange(1000) for _ in range(rng.randint(8, 64))] for _ in range(32)]
    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
    llm = LLM("shakespeare", enable_prefix_caching=False, max_num_seqs=64)
    llm.generate(prompts, SamplingParams(max_tokens=2))  # warm up
    peer = transformers_generate(llm, num_new) if llm.runner.device.type == "cpu" and find_spec("transformers") else None
    best = dict.fromkeys(("one", "many", "peer one", "peer many"), 0.0)
    for _ in range(2 if quick else 4):  # in turns, and the best of each: the machine may be busy now and then
        tries = {"one": (lambda: [llm.generate(prompt, params) for prompt in prompts[:4]], 4),
                 "many": (lambda: llm.generate(prompts, params), 32)}
        if peer:
            tries |= {"peer one": (lambda: [peer([prompt]) for prompt in prompts[:4]], 4), "peer many": (lambda: peer(prompts), 32)}
        for name, (function, count) in tries.items():
            best[name] = max(best[name], rate(function, count * num_new))
    for name, label in (("one", "bundled model, one prompt at a time"), ("many", "bundled model, 32 prompts at once")):
        beside = f"transformers generate {_number(best['peer ' + name])}, so {best[name] / best['peer ' + name]:.2f} times" if peer else ""
        row(label, best[name], "tokens/s", peer=beside)
    row("  which is", best["many"] / best["one"], "times")


def transformers_generate(llm: LLM, num_new: int):
    """`generate` of `transformers` with the same weights and threads, for a list of prompts as one left-padded batch."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(llm.path, dtype=torch.float32).eval()
    settings = dict(max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False, pad_token_id=0)

    def generate(batch):
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        model.generate(ids, attention_mask=mask, **settings)

    generate([[1, 2, 3]])  # warm up
    return generate


def scheduler(quick: bool) -> None:
    """Schedule and update alone, no model: ms per decode step, with few and many requests waiting, small and large pools."""
    best = {}
    for _ in range(3):  # in turns, and the best of each: the machine may be busy now and then
        for case in itertools.product((256, 1024), ((0, 20_000), (10_000, 20_000), (0, 1_000_000))):
            best[case] = min(best.get(case, math.inf), scheduler_ms(case[0], *case[1], steps=20 if quick else 100))
    for (num_running, (num_waiting, num_blocks)), ms in best.items():
        row(f"scheduler, {num_running} running, {num_waiting} waiting, {num_blocks} blocks", ms, "ms/step")


def scheduler_ms(num_running: int, num_waiting: int, num_blocks: int, steps: int) -> float:
    """The median of so many decode steps."""
    plan = Scheduler(BlockManager(num_blocks, 64), num_running, 8192)
    for i in range(num_running + num_waiting):
        plan.add(Sequence([i % 1000] * 8, (0, i, 0), 1008))
    while sum(seq.num_tokens > 8 for seq in plan.running) < num_running:
        step = plan.schedule()
        plan.update(step, Sampled([1] * len(step.sampled)))
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        step = plan.schedule()
        plan.update(step, Sampled([1] * len(step.sampled)))
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1000


def planned(prompts: list, params: list, max_num_seqs: int = 256, block_size: int = 64):
    """The steps in which an engine would compute these requests, planned without a model: (scheduler, step) of each."""
    plan = Scheduler(BlockManager(100_000, block_size, enable_prefix_caching=False), max_num_seqs, 8192)
    for i, (prompt, wanted) in enumerate(zip(prompts, params)):
        plan.add(Sequence(prompt, (0, i, 0), len(prompt) + wanted.max_tokens))
    while plan.waiting or plan.running:
        step = plan.schedule()
        yield plan, step
        plan.update(step, Sampled([1] * len(step.sampled)))


def fragmentation(quick: bool) -> None:
    """Workload "256" through the scheduler, without a model: of the slots that are held, how many hold a token; and how many
    would if every sequence had room for max_model_len 4,096 tokens, as without paging."""
    for block_size in (16, 64):
        tokens = held = contiguous = 0
        for plan, _ in planned(*workload_256(), block_size=block_size):
            tokens += sum(seq.num_computed_tokens for seq in plan.running)
            held += (plan.block_manager.num_blocks - plan.block_manager.num_free_blocks) * block_size
            contiguous += len(plan.running) * 4096
        row(f"held slots that hold a token, block_size {block_size}", 100 * tokens / held, "%")
    row("  without paging, 4,096 slots per sequence", 100 * tokens / contiguous, "%")


def prefix(quick: bool) -> None:
    """64 chats with one system prompt, of 1,000 tokens on a GPU, and once more with other questions; then without caching."""
    on_gpu = torch.cuda.is_available()
    system, question = (1000, 40) if on_gpu else (208, 20)
    llm = None
    for caching in (True, False):
        del llm  # else two engines would want the card
        llm = (random_llm("0.6B", max_model_len=2048, enable_prefix_caching=caching) if on_gpu else
               LLM("shakespeare", max_num_seqs=64, enable_prefix_caching=caching))
        rng, manager = random.Random(4), llm.scheduler.block_manager
        waves = ("first wave", "second wave") if caching else ("no caching",)
        for warming_up in (True, False):  # with other chats: steps of a new size wait for the library of matrix products
            shared = [rng.randrange(1000) for _ in range(system)]
            for wave in waves:
                asked, cached, saved = manager.num_prompt_tokens, manager.num_cached_tokens, manager.num_saved_blocks
                started, first_tokens = time.perf_counter(), []
                for _ in range(64):
                    llm.add_request(shared + [rng.randrange(1000) for _ in range(question)], SamplingParams(max_tokens=1))
                while llm.has_unfinished_requests():
                    num_done = len(llm.step())
                    first_tokens += [time.perf_counter() - started] * num_done
                if warming_up:
                    continue
                asked, cached = manager.num_prompt_tokens - asked, manager.num_cached_tokens - cached
                row(f"64 chats, {system} tokens shared, {wave}", 100 * (asked - cached) / asked, "% computed",
                    peer=f"{cached} tokens, {manager.num_saved_blocks - saved} blocks saved")
                row("  time to first token", statistics.median(first_tokens) * 1000, "ms")


# --------------------------------------------------------------------------------------------------
# The kernel, on a CUDA device
# --------------------------------------------------------------------------------------------------

def gpu_seconds(function, repeat: int = 5) -> float:
    """Median time of one call on the device, after a warm-up."""
    times = []
    for _ in range(repeat + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return sorted(times[2:])[repeat // 2]


class Limits:
    """What this device can do, measured: bytes read plus written per second, and bfloat16 FLOP/s."""

    def __init__(self):
        source = torch.randint(256, (2**31,), dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        self.copy = 2 * source.numel() / gpu_seconds(lambda: target.copy_(source))
        a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
        self.product = 2 * 8192**3 / gpu_seconds(lambda: a @ b)
        del source, target, a, b
        torch.cuda.empty_cache()
        row("device copy", self.copy / 1e9, "GB/s")
        row("device bfloat16 matrix product", self.product / 1e12, "TFLOP/s")

    def step_seconds(self, shape: dict, query_lens, seq_lens, num_samples: int) -> float:
        """The least time of a step: all matrix products, and attention. In the last layer tokens that sample nothing need
        only K and V, and the others attend alone."""
        d, layers, kv = shape["hidden_size"], shape["num_hidden_layers"], shape["num_key_value_heads"]
        heads, dim = shape["num_attention_heads"], shape["head_dim"]
        store, rest = d * 2 * kv * dim, 2 * heads * dim * d + 3 * d * shape["intermediate_size"]  # weights of a layer
        head, tokens = d * shape["vocab_size"], sum(query_lens)
        products = sum(max(2 * weights / self.copy, 2 * weights * rows / self.product)
                       for weights, rows in ((store * layers + rest * (layers - 1), tokens), (rest + head, num_samples)))
        attention = sum(max(s * kv * dim * 4 / self.copy, 4 * heads * dim * (q * (s - q) + q * (q + 1) / 2) / self.product)
                        for q, s in zip(query_lens, seq_lens)) * (layers - 1)
        return products + attention + sum(seq_lens) * kv * dim * 4 / self.copy * num_samples / len(seq_lens)

    def tokens_per_second(self, shape: dict, prompts: list, params: list, max_num_seqs: int = 256) -> float:
        """The most output tokens per second, when each step of these requests takes its least time."""
        seconds = sum(self.step_seconds(shape, step.num_tokens, [seq.num_computed_tokens for seq in step.seqs], len(step.sampled))
                      for _, step in planned(prompts, params, max_num_seqs))
        return sum(p.max_tokens for p in params) / seconds


def attention_seconds(query_len: int, seq_lens: list[int], block_size: int = 64, shuffled: bool = True,
                      dtype: torch.dtype = torch.bfloat16) -> float:
    """Time of paged_attention, as a graph over as many pools as do not fit the L2 cache, as a model's layers are."""
    num_blocks = [cdiv(n, block_size) for n in seq_lens]
    total, width = sum(num_blocks), max(num_blocks)
    copies = 1 + int(3e8 // (sum(seq_lens) * 4096))
    ids = (torch.randperm(total) if shuffled else torch.arange(total)).int().split(num_blocks)
    tables = torch.stack([torch.cat([x, torch.zeros(width - len(x), dtype=torch.int32)]) for x in ids]).cuda()
    pools = [torch.randn(2, total, block_size, 8, 128, device="cuda", dtype=torch.bfloat16).to(dtype) for _ in range(copies)]
    q = torch.randn(len(seq_lens) * query_len, 16, 128, device="cuda", dtype=torch.bfloat16)
    lens = torch.tensor(seq_lens, device="cuda", dtype=torch.int32)
    starts = torch.arange(0, len(q) + 1, query_len, device="cuda", dtype=torch.int32)
    tiles = kernel.make_query_tiles([query_len] * len(seq_lens), seq_lens,
                                    kernel.tokens_per_tile(2, 128, torch.bfloat16, q.device)).cuda()

    def every_layer():
        for k_cache, v_cache in pools:
            paged_attention(q, k_cache, v_cache, tables, lens, starts, 128 ** -0.5, max_query_len=query_len,
                            max_seq_len=max(seq_lens), query_tiles=tiles, num_decodes=0 if query_len > 1 else None)

    every_layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        every_layer()
    return gpu_seconds(graph.replay) / copies


DECODE = {"1 x 1k": ([1024], "255"), "1 x 8k": ([8192], "1,705"), "1 x 64k": ([65536], "3,196"),
          "8 x 8k": ([8192] * 8, "3,576"), "64 x 1k": ([1024] * 64, "3,343"), "64 x 8k": ([8192] * 64, "4,337"),
          "256 x 800": ([800] * 256, "3,459"), "256 x 4k": ([4096] * 256, "4,379")}
PREFILL = {"1 x 8k": (8192, [8192], "612"), "8 x 2k": (2048, [2048] * 8, "479"), "16 x 512": (512, [512] * 16, "226"),
           "4 x (2k after 14k)": (2048, [16384] * 4, "646")}


def attention(limits: Limits, quick: bool) -> None:
    """16 query heads on 8 kv heads of 128, bfloat16; decode in GB/s of K and V read, prefill in TFLOP/s."""
    for name, (seq_lens, peer) in DECODE.items():
        seconds = attention_seconds(1, seq_lens)
        row(f"attention, decode {name}", sum(seq_lens) * 4096 / seconds / 1e9, "GB/s", limits.copy / 1e9, f"FlashAttention-3 {peer}")
    for name, (query_len, seq_lens, peer) in PREFILL.items():
        flops = sum(4 * 16 * 128 * (query_len * (s - query_len) + query_len * (query_len + 1) / 2) for s in seq_lens)
        row(f"attention, prefill {name}", flops / attention_seconds(query_len, seq_lens) / 1e12, "TFLOP/s",
            limits.product / 1e12, f"FlashAttention-3 {peer}")


def fp8(limits: Limits, quick: bool) -> None:
    """Decode attention over an fp8 cache, beside the same over bfloat16; the limit is half, because half the bytes are read."""
    for name in ("64 x 1k", "256 x 4k"):
        seq_lens, _ = DECODE[name]
        ratio = attention_seconds(1, seq_lens, dtype=torch.float8_e4m3fn) / attention_seconds(1, seq_lens)
        row(f"attention, decode {name}, fp8 cache", ratio, "s / s of bf16", 0.5)


def swapping(limits: Limits, quick: bool) -> None:
    """What a preemption costs: moving blocks to the host and back, or computing them again."""
    llm = random_llm("0.6B", max_model_len=17_000, num_blocks=1000, swap_space=4)
    prompts = random.Random(5)
    for tokens in (256, 1024, 4096, 16_384):
        count, moves = cdiv(tokens, llm.runner.block_size), []
        for kind in ("swaps_out", "swaps_in"):
            step = SchedulerOutput(**{kind: [(i, i) for i in range(count)]})
            with torch.inference_mode():
                moves.append(gpu_seconds(lambda: llm.runner._move_blocks(step)) * 1000)
        compute = min(1000 / rate(lambda: llm.generate(random_prompts(prompts, [tokens]), SamplingParams(max_tokens=1)), 1) for _ in range(3))
        row(f"preempt {tokens:,} tokens: to the host and back", sum(moves), "ms", peer=f"out {moves[0]:.2f}, in {moves[1]:.2f}")
        row(f"preempt {tokens:,} tokens: compute again", compute, "ms")


def paging(limits: Limits, quick: bool) -> None:
    """The price of paging: the same attention over shuffled blocks of several sizes, and over contiguous K and V."""
    for block_size, label in ((1, "block_size 1"), (16, "block_size 16"), (64, "block_size 64"), (256, "block_size 256"),
                              (4096, "contiguous")):
        decode = attention_seconds(1, [4096] * 64, block_size, shuffled=block_size < 4096)
        prefill = attention_seconds(4096, [4096] * 2, block_size, shuffled=block_size < 4096)
        row(f"paging, decode 64 x 4k, {label}", 64 * 4096 * 4096 / decode / 1e9, "GB/s", limits.copy / 1e9)
        row(f"paging, prefill 2 x 4k, {label}", 2 * 4 * 16 * 128 * 4096 * 4097 / 2 / prefill / 1e12, "TFLOP/s", limits.product / 1e12)


# --------------------------------------------------------------------------------------------------
# The engine, on a CUDA device
# --------------------------------------------------------------------------------------------------

class CardTooSmall(Exception):
    """The engine's sentence about it."""


def random_llm(shape: str, **options) -> LLM:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape]))
        try:
            return LLM(folder, **dict(load_format="dummy", enable_prefix_caching=False) | options)
        except ValueError as error:
            raise CardTooSmall(error) from None


def random_prompts(rng: random.Random, lengths) -> list[list[int]]:
    return [[rng.randint(0, 10000) for _ in range(length)] for length in lengths]


def stop_all(llm: LLM) -> None:
    for request_id in list(llm.requests):
        llm.abort_request(request_id)
    while llm.engine.launched:
        llm._update()


def prefill_rate(llm: LLM, batch: int, context: int) -> float:
    """Prompt tokens/s of prompts that want one token each."""
    prompts = random_prompts(random.Random(1), [context] * batch)
    return rate(lambda: llm.generate(prompts, SamplingParams(temperature=0.6, max_tokens=1)), batch * context)


def decode_ms(llm: LLM, batch: int, context: int, steps: int = 50) -> float:
    """ms per decode step, when all prompts are computed."""
    params = SamplingParams(temperature=0.6, max_tokens=steps + batch * cdiv(context, 8192) + 30, ignore_eos=True)
    for prompt in random_prompts(random.Random(1), [context] * batch):
        llm.add_request(prompt, params)
    while llm.scheduler.waiting or any(seq.num_computed_tokens < context for seq in llm.scheduler.running):
        llm._step()
    for _ in range(5):
        llm._step()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        llm._step()
    torch.cuda.synchronize()
    ms = (time.perf_counter() - started) / steps * 1000
    stop_all(llm)
    return ms


def workload_256(seed: int = 0) -> tuple[list, list]:
    """Prompts and sampling parameters of the random workload that nano-vllm's benchmark defines."""
    rng = random.Random(seed)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    return prompts, [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=rng.randint(100, 1024)) for _ in range(256)]


def warm_up(llm: LLM, prompts: list) -> None:
    """A few steps of the sizes to come: libraries load a kernel when it is first wanted."""
    llm.generate(prompts, SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=8))


def workload(llm: LLM) -> tuple[float, int, int]:
    """(output tokens/s, prompt tokens, output tokens) of that workload."""
    prompts, params = workload_256()
    new = sum(p.max_tokens for p in params)
    return rate(lambda: llm.generate(prompts, params), new), sum(map(len, prompts)), new


def decode(limits: Limits, quick: bool) -> None:
    """ms per decode step, and long prompts."""
    llm = random_llm("0.6B", max_model_len=9000)
    peers = {1: "vLLM 1.62", 8: "vLLM 1.71", 64: "vLLM 2.90", 256: "vLLM 6.93"}
    for batch, peer in peers.items():
        limit = limits.step_seconds(SHAPES["0.6B"], [1] * batch, [540] * batch, batch) * 1000
        row(f"0.6B decode, batch {batch}, context 512", decode_ms(llm, batch, 512), "ms/step", limit, peer)
    long_prompts(llm, limits, "0.6B", "vLLM 8.57", "vLLM 280,400")


def long_prompts(llm: LLM, limits: Limits, shape: str, decode_peer: str, prefill_peer: str) -> None:
    """32 prompts of 8,000 tokens: a decode step of them, and their prefill."""
    limit = limits.step_seconds(SHAPES[shape], [1] * 32, [8030] * 32, 32) * 1000
    row(f"{shape} decode, batch 32, context 8,000", decode_ms(llm, 32, 8000, 20), "ms/step", limit, decode_peer)
    prefill_rate(llm, 4, 8000)  # warm up
    limit = 32 * 8000 / limits.step_seconds(SHAPES[shape], [8000] * 32, [8000] * 32, 32)
    row(f"{shape} prefill, 32 x 8,000", prefill_rate(llm, 32, 8000), "tokens/s", limit, prefill_peer)


def throughput(limits: Limits, quick: bool) -> None:
    """Workload "256", and 1,024 short requests at once."""
    llm = random_llm("0.6B", max_model_len=4096)
    warm_up(llm, workload_256(seed=1)[0])
    tokens_per_second, num_in, num_out = workload(llm)
    row(f"0.6B workload 256 ({num_in:,} in, {num_out:,} out)", tokens_per_second, "tokens/s",
        limits.tokens_per_second(SHAPES["0.6B"], *workload_256()), "vLLM 23,450")
    if quick:
        return
    del llm
    llm = random_llm("0.6B", max_model_len=1024, max_num_seqs=1024)
    prompts = random_prompts(random.Random(0), [128] * 1024)
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=128)] * 1024
    warm_up(llm, prompts)
    row("0.6B 1,024 x (128 in, 128 out)", rate(lambda: llm.generate(prompts, params), 1024 * 128), "tokens/s",
        limits.tokens_per_second(SHAPES["0.6B"], prompts, params, 1024), "vLLM 36,650, nano-vllm 52,590")


def large(limits: Limits, quick: bool) -> None:
    """Qwen3-8B's shape."""
    if quick:
        return
    llm = random_llm("8B", max_model_len=9000)
    for batch, peer in {1: "vLLM 5.21", 256: "vLLM 14.85"}.items():
        limit = limits.step_seconds(SHAPES["8B"], [1] * batch, [540] * batch, batch) * 1000
        row(f"8B decode, batch {batch}, context 512", decode_ms(llm, batch, 512, 30), "ms/step", limit, peer)
    long_prompts(llm, limits, "8B", "vLLM 14.3", "vLLM 37,800")
    warm_up(llm, workload_256(seed=1)[0])
    row("8B workload 256", workload(llm)[0], "tokens/s", limits.tokens_per_second(SHAPES["8B"], *workload_256()), "vLLM 9,140")


def latency(limits: Limits, quick: bool) -> None:
    """Time to first token of a prompt that comes alone. 64 sequences decode while prompts of 4,000 tokens arrive: gaps between
    their tokens, and time to first token."""
    llm = random_llm("0.6B", max_model_len=8192)
    prefill_rate(llm, 4, 8000)  # warm up
    budget_ms = 8192 / prefill_rate(llm, 8, 8000) * 1000
    rng, params = random.Random(2), SamplingParams(temperature=0.6, max_tokens=4000, ignore_eos=True)
    for prompt in random_prompts(rng, [512] * 64):
        llm.add_request(prompt, params)
    for _ in range(20):
        llm._step()
    gaps, first_tokens, arrived, last = [], [], {}, time.perf_counter()
    arrivals = deque(random_prompts(rng, [4000] * 12))
    for step in range(400):
        if step % 30 == 10 and arrivals:
            arrived[llm.add_request(arrivals.popleft(), SamplingParams(max_tokens=1))] = time.perf_counter()
        finished = llm._step()
        now = time.perf_counter()
        gaps.append((now - last) * 1000)
        first_tokens += [(now - arrived[request.request_id]) * 1000 for request in finished if request.request_id in arrived]
        last = now
    stop_all(llm)
    short = [1000 / rate(lambda: llm.generate(random_prompts(rng, [100]), SamplingParams(max_tokens=1)), 1) for _ in range(11)]
    row("time to first token of a 100-token prompt, alone", statistics.median(short), "ms")
    row("gap between tokens under load, median", statistics.median(gaps), "ms")
    row("gap between tokens under load, 99th percentile", sorted(gaps)[int(0.99 * len(gaps))], "ms", peer=f"one budget of work: {budget_ms:.0f} ms")
    row("time to first token of a 4,000-token prompt", statistics.median(first_tokens), "ms")


def invariance(limits: Limits, quick: bool) -> None:
    """How often greedy bfloat16 tokens differ between batch 1 and batch 256: matrix products differ with the batch."""
    llm = random_llm("0.6B", max_model_len=1024)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=64)
    prompts = random_prompts(random.Random(3), [64] * 256)
    together = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    alone = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in prompts[:16]]
    first = [next((i for i, (a, b) in enumerate(zip(x, y)) if a != b), 64) for x, y in zip(alone, together)]
    row("greedy bfloat16, batch 1 against 256: texts of 64 that differ", 100 * sum(i < 64 for i in first) / len(first), "%")


START = """
import sys, time; sys.path.insert(0, {root!r})
import bench
from nanopaged import SamplingParams
llm = bench.random_llm("0.6B", max_model_len=4096)
llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
print(time.time())
"""


def start(limits: Limits, quick: bool) -> None:
    """Process start to first token, with the compile caches empty and then full; twice, and the best, for it is the host's
    work, and the host may be busy. One start before them, with caches of its own, has Python compile byte code, which pip
    does where it installs packages."""
    seconds = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as folder:
        for caches, label in (("first", ""), ("second", "cold"), ("second", "warm"), ("third", "cold"), ("third", "warm")):
            environment = os.environ | dict(TRITON_CACHE_DIR=f"{folder}/{caches}/triton", PYTHONPYCACHEPREFIX=f"{folder}/python",
                                            TORCHINDUCTOR_CACHE_DIR=f"{folder}/{caches}/inductor")
            environment.pop("PYTHONDONTWRITEBYTECODE", None)
            started = time.time()
            ended = float(subprocess.run([sys.executable, "-c", START.format(root=str(Path(__file__).parent))], env=environment,
                                         check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])
            if label:
                seconds[label].append(ended - started)
    for label, peer in (("cold", "vLLM 56, nano-vllm about 15; "), ("warm", "")):
        row(f"0.6B process start to first token, caches {label}", min(seconds[label]), "s", peer=f"{peer}the other time {max(seconds[label]):.1f}")


# --------------------------------------------------------------------------------------------------

def machine() -> str:
    """Device, threads and versions: what a figure is worth nothing without."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return f"{device}, {torch.get_num_threads()} CPU threads, Python {platform.python_version()}, " + ", ".join(
        f"{name} {_version(name)}" for name in ("torch", "triton", "transformers"))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


ANYWHERE = [scheduler, fragmentation, prefix, batching]
ON_CUDA = [start, attention, fp8, paging, decode, throughput, latency, swapping, invariance, large]
QUICK = {"scheduler", "fragmentation", "prefix", "batching", "attention", "decode"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about a minute")
    parser.add_argument("--only", default="", metavar="WORD", help="sections whose name contains one of these words (a,b)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    words, runnable = args.only.split(","), [section for section in ANYWHERE + ON_CUDA * torch.cuda.is_available()
                                             if section.__name__ in QUICK or not args.quick]
    sections = [section for section in runnable if any(word in section.__name__ for word in words)]
    unknown = [word for word in words if not any(word in section.__name__ for section in ANYWHERE + ON_CUDA)]
    if unknown or not sections:
        parser.error(f"--only {args.only!r} names a section that there is not, or not here; those that can run are "
                     f"{', '.join(section.__name__ for section in runnable)}")
    print(machine())
    # Before the sections: a driver fills memory that was freed with zeros, and for half a second after an engine is gone
    # an H200 copies 3,800 GB/s instead of 4,230.
    limits = Limits() if any(section in ON_CUDA for section in sections) else None
    for section in sections:
        try:
            section(limits, args.quick) if section in ON_CUDA else section(args.quick)
        except CardTooSmall as error:
            print(f"{section.__name__} is left out from here on: {error}")
        gc.collect()  # engines that are not used any more
        torch.cuda.empty_cache()  # what they held is for the next section, which may be another process
    if args.json:
        args.json.write_text(json.dumps(dict(machine=machine(), rows=ROWS), indent=1))


if __name__ == "__main__":
    main()
