"""A clock in place of a card: chapter 3's Engine, Scheduler and BlockManager serve a trace, and nothing is computed.

    python engine.py --model Qwen/Qwen3-8B --simulate trace.jsonl --card H200 --data-parallel-size 4
    python engine.py --model Qwen/Qwen3-8B --simulate --requests 1000 --rate 20 --ttft 2 --tpot 0.05

`Device` is the runner. It computes nothing, and says when a step would be done. A step takes the time of its matrix
products and of its attention, each the larger of its bytes / the card's copy rate and its FLOPs / the card's product
rate, divided by the fraction of these rates that was measured (`Card`), and a fixed time for each layer. The host's
time for planning a step passes, too: one process serves all cards. Everything else is what runs on a card: admission,
chunks, the prefix cache, preemption, sliding windows, swapping, the router, and the step that is planned ahead.

A **trace** is a file of JSON lines, in the format of Mooncake's traces (Qin et al. 2025):

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, ..], "priority": 0}

The timestamp is in ms. Each id of `hash_ids` stands for the next 512 tokens of the prompt, and equal ids after equal
beginnings are equal tokens. Without ids no prompts have anything in common. A file that `--trace run.json` has written
is a trace, too: its prompts and lengths, which all arrive at once. `--requests N` takes the first N requests, or draws
N where no file is given; then prompts and outputs have 100 to 1,024 tokens each. `--rate R` moves the arrivals so that
R requests arrive in a second.

What a model generates is not in a trace, so a prompt that continues an earlier answer finds no blocks of the answer.
"""
import json
import math
import random
import sys
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NamedTuple

import torch

from nanopaged import engine, model
from nanopaged.api.assemble import choose_groups, find_checkpoint, make_engines
from nanopaged.cli import main as cli
from nanopaged.cli.status import counted
from nanopaged.device.choices import pick_dtype
from nanopaged.device.pool import FP8, GIB, Pool
from nanopaged.features.progress import ProgressBar
from nanopaged.inputs import check_number, open_file, refuse_unknown
from nanopaged.options import MOST_GPUS, OPTIONS, check_options, feature
from nanopaged.sampling_params import SamplingParams
from nanopaged.tiles import DECODE_SIZES, FEW_SEQS, PADDED_ANYWAY, TOKEN_SIZES
from nanopaged.weights.build import modules_for
from nanopaged.weights.checkpoint import read_config
from nanopaged.weights.families import read_model_config

TOKENS_PER_ID = 512  # of a prompt, for each of a trace's hash_ids
REST = [0] * (TOKENS_PER_ID - 8)  # of these, behind the 8 bytes of the id
PERCENTS = 50, 90, 99
NUMBERS = "copy", "product", "memory", "swap", "layer", "decode", "prefill"  # of a card, which --card may give
# Options under which a step takes another time, which was not measured, or which depends on the texts (drafts).
REFUSED = "tensor_parallel_size", "quantization", "speculative_config", "enforce_eager"


# --------------------------------------------------------------------------------------------------
# The time of a step
# --------------------------------------------------------------------------------------------------

