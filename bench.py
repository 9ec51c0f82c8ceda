"""Measure the engine on this machine; on a GPU, print each figure beside the limit of the hardware.

`python bench.py` runs all sections that this machine can run, `python bench.py --only decode` one of them.

The model is Qwen3's shape with random weights on a GPU, and the bundled model on a CPU. **Workload 256** is that of
nano-vllm's benchmark: 256 requests at once, each with a random prompt of 100 to 1,024 tokens and 100 to 1,024 output
tokens, at temperature 0.6.

**Limits.** A limit is the best that the hardware allows, computed from two rates that the same run measures: bytes read
plus written by a copy, and FLOPs of a large bfloat16 matrix product. A matrix product takes at least the larger of
weight bytes / copy rate and FLOPs / product rate, attention the larger of K and V bytes / copy rate and FLOPs / product
rate. Reading alone is faster than a copy, so decode attention may exceed its limit.

**Noise.** Compare figures of one run. Cards of one kind differ by a percent, and a busy host takes up to twice the time
for its part: scheduling, starting, the time to first token. Sections that time the host repeat and report the best. In
brackets are figures of other engines, measured on another card and at another time.

**First runs.** Engines record the sizes of steps before a section measures. Without `warm_up=True` (`--warm-up`) a size
is recorded when a step first needs it, and the first run of a workload makes 10 to 15% fewer tokens/s than the second.
"""
import argparse
import gc
import itertools
import json
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
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Iterable, Iterator, Sequence
from unittest.mock import patch

import nanopaged  # noqa: F401  before torch: it silences a warning of torch's

# isort: split
import torch

from nanopaged import LLM, SamplingParams, engine, kernel, model
from nanopaged.features.simulate import Card, Request, Simulation, Sizes, Times
from nanopaged.options import feature
from nanopaged.outputs import RequestMetrics
from nanopaged.text.byte_level import ADDED_TOKEN, CHAR_OF
from nanopaged.weights.build import modules_for
from nanopaged.weights.families import read_model_config

QWEN3 = dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=151936, num_key_value_heads=8,
             head_dim=128, max_position_embeddings=40960, rope_theta=1e6, rms_norm_eps=1e-6, torch_dtype="bfloat16")
SIZES = "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "tie_word_embeddings"
SHAPES = {name: QWEN3 | dict(zip(SIZES, sizes)) for name, sizes in {
    "0.6B": (1024, 28, 16, 3072, True), "1.7B": (2048, 28, 16, 6144, True), "4B": (2560, 36, 32, 9728, True),
    "8B": (4096, 36, 32, 12288, False)}.items()}
# A mixture of experts, with the sizes of Qwen3-30B-A3B: of 30B weights a token is multiplied by 3B.
SHAPES["30B-A3B"] = QWEN3 | dict(zip(SIZES, (2048, 48, 32, 6144, False))) | dict(
    architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_key_value_heads=4, num_experts=128,
    num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True)
# openai/gpt-oss-20b: of 21B weights, 19B of them in MXFP4, a token is multiplied by 3.6B.
SHAPES["gpt-oss-20b"] = dict(
    architectures=["GptOssForCausalLM"], model_type="gpt_oss", vocab_size=201088, hidden_size=2880,
    num_hidden_layers=24, num_attention_heads=64, num_key_value_heads=8, head_dim=64, intermediate_size=2880,
    num_local_experts=32, num_experts_per_tok=4, sliding_window=128, max_position_embeddings=131072,
    rms_norm_eps=1e-5, quantization_config={"quant_method": "mxfp4"}, torch_dtype="bfloat16")
SHAPES["gpt-oss, 16 bits"] = SHAPES["gpt-oss-20b"] | dict(quantization_config=None)
# Gated delta nets in three of four layers: the text model of Qwen3.5-35B-A3B, in Qwen3-Next's form, and of Qwen3.5-9B.
SHAPES["35B-A3B"] = dict(
    architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", vocab_size=248320, hidden_size=2048,
    num_hidden_layers=40, num_attention_heads=16, num_key_value_heads=2, head_dim=256, linear_num_key_heads=16,
    linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128, num_experts=256,
    num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512, norm_topk_prob=True,
    partial_rotary_factor=0.25, rope_theta=1e7, max_position_embeddings=262144, torch_dtype="bfloat16")
SHAPES["Qwen3.5-9B"] = SHAPES["35B-A3B"] | dict(zip(SIZES, (4096, 32, 16, 12288, False))) | dict(
    architectures=["Qwen3_5ForCausalLM"], model_type="qwen3_5_text", num_key_value_heads=4)
VLLM = {  # for rows of this file: vLLM 0.26.0 on an H200, 2026-11-22
    "0.6B decode, batch 1, context 512": "1.67", "0.6B decode, batch 8, context 512": "1.92",
    "0.6B decode, batch 64, context 512": "3.25", "0.6B decode, batch 256, context 512": "6.99",
    "0.6B decode, 64 x (8,000 common, 200 own)": "10.2", "0.6B decode, 256 x (2,000 common, 200 own)": "12.8",
    "0.6B decode, n = 16 of a prompt of 4,000": "2.53", "0.6B decode, batch 32, context 8,000": "8.57",
    "0.6B prefill, 32 x 8,000": "280,337", "0.6B workload 256": "23,617", "0.6B 1,024 x (128 in, 128 out)": "34,244",
    "8B decode, batch 1, context 512": "5.25", "8B decode, batch 256, context 512": "14.6",
    "8B decode, batch 32, context 8,000": "14.3", "8B prefill, 32 x 8,000": "37,698", "8B workload 256": "9,118",
    "0.6B process start to first token, caches cold": "78.0", "8B on two GPUs, cold start to first token": "68"}
# Attention: (sequences, query tokens, context, what FlashAttention-3 reached on an H200 that copies 4,270 GB/s).
ATTENTION = {
    "decode 1 x 1k": (1, 1, 1024, "255"), "decode 1 x 8k": (1, 1, 8192, "1,705"),
    "decode 1 x 64k": (1, 1, 65536, "3,196"), "decode 8 x 8k": (8, 1, 8192, "3,576"),
    "decode 64 x 1k": (64, 1, 1024, "3,343"), "decode 64 x 8k": (64, 1, 8192, "4,337"),
    "decode 256 x 800": (256, 1, 800, "3,459"), "decode 256 x 4k": (256, 1, 4096, "4,379"),
    "prefill 1 x 8k": (1, 8192, 8192, "612"), "prefill 8 x 2k": (8, 2048, 2048, "479"),
    "prefill 16 x 512": (16, 512, 512, "226"), "prefill 4 x (2k after 14k)": (4, 2048, 16384, "646")}
# A gated delta net: (sequences, tokens of each, microseconds that flash-linear-attention 0.6 took on an H200).
DELTA = {"decode of 1": (1, 1, "5.9"), "decode of 64": (64, 1, "96.9"), "decode of 256": (256, 1, "368"),
         "prefill 1 x 8,192": (1, 8192, "745"), "prefill 8 x 2,048": (8, 2048, "1,157")}
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 8, 128  # of the attention sections
KV_BYTES = 2 * NUM_KV_HEADS * HEAD_DIM * 2  # K and V of one token in bfloat16
RECORDED = "sizes recorded; without --warm-up a first run is 10 to 15% slower"
MORE_THAN_L2 = 3e8  # bytes; an H200's L2 cache has 50 MB
BUDGET = 8192  # max_num_batched_tokens, the default
ROWS: list[dict] = []


class LeftOut(Exception):
    """The reason why a section cannot run here."""


def row(name: str, value: float, unit: str, limit: float | None = None, note: str = "", peer: str = "") -> None:
    """Print one figure, the limit in the same unit, and the fraction of the limit that the figure reaches."""
    peer = peer or (f"vLLM {VLLM[name]}" if name in VLLM else "")
    ROWS.append(dict(name=name, value=value, unit=unit, limit=limit, peer=peer, note=note))
    text = f"{name:48} {_number(value):>10} {unit:14}"
    if limit:
        reached = limit / value if unit.startswith(("ms", "us", "s")) else value / limit
        text += f" limit {_number(limit):>9}, {reached:4.0%} of it"
    remarks = "; ".join(remark for remark in (peer, note) if remark)
    print(text + (f"   [{remarks}]" if remarks else ""), flush=True)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def rate(function: Callable[[], object], amount: float) -> float:
    """amount per second of one call."""
    started = time.perf_counter()
    function()
    return amount / (time.perf_counter() - started)


