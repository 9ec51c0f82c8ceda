"""Measure the engine on this machine; on a GPU, print each figure beside the limit of the hardware.

    python bench.py                 all sections that this machine can run
    python bench.py --quick         a selection, about a minute on an idle machine
    python bench.py --only decode   sections whose names contain the word (a,b: one of the words)
    python bench.py --json FILE     also write the figures to a file

The model is Qwen3's shape with random weights on a GPU, and the bundled model on a CPU. **Workload 256** is that of
nano-vllm's benchmark: 256 requests at once, each with a random prompt of 100 to 1,024 tokens and 100 to 1,024 output
tokens, at temperature 0.6.

**Limits.** A limit is the best that the hardware allows, computed from two rates that the same run measures: bytes read
plus written by a copy, and FLOPs of a large bfloat16 matrix product. A matrix product takes at least the larger of
weight bytes / copy rate and FLOPs / product rate, attention the larger of K and V bytes / copy rate and FLOPs / product
rate. Reading alone is faster than a copy, so decode attention may exceed its limit.

**Noise.** Compare figures of one run. Cards of one kind differ by a percent, and a busy host takes up to twice the time
for its part: scheduling, starting, the time to first token. Sections that time the host repeat and report the best.

**Peers.** Figures of other engines in brackets were measured by others, on another card and at another time (PEERS).
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
import threading
import time
from collections import Counter, deque
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator

import nanopaged  # noqa: F401  before torch: it silences a warning of torch's

# isort: split
import torch

from nanopaged import LLM, SamplingParams, engine, kernel
from nanopaged.cli.batch import open_file
from nanopaged.scheduling import additions
from nanopaged.scheduling.additions import SchedulerOutput
from nanopaged.scheduling.drafts import PAYS, Ngram
from nanopaged.text.byte_level import Detokenizer

QWEN3 = dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=151936, num_key_value_heads=8,
             head_dim=128, max_position_embeddings=40960, rope_theta=1e6, rms_norm_eps=1e-6, torch_dtype="bfloat16")
SHAPES = {
    "0.6B": QWEN3 | dict(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, intermediate_size=3072,
                         tie_word_embeddings=True),
    "1.7B": QWEN3 | dict(hidden_size=2048, num_hidden_layers=28, num_attention_heads=16, intermediate_size=6144,
                         tie_word_embeddings=True),
    "4B": QWEN3 | dict(hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, intermediate_size=9728,
                       tie_word_embeddings=True),
    "8B": QWEN3 | dict(hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, intermediate_size=12288,
                       tie_word_embeddings=False),
}
# Figures of other engines for rows of this file: FlashAttention-3 on an H200 that copies 4,270 GB/s, vLLM 0.26.0 on one
# on 2026-11-22.
PEERS = {
    "attention, decode 1 x 1k": "FlashAttention-3 255", "attention, decode 1 x 8k": "FlashAttention-3 1,705",
    "attention, decode 1 x 64k": "FlashAttention-3 3,196", "attention, decode 8 x 8k": "FlashAttention-3 3,576",
    "attention, decode 64 x 1k": "FlashAttention-3 3,343", "attention, decode 64 x 8k": "FlashAttention-3 4,337",
    "attention, decode 256 x 800": "FlashAttention-3 3,459", "attention, decode 256 x 4k": "FlashAttention-3 4,379",
    "attention, prefill 1 x 8k": "FlashAttention-3 612", "attention, prefill 8 x 2k": "FlashAttention-3 479",
    "attention, prefill 16 x 512": "FlashAttention-3 226",
    "attention, prefill 4 x (2k after 14k)": "FlashAttention-3 646",
    "0.6B decode, batch 1, context 512": "vLLM 1.67", "0.6B decode, batch 8, context 512": "vLLM 1.92",
    "0.6B decode, batch 64, context 512": "vLLM 3.25", "0.6B decode, batch 256, context 512": "vLLM 6.99",
    "0.6B decode, batch 32, context 8,000": "vLLM 8.57", "0.6B prefill, 32 x 8,000": "vLLM 280,337",
    "0.6B workload 256": "vLLM 23,617", "0.6B 1,024 x (128 in, 128 out)": "vLLM 34,244",
    "8B decode, batch 1, context 512": "vLLM 5.25", "8B decode, batch 256, context 512": "vLLM 14.6",
    "8B decode, batch 32, context 8,000": "vLLM 14.3", "8B prefill, 32 x 8,000": "vLLM 37,698",
    "8B workload 256": "vLLM 9,118", "0.6B process start to first token, caches cold": "vLLM 78.0",
}
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 8, 128  # of the attention sections
KV_BYTES = 2 * NUM_KV_HEADS * HEAD_DIM * 2  # K and V of one token in bfloat16
MORE_THAN_L2 = 3e8  # bytes; an H200's L2 cache has 50 MB
BUDGET = 8192  # max_num_batched_tokens, the default
ROWS: list[dict] = []


def row(name: str, value: float, unit: str, limit: float | None = None, note: str = "") -> None:
    """Print one figure, the limit in the same unit, and the fraction of the limit that the figure reaches."""
    peer = PEERS.get(name, "")
    ROWS.append(dict(name=name, value=value, unit=unit, limit=limit, peer=peer, note=note))
    text = f"{name:48} {_number(value):>10} {unit:14}"
    if limit:
        reached = limit / value if unit.startswith(("ms", "s")) else value / limit
        text += f" limit {_number(limit):>9}, {reached:4.0%} of it"
    remarks = "; ".join(remark for remark in (peer, note) if remark)
    print(text + (f"   [{remarks}]" if remarks else ""), flush=True)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# --------------------------------------------------------------------------------------------------
# On any machine
# --------------------------------------------------------------------------------------------------

def rate(function: Callable[[], object], amount: float) -> float:
    """amount per second of one call."""
    started = time.perf_counter()
    function()
    return amount / (time.perf_counter() - started)


def batching(quick: bool) -> None:
    """The bundled model: prompts one by one, and 32 at once. On a CPU beside `transformers`, if it is installed."""
    rng, num_new = random.Random(0), 32 if quick else 128
    prompts = [[rng.randrange(1000) for _ in range(rng.randint(8, 64))] for _ in range(32)]
    few = prompts[:4]
    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
    llm = LLM("shakespeare", enable_prefix_caching=False, max_num_seqs=64)
    llm.generate(prompts, SamplingParams(max_tokens=2))  # warm up
    tries: dict[str, tuple[Callable[[], object], int]] = {
        "one": (lambda: [llm.generate(prompt, params) for prompt in few], len(few)),
        "many": (lambda: llm.generate(prompts, params), len(prompts))}
    if llm.runner.device.type == "cpu" and find_spec("transformers"):
        peer = transformers_generate(llm, num_new)
        tries |= {"peer one": (lambda: [peer([prompt]) for prompt in few], len(few)),
                  "peer many": (lambda: peer(prompts), len(prompts))}
    best = dict.fromkeys(tries, 0.0)
    for _ in range(2 if quick else 4):  # in turns, and the best of each: the machine may be busy now and then
        for name, (function, count) in tries.items():
            best[name] = max(best[name], rate(function, count * num_new))
    for name, label in (("one", "one prompt at a time"), ("many", f"{len(prompts)} prompts at once")):
        note = ""
        if theirs := best.get(f"peer {name}"):
            note = f"transformers generate {_number(theirs)}: {best[name] / theirs:.2f} times as fast"
        row(f"bundled model, {label}", best[name], "tokens/s", note=note)
    row("  batched over one at a time", best["many"] / best["one"], "times")


def transformers_generate(llm: LLM, num_new: int) -> Callable[[list[list[int]]], None]:
    """`generate` of `transformers` with the same weights and threads; a list of prompts is one left-padded batch."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(llm.path, dtype=torch.float32).eval()
    settings = dict(max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False, pad_token_id=0)

    def generate(batch: list[list[int]]) -> None:
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        model.generate(ids, attention_mask=mask, **settings)

    generate([[1, 2, 3]])  # warm up
    return generate