class Sizes(NamedTuple):
    """What a step reads and multiplies of a model."""
    layers: int
    body: tuple[float, float]  # weights of all layers but what `last` has, dense ones and those of one expert
    last: tuple[float, float]  # weights behind the last layer's K and V: only tokens that sample pass them
    experts: int  # of a layer, and how many of them a token chooses; 1 and 1 in a dense model
    top_k: int
    weight_bytes: float  # of a weight
    expert_bytes: float  # of an expert's weight: in MXFP4 4 bits, and a scale of 8 bits for each 32
    token_bytes: float  # K and V of a token in one layer
    head_numbers: int  # query heads * head_dim
    windows: tuple[tuple[int, int], ...]  # of layers that attend: (sliding window or 0, how many but the last layer)
    attends_last: bool  # the last layer does
    state_bytes: float  # recurrent states of a sequence
    num_bytes: float  # of all weights

    @classmethod
    def of(cls, c: model.ModelConfig, kv_bytes: int = 0) -> "Sizes":
        """kv_bytes: of a number in the KV cache; 0: as many as a weight has"""
        if c.layer_heads or c.kv_sharing:
            raise ValueError("a simulation needs a model whose layers have heads of one size, and K and V of their own")
        kv_proj, q_and_o = (n * c.head_dim * c.hidden_size for n in (
            2 * c.num_kv_heads, (2 + c.output_gate) * c.num_heads))
        recurrent, in_recurrent = c.states.get("layers", []), weights_of_recurrent_layer(c) if c.states else 0
        attends_last = c.num_layers - 1 not in recurrent
        late = q_and_o if attends_last else 0
        mlp, e = (2 + c.gated_mlp) * c.hidden_size, c.experts
        expert, top_k, count = (mlp * e["size"], e["top_k"], e["count"]) if e else (0, 1, 1)
        dense = [mlp * (e["shared_size"] if e and i not in e["dense_layers"] else c.intermediate_size)
                 for i in range(c.num_layers)]
        mixtures = [bool(e) and i not in e["dense_layers"] for i in range(c.num_layers)]
        head = c.hidden_size * c.vocab_size
        body = ((kv_proj + q_and_o) * (c.num_layers - len(recurrent)) + in_recurrent * len(recurrent) - late
                + sum(dense[:-1]))
        last, itemsize = late + dense[-1] + head, c.torch_dtype.itemsize
        windows = [size for i, size in enumerate((c.sliding_windows or [0] * c.num_layers)[:-1]) if i not in recurrent]
        expert_bytes = 17 / 32 if c.four_bits else itemsize
        return cls(c.num_layers, (body, expert * sum(mixtures[:-1])), (last, expert * mixtures[-1]), count, top_k,
                   itemsize, expert_bytes, 2 * c.num_kv_heads * c.head_dim * (kv_bytes or itemsize),
                   c.num_heads * c.head_dim,
                   tuple(Counter(windows).items()), attends_last,
                   4 * len(recurrent) * sum(math.prod(shape) for shape in c.states.get("shapes", [])),
                   itemsize * (body + last + head * (not c.tie_word_embeddings))
                   + expert_bytes * expert * count * sum(mixtures))

    def experts_read(self, num_tokens: int) -> float:
        """How many experts of a layer so many tokens choose, if each chooses evenly; of a dense model 1."""
        return self.experts * (1 - (1 - self.top_k / self.experts) ** num_tokens)


def weights_of_recurrent_layer(c: model.ModelConfig) -> int:
    """The numbers of its matrices, without its MLP's."""
    c = replace(c, experts={})
    with torch.device("meta"):
        layer = (modules := modules_for(c)).layer(c, c.states["layers"][0], modules)
    return sum(weight.numel() for name, weight in layer.named_parameters()
               if weight.dim() == 2 and not name.startswith("mlp."))


class Card(NamedTuple):
    """A card's rates, and the fractions of them that steps reach. The defaults are the limit: no step is faster."""
    copy: float  # bytes/s, read plus written by a copy
    product: float  # FLOP/s of a large bfloat16 matrix product
    memory: float = math.inf  # bytes
    swap: float = math.inf  # bytes/s from and to the host's memory
    layer: float = 0.0  # seconds of a layer, whatever a step computes: launches, and small kernels between products
    products: tuple[tuple[int, float], ...] = ((1, 1.0),)  # (tokens of a step, fraction of the matrix products' limit)
    decode: float = 1.0  # fraction of the copy rate at which attention of new tokens reads K and V
    prefill: float = 1.0  # fraction of the product rate that attention of prompts reaches
    host: tuple[float, float] = (0.0, 0.0)  # seconds of the host for a step, and for each sequence of a step

    def products_seconds(self, m: Sizes, num_tokens: int, num_samples: int) -> float:
        """The least time of a step's matrix products."""
        return sum(max((m.weight_bytes * dense + m.expert_bytes * expert * m.experts_read(rows)) / self.copy,
                       2 * (dense + expert * m.top_k) * rows / self.product)
                   for (dense, expert), rows in ((m.body, num_tokens), (m.last, num_samples)))

    def attention_seconds(self, m: Sizes, query_lens: list[int], seq_lens: list[int], num_samples: int) -> float:
        """The time of a step's attention. In the last layer only the tokens that sample attend."""
        read, multiply = self.copy * self.decode, self.product * self.prefill
        seconds = m.attends_last * sum(seq_lens) * m.token_bytes / read * num_samples / len(seq_lens)
        seconds += 2 * len(seq_lens) * m.state_bytes / read  # each state is read and written
        for window, num_layers in m.windows:
            num_bytes = flops = 0.0
            for q, s in zip(query_lens, seq_lens):
                s = min(s, window + q) if window else s
                if q == 1:
                    num_bytes += s * m.token_bytes
                else:
                    pairs = q * min(window, s - q + (q + 1) / 2) if window else q * (s - q) + q * (q + 1) / 2
                    flops += max(4 * m.head_numbers * pairs, s * m.token_bytes / read * multiply)
            seconds += num_layers * (num_bytes / read + flops / multiply)
        return seconds

    def step_seconds(self, m: Sizes, query_lens: list[int], seq_lens: list[int], num_samples: int,
                     max_num_seqs: int = 0) -> float:
        """The time of a step of sequences with so many new tokens, and so many in the KV cache after it. max_num_seqs:
        of an engine that records steps; 0: the step has no padding"""
        seconds = m.layers * self.layer + self.attention_seconds(m, query_lens, seq_lens, num_samples)
        num_tokens = sum(query_lens)
        if max_num_seqs:
            num_tokens, num_samples = recorded_size(query_lens, num_samples, max_num_seqs)
        return seconds + self.products_seconds(m, num_tokens, num_samples) / fraction(self.products, num_tokens)