# --------------------------------------------------------------------------------------------------
# On any machine
# --------------------------------------------------------------------------------------------------

def batching(quick: bool) -> None:
    """The bundled model: prompts one by one, and 32 at once."""
    rng, num_new = random.Random(0), 32 if quick else 128
    prompts = [[rng.randrange(1000) for _ in range(rng.randint(8, 64))] for _ in range(32)]
    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
    llm = LLM("shakespeare", enable_prefix_caching=False, max_num_seqs=64)
    llm.generate(prompts, SamplingParams(max_tokens=2))  # warm up
    one = many = 0.0
    for _ in range(2 if quick else 4):  # in turns, and the best of each: the machine may be busy now and then
        one = max(one, rate(lambda: [llm.generate(prompt, params) for prompt in prompts[:4]], 4 * num_new))
        many = max(many, rate(lambda: llm.generate(prompts, params), len(prompts) * num_new))
    row("bundled model, one prompt at a time", one, "tokens/s")
    row(f"bundled model, {len(prompts)} prompts at once", many, "tokens/s")


def scheduler(quick: bool) -> None:
    """The host's work without a model: ms of a decode step, its update and the planning of the next one. Few or many
    sequences run, few or many requests wait, and the pool is small or large. One step in ten is faster: a median would
    tell how busy the machine is with something else."""
    queues = (0, 20_000), (10_000, 20_000), (0, 1_000_000)
    for num_running, (num_waiting, num_blocks) in itertools.product((256, 1024), queues):
        prompts = [[i % 1000] * 8 for i in range(num_running + num_waiting)]
        times, started = [], 0.0
        for plan, step in planned(prompts, [1000] * len(prompts), engine.BlockManager(num_blocks, 64), num_running):
            is_decode = sum(step.num_tokens) == len(plan.running) == num_running
            times += [time.perf_counter() - started] * is_decode
            if len(times) > (20 if quick else 300):
                break
            started = time.perf_counter()
        row(f"scheduler, {num_running} run, {num_waiting} wait, {num_blocks} blocks",
            statistics.quantiles(times[1:], n=10)[0] * 1000, "ms/step")


def planned(prompts: list[list[int]], lengths: list[int], manager: engine.BlockManager,
            max_num_seqs: int = 256) -> Iterator[tuple[engine.Scheduler, engine.SchedulerOutput]]:
    """(scheduler, step) of each step that computes prompts and then `lengths` new tokens, planned without a model."""
    plan = engine.Scheduler(manager, max_num_seqs, BUDGET)
    for i, (prompt, length) in enumerate(zip(prompts, lengths)):
        plan.add(engine.Sequence(prompt, engine.Order(0, i, 0), len(prompt) + length))
    while plan.waiting or plan.running:
        step = plan.schedule()
        yield plan, step
        plan.update(step, engine.Sampled([1] * len(step.sampled)))


def fragmentation(quick: bool) -> None:
    """Workload 256 without a model: the fraction of held slots that hold a token, and the same fraction without paging,
    where every sequence would reserve 4,096 slots."""
    for block_size in (16, 64):
        manager = engine.BlockManager(100_000, block_size, enable_prefix_caching=False)
        tokens = held = contiguous = 0
        for plan, _ in planned(*workload_256(), manager):
            tokens += sum(seq.num_computed_tokens for seq in plan.running)
            held += (manager.num_blocks - manager.num_free_blocks) * block_size
            contiguous += len(plan.running) * 4096
        row(f"held slots that hold a token, block_size {block_size}", 100 * tokens / held, "%")
    row("  without paging, 4,096 slots per sequence", 100 * tokens / contiguous, "%")


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