def scheduler(quick: bool) -> None:
    """The host's work without a model: ms of schedule and update per decode step. Few or many sequences run, few or
    many requests wait, and the pool is small or large."""
    best: dict[tuple[int, int, int], float] = {}
    for _ in range(3):  # in turns, and the best of each: the machine may be busy now and then
        for num_running, queue in itertools.product((256, 1024), ((0, 20_000), (10_000, 20_000), (0, 1_000_000))):
            ms = scheduler_ms(num_running, *queue, steps=20 if quick else 100)
            best[num_running, *queue] = min(best.get((num_running, *queue), math.inf), ms)
    for (running, waiting, blocks), ms in best.items():
        row(f"scheduler, {running} run, {waiting} wait, {blocks} blocks", ms, "ms/step")


def scheduler_ms(num_running: int, num_waiting: int, num_blocks: int, steps: int) -> float:
    """The median time of a decode step."""
    plan = additions.Scheduler(additions.BlockManager(num_blocks, 64), num_running, BUDGET)
    for i in range(num_running + num_waiting):
        plan.add(additions.Sequence([i % 1000] * 8, (0, i, 0), 1008))
    while sum(seq.num_tokens > 8 for seq in plan.running) < num_running:
        step = plan.schedule()
        plan.update(step, engine.Sampled([1] * len(step.sampled)))
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        step = plan.schedule()
        plan.update(step, engine.Sampled([1] * len(step.sampled)))
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1000


def planned(prompts: list[list[int]], params: list[SamplingParams], max_num_seqs: int = 256,
            block_size: int = 64) -> Iterator[tuple[additions.Scheduler, additions.SchedulerOutput]]:
    """The steps in which an engine computes these requests, planned without a model: (scheduler, step) of each step."""
    plan = additions.Scheduler(additions.BlockManager(100_000, block_size, False), max_num_seqs, BUDGET)
    for i, (prompt, wanted) in enumerate(zip(prompts, params)):
        plan.add(additions.Sequence(prompt, (0, i, 0), len(prompt) + num_output_tokens(wanted)))
    while plan.waiting or plan.running:
        step = plan.schedule()
        yield plan, step
        plan.update(step, engine.Sampled([1] * len(step.sampled)))


def fragmentation(quick: bool) -> None:
    """Workload 256 without a model: the fraction of held slots that hold a token, and the same fraction without paging,
    where every sequence would reserve max_model_len slots."""
    max_model_len = 4096
    for block_size in (16, 64):
        tokens = held = contiguous = 0
        for plan, _ in planned(*workload_256(), block_size=block_size):
            tokens += sum(seq.num_computed_tokens for seq in plan.running)
            held += (plan.block_manager.num_blocks - plan.block_manager.num_free_blocks) * block_size
            contiguous += len(plan.running) * max_model_len
        row(f"held slots that hold a token, block_size {block_size}", 100 * tokens / held, "%")
    row(f"  without paging, {max_model_len:,} slots per sequence", 100 * tokens / contiguous, "%")


def prefix(quick: bool) -> None:
    """64 chats with a common system prompt (1,000 tokens on a GPU), a second wave with other questions, and a wave
    without prefix caching. With cached prompts the time to first token on a GPU is mostly the host's work."""
    on_gpu = torch.cuda.is_available()
    system, question = (1000, 40) if on_gpu else (208, 20)
    llm = None
    for caching in (True, False):
        del llm  # otherwise two engines would share the card
        llm = (random_llm("0.6B", max_model_len=2048, enable_prefix_caching=caching) if on_gpu else
               LLM("shakespeare", max_num_seqs=64, enable_prefix_caching=caching))
        rng = random.Random(4)
        for warming_up in (True, False):  # with other chats: for a new step size a library loads its matrix kernels
            shared = [rng.randrange(1000) for _ in range(system)]
            for wave in ("first wave", "second wave") if caching else ("no caching",):
                chats = [shared + [rng.randrange(1000) for _ in range(question)] for _ in range(64)]
                num_prompt_tokens, num_cached_tokens, num_saved_blocks, seconds = chat_wave(llm, chats)
                if not warming_up:
                    computed = 100 * (num_prompt_tokens - num_cached_tokens) / num_prompt_tokens
                    row(f"64 chats, {system} tokens shared, {wave}", computed, "% computed",
                        note=f"{num_cached_tokens} tokens, {num_saved_blocks} blocks saved")
                    row("  time to first token", seconds * 1000, "ms")