def recorded_size(query_lens: list[int], num_samples: int, max_num_seqs: int) -> tuple[int, int]:
    """The tokens and logit rows that the matrix products of a step have: a recorded step (features/graphs.py) computes
    its padding, too."""
    num_tokens, num_seqs = sum(query_lens), len(query_lens)
    if num_tokens == num_seqs:
        num_tokens = num_samples = next((size for size in DECODE_SIZES if size >= num_seqs), num_seqs)
    elif num_tokens <= PADDED_ANYWAY:
        num_tokens = next(size for size in TOKEN_SIZES if size >= num_tokens)
        num_samples = FEW_SEQS if num_seqs <= FEW_SEQS else min(max_num_seqs, num_tokens)
    return num_tokens, num_samples


@cache
def fraction(known: tuple[tuple[int, float], ...], num_tokens: int) -> float:
    """The fraction between those that are known of fewer and of more tokens; it is a line over their logarithm."""
    index = bisect_right(known, (num_tokens, math.inf))
    (low, before), (high, after) = known[max(index - 1, 0)], known[min(index, len(known) - 1)]
    return before + (after - before) * (math.log(num_tokens / low) / math.log(high / low) if low < high else 0)


# An H200's numbers follow from the figures of Qwen3-8B's shape in nanopaged/README.md, and `bench.py --only simulate`
# measures such a row for each of three shapes. The other cards have the rates of their data sheets, times what an H200
# reaches of its own, and its fractions.
H200 = Card(4.23e12, 787e12, 139 * GIB, 50e9, 13e-6,
            ((1, 1.0), (8, 0.90), (64, 0.79), (256, 0.72), (8192, 0.80)), 0.90, 0.75, (250e-6, 1.7e-6))
CARDS = dict(
    H200=H200,
    H100=H200._replace(copy=3.35e12 * 0.88, product=989e12 * 0.8, memory=79 * GIB),
    A100=H200._replace(copy=2.04e12 * 0.88, product=312e12 * 0.8, memory=79 * GIB, swap=25e9),
    RTX4090=H200._replace(copy=1.01e12 * 0.88, product=165e12 * 0.8, memory=23.5 * GIB, swap=25e9))


# --------------------------------------------------------------------------------------------------
# The engine on a clock
# --------------------------------------------------------------------------------------------------

class Clock:
    now = 0.0  # seconds


class LaunchedStep(NamedTuple):
    """A step that the device will have done at that time."""
    clock: Clock
    done: float
    num_sampled: int

    def __call__(self) -> engine.Sampled:
        self.clock.now = max(self.clock.now, self.done)
        return engine.Sampled([0] * self.num_sampled)

    def is_done(self) -> bool:
        return self.clock.now >= self.done