def measure_limits() -> Card:
    """The rates of this card, on which the limits depend."""
    source = torch.randint(256, (2**31,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * source.numel() / gpu_seconds(lambda: target.copy_(source))
    row("device copy", copy / 1e9, "GB/s")
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = 2 * 8192**3 / gpu_seconds(lambda: a @ b)
    row("device bfloat16 matrix product", product / 1e12, "TFLOP/s")
    return Card(copy, product)


def sizes_of(shape: str) -> Sizes:
    return Sizes.of(read_model_config(SHAPES[shape]))


def tokens_per_second(limits: Card, sizes: Sizes, prompts: list[list[int]], lengths: list[int],
                      max_num_seqs: int = 256) -> float:
    """Output tokens per second if every step of these requests takes its least time."""
    manager = engine.BlockManager(100_000, 64, enable_prefix_caching=False)
    seconds = sum(limits.step_seconds(sizes, step.num_tokens, [seq.num_computed_tokens for seq in step.seqs],
                                      len(step.sampled))
                  for _, step in planned(prompts, lengths, manager, max_num_seqs))
    return sum(lengths) / seconds


def attention_seconds(count: int, query_len: int, context: int, block_size: int = 64, shuffled: bool = True) -> float:
    """Time of one paged_attention call for `count` sequences, from a graph of calls on several pools. Together the
    pools exceed the L2 cache, as the layers of a model do."""
    width = engine.cdiv(context, block_size)
    total, copies = count * width, 1 + int(MORE_THAN_L2 // (count * context * KV_BYTES))
    tables = (torch.randperm(total) if shuffled else torch.arange(total)).int().view(count, width).cuda()
    options: dict[str, Any] = dict(device="cuda", dtype=torch.bfloat16)
    pools = [torch.randn(2, total, block_size, NUM_KV_HEADS, HEAD_DIM, **options) for _ in range(copies)]
    q = torch.randn(count * query_len, NUM_HEADS, HEAD_DIM, **options)
    lens = torch.full((count,), context, device="cuda", dtype=torch.int32)
    starts = torch.arange(0, len(q) + 1, query_len, device="cuda", dtype=torch.int32)
    kernels = feature("hopper", "attention of prefill").with_prefill(kernel.TRITON)
    query_tile = kernels.tokens_per_tile(NUM_HEADS // NUM_KV_HEADS, HEAD_DIM, block_size, q.dtype, q.dtype, q.device)
    tiles = kernel.make_query_tiles([query_len] * count, [context] * count, query_tile).cuda()

    def every_layer() -> None:
        for k_cache, v_cache in pools:
            kernels.attention(q, k_cache, v_cache, tables, lens, starts, HEAD_DIM ** -0.5, max_query_len=query_len,
                              max_seq_len=context, query_tiles=tiles, num_decodes=0 if query_len > 1 else None)

    every_layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        every_layer()
    return gpu_seconds(graph.replay) / copies


def attention_row(limits: Card, name: str, count: int, query_len: int, context: int, *layout: Any,
                  peer: str = "") -> None:
    """Decode attention: GB/s of K and V that are read. Prefill: TFLOP/s, two products of head_dim numbers for each pair
    of a query and a key up to it."""
    seconds = attention_seconds(count, query_len, context, *layout)
    pairs = count * (query_len * (context - query_len) + query_len * (query_len + 1) / 2)
    if query_len == 1:
        row(name, count * context * KV_BYTES / seconds / 1e9, "GB/s", limits.copy / 1e9, peer=peer)
    else:
        row(name, 4 * NUM_HEADS * HEAD_DIM * pairs / seconds / 1e12, "TFLOP/s", limits.product / 1e12, peer=peer)


def attention(limits: Card, quick: bool) -> None:
    """16 query heads on 8 kv heads of 128, bfloat16."""
    for name, (*sizes, peer) in ATTENTION.items():
        attention_row(limits, f"attention, {name}", *sizes, peer=f"FlashAttention-3 {peer}")


def paging(limits: Card, quick: bool) -> None:
    """The price of paging: the same attention over shuffled blocks of several sizes, and over contiguous K and V."""
    for block_size in (1, 16, 64, 256, 4096):
        label = "contiguous" if block_size == 4096 else f"block_size {block_size}"
        for name, sizes in (("decode 64 x 4k", (64, 1, 4096)), ("prefill 2 x 4k", (2, 4096, 4096))):
            attention_row(limits, f"paging, {name}, {label}", *sizes, block_size, block_size < 4096)


def delta_seconds(count: int, length: int, k_heads: int, v_heads: int, dim: int) -> float:
    """Time of a gated delta net between its projections, for `count` sequences with so many new tokens, from a graph of
    calls. Those of decode have states of their own, which together exceed the L2 cache."""
    kernels, recurrent = feature("delta_kernels", "delta"), feature("kinds.recurrent", "delta")
    channels, num_slots, noise = (2 * k_heads + v_heads) * dim, 640, partial(torch.randn, device="cuda")
    ints, half = partial(torch.tensor, dtype=torch.int32, device="cuda"), partial(noise, dtype=torch.bfloat16)
    w = kernels.Weights(half(channels, 4) / 2, noise(v_heads), noise(v_heads) - 2, noise(dim), 1e-6, k_heads, v_heads,
                        dim, dim, 4)
    states = [noise(num_slots, 4, channels), noise(num_slots, v_heads, dim, dim) / 10]
    sizes, ends = [channels, v_heads * dim, v_heads, v_heads], [1000 if length == 1 else length] * count
    qkv, z, b, a = half(count * length, sum(sizes)).split(sizes, dim=1)
    work, calls = recurrent.Work(count), max(2, min(100, num_slots // count))
    if length > 1:
        layout, calls = recurrent.work_layout(count * length, count, kernels.CHUNK), 2
        lists = recurrent.pad_lists(recurrent.make_work([length] * count, ends, kernels.CHUNK), layout)
        work = recurrent.Work(0, *lists.cuda().split(layout))
    slots = [recurrent.state_slots(
        ints(range(0, count * length + 1, length)), ints(ends),
        ints([[slot, slot, *recurrent.empty_row()[2:]] for slot in part]), work=work)
        for part in torch.randperm(num_slots)[:calls * count].view(calls, count).tolist()]

    def every_call() -> None:
        for one in slots:
            kernels.gated_delta(qkv, z.unflatten(1, (v_heads, dim)), b, a, w, states, one)

    every_call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        every_call()
    return gpu_seconds(graph.replay, 15) / calls


def delta(limits: Card, quick: bool) -> None:
    """Gated delta nets with Qwen3.5's 16 k heads and 32 v heads of 128, bfloat16, states in float32."""
    k_heads, v_heads, dim, chunk = 16, 32, 128, 64
    # Products of a token: w S, q S and k^T new; in its chunk u, w and P new of v heads, and two of k heads.
    flops = 2 * dim * (v_heads * 3 * (dim + chunk) + k_heads * 2 * chunk)
    for name, (count, length, peer) in DELTA.items():
        seconds = delta_seconds(count, length, k_heads, v_heads, dim)
        num_bytes = 8 * count * v_heads * dim * dim + 2 * count * length * (2 * k_heads + 3 * v_heads) * dim
        limit = max(num_bytes / limits.copy, count * length * flops / limits.product * (length > 1))
        row(f"gated delta net, {name}", seconds * 1e6, "us", limit * 1e6, peer=f"flash-linear-attention {peer}")


# --------------------------------------------------------------------------------------------------
# The engine, on a CUDA device
# --------------------------------------------------------------------------------------------------

def random_llm(shape: dict[str, Any], with_tokenizer: bool = False, **options: Any) -> LLM:
    """An engine with random weights. Its tokenizer, if it has one, knows random words."""
    gc.collect()  # engines that are no longer used
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        if with_tokenizer:
            (Path(folder) / "tokenizer.json").write_text(json.dumps(random_tokenizer()))
        try:
            return LLM(folder, **dict(load_format="dummy", enable_prefix_caching=False, warm_up=True) | options)
        except ValueError as error:  # the card is too small
            raise LeftOut(error) from None


def random_tokenizer(num_words: int = 150_000) -> dict[str, Any]:
    """A tokenizer.json of Qwen3's size: bytes, an end token, and random words with and without a space before them."""
    rng, letters = random.Random(0), "etaoinshrdlcumwfgypbvkETAOINSHRDL0123456789.,"
    words = {CHAR_OF[ord(" ")] * rng.randint(0, 1) + "".join(rng.choices(letters, k=rng.randint(2, 9)))
             for _ in range(num_words)}
    vocab = {token: i for i, token in enumerate([*CHAR_OF.values(), "<|endoftext|>", *sorted(words)])}
    end = ADDED_TOKEN | {"id": vocab["<|endoftext|>"], "content": "<|endoftext|>", "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False}
    return {"model": {"type": "BPE", "vocab": vocab, "merges": [], "ignore_merges": True}, "added_tokens": [end],
            "pre_tokenizer": byte_level, "decoder": byte_level}


def random_prompts(seed: int, lengths: Iterable[int]) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randint(0, 10000) for _ in range(length)] for length in lengths]


def exactly(num_tokens: int, **settings: Any) -> SamplingParams:
    """Sampling parameters of a text of this length, at the temperature of workload 256."""
    return SamplingParams(**dict(temperature=0.6, ignore_eos=True, max_tokens=num_tokens) | settings)


def workload_256(seed: int = 0) -> tuple[list[list[int]], list[int]]:
    """Prompts and output lengths of workload 256: 142,827 prompt and 133,966 output tokens."""
    rng = random.Random(seed)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    return prompts, [rng.randint(100, 1024) for _ in range(256)]


def generate_rate(llm: LLM, prompts: list[list[int]], lengths: list[int], **settings: Any) -> float:
    """Output tokens/s of requests, all at once, after a few steps of these sizes: libraries load a kernel at its first
    use."""
    llm.generate(prompts, exactly(8))
    params = [exactly(length, **settings) for length in lengths]
    return rate(lambda: llm.generate(prompts, params), sum(lengths))


def prefill_rate(llm: LLM, batch: int, context: int) -> float:
    """Prompt tokens/s of prompts that generate one token each."""
    prompts = random_prompts(1, [context] * batch)
    return rate(lambda: llm.generate(prompts, exactly(1)), batch * context)


def step_times(llm: LLM, prompts: list[list[int]], steps: int, arriving: Iterable[list[int]] = (),
               **settings: Any) -> list[float]:
    """ms of each decode step after these prompts. Every 30 steps another prompt of `arriving` arrives. A call that
    launches a step ahead waits for the step before, so the calls together take as long as the steps."""
    prefill_steps = sum(engine.cdiv(len(prompt), BUDGET) for prompt in prompts)
    for prompt in prompts:
        llm.add_request(prompt, exactly(prefill_steps + 6 * steps + 60, **settings))  # 6: with drafts
    while llm.scheduler.waiting or any(seq.num_computed_tokens < seq.num_prompt_tokens
                                       for seq in llm.scheduler.running):
        llm.advance()
    gc.collect()  # or Python does so in the middle of the steps that are timed, for 20 ms
    for _ in range(5):
        llm.advance()
    arrivals, times = iter(arriving), []
    for step in range(steps):
        started = time.perf_counter()
        if step % 30 == 10 and (prompt := next(arrivals, None)):
            llm.add_request(prompt, exactly(1))
        llm.advance()
        times.append((time.perf_counter() - started) * 1000)
    llm.abort(*llm.requests)
    while not llm.engine.is_idle:  # steps that were launched ahead
        llm.advance()
    return times


def decode_ms(llm: LLM, batch: int, context: int, steps: int = 50) -> float:
    """ms per decode step."""
    return statistics.mean(step_times(llm, random_prompts(1, [context] * batch), steps))


def decode(limits: Card, quick: bool, shape: str = "0.6B", batches: Iterable[int] = (1, 8, 64, 256),
           **options: Any) -> None:
    """ms per decode step from a context of 512 on, and 32 prompts of 8,000 tokens: their decode step, and prefill, also
    of many short prompts."""
    llm = random_llm(SHAPES[shape], max_model_len=9000, **options)
    decode_rows(limits, llm, " ".join([shape, *options.values()]), sizes_of(shape), batches)


def decode_rows(limits: Card, llm: LLM, label: str, sizes: Sizes, batches: Iterable[int]) -> None:
    for batch, context, steps in (*((batch, 512, 50) for batch in batches), (32, 8000, 20)):
        limit = limits.step_seconds(sizes, [1] * batch, [context + 28] * batch, batch) * 1000  # 28: half-way through
        row(f"{label} decode, batch {batch}, context {context:,}", decode_ms(llm, batch, context, steps), "ms/step",
            limit)
    prefill_rate(llm, 4, 8000)  # warm up
    for batch, context in ((32, 8000), (256, 512)):
        limit = batch * context / limits.step_seconds(sizes, [context] * batch, [context] * batch, batch)
        row(f"{label} prefill, {batch} x {context:,}", prefill_rate(llm, batch, context), "tokens/s", limit)


SHARED = {  # samples, prompts, tokens that a prompt has in common with the others of its group, its own; groups
    "64 x (8,000 common, 200 own)": (1, 64, 8000, 200, 1), "256 x (2,000 common, 200 own)": (1, 256, 2000, 200, 1),
    "n = 16 of a prompt of 4,000": (16, 1, 4000, 0, 1), "4 x 8 x (4,000 common, 200 own)": (1, 32, 4000, 200, 4)}


def shared(limits: Card, quick: bool) -> None:
    """Decode steps of texts that have blocks in common, beside the same steps without a cascade."""
    for cache, label in (("auto", "decode"), ("fp8", "fp8 cache")):
        llm = cascade = None  # frees the engine before
        llm = random_llm(SHAPES["0.6B"], max_model_len=9000, enable_prefix_caching=True, warm_up=False,
                         kv_cache_dtype=cache, disable_cascade_attn=False)
        cascade = llm.runner.cascade
        for name, (n, count, common, own, groups) in SHARED.items():
            starts, ends = random_prompts(2, [common] * groups), random_prompts(3, [own] * count)
            prompts = [starts[i % groups] + end for i, end in enumerate(ends)]
            times = []
            for llm.runner.cascade in (cascade, None):
                step_times(llm, prompts, 5, n=n)  # warm up
                times.append(min(statistics.mean(step_times(llm, prompts, 50, n=n)) for _ in range(3)))
            row(f"0.6B {label}, {name}", times[0], "ms/step",
                note=f"each by itself {times[1]:.3g}: {times[0] / times[1]:.2f} of it")


def workload(limits: Card, shape: str, **options: Any) -> None:
    llm = random_llm(SHAPES[shape], max_model_len=4096, **options)
    workload_row(limits, llm, " ".join([shape, *options.values()]), sizes_of(shape))


def workload_row(limits: Card, llm: LLM, label: str, sizes: Sizes) -> None:
    row(f"{label} workload 256", generate_rate(llm, *workload_256()), "tokens/s",
        tokens_per_second(limits, sizes, *workload_256()), RECORDED)


def throughput(limits: Card, quick: bool) -> None:
    """Workload 256, and 1,024 short requests at once."""
    workload(limits, "0.6B")
    llm = random_llm(SHAPES["0.6B"], max_model_len=1024, max_num_seqs=1024)
    short = random_prompts(0, [128] * 1024), [128] * 1024
    row("0.6B 1,024 x (128 in, 128 out)", generate_rate(llm, *short), "tokens/s",
        tokens_per_second(limits, sizes_of("0.6B"), *short, 1024), RECORDED)


def large(limits: Card, quick: bool) -> None:
    """Qwen3-8B's shape; then its matrices in FP8, beside the limits of bfloat16."""
    decode(limits, quick, "8B", (1, 256))
    workload(limits, "8B")
    decode(limits, quick, "8B", (1, 64, 256), quantization="fp8")
    workload(limits, "8B", quantization="fp8")


def experts(limits: Card, quick: bool) -> None:
    """Qwen3-30B-A3B's shape; and how many of a layer's 128 experts a decode step reads, on which its limits depend."""
    sizes, llm = sizes_of("30B-A3B"), random_llm(SHAPES["30B-A3B"], max_model_len=9000)
    decode_rows(limits, llm, "30B-A3B", sizes, (1, 8, 64))
    workload_row(limits, llm, "30B-A3B", sizes)
    for batch in (1, 8, 64, 256):
        row(f"30B-A3B decode, batch {batch}, experts of a layer", experts_chosen(llm, batch), "of 128",
            note=f"{sizes.experts_read(batch):.1f} if each token chose evenly")


def gpt_oss(limits: Card, quick: bool) -> None:
    """gpt-oss-20b's shape, with experts in MXFP4 and in 16 bits."""
    for label in ("gpt-oss-20b", "gpt-oss, 16 bits"):
        sizes, llm = sizes_of(label), random_llm(SHAPES[label], max_model_len=9000)
        decode_rows(limits, llm, label, sizes, (1, 8, 64))
        workload_row(limits, llm, label, sizes)
        del llm


def hybrid(limits: Card, quick: bool) -> None:
    """Gated delta nets beside attention: the shapes of Qwen3.5-35B-A3B and Qwen3.5-9B. A second turn goes on from the
    first one's state."""
    with tempfile.TemporaryDirectory() as folder:
        row("35B-A3B process start to first token", first_token_after(folder, "caches", "35B-A3B"), "s",
            note="kernels are compiled")
    for label in ("35B-A3B", "Qwen3.5-9B"):
        sizes, llm = sizes_of(label), random_llm(SHAPES[label], max_model_len=9000)
        decode_rows(limits, llm, label, sizes, (1, 64, 256))
        workload_row(limits, llm, label, sizes)
        row(f"{label} single stream, 128 in, 512 out", 1000 / generate_rate(llm, random_prompts(2, [128]), [512]),
            "ms/token", 1000 * limits.step_seconds(sizes, [1], [128 + 256], 1))
        llm = None  # frees the engine before
        llm = random_llm(SHAPES[label], max_model_len=1024, max_num_seqs=1024)
        short = random_prompts(0, SHORT), SHORT
        row(f"{label} 1,024 x (128 in, 128 out)", generate_rate(llm, *short), "tokens/s",
            tokens_per_second(limits, sizes, *short, llm.scheduler.max_num_seqs), RECORDED)  # whose states have room
        llm = None
        llm = random_llm(SHAPES[label], max_model_len=9000, enable_prefix_caching=True)
        first, second, alone = map(statistics.median, zip(*[turns(llm, seed) for seed in range(6)][1:]))
        row(f"{label} second turn, 200 after 8,000", second, "ms",
            note=f"to the first token; of 200 tokens alone {alone:.1f}, of the first turn {first:.0f}")
        del llm


def turns(llm: LLM, seed: int) -> list[float]:
    """ms to the first token of a prompt of 8,000 tokens, of the same with 200 more, and of 200 others."""
    first, more, others = (random_prompts(3 * seed + i, [length])[0] for i, length in enumerate((8000, 200, 200)))
    return [1000 / rate(lambda: llm.generate([prompt], exactly(1)), 1) for prompt in (first, first + more, others)]


def int4(limits: Card, quick: bool) -> None:
    """Qwen3-8B's shape with matrices in 4 bits, and in FP8 blocks, beside bfloat16 in the same run; and their products
    by both ways."""
    figures: dict[str, list[float]] = {}
    blocks = dict(quantization_config=dict(quant_method="fp8", weight_block_size=[128, 128]))
    for options, more in (({}, {}), (dict(quantization="int4"), {}), ({}, blocks)):
        llm = random_llm(SHAPES["8B"] | more, max_model_len=9000, **options)
        size = sum(parameter.nbytes for parameter in llm.runner.model.parameters())
        figures.setdefault("weights|GB", []).append(size / 1e9)
        for batch in (1, 8, 64, 256):
            name = f"decode, batch {batch}, context 512|ms/step"
            figures.setdefault(name, []).append(decode_ms(llm, batch, 512))
        prefill_rate(llm, 4, 8000)  # warm up
        figures.setdefault("prefill, 32 x 8,000|tokens/s", []).append(prefill_rate(llm, 32, 8000))
        del llm
    for name, (plain, *others) in figures.items():
        for kind, ours in zip(("int4", "FP8 blocks"), others):
            row(f"8B {kind} {name.partition('|')[0]}", ours, name.partition("|")[2],
                note=f"bfloat16 {_number(plain)}: {ours / plain:.3f} of it")
    matrices = dict(qkv_proj=(4096, 6144), gate_up_proj=(4096, 24576), down_proj=(12288, 4096)).items()
    for bits, (name, (size_in, size_out)) in itertools.product((4, 8), matrices):
        for num_rows in (1, 8, 16, 64, 128, 512, 8192):
            us = product_us(size_in, size_out, num_rows, bits)
            row(f"8B {name}{', FP8' * (bits == 8)}, {num_rows:,} rows, few-row kernel", us[0], "us",
                note=f"widened {us[1]:.3g}, bfloat16 {us[2]:.3g}; at the memory's rate "
                     f"{size_in * size_out * (bits / 8 + bits / 2 / 128) / limits.copy * 1e6:.3g}")


def product_us(size_in: int, size_out: int, num_rows: int, bits: int) -> list[float]:
    """Microseconds of three products: a matrix in 4 bits, or in FP8 blocks, by the kernel for few rows; the same matrix
    turned into 16 bits first; a matrix in 16 bits. Copies of the matrix exceed the L2 cache."""
    kernels, copies = feature("four_bit_kernels", "int4"), 1 + int(MORE_THAN_L2 // (size_in * size_out * bits / 8))
    make: Any = partial(torch.randn, device="cuda")
    x = make(num_rows, size_in, dtype=torch.bfloat16)
    wide = [make(size_out, size_in, dtype=torch.bfloat16) for _ in range(1 + copies * bits // 16)]
    codes, scale = (torch.uint8, torch.float16) if bits == 4 else (torch.float8_e4m3fn, torch.float32)
    kept = [(torch.randint(256, (size_out, size_in * bits // 8), dtype=torch.uint8, device="cuda").view(codes),
             make(size_out, size_in // 128, dtype=scale), None, None) for _ in range(copies)]

    def products(is_few: bool) -> None:
        with patch.object(kernels, "has_few_rows", lambda *_: is_few):
            for matrix in kept:
                kernels.linear(x, *matrix)

    times = []
    for function, count in ((partial(products, True), copies), (partial(products, False), copies),
                            (lambda: [torch.matmul(x, one.T) for one in wide], len(wide))):
        function()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        times.append(gpu_seconds(graph.replay) / count * 1e6)
    return times


def experts_chosen(llm: LLM, batch: int, context: int = 512) -> float:
    """The number of experts that the tokens of a decode step choose, on average over the layers."""
    chosen: list[int] = []
    mixtures = [layer.mlp for layer in llm.runner.model.layers if hasattr(layer.mlp, "router")]
    hooks = [mlp.router.register_forward_hook(lambda mlp, arguments, _: chosen.append(
        (arguments[0] @ mlp.weight.T).topk(llm.config.experts["top_k"]).indices.unique().numel())) for mlp in mixtures]
    with patch.object(llm.runner, "graph_shape", lambda *_: None, create=True):  # a recorded step calls no hooks
        step_times(llm, random_prompts(1, [context] * batch), 3)
    for hook in hooks:
        hook.remove()
    return statistics.mean(chosen[-2 * len(mixtures):])  # the last steps; those before compute prompts


# What a simulation is checked with: for each shape a stream of workload 256's requests, at this rate a second. An H200
# serves half as many again.
STREAMS = {"0.6B": 36, "8B": 12, "30B-A3B": 8}
SHORT = [128] * 1024  # the tokens of prompts that arrive at once, and of their outputs
FOR_STREAMS: dict[str, Any] = dict(max_model_len=4096, max_num_seqs=1024)
DECODES, PREFILLS, STEPS = (1, 8, 32, 64, 128, 256, 512, 1024), (2048, BUDGET), 30  # the tokens of steps; how many


def simulate(limits: Card, quick: bool) -> None:
    """Simulated beside measured: workload 256, 1,024 short requests at once, and a stream of 256 requests at random
    times. The simulation knows this run's rates, and how long single steps take (`calibrated`)."""
    for shape, per_second in STREAMS.items():
        simulate_shape(limits, shape, per_second)  # whose engine is gone before the next one is made


def simulate_shape(limits: Card, shape: str, per_second: float) -> None:
    llm, (prompts, lengths), rng = random_llm(SHAPES[shape], **FOR_STREAMS), workload_256(), random.Random(0)
    card = calibrated(limits, llm, sizes_of(shape))
    print(f"{shape}: {card}", flush=True)
    for name, work in (("workload 256", (prompts, lengths)),
                       ("1,024 x (128, 128)", (random_prompts(0, SHORT), SHORT))):
        together = simulated(card, llm, as_requests(*work, itertools.repeat(0.0)))
        beside(f"{shape} {name}, simulated", together.num_new_tokens / together.clock.now,
               generate_rate(llm, *work), "tokens/s")
    stream = as_requests(prompts, lengths, itertools.accumulate(rng.expovariate(per_second) for _ in prompts))
    both = simulated(card, llm, stream).times, served(llm, stream)
    first, each, total = ([statistics.mean(getattr(one, name) for one in times) for times in both]
                          for name in Times._fields)
    beside(f"{shape} {per_second} requests/s, each takes, simulated", *total, "s", f"; first token "
           f"{first[0] * 1000:.3g} and {first[1] * 1000:.3g} ms, each one after it {each[0] * 1000:.3g} and "
           f"{each[1] * 1000:.3g} ms")


def beside(name: str, ours: float, measured: float, unit: str, more: str = "") -> None:
    row(name, ours, unit, note=f"measured {_number(measured)}: {ours / measured:.3f} of it{more}")


def calibrated(limits: Card, llm: LLM, m: Sizes) -> Card:
    """The card, with what this model's steps reach of its limits: decode steps of many batch sizes after 128 tokens,
    one after 3,000, and prompts of 500 and of 4,000 tokens. Each number follows from one or two of these times."""
    spent: list[float] = []  # by the host, to plan and launch a step, and to append its tokens

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = function(*arguments)
            spent.append(time.perf_counter() - started)
            return result
        return call

    def decode_seconds(batch: int, context: int = 128) -> float:
        spent.clear()
        with (patch.object(llm.engine, "launch", timed(llm.engine.launch)),
              patch.object(llm.scheduler, "update", timed(llm.scheduler.update))):
            return decode_ms(llm, batch, context, STEPS) / 1000

    def decode_attention(card: Card, batch: int, context: int = 128) -> float:
        return card.attention_seconds(m, [1] * batch, [context + STEPS // 2 + 5] * batch, batch)

    def prompts_seconds(count: int, length: int, budget: int = BUDGET) -> float:
        with patch.object(llm.scheduler, "max_num_batched_tokens", budget):
            return min(count * length / prefill_rate(llm, count, length) for _ in range(2))

    def prompts_attention(card: Card, count: int, length: int) -> float:
        return card.attention_seconds(m, [length] * count, [length] * count, count)

    decodes, host = {}, {}
    for batch in DECODES:
        decodes[batch] = decode_seconds(batch)
        host[batch] = sum(spent[-2 * STEPS:]) / STEPS
    per_seq = max(0.0, (host[256] - host[1]) / 255)
    card = limits._replace(
        host=(max(0.0, host[1] - per_seq), per_seq),
        decode=reached(decode_attention(limits, 32, 3000) - decode_attention(limits, 32),
                       decode_seconds(32, 3000) - decodes[32]),
        prefill=reached(prompts_attention(limits, 8, 4000) - prompts_attention(limits, 64, 500),
                        prompts_seconds(8, 4000) - prompts_seconds(64, 500)))
    alone = decodes[1] - decode_attention(card, 1) - card.products_seconds(m, 1, 1)
    card = card._replace(layer=max(0.0, alone / m.layers))
    fractions = {batch: reached(card.products_seconds(m, batch, batch),
                                seconds - decode_attention(card, batch) - m.layers * card.layer)
                 for batch, seconds in decodes.items()}
    for budget in PREFILLS:
        steps = [budget] * (32_000 // budget) + [32_000 % budget]
        fractions[budget] = reached(
            sum(card.products_seconds(m, tokens, tokens // 500) for tokens in steps), prompts_seconds(64, 500, budget)
            - prompts_attention(card, 64, 500) - len(steps) * m.layers * card.layer)
    return card._replace(products=tuple(sorted(fractions.items())))


def reached(limit: float, seconds: float) -> float:
    """The fraction of a limit. Short times have noise, and then the fraction means little; but it must be above 0."""
    return min(max(limit / max(seconds, 1e-9), 0.01), 2.0)


def as_requests(prompts: list[list[int]], lengths: list[int], arrivals: Iterable[float]) -> list[Request]:
    return [Request(arrival, partial(list, prompt), len(prompt), length)
            for prompt, length, arrival in zip(prompts, lengths, arrivals)]


def simulated(card: Card, llm: LLM, requests: list[Request]) -> Simulation:
    """The requests on a clock, with the options and the pool of this engine."""
    options = vars(llm.options) | dict(num_blocks=llm.scheduler.block_manager.num_blocks, swap_space=0,
                                       block_size=llm.runner.block_size)
    simulation = Simulation(card, llm.config, SimpleNamespace(**options))
    simulation.run(requests)
    return simulation


def served(llm: LLM, requests: list[Request]) -> list[Times]:
    """The requests on the card, each added at its time."""
    pending, under_way, times = deque(requests), dict[Any, tuple[float, list[float]]](), []
    started = time.perf_counter()
    while pending or under_way:
        now = time.perf_counter() - started
        while pending and pending[0].arrival <= now:
            one = pending.popleft()
            request = llm.read_request(one.prompt(), exactly(one.num_new_tokens))
            llm.add(request)
            under_way[request] = one.arrival, []
        if not under_way:
            time.sleep(pending[0].arrival - now)
            continue
        llm.advance()
        now = time.perf_counter() - started
        for request, (arrival, first) in [*under_way.items()]:
            seq = request.sequences[0]
            if not first and len(seq.token_ids) > seq.num_prompt_tokens:
                first.append(now)
            if request.finished:
                del under_way[request]
                num_more = max(1, len(seq.token_ids) - seq.num_prompt_tokens - 1)
                times.append(Times(first[0] - arrival, (now - first[0]) / num_more, now - arrival))
    while not llm.engine.is_idle:  # a step that was launched ahead
        llm.advance()
    return times


def windows(limits: Card, quick: bool) -> None:
    """Gemma 3 4B's shape, whose layers are of two kinds (nanopaged/features/kinds)."""
    shape = dict(
        architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", vocab_size=262208, hidden_size=2560,
        num_hidden_layers=34, num_attention_heads=8, num_key_value_heads=4, head_dim=256, intermediate_size=10240,
        sliding_window=1024, sliding_window_pattern=6, query_pre_attn_scalar=256, max_position_embeddings=131072,
        torch_dtype="bfloat16")
    llm = random_llm(shape, max_model_len=9000)
    for batch in (1, 64):
        row(f"Gemma 3 4B decode, batch {batch}, context 512", decode_ms(llm, batch, 512, 50), "ms/step")
    row("Gemma 3 4B workload 256", generate_rate(llm, *workload_256()), "tokens/s", note=RECORDED)


GEMMA4: dict[str, dict[str, Any]] = {"31B": dict(  # google/gemma-4-31B-it and 26B-A4B-it
    architectures=["Gemma4ForCausalLM"], model_type="gemma4_text", attention_k_eq_v=True, final_logit_softcapping=30.0,
    hidden_size=5376, hidden_size_per_layer_input=0, intermediate_size=21504, max_position_embeddings=262144,
    num_attention_heads=32, num_global_key_value_heads=4, num_hidden_layers=60, num_key_value_heads=16,
    sliding_window=1024, torch_dtype="bfloat16")}
GEMMA4["26B-A4B"] = GEMMA4["31B"] | dict(
    enable_moe_block=True, hidden_size=2816, intermediate_size=2112, moe_intermediate_size=704, num_attention_heads=16,
    num_experts=128, num_global_key_value_heads=2, num_hidden_layers=30, num_key_value_heads=8, top_k_experts=8)


def gemma4_memory(quick: bool) -> None:
    """Texts of 32,000 tokens whose K and V fit into 40 GB, while each decodes. No step is done."""
    kinds, windows = feature("kinds.device", "gemma4_memory"), feature("kinds.windows", "gemma4_memory")
    for name, shape in GEMMA4.items():
        config, options = read_model_config(shape), SimpleNamespace(max_model_len=None, swap_space=0,
                                                                    tensor_parallel_size=1)
        kinds.choose(options, config)
        layout, length, memory = kinds.Layout(config, 64, torch.bfloat16), 32_000, 40e9
        held = [min(length // 64, windows.max_blocks(config.sliding_windows[layer], 1, 64))
                for layer in layout.first_layers]
        ours, all_kept = (memory / block / count for block, count in (
            (layout.block_bytes, sum(held)), (layout.model_bytes, length // 64)))
        sizes = ", ".join(str(config.groups.count(group)) for group in range(layout.num_groups))
        wasted = 1 - layout.model_bytes / (layout.block_bytes * layout.num_groups)
        row(f"Gemma 4 {name}, texts of 32,000 tokens in 40 GB", ours, "texts", note=(
            f"if all blocks are kept: {all_kept:.2f}, {ours / all_kept:.1f} times fewer; groups of {sizes} layers in "
            f"blocks of {layout.block_bytes / 2**20:.1f} MiB, of which {wasted:.0%} are wasted"))


class Gemma4Limits(Card):
    """The least time of a step of a dense Gemma 4, whose layers differ in their heads."""

    def step_seconds(self, m: Any, query_lens: list[int], seq_lens: list[int], num_samples: int, *_: Any) -> float:
        """m: those of `gemma4_sizes`"""
        seconds = 0.0
        for (weights, num_heads, num_kv_heads, head_dim, window), count in m.items():
            rows = sum(query_lens) if head_dim else num_samples
            of_layer = max(2 * weights / self.copy, 2 * weights * rows / self.product)
            for q, s in zip(query_lens, seq_lens):
                s = min(s, window + q) if window else s
                pairs = q * min(window or s, s - q + (q + 1) / 2) * (q > 1)
                of_layer += max(4 * num_kv_heads * head_dim * s / self.copy,
                                4 * num_heads * head_dim * pairs / self.product)
            seconds += count * of_layer
        return seconds


def gemma4_sizes(c: model.ModelConfig) -> Counter:
    """How many layers have (weights, query heads, kv heads, head_dim, window). The matrix of the logits is one, too."""
    with torch.device("meta"):
        layers = model.Transformer(c, modules_for(c)).layers
    weights = [sum(one.numel() for one in layer.parameters()) for layer in layers]
    return Counter({(c.vocab_size * c.hidden_size, 0, 0, 0, 0): 1}) + Counter(
        (one, c.num_heads, *heads, window) for one, heads, window in zip(weights, c.layer_heads, c.sliding_windows))


def gemma4(limits: Card, quick: bool) -> None:
    """Gemma 4 31B's shape. The limit of workload 256 assumes the largest number of texts that ran at once."""
    llm, sizes = random_llm(GEMMA4["31B"], max_model_len=9000), gemma4_sizes(read_model_config(GEMMA4["31B"]))
    gemma4_rows(Gemma4Limits(*limits), llm, "31B", sizes)


def gemma_26b(limits: Card, quick: bool) -> None:
    """Gemma 4 26B-A4B's shape."""
    gemma4_rows(limits, random_llm(GEMMA4["26B-A4B"], max_model_len=9000), "26B-A4B")


def gemma4_rows(limits: Card, llm: LLM, name: str, sizes: Any = None) -> None:
    """No warm-up of the workload: its steps' sizes are recorded, and other rows have run before."""
    for batch in (1, 8, 64):
        limit = limits.step_seconds(sizes, [1] * batch, [530] * batch, batch) * 1000 if sizes else None
        row(f"Gemma 4 {name} decode, batch {batch}, context 512", decode_ms(llm, batch, 512, 30), "ms/step", limit)
    prefill_rate(llm, 2, 8000)  # warm up
    limit = 256_000 / limits.step_seconds(sizes, [8000] * 32, [8000] * 32, 32) if sizes else None
    row(f"Gemma 4 {name} prefill, 32 x 8,000", prefill_rate(llm, 32, 8000), "tokens/s", limit)
    (prompts, lengths), most, before = workload_256(), 0, llm.counts.num_preemptions

    def launch(launch: Callable[[], Any] = llm.engine.launch) -> Any:
        nonlocal most
        most = max(most, len(llm.scheduler.running))
        return launch()

    with patch.object(llm.engine, "launch", launch):
        value = rate(lambda: llm.generate(prompts, [exactly(length) for length in lengths]), sum(lengths))
    limit = tokens_per_second(limits, sizes, prompts, lengths, most) if sizes else None
    row(f"Gemma 4 {name} workload 256", value, "tokens/s", limit,
        f"{most} at once at most, {llm.counts.num_preemptions - before} preemptions")


def latency(limits: Card, quick: bool) -> None:
    """Time to first token of a single prompt. Then 64 sequences decode while prompts of 4,000 tokens arrive: the gaps
    between the sequences' tokens."""
    llm = random_llm(SHAPES["0.6B"], max_model_len=8192)
    prefill_rate(llm, 4, 8000)  # warm up
    gaps = step_times(llm, random_prompts(1, [512] * 64), 400, arriving=random_prompts(2, [4000] * 12))
    alone = [100_000 / prefill_rate(llm, 1, 100) for _ in range(11)]
    row("time to first token of a 100-token prompt, alone", statistics.median(alone), "ms")
    row("gap between tokens under load, median", statistics.median(gaps), "ms")
    row("gap between tokens under load, 99th percentile", statistics.quantiles(gaps, n=100)[98], "ms")


def start(limits: Card, quick: bool) -> None:
    """Seconds from process start to first token, with Triton's cache empty and then full. This is the host's work,
    and the host may be busy: each is measured twice, and the row has the better time. A first start, with caches of its
    own, makes Python's byte code, which pip does when it installs packages."""
    with tempfile.TemporaryDirectory() as folder:
        _, *times = (first_token_after(folder, caches) for caches in ("first", *["second"] * 2, *["third"] * 2))
    for label, both in (("cold", times[::2]), ("warm", times[1::2])):
        row(f"0.6B process start to first token, caches {label}", min(both), "s", note=f"another {max(both):.1f}")


def first_token_after(folder: str, caches: str, shape: str = "0.6B", options: str = "") -> float:
    """Seconds to the first token of a new process that keeps what Triton compiles under this name."""
    environment = os.environ | dict(PYTHONPYCACHEPREFIX=f"{folder}/python", PYTHONDONTWRITEBYTECODE="",
                                    TRITON_CACHE_DIR=f"{folder}/{caches}/triton")
    program = (f"import sys, time; sys.path.insert(0, {str(Path(__file__).parent)!r}); import bench\n"
               f"llm = bench.random_llm(bench.SHAPES[{shape!r}], max_model_len=4096, warm_up=False, {options})\n"
               "llm.generate([[1, 2, 3]], bench.exactly(1))\nprint(time.time())")
    started = time.time()
    printed = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
    return float(printed.split()[-1]) - started


def data_parallel(limits: Card, quick: bool) -> None:
    """Workload 256 once for each GPU, in one engine for all of them, beside one GPU with one. The host's time for a
    step bounds the process: the CPU time of its thread."""
    count = max(2, torch.cuda.device_count())
    for shape in ("0.6B", "1.7B", "4B", "8B"):
        (together, host_ms), (alone, _) = rate_and_host_ms(shape, count), rate_and_host_ms(shape, 1)
        row(f"{shape} workload 256 on one GPU", alone, "tokens/s")
        row(f"{shape} workload 256 on each of {count} GPUs", together, "tokens/s",
            note=f"{together / alone:.2f} times one GPU; host {host_ms:.2f} ms a step")


def rate_and_host_ms(shape: str, count: int) -> tuple[float, float]:
    """Tokens/s of workload 256 once for each GPU, and ms of CPU time per step."""
    llm = random_llm(SHAPES[shape], max_model_len=4096, data_parallel_size=count)
    prompts, lengths = (sum(parts, []) for parts in zip(*map(workload_256, range(count))))
    llm.generate(prompts, exactly(8))  # warm up
    params = [exactly(length) for length in lengths]
    launches: list[Any] = []
    for runner in llm.runners:
        runner.launch = lambda step, launch=runner.launch: launches.append(step.num_tokens) or launch(step)
    started = time.thread_time()
    tokens_per_second = rate(lambda: llm.generate(prompts, params), sum(lengths))
    return tokens_per_second, (time.thread_time() - started) / len(launches) * 1000


ON_TWO: dict[str, tuple[str, str, Callable[[LLM], float]]] = {  # what is measured: unit, vLLM's figure for 8B, how
    "decode, batch 1": ("ms/step", "3.73, ratio 0.71", lambda llm: decode_ms(llm, 1, 512)),
    "decode, batch 256": ("ms/step", "9.53, ratio 0.65", lambda llm: decode_ms(llm, 256, 512)),
    "workload 256": ("tokens/s", "14,154, ratio 1.55", lambda llm: generate_rate(llm, *workload_256())),
    "prefill 32 x 8,000": ("tokens/s", "63,525, ratio 1.69", lambda llm: prefill_rate(llm, 32, 8000)),
    "single stream": ("tokens/s", "266, ratio 1.40", lambda llm: generate_rate(llm, random_prompts(2, [128]), [512]))}


def tensor_parallel(limits: Card, quick: bool) -> None:
    """Qwen3-8B's shape on two GPUs, beside one in the same run."""
    on_two("8B", list(ON_TWO), 9000)
    with tempfile.TemporaryDirectory() as folder:
        _, two, one = (first_token_after(folder, caches, "8B", f"tensor_parallel_size={size}")
                       for caches, size in (("first", 2), ("second", 2), ("third", 1)))
    row("8B on two GPUs, cold start to first token", two, "s", note=f"one GPU {one:.3g}, ratio {two / one:.2f}")


def parallel_sizes(limits: Card, quick: bool) -> None:
    """From which model size on two GPUs are faster than one."""
    for shape in ("0.6B", "1.7B", "4B"):
        on_two(shape, list(ON_TWO)[:3], 4096)


def on_two(shape: str, names: list[str], max_model_len: int) -> None:
    def figures(size: int) -> list[float]:
        llm = random_llm(SHAPES[shape], max_model_len=max_model_len, tensor_parallel_size=size)
        prefill_rate(llm, 4, 4000)  # warm up
        return [ON_TWO[name][2](llm) for name in names]

    for name, two, one in zip(names, figures(2), figures(1)):
        unit, peer, _ = ON_TWO[name]
        row(f"{shape} on two GPUs, {name}", two, unit, note=f"one GPU {_number(one)}, ratio {two / one:.2f}",
            peer=f"vLLM {peer}" if shape == "8B" else "")


def structured(limits: Card, quick: bool) -> None:
    """64 texts of 256 tokens: plain ones, all with a JSON schema, and 8 with one."""
    if find_spec("llguidance") is None:
        raise LeftOut("the package llguidance is missing")
    llm, prompts = random_llm(SHAPES["0.6B"], with_tokenizer=True, max_model_len=4096), random_prompts(0, [128] * 64)
    properties = {"name": {"type": "string"}, "age": {"type": "integer", "maximum": 10**6},
                  "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}}}
    person = dict(type="object", properties=properties, required=list(properties), additionalProperties=False)
    schema = dict(json=dict(type="array", items=person, minItems=1000))
    plain = 0.0
    for count, name in ((0, "64 x (128 in, 256 out)"), (64, "64 of them with a JSON schema"),
                        (8, "8 of them with a JSON schema")):
        params = [exactly(256, temperature=1, detokenize=False, structured_outputs=schema if i < count else None)
                  for i in range(64)]
        llm.generate(prompts, params)  # warm up
        tokens_per_second = rate(lambda: llm.generate(prompts, params), 64 * 256)
        plain = plain or tokens_per_second
        row(f"0.6B, {name}", tokens_per_second, "tokens/s",
            note=f"{tokens_per_second / plain:.2f} of the plain ones" if count else "")


def drafts(limits: Card, quick: bool) -> None:
    """Steps with five drafts and without, guesses that are right with probability 0.8 per token (3.69 tokens a step),
    and a text that never repeats itself."""
    guesses = SimpleNamespace(propose=lambda token_ids, k: [random.randint(0, 10000) for _ in range(k)])
    llm = random_llm(SHAPES["8B"], max_model_len=4096, speculative_config={"method": lambda: guesses})
    drafting = llm.drafting
    drafting.pays = 0
    for batch in (1, 8, 16, 32):
        drafting.most_drafting = batch
        plain, wrong, right = (draft_ms(llm, *how, batch) for how in ((None, 0), (drafting, 0), (drafting, 0.8)))
        tokens = drafting.metrics.mean_acceptance_length
        row(f"8B decode, batch {batch}, context 512, 5 drafts", wrong, "ms/step",
            note=f"without drafts {plain:.2f}: {wrong / plain:.2f} times")
        row("  right with probability 0.8", batch * tokens / right * 1000, "tokens/s",
            note=f"{tokens:.2f} tokens a step: {tokens / right * plain:.2f} times as fast")
    del llm, drafting
    plain, wrong = (generate_rate(random_llm(SHAPES["8B"], max_model_len=4096, speculative_config=config),
                                  random_prompts(0, [128]), [512], temperature=1)
                    for config in (None, {"num_speculative_tokens": 5}))
    row("8B single stream that nothing repeats, drafts", wrong, "tokens/s", note=f"{wrong / plain:.3f} of that without")


def draft_ms(llm: LLM, drafting: Any, p: float, batch: int, context: int = 512, steps: int = 40) -> float:
    """ms per decode step, if drafts come true with probability p each. drafting: the engine's, or None"""
    rng, update, llm.drafting = random.Random(0), llm.scheduler.update, drafting
    if drafting:
        drafting.metrics = RequestMetrics()

    def accept(step: engine.SchedulerOutput, sampled: engine.Sampled) -> Any:
        for i, (seq, position) in enumerate(zip(step.sampled, step.positions) if drafting else ()):
            place = position - len(seq.token_ids)  # among the drafts; behind the last one the sample is the model's own
            if place < len(seq.drafts) and rng.random() < p:
                sampled.tokens[i] = seq.drafts[place]
        return update(step, sampled)

    llm.scheduler.update = accept
    ms = decode_ms(llm, batch, context, steps)
    del llm.scheduler.update
    return ms


CLIENT = """
import json, selectors, socket, sys, time
bodies, ready = [line.encode() for line in sys.stdin], selectors.DefaultSelector()
head = ("POST /v1/completions HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n"
        "Content-Type: application/json\\r\\nContent-Length: ")
started, times = time.perf_counter(), [[] for _ in bodies]
for body, events in zip(bodies, times):
    connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    connection.sendall((head + str(len(body)) + "\\r\\n\\r\\n").encode() + body)
    ready.register(connection, selectors.EVENT_READ, events)
while ready.get_map():
    for key, _ in ready.select():
        data = key.fileobj.recv(2**20)
        key.data.extend([time.perf_counter() - started] * data.count(b"data: {"))
        if not data:
            ready.unregister(key.fileobj)
print(json.dumps([time.perf_counter() - started, times]))
"""  # a process of its own: it would share Python's lock with the engine


def server(quick: bool) -> None:
    """Clients that stream, all at once, beside `generate` of the same requests. On a GPU 256 of them, with 512 tokens
    in and 256 out. A slow event loop gets several tokens in one event."""
    if find_spec("uvicorn") is None or find_spec("starlette") is None:
        raise LeftOut("the package uvicorn or starlette is missing")
    on_gpu = torch.cuda.is_available()
    count, num_in, num_out = (256, 512, 256) if on_gpu else (16, 32, 32)
    llm = (random_llm(SHAPES["0.6B"], with_tokenizer=True, max_model_len=1024) if on_gpu else
           LLM("shakespeare", enable_prefix_caching=False))
    prompts = [[token % 1000 for token in prompt] for prompt in random_prompts(0, [num_in] * count)]
    with serving(llm) as port:  # twice in turns, and the best of each
        runs = [(generate_rate(llm, prompts, [num_out] * count), stream_all(port, prompts, exactly(num_out)))
                for _ in range(2)]
    best, (seconds, times) = max(rate for rate, _ in runs), min(streams for _, streams in runs)
    gaps = [(after - before) * 1000 for events in times for before, after in itertools.pairwise(events)]
    tokens_per_second = count * num_out / seconds
    row(f"server, {count} streams of ({num_in} in, {num_out} out)", tokens_per_second, "tokens/s",
        note=f"{tokens_per_second / best:.2f} of generate's {_number(best)}")
    for name, values in (("time to first token", [events[0] * 1000 for events in times]),
                         ("gap between a stream's tokens", gaps)):
        for percent in (50, 99):
            row(f"  {name}, {percent}th percentile", statistics.quantiles(values, n=100)[percent - 1], "ms",
                note=f"{count * num_out / sum(map(len, times)):.1f} tokens an event" if values is gaps else "")


@contextmanager
def serving(llm: LLM) -> Iterator[int]:
    """A server in a thread of this process, as `python engine.py --serve` has it; its port."""
    from nanopaged.features.server.app import Application, Server, bind
    from nanopaged.features.server.openai import Serving
    server, listener = Server(Application(Serving(llm, "bench", llm.chat_prompt))), bind("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs=dict(sockets=[listener]))
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def stream_all(port: int, prompts: list[list[int]], params: SamplingParams) -> tuple[float, list[list[float]]]:
    """All requests at once, from another process: the seconds to the end of the last one, and for each request those to
    each of its events."""
    settings = dict(temperature=params.temperature, max_tokens=params.max_tokens, ignore_eos=True, stream=True)
    bodies = "\n".join(json.dumps(settings | dict(prompt=prompt)) for prompt in prompts)
    return json.loads(subprocess.check_output([sys.executable, "-c", CLIENT, str(port)], input=bodies, text=True))


def machine() -> str:
    """Device, threads and versions, without which no figure means anything."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    parts = [device, f"{torch.get_num_threads()} CPU threads", f"Python {platform.python_version()}"]
    for name in ("torch", "triton"):
        with suppress(PackageNotFoundError):
            parts.append(f"{name} {version(name)}")
    return ", ".join(parts)


ANYWHERE: list[Callable[..., None]] = [scheduler, fragmentation, batching, server, gemma4_memory]
ON_CUDA: list[Callable[..., None]] = [start, attention, paging, delta, decode, throughput, shared, latency, large,
                                      windows, gemma4, gemma_26b, experts, gpt_oss, int4, hybrid, structured, drafts,
                                      simulate, data_parallel, tensor_parallel, parallel_sizes]
QUICK = {"scheduler", "fragmentation", "batching", "server", "attention", "decode"}


def main(argv: list[str] | None = None, anywhere: Sequence[Callable] = ANYWHERE,
         on_cuda: Sequence[Callable] = ON_CUDA) -> None:
    """argv: the words of the command line; anywhere, on_cuda: the sections that there are"""
    parser = argparse.ArgumentParser(description=(__doc__ or "").replace("**", ""),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a selection, about a minute on an idle machine")
    parser.add_argument("--only", default="", metavar="WORD", help="sections whose names contain a word of a,b")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    args = parser.parse_args(argv)
    words = args.only.split(",")
    runnable = {section.__name__: section for section in [*anywhere, *on_cuda]
                if section in anywhere or torch.cuda.is_available() if section.__name__ in QUICK or not args.quick}
    sections = [section for name, section in runnable.items() if any(word in name for word in words)]
    if not all(any(word in name for name in runnable) for word in words):
        parser.error(f"--only {args.only!r} names a section that does not exist or that cannot run here; the sections "
                     f"that can run are {', '.join(runnable)}")
    if args.json:
        try:
            feature("batch", "--json").open_file("--json", args.json, "a").close()
        except ValueError as error:
            parser.error(str(error))
    print(machine(), flush=True)
    # The rates are measured before the sections: a driver fills freed memory with zeros, and for half a second after an
    # engine is gone an H200 copies 3,800 GB/s instead of 4,230.
    limits = measure_limits() if set(sections) & set(on_cuda) else None
    torch.cuda.empty_cache()
    for section in sections:
        print(f"{section.__name__} is running ..", file=sys.stderr, flush=True)
        try:
            section(*(limits, args.quick) if section in on_cuda else (args.quick,))
        except LeftOut as error:
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