def chat_wave(llm: LLM, prompts: list[list[int]]) -> tuple[int, int, int, float]:
    """(prompt tokens, cached tokens, saved blocks, median seconds to first token) of prompts that arrive together."""
    manager = llm.scheduler.block_manager
    before = manager.num_prompt_tokens, manager.num_cached_tokens, manager.num_saved_blocks
    started = time.perf_counter()
    first_tokens: list[float] = []
    for prompt in prompts:
        llm.add_request(prompt, SamplingParams(max_tokens=1))
    while llm.has_unfinished_requests():
        num_done = len(llm.step())
        first_tokens += [time.perf_counter() - started] * num_done
    after = manager.num_prompt_tokens, manager.num_cached_tokens, manager.num_saved_blocks
    num_prompt_tokens, num_cached_tokens, num_saved_blocks = (new - old for old, new in zip(before, after))
    return num_prompt_tokens, num_cached_tokens, num_saved_blocks, statistics.median(first_tokens)


# --------------------------------------------------------------------------------------------------
# The kernel, on a CUDA device
# --------------------------------------------------------------------------------------------------

def gpu_seconds(function: Callable[[], object], repeat: int = 5) -> float:
    """Median time of one call on the device, after a warm-up of two calls."""
    times = []
    for _ in range(repeat + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return sorted(times[2:])[repeat // 2]


def copy_rate() -> float:
    """Bytes read plus written per second."""
    source = torch.randint(256, (2**31,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / gpu_seconds(lambda: target.copy_(source))


def product_rate() -> float:
    """FLOP/s of a bfloat16 matrix product."""
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / gpu_seconds(lambda: a @ b)


class Limits:
    """The device's measured rates, and the limits that follow from them."""

    def __init__(self) -> None:
        self.copy, self.product = copy_rate(), product_rate()
        torch.cuda.empty_cache()
        row("device copy", self.copy / 1e9, "GB/s")
        row("device bfloat16 matrix product", self.product / 1e12, "TFLOP/s")

    def step_seconds(self, shape: dict[str, Any], query_lens: list[int], seq_lens: list[int],
                     num_samples: int) -> float:
        """The least time of a step: all matrix products, and attention. In the last layer only the tokens that sample
        attend and pass the MLP; the others need K and V."""
        d, layers, kv = shape["hidden_size"], shape["num_hidden_layers"], shape["num_key_value_heads"]
        heads, dim = shape["num_attention_heads"], shape["head_dim"]
        kv_proj = d * 2 * kv * dim  # weights of a layer
        rest = 2 * heads * dim * d + 3 * d * shape["intermediate_size"]
        products = sum(max(2 * weights / self.copy, 2 * weights * rows / self.product) for weights, rows in (
            (kv_proj * layers + rest * (layers - 1), sum(query_lens)),
            (rest + d * shape["vocab_size"], num_samples)))
        token_bytes = 4 * kv * dim  # K and V in bfloat16, of one layer
        attention = sum(
            max(s * token_bytes / self.copy, 4 * heads * dim * (q * (s - q) + q * (q + 1) / 2) / self.product)
            for q, s in zip(query_lens, seq_lens)) * (layers - 1)
        last_layer = sum(seq_lens) * token_bytes / self.copy * num_samples / len(seq_lens)
        return products + attention + last_layer

    def tokens_per_second(self, shape: dict[str, Any], prompts: list[list[int]], params: list[SamplingParams],
                          max_num_seqs: int = 256) -> float:
        """Output tokens per second if every step of these requests takes its least time."""
        seconds = sum(self.step_seconds(shape, step.num_tokens, [seq.num_computed_tokens for seq in step.seqs],
                                        len(step.sampled))
                      for _, step in planned(prompts, params, max_num_seqs))
        return sum(map(num_output_tokens, params)) / seconds


def attention_seconds(query_len: int, seq_lens: list[int], block_size: int = 64, shuffled: bool = True,
                      dtype: torch.dtype = torch.bfloat16, rows: int = 1) -> float:
    """Time of one paged_attention call, from a graph of calls on several pools. Together the pools exceed the L2 cache,
    as the layers of a model do. rows: of the same sequence, with the same block table"""
    num_blocks = [engine.cdiv(n, block_size) for n in seq_lens]
    total, width = sum(num_blocks), max(num_blocks)
    copies = 1 + int(MORE_THAN_L2 // (sum(seq_lens) * KV_BYTES))
    ids = (torch.randperm(total) if shuffled else torch.arange(total)).int().split(num_blocks)
    tables = torch.stack([torch.cat([x, torch.zeros(width - len(x), dtype=torch.int32)]) for x in ids]).cuda()
    tables, seq_lens = tables.repeat_interleave(rows, 0), [n for n in seq_lens for _ in range(rows)]
    options: dict[str, Any] = dict(device="cuda", dtype=torch.bfloat16)
    pools = [torch.randn(2, total, block_size, NUM_KV_HEADS, HEAD_DIM, **options).to(dtype) for _ in range(copies)]
    q = torch.randn(len(seq_lens) * query_len, NUM_HEADS, HEAD_DIM, **options)
    lens = torch.tensor(seq_lens, device="cuda", dtype=torch.int32)
    starts = torch.arange(0, len(q) + 1, query_len, device="cuda", dtype=torch.int32)
    query_tile = kernel.tokens_per_tile(NUM_HEADS // NUM_KV_HEADS, HEAD_DIM, torch.bfloat16, q.device)
    tiles = kernel.make_query_tiles([query_len] * len(seq_lens), seq_lens, query_tile).cuda()

    def every_layer() -> None:
        for k_cache, v_cache in pools:
            kernel.paged_attention(q, k_cache, v_cache, tables, lens, starts, HEAD_DIM ** -0.5, max_query_len=query_len,
                                   max_seq_len=max(seq_lens), query_tiles=tiles,
                                   num_decodes=0 if query_len > 1 else None)

    every_layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        every_layer()
    return gpu_seconds(graph.replay) / copies


def attention_flops(query_len: int, seq_lens: list[int]) -> float:
    """Two products of head_dim numbers for each pair of a query and a key up to it."""
    pairs = sum(query_len * (n - query_len) + query_len * (query_len + 1) / 2 for n in seq_lens)
    return 4 * NUM_HEADS * HEAD_DIM * pairs


DECODE = {"1 x 1k": [1024], "1 x 8k": [8192], "1 x 64k": [65536], "8 x 8k": [8192] * 8, "64 x 1k": [1024] * 64,
          "64 x 8k": [8192] * 64, "256 x 800": [800] * 256, "256 x 4k": [4096] * 256}
PREFILL = {"1 x 8k": (8192, [8192]), "8 x 2k": (2048, [2048] * 8), "16 x 512": (512, [512] * 16),
           "4 x (2k after 14k)": (2048, [16384] * 4)}


def attention(limits: Limits, quick: bool) -> None:
    """16 query heads on 8 kv heads of 128, bfloat16: decode in GB/s of K and V read, prefill in TFLOP/s."""
    for name, seq_lens in DECODE.items():
        seconds = attention_seconds(1, seq_lens)
        row(f"attention, decode {name}", sum(seq_lens) * KV_BYTES / seconds / 1e9, "GB/s", limits.copy / 1e9)
    for name, (query_len, seq_lens) in PREFILL.items():
        flops = attention_flops(query_len, seq_lens)
        row(f"attention, prefill {name}", flops / attention_seconds(query_len, seq_lens) / 1e12, "TFLOP/s",
            limits.product / 1e12)


def fp8(limits: Limits, quick: bool) -> None:
    """Time of decode attention over an fp8 cache, relative to bfloat16. The limit is one half: it reads half the bytes.
    `pytest -k fp8_cache_changes` checks the quality: less than a percent of the bundled model's loss."""
    for name in ("64 x 1k", "256 x 4k"):
        seq_lens = DECODE[name]
        ratio = attention_seconds(1, seq_lens, dtype=torch.float8_e4m3fn) / attention_seconds(1, seq_lens)
        row(f"attention, decode {name}, fp8 cache", ratio, "s / s of bf16", 0.5)


def swapping(limits: Limits, quick: bool) -> None:
    """The price of a preemption: move the blocks to the host and back, or compute the tokens again."""
    llm = random_llm("0.6B", max_model_len=17_000, num_blocks=1000, swap_space=4)
    rng, params = random.Random(5), SamplingParams(max_tokens=1)
    for num_tokens in (256, 1024, 4096, 16_384):
        pairs = [(i, i) for i in range(engine.cdiv(num_tokens, llm.runner.block_size))]
        with torch.inference_mode():
            out, back = (gpu_seconds(lambda: llm.runner._move_blocks(step)) * 1000
                         for step in (SchedulerOutput(swaps_out=pairs), SchedulerOutput(swaps_in=pairs)))
        compute = max(rate(lambda: llm.generate(random_prompts(rng, [num_tokens]), params), 1) for _ in range(3))
        label = f"preempt {num_tokens:,} tokens"
        row(f"{label}: to the host and back", out + back, "ms", note=f"out {out:.2f}, in {back:.2f}")
        row(f"{label}: compute again", 1000 / compute, "ms")


def paging(limits: Limits, quick: bool) -> None:
    """The price of paging: the same attention over shuffled blocks of several sizes, and over contiguous K and V."""
    context = 4096
    for block_size in (1, 16, 64, 256, context):
        label = "contiguous" if block_size == context else f"block_size {block_size}"
        decode = attention_seconds(1, [context] * 64, block_size, shuffled=block_size < context)
        prefill = attention_seconds(context, [context] * 2, block_size, shuffled=block_size < context)
        row(f"paging, decode 64 x 4k, {label}", 64 * context * KV_BYTES / decode / 1e9, "GB/s", limits.copy / 1e9)
        row(f"paging, prefill 2 x 4k, {label}", attention_flops(context, [context] * 2) / prefill / 1e12, "TFLOP/s",
            limits.product / 1e12)


# --------------------------------------------------------------------------------------------------
# The engine, on a CUDA device
# --------------------------------------------------------------------------------------------------

class CardTooSmall(Exception):
    """Carries the engine's own message."""


def random_llm(shape: str, **options: Any) -> LLM:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape]))
        try:
            return LLM(folder, **dict(load_format="dummy", enable_prefix_caching=False) | options)
        except ValueError as error:
            raise CardTooSmall(error) from None


def random_prompts(rng: random.Random, lengths: Iterable[int]) -> list[list[int]]:
    return [[rng.randint(0, 10000) for _ in range(length)] for length in lengths]


def stop_all(llm: LLM) -> None:
    """Abort all requests, and read the steps that were launched ahead."""
    for request_id in list(llm.requests):
        llm.abort_request(request_id)
    while not llm.engine.is_idle:
        llm._step()


def prefill_rate(llm: LLM, batch: int, context: int) -> float:
    """Prompt tokens/s of prompts that generate one token each."""
    prompts = random_prompts(random.Random(1), [context] * batch)
    return rate(lambda: llm.generate(prompts, SamplingParams(temperature=0.6, max_tokens=1)), batch * context)


def decode_ms(llm: LLM, batch: int, context: int, steps: int = 50) -> float:
    """ms per decode step, after all prompts have been computed."""
    num_prefill_steps = batch * engine.cdiv(context, BUDGET)
    params = SamplingParams(temperature=0.6, max_tokens=num_prefill_steps + steps + 30, ignore_eos=True)
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


def num_output_tokens(params: SamplingParams) -> int:
    return params.max_tokens or 0


def workload_256(seed: int = 0) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and sampling parameters of workload 256: 142,827 prompt and 133,966 output tokens."""
    rng = random.Random(seed)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=rng.randint(100, 1024)) for _ in range(256)]
    return prompts, params


def warm_up(llm: LLM, prompts: list[list[int]]) -> None:
    """A few steps of the sizes to come: libraries load a kernel at its first use."""
    llm.generate(prompts, SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=8))


def workload(llm: LLM, limits: Limits, shape: str) -> None:
    warm_up(llm, workload_256(seed=1)[0])
    prompts, params = workload_256()
    tokens_per_second = rate(lambda: llm.generate(prompts, params), sum(map(num_output_tokens, params)))
    limit = limits.tokens_per_second(SHAPES[shape], prompts, params)
    row(f"{shape} workload 256", tokens_per_second, "tokens/s", limit)


def decode_steps(llm: LLM, limits: Limits, shape: str, batches: Iterable[int], steps: int) -> None:
    """Decode steps that begin at a context of 512."""
    for batch in batches:
        limit = limits.step_seconds(SHAPES[shape], [1] * batch, [540] * batch, batch) * 1000  # 540: half-way through
        row(f"{shape} decode, batch {batch}, context 512", decode_ms(llm, batch, 512, steps), "ms/step", limit)


def long_prompts(llm: LLM, limits: Limits, shape: str) -> None:
    """32 prompts of 8,000 tokens: their decode step, and their prefill."""
    limit = limits.step_seconds(SHAPES[shape], [1] * 32, [8030] * 32, 32) * 1000
    row(f"{shape} decode, batch 32, context 8,000", decode_ms(llm, 32, 8000, 20), "ms/step", limit)
    prefill_rate(llm, 4, 8000)  # warm up
    limit = 32 * 8000 / limits.step_seconds(SHAPES[shape], [8000] * 32, [8000] * 32, 32)
    row(f"{shape} prefill, 32 x 8,000", prefill_rate(llm, 32, 8000), "tokens/s", limit)


def decode(limits: Limits, quick: bool) -> None:
    """ms per decode step, and long prompts."""
    llm = random_llm("0.6B", max_model_len=9000)
    decode_steps(llm, limits, "0.6B", (1, 8, 64, 256), steps=50)
    long_prompts(llm, limits, "0.6B")


def throughput(limits: Limits, quick: bool) -> None:
    """Workload 256, and 1,024 short requests at once."""
    llm = random_llm("0.6B", max_model_len=4096)
    workload(llm, limits, "0.6B")
    if quick:
        return
    del llm
    llm = random_llm("0.6B", max_model_len=1024, max_num_seqs=1024)
    prompts = random_prompts(random.Random(0), [128] * 1024)
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=128)] * 1024
    warm_up(llm, prompts)
    row("0.6B 1,024 x (128 in, 128 out)", rate(lambda: llm.generate(prompts, params), 1024 * 128), "tokens/s",
        limits.tokens_per_second(SHAPES["0.6B"], prompts, params, 1024))


def large(limits: Limits, quick: bool) -> None:
    """Qwen3-8B's shape."""
    if quick:
        return
    llm = random_llm("8B", max_model_len=9000)
    decode_steps(llm, limits, "8B", (1, 256), steps=30)
    long_prompts(llm, limits, "8B")
    workload(llm, limits, "8B")


def data_parallel(limits: Limits, quick: bool) -> None:
    """Workload 256 once for each GPU, in one engine for all of them, beside one GPU with one. The host's time for a
    step bounds the process: the CPU time of its thread. Then 64 chats with one system prompt."""
    count = torch.cuda.device_count()
    if count < 2:
        raise CardTooSmall(f"several GPUs are needed, and torch sees {count}")
    for shape in SHAPES:
        alone, _ = rate_and_host_ms(random_llm(shape, max_model_len=4096), 1)
        gc.collect()
        together, host_ms = rate_and_host_ms(random_llm(shape, max_model_len=4096, data_parallel_size=count), count)
        gc.collect()
        row(f"{shape} workload 256 on one GPU", alone, "tokens/s")
        row(f"{shape} workload 256 on each of {count} GPUs", together, "tokens/s",
            note=f"{together / alone:.2f} times one GPU; host {host_ms:.2f} ms a step")
    llm = random_llm("0.6B", max_model_len=4096, data_parallel_size=count, enable_prefix_caching=True)
    common, *own = random_prompts(random.Random(1), [1000] + [20] * 64)
    llm.generate([common + prompt for prompt in own], SamplingParams(max_tokens=1, ignore_eos=True))
    managers = llm.scheduler.block_manager.managers
    computed = [manager.num_prompt_tokens - manager.num_cached_tokens for manager in managers]
    row("64 chats of 1,000 common and 20 tokens, computed", sum(computed), "tokens",
        note=f"on each GPU {', '.join(map(str, computed))}")


# Qwen3-8B on two GPUs against one: the figure's name, whether less is better, and what vLLM 0.26 reached on two.
ON_TWO = {"decode, batch 1": (True, "0.71, 3.73 ms"), "decode, batch 256": (True, "0.65, 9.53 ms"),
          "prefill 32 x 8,000": (False, "1.69, 63,525"), "workload 256": (False, "1.55, 14,154"),
          "single stream": (False, "1.40, 266"), "cold start to first token": (True, "68 s")}


def tensor_parallel(limits: Limits, quick: bool) -> None:
    """Qwen3-8B's shape on two GPUs, beside one in the same run."""
    count = torch.cuda.device_count()
    if count < 2:
        raise CardTooSmall(f"two GPUs are needed, and torch sees {count}")
    found = []
    for size in (1, 2):
        figures = figures_of_8b(random_llm("8B", max_model_len=9000, tensor_parallel_size=size))
        gc.collect()
        torch.cuda.empty_cache()
        with tempfile.TemporaryDirectory() as folder:
            for caches in ("first", "second"):  # the first start makes Python's byte code
                seconds = first_token_after(folder, caches, "8B", f"tensor_parallel_size={size}")
        found.append([*figures, seconds])
    for (name, (less, peer)), one, two in zip(ON_TWO.items(), *found):
        unit = "s" if "start" in name else "ms/step" if less else "tokens/s"
        row(f"8B on two GPUs, {name}", two, unit, note=f"one GPU {_number(one)}, ratio {two / one:.2f}; vLLM {peer}")


def figures_of_8b(llm: LLM) -> list[float]:
    """The figures that ON_TWO names, but for the last."""
    prefill_rate(llm, 2, 8000)  # warm up
    figures = [decode_ms(llm, batch, 512) for batch in (1, 256)]
    figures.append(max(prefill_rate(llm, 32, 8000) for _ in range(2)))
    warm_up(llm, workload_256(seed=1)[0])
    prompts, params = workload_256()
    figures.append(rate(lambda: llm.generate(prompts, params), sum(map(num_output_tokens, params))))
    stream, long = random_prompts(random.Random(2), [128]), SamplingParams(ignore_eos=True, max_tokens=512)
    figures.append(max(rate(lambda: llm.generate(stream, long), 512) for _ in range(2)))
    return figures


def parallel_sizes(limits: Limits, quick: bool) -> None:
    """From which model size on two GPUs are faster than one."""
    if torch.cuda.device_count() < 2:
        raise CardTooSmall("two GPUs are needed")
    for shape in ("0.6B", "1.7B", "4B"):
        one, two = (figures_of_a_size(shape, size) for size in (1, 2))
        for name, alone, together in zip(("decode, batch 1", "decode, batch 256", "workload 256"), one, two):
            unit = "tokens/s" if "workload" in name else "ms/step"
            row(f"{shape} on two GPUs, {name}", together, unit,
                note=f"one GPU {_number(alone)}, ratio {together / alone:.2f}")


def figures_of_a_size(shape: str, size: int) -> list[float]:
    llm = random_llm(shape, max_model_len=4096, tensor_parallel_size=size)
    prompts, params = workload_256()
    warm_up(llm, workload_256(seed=1)[0])
    figures = [decode_ms(llm, batch, 512) for batch in (1, 256)]
    return [*figures, rate(lambda: llm.generate(prompts, params), sum(map(num_output_tokens, params)))]


def rate_and_host_ms(llm: LLM, count: int) -> tuple[float, float]:
    """Tokens/s of `count` times workload 256, and ms of CPU time per step."""
    prompts: list[list[int]] = []
    params: list[SamplingParams] = []
    for seed in range(count):
        more, settings = workload_256(seed)
        prompts += more
        params += settings
    warm_up(llm, prompts)
    steps, started = [0], time.thread_time()
    for runner in llm.runners:
        runner.launch = counted(runner.launch, steps)
    tokens_per_second = rate(lambda: llm.generate(prompts, params), sum(map(num_output_tokens, params)))
    return tokens_per_second, (time.thread_time() - started) / steps[0] * 1000


def counted(function: Callable[[Any], Any], calls: list[int]) -> Callable[[Any], Any]:
    """The function, which adds its calls to calls[0]."""
    def call(argument: Any) -> Any:
        calls[0] += 1
        return function(argument)
    return call


class RandomVocabulary:
    """Stands for a tokenizer of Qwen3's size: the bytes, and random words with and without a space before them."""
    eos_token_id = 256

    def __init__(self, size: int):
        rng, letters = random.Random(0), "etaoinshrdlcumwfgypbvkETAOINSHRDL0123456789.,"
        words = {(" " * rng.randint(0, 1) + "".join(rng.choices(letters, k=rng.randint(2, 9)))).encode()
                 for _ in range(size)}
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"<eos>", *sorted(words)]
        self.bytes_of = dict(enumerate(self.tokens))

    def token_bytes(self) -> list[bytes]:
        return self.tokens

    def special_token_ids(self) -> set[int]:
        return {self.eos_token_id}

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode())

    def detokenizer(self, *_: Any) -> Detokenizer:
        return Detokenizer(self.bytes_of)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        return b"".join(self.tokens[token] for token in ids if token < len(self.tokens)).decode(errors="replace")


def structured(limits: Limits, quick: bool) -> None:
    """64 texts of 256 tokens: plain ones, all with a JSON schema, and 8 with one. Then what a new schema costs."""
    if find_spec("llguidance") is None:
        raise CardTooSmall("the package llguidance is missing")
    llm = random_llm("0.6B", max_model_len=4096)
    llm.tokenizer, llm.eos_token_ids = RandomVocabulary(150_000), frozenset({256})
    prompts = random_prompts(random.Random(0), [128] * 64)

    def settings(number: int, max_tokens: int = 256, top: int = 10**6) -> SamplingParams:
        properties = {"name": {"type": "string"}, "age": {"type": "integer", "maximum": top},
                      "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}}}
        person = {"type": "object", "properties": properties, "required": list(properties),
                  "additionalProperties": False}
        schema = dict(json={"type": "array", "items": person, "minItems": 1000}) if number else None
        return SamplingParams(temperature=1, ignore_eos=True, max_tokens=max_tokens, detokenize=False,
                              structured_outputs=schema)

    rates = {}
    for count in (0, 64, 8):
        params = [settings(i < count) for i in range(64)]
        llm.generate(prompts, params)
        rates[count] = rate(lambda: llm.generate(prompts, params), 64 * 256)
    row("0.6B, 64 x (128 in, 256 out)", rates[0], "tokens/s")
    for count in (64, 8):
        row(f"0.6B, {count} of them with a JSON schema", rates[count], "tokens/s",
            note=f"{rates[count] / rates[0]:.2f} of the plain ones")
    first = [[1000 / rate(lambda: llm.generate(prompts[:1], settings(number, 1, top)), 1) for top in range(1, 12)]
             for number in (0, 1)]
    row("time to first token with a new schema", statistics.median(first[1]), "ms",
        note=f"without one {statistics.median(first[0]):.1f}")


class RandomDrafts:
    """Guesses random tokens."""
    rng = random.Random(0)

    def propose(self, token_ids: list[int], k: int) -> list[int]:
        return [self.rng.randint(0, 10000) for _ in range(k)]


def drafts(limits: Limits, quick: bool) -> None:
    """Attention of six rows of one sequence, as of a step with five drafts, and of a chunk of six tokens. Then steps
    with five drafts and without, guesses that are right with probability 0.8 per token (3.69 tokens a step), and a text
    that never repeats itself."""
    for batch, context, name in ((1, 512, "512"), (1, 4096, "4k"), (1, 65536, "64k"), (8, 512, "512"), (8, 8192, "8k")):
        rows, chunk = attention_seconds(1, [context] * batch, rows=6), attention_seconds(6, [context] * batch)
        row(f"attention, {batch} x {name}, 6 rows each", rows * 1e6, "us", note=f"chunks of 6: {chunk * 1e6:.1f}")
    llm = random_llm("8B", max_model_len=4096, speculative_config={"method": RandomDrafts})
    drafting = llm.drafting
    for batch in (1, 8, 16, 32):
        drafting.most_drafting = batch
        drafting.pays, llm.drafting = 0, None
        plain, _ = draft_rate(llm, batch, 0)
        llm.drafting = drafting
        wrong, _ = draft_rate(llm, batch, 0)
        right, tokens = draft_rate(llm, batch, 0.8)
        row(f"8B decode, batch {batch}, context 512, 5 drafts", wrong, "ms/step",
            note=f"without drafts {plain:.2f}: {wrong / plain:.2f} times")
        row("  right with probability 0.8", tokens / right * 1000, "tokens/s",
            note=f"{tokens / batch:.2f} tokens a step: {tokens / right / batch * plain:.2f} times as fast")
    drafting.pays, params = PAYS, SamplingParams(temperature=1, max_tokens=512, ignore_eos=True)
    drafting.make_proposer = Ngram
    prompt = random_prompts(random.Random(0), [128])
    rates = {}
    for _ in range(2):
        for llm.drafting in (None, drafting):
            llm.generate(prompt, params)
            rates[llm.drafting] = max(rates.get(llm.drafting, 0), rate(lambda: llm.generate(prompt, params), 512))
    row("8B single stream that nothing repeats, drafts", rates[drafting], "tokens/s",
        note=f"{rates[drafting] / rates[None]:.3f} of that without")


def draft_rate(llm: LLM, batch: int, p: float, steps: int = 40) -> tuple[float, float]:
    """ms and tokens per step, with drafts that are taken for right with probability p per token."""
    rng, scheduler = random.Random(0), llm.scheduler
    update, launch, num_launches = scheduler.update, llm.runner.launch, [0]

    def accept(step: additions.SchedulerOutput, sampled: engine.Sampled) -> None:
        tokens, num_rows = [], Counter[additions.Sequence]()
        for seq, token in zip(step.sampled, sampled.tokens):
            is_right = num_rows[seq] < len(seq.drafts) and rng.random() < p
            tokens.append(seq.drafts[num_rows[seq]] if is_right else token)
            num_rows[seq] += 1
        update(step, engine.Sampled(tokens))

    for prompt in random_prompts(random.Random(1), [512] * batch):
        llm.add_request(prompt, SamplingParams(temperature=0.6, max_tokens=2000, ignore_eos=True))
    while scheduler.waiting or any(seq.num_computed_tokens < 520 for seq in scheduler.running):
        llm._step()
    scheduler.update, llm.runner.launch = accept, counted(launch, num_launches)
    torch.cuda.synchronize()
    before, started = scheduler.num_generated_tokens, time.perf_counter()
    while num_launches[0] < steps:
        llm._step()
    torch.cuda.synchronize()
    ms, tokens = (time.perf_counter() - started) * 1000, scheduler.num_generated_tokens - before
    del scheduler.update, llm.runner.launch
    stop_all(llm)
    return ms / steps, tokens / steps


CLIENT = """
import json, selectors, socket, sys, time
bodies, ready = [line.encode() for line in sys.stdin], selectors.DefaultSelector()
head = "POST /v1/completions HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Type: application/json\\r\\nContent-Length: "
started, times = time.perf_counter(), [[] for _ in bodies]
for body, events in zip(bodies, times):
    connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    connection.sendall((head + str(len(body)) + "\\r\\n\\r\\n").encode() + body)
    ready.register(connection, selectors.EVENT_READ, (events, [b""]))
while ready.get_map():
    for key, _ in ready.select():
        data, (events, last) = key.fileobj.recv(2**20), key.data
        events += [time.perf_counter() - started] * data.count(b"data: {")
        last[0] = (last[0] + data)[-64:]
        if not data or b"[DONE]" in last[0]:
            ready.unregister(key.fileobj)
            key.fileobj.close()
print(json.dumps([time.perf_counter() - started, times]))
"""  # a process of its own: it would share Python's lock with the engine


def server(quick: bool) -> None:
    """Clients that stream, all at once, beside `generate` of the same requests. On a GPU 256 of them, with 512 tokens
    in and 256 out. A slow event loop gets several tokens in one event."""
    if find_spec("uvicorn") is None or find_spec("starlette") is None:
        raise CardTooSmall("the package uvicorn or starlette is missing")
    on_gpu = torch.cuda.is_available()
    count, num_in, num_out = (256, 512, 256) if on_gpu else (16, 32, 32)
    llm = random_llm("0.6B", max_model_len=1024) if on_gpu else LLM("shakespeare", enable_prefix_caching=False)
    if on_gpu:
        llm.tokenizer = RandomVocabulary(150_000)
    prompts = [[token % 1000 for token in prompt] for prompt in random_prompts(random.Random(0), [num_in] * count)]
    params = SamplingParams(temperature=0.6, max_tokens=num_out, ignore_eos=True)
    llm.generate(prompts, params)  # warm up
    best, served = 0.0, (math.inf, list[list[float]]())
    with serving(llm) as port:
        for _ in range(2):  # in turns, and the best of each
            best = max(best, rate(lambda: llm.generate(prompts, params), count * num_out))
            served = min(served, stream_all(port, prompts, params))
    seconds, times = served
    first = [events[0] * 1000 for events in times]
    gaps = [(after - before) * 1000 for events in times for before, after in itertools.pairwise(events)]
    tokens_per_second = count * num_out / seconds
    row(f"server, {count} streams of ({num_in} in, {num_out} out)", tokens_per_second, "tokens/s",
        note=f"{tokens_per_second / best:.2f} of generate's {_number(best)}")
    for name, values in (("time to first token", first), ("gap between a stream's tokens", gaps)):
        for percent in (50, 99):
            row(f"  {name}, {percent}th percentile", sorted(values)[int(percent / 100 * (len(values) - 1))], "ms",
                note=f"{count * num_out / sum(map(len, times)):.1f} tokens an event" if values is gaps else "")


@contextmanager
def serving(llm: LLM) -> Iterator[int]:
    """A server in a thread of this process, as `python engine.py --serve` has it; its port."""
    from nanopaged.api.openai import Serving
    from nanopaged.api.server import Api, bind
    api, listener = Api(Serving(llm, "bench", llm.chat_prompt)), bind("127.0.0.1", 0)
    listening = api.server("127.0.0.1", None)
    thread = threading.Thread(target=listening.run, kwargs=dict(sockets=[listener]))
    thread.start()
    try:
        while not listening.started:
            time.sleep(0.01)
        yield listener.getsockname()[1]
    finally:
        listening.should_exit = True
        thread.join()
        api.engine.stop()


def stream_all(port: int, prompts: list[list[int]], params: SamplingParams) -> tuple[float, list[list[float]]]:
    """All requests at once, from another process: the seconds until the last has ended, and for each request those
    until each of its events."""
    settings = dict(temperature=params.temperature, max_tokens=params.max_tokens, ignore_eos=True, stream=True)
    bodies = "\n".join(json.dumps(settings | dict(prompt=prompt)) for prompt in prompts)
    done = subprocess.run([sys.executable, "-c", CLIENT, str(port)], input=bodies, check=True, stdout=subprocess.PIPE,
                          text=True)
    seconds, times = json.loads(done.stdout)
    return seconds, times


def latency(limits: Limits, quick: bool) -> None:
    """Time to first token of a single prompt. Then 64 sequences decode while prompts of 4,000 tokens arrive: the gaps
    between the sequences' tokens, and the prompts' time to first token."""
    llm = random_llm("0.6B", max_model_len=8192)
    prefill_rate(llm, 4, 8000)  # warm up
    budget_ms = BUDGET / prefill_rate(llm, 8, 8000) * 1000
    gaps, first_tokens = under_load(llm, num_decodes=64, context=512, num_arrivals=12, prompt_len=4000, steps=400)
    rng, params = random.Random(3), SamplingParams(max_tokens=1)
    short = [1000 / rate(lambda: llm.generate(random_prompts(rng, [100]), params), 1) for _ in range(11)]
    row("time to first token of a 100-token prompt, alone", statistics.median(short), "ms")
    row("gap between tokens under load, median", statistics.median(gaps), "ms")
    row("gap between tokens under load, 99th percentile", sorted(gaps)[int(0.99 * len(gaps))], "ms",
        note=f"prefill of one token budget: {budget_ms:.0f} ms")
    row("time to first token of a 4,000-token prompt", statistics.median(first_tokens), "ms")


def under_load(llm: LLM, num_decodes: int, context: int, num_arrivals: int, prompt_len: int,
               steps: int) -> tuple[list[float], list[float]]:
    """Sequences decode, and every 30 steps another prompt arrives: the ms between steps, and to each prompt's token."""
    rng = random.Random(2)
    params = SamplingParams(temperature=0.6, max_tokens=10 * steps, ignore_eos=True)
    for prompt in random_prompts(rng, [context] * num_decodes):
        llm.add_request(prompt, params)
    for _ in range(20):
        llm._step()
    arrivals = deque(random_prompts(rng, [prompt_len] * num_arrivals))
    arrived: dict[str, float] = {}
    gaps, first_tokens, last = [], [], time.perf_counter()
    for step in range(steps):
        if step % 30 == 10 and arrivals:
            request_id = llm.add_request(arrivals.popleft(), SamplingParams(max_tokens=1))
            arrived[request_id] = time.perf_counter()
        llm._step()
        now = time.perf_counter()
        gaps.append((now - last) * 1000)
        for request_id in arrived.keys() - llm.requests.keys():  # finished
            first_tokens.append((now - arrived.pop(request_id)) * 1000)
        last = now
    stop_all(llm)
    return gaps, first_tokens


def invariance(limits: Limits, quick: bool) -> None:
    """The fraction of greedy bfloat16 texts that differ between batch 1 and batch 256. Matrix products are rounded
    differently in batches of another size, and random weights have many near ties. Attention has the same bits."""
    llm = random_llm("0.6B", max_model_len=1024)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=64)
    prompts = random_prompts(random.Random(3), [64] * 256)
    together = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    alone = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in prompts[:16]]
    num_different = sum(a != b for a, b in zip(alone, together))
    row("greedy texts that differ, batch 1 against 256", 100 * num_different / len(alone), "%")