class Device:
    """The runner of one card."""
    lookahead, num_ranks, device = 1, 1, torch.device("meta")  # tensors of this device have no memory

    def __init__(self, card: Card, sizes: Sizes, clock: Clock, config: model.ModelConfig, block_size: int,
                 dtype: torch.dtype, max_model_len: int, max_num_seqs: int, snapshot_memory: float = 0.0) -> None:
        self.card, self.sizes, self.clock, self.config, self.block_size = card, sizes, clock, config, block_size
        block_shape = block_size, config.num_kv_heads, config.head_dim
        self.pool = Pool(config.num_layers, block_shape, dtype, self.device)
        self.max_model_len, self.max_num_seqs = max_model_len, max_num_seqs
        if config.groups:
            kinds = feature("kinds.device", "a model with layers of several kinds")
            self.pool = kinds.KindsPool(kinds.Layout(config, block_size, dtype), self.device)
        if states := config.states:
            self.pool = feature("kinds.recurrent", "a model with recurrent states").StatesPool(
                states["shapes"], [i in states["layers"] for i in range(config.num_layers)], max_num_seqs,
                0, snapshot_memory, block_shape, dtype, self.device)
        self.free_at = self.busy = 0.0

    def launch(self, step: engine.SchedulerOutput) -> LaunchedStep:
        seconds = self.card.step_seconds(self.sizes, step.num_tokens, [seq.num_computed_tokens for seq in step.seqs],
                                         len(step.sampled), self.max_num_seqs)
        moved = [*vars(step).get("swaps_in", ()), *vars(step).get("swaps_out", ())]
        seconds += len(moved) * self.pool.block_bytes / self.card.swap
        for_step, for_seq = self.card.host
        self.clock.now += for_step + for_seq * len(step.seqs)
        self.free_at = max(self.free_at, self.clock.now) + seconds
        self.busy += seconds
        return LaunchedStep(self.clock, self.free_at, len(step.sampled))


class Request(NamedTuple):
    arrival: float  # seconds
    prompt: Callable[[], list[int]]
    num_prompt_tokens: int
    num_new_tokens: int
    priority: int = 0


class Times(NamedTuple):
    """Of a request that has ended, in seconds."""
    first: float  # to the first token
    each: float  # per token after it
    total: float  # to the last token


