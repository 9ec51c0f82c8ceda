"""Measure the engine on this machine, each figure beside what limits it.

    python bench.py            everything that this machine can run
    python bench.py --quick    about a minute

On a CPU: the bundled model, 32 prompts one by one and at once, beside `transformers` where that is installed.
On a CUDA device also: the decode kernel's rate beside the measured copy rate, and throughput with random weights in
the shape of Qwen3-0.6B. Figures are from one run on a machine that may be noisy: compare within a run.
"""
import argparse
import json
import platform
import random
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from engine import LLM
from kernel import cdiv, paged_attention
from nanopaged import SamplingParams

QWEN3_06B = dict(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=151936, hidden_size=1024, num_hidden_layers=28,
    num_attention_heads=16, num_key_value_heads=8, head_dim=128, intermediate_size=3072, max_position_embeddings=40960,
    rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=True, torch_dtype="bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about a minute")
    args = parser.parse_args()
    print(machine())
    batching(num_new=32 if args.quick else 128)
    if torch.cuda.is_available():
        decode_kernel()
        workload_256(32 if args.quick else 256)


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


# ---- on any machine

def batching(num_new: int) -> None:
    """32 prompts of the bundled model, one by one and at once: what batching is for."""
    rng = random.Random(0)
    prompts = [[rng.randrange(1000) for _ in range(rng.randint(8, 64))] for _ in range(32)]
    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
    llm = LLM("shakespeare", enable_prefix_caching=False)
    llm.generate(prompts, SamplingParams(max_tokens=2))  # warm up
    one_by_one = rate(lambda: [llm.generate(prompt, params) for prompt in prompts[:8]], 8 * num_new)
    at_once = rate(lambda: llm.generate(prompts, params), 32 * num_new)
    print(f"bundled model on {llm.runner.device}, {num_new} new tokens each: one by one {one_by_one:,.0f} tokens/s, "
          f"32 at once {at_once:,.0f} tokens/s ({at_once / one_by_one:.1f} times)")
    if llm.runner.device.type == "cpu" and find_spec("transformers"):
        one_peer, all_peer = transformers_rates(llm, prompts, num_new)
        print(f"transformers generate, same weights and threads: one by one {one_peer:,.0f} tokens/s, 32 at once, padded, "
              f"{all_peer:,.0f} tokens/s (nanopaged: {one_by_one / one_peer:.1f} and {at_once / all_peer:.1f} times that)")


def transformers_rates(llm: LLM, prompts: list[list[int]], num_new: int) -> tuple[float, float]:
    """Output tokens/s of `transformers` on the same task: one prompt at a time, and one left-padded batch."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging
    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(llm.path, dtype=torch.float32).eval()
    settings = dict(max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False, pad_token_id=0)

    def generate(batch):
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        model.generate(ids, attention_mask=mask, **settings)

    generate(prompts[:1])  # warm up
    return (rate(lambda: [generate([prompt]) for prompt in prompts[:4]], 4 * num_new),
            rate(lambda: generate(prompts), 32 * num_new))


def rate(function, amount: float) -> float:
    """amount per second of one call."""
    started = time.perf_counter()
    function()
    return amount / (time.perf_counter() - started)


# ---- on a CUDA device

def gpu_seconds(function, repeat: int = 10) -> float:
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


def copy_rate() -> float:
    """Bytes read plus bytes written per second of a large copy on the device."""
    source = torch.randint(256, (2**31,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / gpu_seconds(lambda: target.copy_(source))


def decode_kernel() -> None:
    """K and V bytes that the decode kernel reads per second (16 query heads on 8 kv heads of 128, bfloat16)."""
    limit = copy_rate()
    for num_seqs, seq_len in ((1, 8192), (64, 1024), (64, 8192), (256, 800), (256, 4096)):
        blocks = cdiv(seq_len, 16)
        num_bytes = 2 * num_seqs * seq_len * 8 * 128 * 2
        copies = 1 + int(2e8 // num_bytes)  # more than fits the L2 cache, one after another as a model's layers are
        pools = [torch.randn(2, num_seqs * blocks, 16, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        q = torch.randn(num_seqs, 16, 128, device="cuda", dtype=torch.bfloat16)
        tables = torch.randperm(num_seqs * blocks, device="cuda").int().view(num_seqs, blocks)
        lens = torch.full((num_seqs,), seq_len, device="cuda", dtype=torch.int32)
        starts = torch.arange(num_seqs + 1, device="cuda", dtype=torch.int32)

        def every_layer():
            for k_cache, v_cache in pools:
                paged_attention(q, k_cache, v_cache, tables, lens, starts, 128 ** -0.5, max_query_len=1, max_seq_len=seq_len)

        every_layer()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            every_layer()
        achieved = num_bytes * copies / gpu_seconds(graph.replay)
        print(f"decode attention {num_seqs:3} x {seq_len}: {achieved / 1e9:,.0f} GB/s, {achieved / limit:.2f} of the "
              f"device's copy rate ({limit / 1e9:,.0f} GB/s)")


def workload_256(num_prompts: int) -> None:
    """Offline throughput on random token ids: prompts and outputs of 100 to 1,024 tokens, temperature 0.6."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(num_prompts)]
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=rng.randint(100, 1024)) for _ in range(num_prompts)]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(QWEN3_06B))
        llm = LLM(folder, load_format="dummy", enable_prefix_caching=False, max_model_len=4096)
    llm.generate(prompts[:4], SamplingParams(max_tokens=4))  # warm up
    new = sum(p.max_tokens for p in params)
    achieved = rate(lambda: llm.generate(prompts, params), new)
    print(f"Qwen3-0.6B shape, {num_prompts} prompts ({sum(map(len, prompts)):,} tokens in, {new:,} out): "
          f"{achieved:,.0f} output tokens/s")


if __name__ == "__main__":
    sys.exit(main())