START = """
import sys, time; sys.path.insert(0, {root!r})
import bench
from nanopaged import SamplingParams
llm = bench.random_llm({shape!r}, max_model_len=4096, {options})
llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
print(time.time())
"""


def start(limits: Limits, quick: bool) -> None:
    """Seconds from process start to first token, with the compile caches empty and then full. This is the host's work,
    and the host may be busy: each is measured twice, and the row has the better time. A first start, with caches of its
    own, makes Python's byte code, which pip does when it installs packages."""
    seconds: dict[str, list[float]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as folder:
        first_token_after(folder, "first")
        for caches in ("second", "third"):
            for label in seconds:
                seconds[label].append(first_token_after(folder, caches))
    for label, times in seconds.items():
        note = f"the other time {max(times):.1f}"
        row(f"0.6B process start to first token, caches {label}", min(times), "s", note=note)


def first_token_after(folder: str, caches: str, shape: str = "0.6B", options: str = "") -> float:
    """Seconds to the first token of a new process that keeps its compile caches under this name."""
    environment = os.environ | dict(
        PYTHONPYCACHEPREFIX=f"{folder}/python", TRITON_CACHE_DIR=f"{folder}/{caches}/triton",
        TORCHINDUCTOR_CACHE_DIR=f"{folder}/{caches}/inductor")
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    program = START.format(root=str(Path(__file__).parent), shape=shape, options=options)
    started = time.time()
    argv = [sys.executable, "-c", program]
    done = subprocess.run(argv, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.split()[-1]) - started


# --------------------------------------------------------------------------------------------------

def machine() -> str:
    """Device, threads and versions, without which no figure means anything."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    parts = [device, f"{torch.get_num_threads()} CPU threads", f"Python {platform.python_version()}"]
    for name in ("torch", "triton", "transformers"):
        with suppress(PackageNotFoundError):
            parts.append(f"{name} {version(name)}")
    return ", ".join(parts)


ANYWHERE: list[Callable[..., None]] = [scheduler, fragmentation, prefix, batching, server]
ON_CUDA: list[Callable[..., None]] = [
    start, attention, fp8, paging, decode, throughput, latency, swapping, invariance, large, structured, drafts,
    data_parallel, tensor_parallel, parallel_sizes]
QUICK = {"scheduler", "fragmentation", "prefix", "batching", "server", "attention", "decode"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").replace("**", ""),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a selection, about a minute on an idle machine")
    parser.add_argument("--only", default="", metavar="WORD",
                        help="sections whose names contain one of the words (a,b)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    args = parser.parse_args()
    words = args.only.split(",")
    runnable = [section for section in ANYWHERE + ON_CUDA * torch.cuda.is_available()
                if section.__name__ in QUICK or not args.quick]
    sections = [section for section in runnable if any(word in section.__name__ for word in words)]
    unknown = [word for word in words if not any(word in section.__name__ for section in ANYWHERE + ON_CUDA)]
    if unknown or not sections:
        parser.error(f"--only {args.only!r} names a section that does not exist or that cannot run here; the sections "
                     f"that can run are {', '.join(section.__name__ for section in runnable)}")
    if args.json:
        try:
            open_file("--json", args.json, "a").close()
        except ValueError as error:
            parser.error(str(error))
    print(machine(), flush=True)
    # The rates are measured before the sections: a driver fills freed memory with zeros, and for half a second after an
    # engine is gone an H200 copies 3,800 GB/s instead of 4,230.
    limits = Limits() if any(section in ON_CUDA for section in sections) else None
    for section in sections:
        print(f"{section.__name__} is running ..", file=sys.stderr, flush=True)
        try:
            section(*(limits, args.quick) if section in ON_CUDA else (args.quick,))
        except CardTooSmall as error:
            print(f"{section.__name__} is left out from here on: {error}")
        gc.collect()  # engines that are no longer used
        torch.cuda.empty_cache()  # the next section may be another process and need the memory
    if args.json:
        Path(args.json).write_text(json.dumps(dict(machine=machine(), rows=ROWS), indent=1))


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # `| head` has read enough
        sys.stdout = open(os.devnull, "w")