class Simulation:
    """The engine of an LLM with these options, whose cards are a clock. ValueError: the card is too small."""
    tokenizer = None  # this, `requests`, `runner`, `config` and `path` are what a trace of the run asks an LLM for

    def __init__(self, card: Card, config: model.ModelConfig, options: Any, path: Path = Path()) -> None:
        c, dtype = config, config.torch_dtype if options.kv_cache_dtype == "auto" else FP8
        self.config, self.path, self.clock, self.sizes = c, path, Clock(), Sizes.of(c, dtype.itemsize)
        choose_groups(options, c)
        self.runners = [Device(card, self.sizes, self.clock, c, options.block_size or 64, dtype,
                               options.max_model_len or c.max_position_embeddings, options.max_num_seqs,
                               options.enable_prefix_caching * options.snapshot_memory)
                        for _ in range(options.data_parallel_size)]
        self.runner: Any = self.runners[0]
        num_blocks = options.num_gpu_blocks_override or options.num_blocks or self._num_blocks(card, options)
        for runner in self.runners:
            runner.pool.allocate(num_blocks)
        with Device.device:  # blocks on the host have no memory either
            self.engines, self.max_model_len = make_engines(options, self.runners, [num_blocks] * len(self.runners))
        self.engine: Any = self.engines[0]
        self.scheduler: Any = self.engine.scheduler
        if len(self.engines) > 1:
            self.engine = self.scheduler = feature("router", "data_parallel_size").Router(self.engines, _fail, None)
            self.engine.wait = self._wait
        self.is_ordered = options.scheduling_policy == "priority"
        self.requests: dict[str, Any] = {}  # those under way
        self.times: list[Times] = []  # of those that have ended
        self.num_late = [0, 0]  # of those: their first token came too late, or their other tokens did
        self.num_prompt_tokens = self.num_cached_tokens = self.num_new_tokens = self.num_preemptions = 0

    def _num_blocks(self, card: Card, options: SimpleNamespace) -> int:
        c, block_bytes = self.config, self.runner.pool.block_bytes
        step = 2 * (options.max_num_batched_tokens * (8 * c.hidden_size + 4 * c.intermediate_size)
                    + 6 * options.max_num_seqs * c.vocab_size)  # about what trial.py measures
        left = card.memory * options.gpu_memory_utilization - self.sizes.num_bytes - step
        if left < block_bytes:
            raise ValueError(f"{card.memory / GIB:.0f} GiB of the card do not hold the model, a step and one block; "
                             "take another --card, or give num_blocks")
        return [runner.pool.num_blocks_in(int(left)) for runner in self.runners][0]

    def _wait(self) -> None:
        """In place of the router's `wait`: until the first card has done its step."""
        self.clock.now = min(one.launched[0][1].done for one in self.engines if one.launched)

    def run(self, requests: list[Request], bounds: tuple[float, float] = (math.inf, math.inf),
            most_late: float = math.inf, show_progress: bool = False) -> bool:
        """Serve the requests; whether at most `most_late` of them took longer than these bounds of Times.first and of
        Times.each. Once more have, the run ends."""
        pending, one, clock, number = deque(sorted(requests, key=lambda each: each.arrival)), self.engine, self.clock, 0
        arrivals: dict[engine.Sequence, float] = {}
        firsts: dict[engine.Sequence, float] = {}  # when its first token came
        bar, sampling = ProgressBar(len(pending), show_progress, "request"), SimpleNamespace(params=SamplingParams())
        while (pending or not one.is_idle) and max(self.num_late) <= most_late:
            while pending and pending[0].arrival <= clock.now:
                request, number = pending.popleft(), number + 1
                most_tokens = min(request.num_prompt_tokens + request.num_new_tokens, self.max_model_len)
                order = engine.Order(request.priority if self.is_ordered else 0, number, 0)
                seq = engine.Sequence(request.prompt(), order, most_tokens, request_id=str(number), sampling=sampling)
                arrivals[seq], self.requests[seq.request_id] = request.arrival, SimpleNamespace(sequences=[seq])
                self.scheduler.add(seq)
            if one.is_idle:
                clock.now = pending[0].arrival
                continue
            one.step()
            while one.updates:
                step, _, appended = one.updates.popleft()
                self.num_preemptions += len(step.preempted)
                self.num_new_tokens += len(appended)
                for seq, _ in appended:
                    firsts.setdefault(seq, clock.now)
                    if seq.status is engine.Status.FINISHED:
                        self._note(seq, arrivals.pop(seq), firsts.pop(seq), bounds)
            if bar.due:
                bar.update(len(self.times), self.num_new_tokens, f"{clock.now:.0f} s simulated")
        bar.clear()
        if one.is_idle:
            self.scheduler.block_manager.check_idle()
        return max(self.num_late) <= most_late

    def _note(self, seq: engine.Sequence, arrival: float, first: float, bounds: tuple[float, float]) -> None:
        """A request has ended."""
        del self.requests[seq.request_id]
        num_more, now = len(seq.token_ids) - seq.num_prompt_tokens - 1, self.clock.now
        self.times.append(Times(first - arrival, (now - first) / max(1, num_more), now - arrival))
        for i, bound in enumerate(bounds):
            self.num_late[i] += self.times[-1][i] > bound
        self.num_prompt_tokens += seq.num_prompt_tokens
        self.num_cached_tokens += seq.num_cached_tokens or 0

    def percentile(self, name: str, percent: float) -> float:
        """Of the requests' Times."""
        values = sorted(getattr(times, name) for times in self.times)
        return values[min(len(values) - 1, int(len(values) * percent / 100))]

    def report(self) -> None:
        """Print the figures."""
        seconds, count = self.clock.now, len(self.times)
        row("requests", count / seconds, "requests/s", f"{count:,} in {seconds:,.1f} s")
        row("new tokens", self.num_new_tokens / seconds, "tokens/s")
        row("prompt tokens from the prefix cache", 100 * self.num_cached_tokens / self.num_prompt_tokens, "%")
        for title, name in (("time to first token", "first"), ("time per output token", "each")):
            for percent in PERCENTS:
                row(f"{title}, {percent}th percentile", 1000 * self.percentile(name, percent), "ms")
        row("preemptions", self.num_preemptions, "")
        idle = 1 - sum(runner.busy for runner in self.runners) / seconds / len(self.runners)
        row(f"idle, of {counted(len(self.runners), 'card')}", 100 * idle, "% of the time")


def _fail(one: engine.Engine, error: BaseException) -> None:
    raise error


def row(name: str, value: float, unit: str, note: str = "") -> None:
    """Print one figure, as bench.py does."""
    number = f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
    print(f"{name:48} {number:>10} {unit:14}" + f"   [{note}]" * bool(note), flush=True)


# --------------------------------------------------------------------------------------------------
# The trace
# --------------------------------------------------------------------------------------------------

def read_requests(path: str, count: int | None = None, rate: float | None = None, seed: int = 0) -> list[Request]:
    """The first `count` requests of a file; of no file, so many that are drawn. With a rate they arrive at this one:
    what a file says is stretched, and what has no arrivals arrives at random (a Poisson process)."""
    rng = random.Random(seed)
    if not path:
        lengths = [(rng.randint(100, 1024), rng.randint(100, 1024)) for _ in range(count or 0)]
        requests = [Request(0, partial(tokens_of, [i], n), n, new) for i, (n, new) in enumerate(lengths)]
    else:
        with open_file("--simulate", path, "rb") as file:
            requests = [*(read_frames if path.lower().endswith(".json") else read_lines)(path, file)][:count]
    if not requests:
        raise ValueError("there is nothing to simulate; give --simulate a file with requests, or --requests N")
    requests.sort(key=lambda request: request.arrival)
    start, end = requests[0].arrival, requests[-1].arrival
    if rate and start < end:
        scale = len(requests) / rate / (end - start)
        return [one._replace(arrival=(one.arrival - start) * scale) for one in requests]
    arrival = 0.0
    for i, one in enumerate(requests):
        arrival += rng.expovariate(rate) if rate else 0
        requests[i] = one._replace(arrival=arrival if rate else one.arrival - start)
    return requests


def read_lines(path: str, file: Iterable[bytes]) -> Iterator[Request]:
    for number, line in enumerate(file, 1):
        try:
            entry = json.loads(line)
            arrival, length, num_new = entry["timestamp"] / 1000, entry["input_length"], entry["output_length"]
            ids = list(map(int, entry.get("hash_ids") or [2**40 + number]))
            if not (0 <= arrival < 1e12 and length > 0 and num_new >= 0 and min(ids) >= 0 and max(ids) < 2**64):
                raise ValueError
            yield Request(arrival, partial(tokens_of, ids, int(length)), int(length), max(1, int(num_new)),
                          int(entry.get("priority", 0)))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ValueError(f"--simulate {path!r}: line {number} must be a JSON object with a timestamp in ms, an "
                             f"input_length, an output_length and maybe hash_ids, not "
                             f"{line.decode(errors='replace').strip()!r:.80}") from None


def tokens_of(ids: list[int], length: int) -> list[int]:
    """A prompt of these ids. All tokens are below 256: Python has each such number once, so millions of them take
    little memory."""
    tokens: list[int] = []
    for number in ids + ids[-1:] * (engine.cdiv(length, TOKENS_PER_ID) - len(ids)):
        tokens += [*number.to_bytes(8, "little"), *REST]
    return tokens[:length]


def read_frames(path: str, file: IO) -> Iterator[Request]:
    """The texts of a run, each sample for itself. file: what `--trace run.json` has written (frames.py)"""
    prompts, num_new = dict[str, tuple[int, list[int]]](), Counter[str]()
    try:
        for frame in json.load(file)["frames"]:
            for names, priority, _, prompt, _ in frame.get("arrived", ()):
                prompts |= {name: (priority, prompt) for name in names}
            for name, new, _, forced, *_ in frame.get("sampled", ()):
                num_new[name] += len(new) + len(forced)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(f"--simulate {path!r} is not what --trace FILE.json writes; JSON lines are in a file of "
                         "another name, .jsonl for example") from None
    for name, (priority, prompt) in prompts.items():
        if num_new[name]:  # a beam's tokens are not told
            yield Request(0, partial(list, prompt), len(prompt), num_new[name], priority)


# --------------------------------------------------------------------------------------------------
# The command
# --------------------------------------------------------------------------------------------------

def read_card(text: str) -> Card:
    """A row of CARDS, or numbers in JSON, and the others an H200's."""
    if not text.startswith("{"):
        refuse_unknown("there is no card", [text], CARDS, f"there are {', '.join(CARDS)}, or numbers as in "
                       '{"copy": 3e12, "product": 8e14, "memory": 8e10}')
        return CARDS[text]
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--card {text!r:.80} is not JSON ({error})") from None
    refuse_unknown("a card has no number", given, NUMBERS)
    for name, value in given.items():
        check_number(f"{name} of a card", value, (int, float), lambda x: 0 < x < 1e20, "a number above 0")
    return H200._replace(**given)


SIMULATION = "simulate", "card", "requests", "rate", "ttft", "tpot"


def prepare(args: Any) -> "Study":
    """For the command line: read the trace and the model's config. The result brings its own `llm`."""
    study = Study(args.model, cli.given(args, SIMULATION), cli.given(args, cli.ENGINE))
    study.show_progress = not args.prints_steps
    return study


class Study:
    """What the command line does: a run, and on how many cards its bounds are kept.

    given: the values of --simulate, --card, --requests, --rate, --ttft and --tpot, if they are given
    options: those of an LLM
    """
    show_progress = True

    def __init__(self, model: str, given: dict[str, Any], options: dict[str, Any]) -> None:
        for name in ("requests", "rate", "ttft", "tpot"):
            check_number(f"--{name}", given.get(name, 1), (int, float), lambda x: 0 < x < 1e9, "a number above 0")
        self.options = SimpleNamespace(**{name: option.default for name, option in OPTIONS.items()} | options)
        self.options.model = model
        check_options(vars(self.options), {})
        self.card = read_card(given.get("card", "H200"))
        self.requests = read_requests(given["simulate"], given.get("requests"), given.get("rate"), self.options.seed)
        self.bounds = given.get("ttft", math.inf), given.get("tpot", math.inf)
        for name in REFUSED:
            if vars(self.options)[name] != OPTIONS[name].default:
                raise ValueError(f"a simulation knows no times of steps with {name}; leave it out")
        self.path = find_checkpoint(model, self.options.revision, read_config, True, self.options.hf_token,
                                    self.options.download_dir)
        self.config = read_model_config(read_config(self.path) | (self.options.hf_overrides or {}))
        if self.config.fp8 or self.config.four_bits not in (None, "mxfp4"):
            raise ValueError("a simulation knows no times of steps with weights in FP8 or 4 bits; give a model in 16 "
                             "bits")
        self.config.torch_dtype = pick_dtype(self.options.dtype, self.config.torch_dtype, Device.device)
        self.llm = self.on(self.options.data_parallel_size)

    def on(self, num_cards: int) -> Simulation:
        options = vars(self.options) | {"data_parallel_size": num_cards}
        return Simulation(self.card, self.config, SimpleNamespace(**options), self.path)

    def __call__(self, llm: Any = None) -> int:
        """Print the figures; the exit code."""
        served = [one for one in self.requests if one.num_prompt_tokens < self.llm.max_model_len]
        if num_refused := len(self.requests) - len(served):
            print(f"{counted(num_refused, 'prompt')} of max_model_len {self.llm.max_model_len} tokens or more left out",
                  file=sys.stderr)
        if not served:
            raise ValueError("no prompt is shorter than max_model_len; raise it, or take another model")
        self.llm.run(served, show_progress=self.show_progress)
        self.llm.report()
        if min(self.bounds) < math.inf:
            count = fewest(lambda n: self.on(n).run(served, self.bounds, len(served) // 10, self.show_progress),
                           MOST_GPUS)
            names = [f"{name} {bound:g} s" for name, bound in zip(("TTFT", "TPOT"), self.bounds) if bound < math.inf]
            row(f"cards that keep 90% within {' and '.join(names)}", count or MOST_GPUS, "",
                "" if count else "are not enough")
        return 0


def fewest(keeps: Callable[[int], bool], most: int) -> int | None:
    """The least count with keeps(count), by doubling and bisection: more cards keep what fewer keep. None: `most` does
    not."""
    low, high = 0, 1
    while not keeps(high):
        if high == most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if keeps(middle) else (middle, high)
    return high
