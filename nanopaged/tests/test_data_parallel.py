"""Several pools in one process: a pool, a scheduler and a step loop on each of several devices.

A CPU counts as any number of devices, so everything but speed is tested without a GPU. The random operations of
test_paged.py run with 1 to 3 pools, too.
"""
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import count, cycle
from unittest.mock import Mock

import pytest
import torch

import engine
from nanopaged import BeamSearchParams, SamplingParams
from nanopaged.api import assemble
from nanopaged.cli.main import main
from nanopaged.cli.trace import Trace
from nanopaged.device import choices
from nanopaged.scheduling import additions
from nanopaged.scheduling.data_parallel import Pools, make_schedulers
from nanopaged.scheduling.samples import Samples
from nanopaged.tests.helpers import GREEDY, PROMPT, check_books, complaint, freed_at_once, let_fail, load, tokens_of

PROMPTS = [PROMPT[:n] + list(range(n)) for n in (3, 9, 15, 15, 4, 12)] + [PROMPT + PROMPT, [7], PROMPT]
SETTINGS = [GREEDY, SamplingParams(temperature=0.9, seed=5, max_tokens=20, ignore_eos=True, repetition_penalty=1.3),
            SamplingParams(temperature=0.8, seed=6, n=3, max_tokens=12, ignore_eos=True, logprobs=2),
            SamplingParams(temperature=0, max_tokens=9, prompt_logprobs=1, presence_penalty=0.7)]
BEAMS = BeamSearchParams(beam_width=3, max_tokens=6)


def pools(count, model="qwen3", **options):
    return load(model, **dict(data_parallel_size=count, device="cpu", block_size=4, num_blocks=200) | options)


def run(llm, prompts, params):
    """The requests' outputs. Every pool keeps its promises after each step."""
    requests, done = [llm.add_request(*pair) for pair in zip(prompts, params)], {}
    while llm.has_unfinished_requests():
        done |= {output.request_id: output for output in llm.step()}
        for one in llm.engines:
            check_books(one.scheduler)
    llm.scheduler.block_manager.check_idle()
    return [done[request] for request in requests]


def texts(llm):
    """What mixed requests generate, and the number of preemptions."""
    outputs, num_preempted = run(llm, PROMPTS, cycle(SETTINGS)), llm.scheduler.num_preemptions
    beams = llm.beam_search([PROMPT, PROMPT[:4]], BEAMS)
    llm.scheduler.block_manager.check_idle()
    found = [[(sample.token_ids, sample.finish_reason) for sample in output.outputs] for output in outputs]
    return found + [[beam.tokens for beam in output.sequences] for output in beams], num_preempted


@cache
def from_one_pool(**options):
    return texts(pools(1, **options))[0]


@pytest.mark.parametrize("size, options", [
    (2, dict(num_blocks=14)), (3, dict(num_blocks=14, swap_space=0.01)), (2, dict(max_num_seqs=2)),
    (3, dict(num_blocks=14, enable_prefix_caching=False)), (2, dict(max_num_batched_tokens=5)), (3, dict(lookahead=1)),
    (3, dict(num_blocks=14, lookahead=1)), (2, dict(model="mistral", num_blocks=14)), (2, dict(model="gpt2")),
    (3, dict(kv_cache_dtype="fp8"))], ids=str)
def test_outputs_do_not_depend_on_the_number_of_pools(size, options):
    """Nor on what the pools lack. A sliding window and an fp8 cache may change the outputs, and pools may not."""
    expected = from_one_pool(**{name: options[name] for name in ("model", "kv_cache_dtype") if name in options})
    found, num_preempted = texts(pools(size, **options))
    assert found == expected
    assert num_preempted or options.get("num_blocks") != 14 or "model" in options


# ---- Which pool gets a sequence

ARRIVALS = count()


def sequence(tokens, max_new=4, priority=0, **settings):
    return additions.Sequence(list(tokens), (priority, next(ARRIVALS), 0), len(tokens) + max_new, **settings)


class FakeRunner:
    """looks: whether a step is done, at each look."""
    looks = [False]

    def __init__(self):
        self.launched = []

    def launch(self, step):
        self.launched.append(Mock(return_value=engine.Sampled([1] * len(step.sampled))))
        self.launched[-1].is_done.side_effect = cycle(self.looks)
        return self.launched[-1]


def schedulers(num_blocks=100, block_size=4, max_num_seqs=64, max_num_batched_tokens=512, lookahead=0):
    """Two pools as one, and each of them."""
    parts = make_schedulers([additions.BlockManager(num_blocks, block_size) for _ in range(2)], max_num_seqs,
                            max_num_batched_tokens)
    return Pools([additions.Engine(part, FakeRunner(), lookahead) for part in parts]), *parts


def add(whole, *prompts, **settings):
    """Sequences in the queue of all pools."""
    seqs = [sequence(tokens, **settings) for tokens in prompts]
    for seq in seqs:
        whole.add(seq)
    return seqs


def compute(pool):
    """A step of this pool, whose sequences all sample token 1."""
    step = pool.schedule()
    pool.update(step, engine.Sampled([1] * len(step.sampled)))
    return step


def tokens_offered(scheduler):
    return [[placement.offers[pool].num_tokens for pool in scheduler.pools] for placement in scheduler.placements]


def test_a_sequence_goes_where_the_next_step_has_the_fewest_tokens():
    whole, first, second = schedulers()
    seqs = add(whole, range(40), range(50, 58), range(70, 78), range(90, 98))
    assert first.schedule().num_tokens == [40]
    assert tokens_offered(first) == [[40, 40], [48, 8], [48, 16], [48, 24]]
    assert first.running == seqs[:1] and second.waiting == seqs[1:]
    assert second.schedule().num_tokens == [8, 8, 8]


def test_a_pool_counts_what_waits_there_and_an_abort_ends_what_waits_anywhere():
    whole, first, second = schedulers(num_blocks=10)
    _, placed = add(whole, range(12), range(20, 28))
    first.schedule()
    _, queued = add(whole, range(40, 48), range(60, 93))
    first.schedule()
    assert tokens_offered(first) == [[9, 16]] and first.queue == [queued] and second.waiting == [placed]
    whole.finish(placed, "abort")
    whole.finish(queued, "abort")
    assert not whole.waiting


def test_among_equals_a_sequence_goes_where_most_blocks_are_free():
    whole, first, second = schedulers()
    [holder] = add(whole, range(20))
    compute(first)
    holder.max_len = holder.num_computed_tokens + 1  # nothing is left to compute: it only holds blocks
    [seq] = add(whole, range(30, 40))
    first.schedule()
    assert tokens_offered(first) == [[10, 10]] and seq in second.waiting


def test_a_sequence_follows_its_cached_prefix_unless_another_pool_has_a_smaller_step():
    whole, first, second = schedulers()
    add(whole, range(40), max_new=1)
    compute(first)
    [seq] = add(whole, [*range(40), 99])
    second.schedule()
    assert tokens_offered(second) == [[1, 41]] and not second.running
    first.schedule()
    assert first.running == [seq] and seq.num_hit_tokens == 40
    first.finish(seq, "abort")
    _, other = add(whole, range(100, 180), [*range(40), 98])  # 80 tokens are on their way to the first pool
    first.schedule()
    assert tokens_offered(first) == [[80, 80], [81, 41]] and other in second.waiting


def test_chats_with_one_system_prompt_spread_and_each_pool_computes_it_once():
    whole, *parts = schedulers(1000, 16, 64, 8192)
    add(whole, *(list(range(1000)) + [2000 + i] * 20 for i in range(64)), max_new=30)
    steps = [(pool, compute(pool)) for pool in parts * 2]
    for pool in parts:
        num_computed = sum(sum(step.num_tokens) for one, step in steps if one is pool)
        assert len(pool.running) == 32 and num_computed < 1000 + 32 * 40


def test_no_pool_idles_while_a_sequence_waits_that_it_could_serve():
    whole, first, second = schedulers(max_num_seqs=1)
    seqs = add(whole, range(8), range(10, 18), range(20, 28))
    first.schedule()
    second.schedule()
    assert [first.running, second.running, first.queue] == [[seqs[0]], [seqs[1]], [seqs[2]]]
    second.finish(seqs[1], "abort")
    assert second.schedule().seqs == [seqs[2]]
    whole, first, second = schedulers()  # placed, and not admitted yet: an idle pool takes it over
    seqs = add(whole, range(40), range(50, 58))
    first.schedule()
    assert second.waiting == [seqs[1]]
    first.finish(seqs[0], "abort")
    assert first.schedule().seqs == [seqs[1]]


def test_a_sequence_does_not_wait_behind_one_that_its_pool_has_no_blocks_for():
    """Its prefix is cached there, but another pool could serve it now."""
    whole, first, second = schedulers(num_blocks=40)
    add(first, range(32), max_new=1)
    compute(first)
    _, sample = add(first, range(400, 440), range(100, 132), max_new=120)
    compute(first)
    bound = sequence(range(100, 132), max_new=120)
    sample.samples = bound.samples = Samples([sample, bound])
    bound.token_ids += range(200, 300)  # it was preempted
    first.add(bound)
    compute(first)
    assert first.waiting == [bound]
    [other] = add(whole, [*range(32), 99])
    compute(first)
    assert compute(second).seqs == [other]


def test_an_urgent_sequence_preempts_the_last_one_of_all_pools():
    whole, first, second = schedulers(num_blocks=10)
    seqs = add(whole, range(36), range(100, 136))
    for part in (first, second):
        compute(part)
    [urgent] = add(whole, range(300, 336), priority=-1)
    first.schedule()
    assert second.waiting == [urgent]
    assert second.schedule().preempted == [seqs[1]] and second.running == [urgent]
    assert first.queue == [seqs[1]] and first.running == [seqs[0]]


def test_a_preempted_sequence_may_come_back_in_another_pool():
    llm, homes = pools(3, num_blocks=14), set()
    for pool in llm.scheduler.parts:
        pool.observers.append(lambda *_, pool=pool: homes.update((seq.request_id, pool) for seq in pool.running))
    assert tokens_of(llm.generate(PROMPTS, SETTINGS[1])) == tokens_of(pools(1).generate(PROMPTS, SETTINGS[1]))
    assert len(homes) > len(PROMPTS)


# ---- The loop

@pytest.mark.parametrize("lookahead", [0, 1])
def test_no_device_waits_for_another_ones_step(lookahead):
    whole, *_ = schedulers(100, 4, 8, 64, lookahead)
    busy, quick = [one.runner for one in whole.engines]
    quick.looks = [False, False, True]
    add(whole, range(60), range(100, 104), max_new=50)  # the first device has a long prompt
    for _ in range(10):
        whole.step()
    assert len(quick.launched) >= 10 and len(busy.launched) == 1 + lookahead
    assert len(whole.running[1].token_ids) == 4 + 10 - lookahead


@pytest.mark.parametrize("lookahead", [0, 1])
def test_one_busy_device_has_its_lookahead(lookahead):
    whole, *_ = schedulers(100, 4, 8, 64, lookahead)
    (first, second), depths = whole.engines, []
    update = first.update
    first.update = lambda: (depths.append(len(first.launched)), update())
    add(whole, range(6), max_new=5)
    while not whole.is_idle:
        whole.step()
    assert depths[:4] == [1 + lookahead] * 4 and not second.runner.launched


def test_a_preempted_sequence_is_admitted_once_its_token_is_known():
    """A step that only preempted is not launched, so the one before may still be under way when the next is planned."""
    whole, pool, _ = schedulers(num_blocks=4)
    [first], [last] = add(pool, range(8), may_look_ahead=False), add(pool, range(50, 58))
    launched = pool.schedule()
    step = pool.schedule()
    assert step.preempted == [last] and not step.seqs
    pool.undo(step)
    whole.finish(first, "abort")
    assert not pool.schedule().seqs
    pool.update(launched, engine.Sampled([1, 2]))
    assert pool.schedule().seqs == [last] and last.token_ids[8:] == [2]


def test_a_step_that_failed_late_leaves_a_sequence_alone_that_runs_elsewhere_by_now():
    whole, first, second = schedulers(num_blocks=16, max_num_batched_tokens=20)
    second.block_manager.allocate(holder := sequence([]), 64)
    [seq] = add(whole, range(40))
    part = first.schedule()
    add(whole, range(100, 160), priority=-1)
    assert first.schedule().preempted == [seq]
    second.block_manager.free(holder)
    assert second.schedule().seqs == [seq]
    first.undo(part)
    assert second.running == [seq] and len(seq.block_table) == 5
    check_books(first), check_books(second)


def test_a_step_that_fails_on_one_device_leaves_the_others_alone():
    llm, calls, errors = pools(2), count(), []
    let_fail(llm.runners[1], RuntimeError("device 1"), lambda step: next(calls) == 3)

    def step(works=llm.step):
        try:
            return works()
        except RuntimeError as error:
            return errors.append(str(error)) or []

    llm.step = step
    assert tokens_of(run(llm, PROMPTS, cycle([GREEDY]))) == tokens_of(pools(1).generate(PROMPTS, GREEDY))
    assert errors == ["device 1"]


def test_a_device_out_of_memory_computes_smaller_steps_alone(capsys):
    llm = pools(2, max_num_batched_tokens=64)
    let_fail(llm.runners[1], torch.OutOfMemoryError("CUDA out of memory"), lambda step: sum(step.num_tokens) > 20)
    assert tokens_of(llm.generate(PROMPTS, GREEDY)) == tokens_of(pools(1).generate(PROMPTS, GREEDY))
    assert [one.scheduler.max_num_batched_tokens for one in llm.engines] == [64, 16]
    assert "out of memory" in capsys.readouterr().err


def test_sequences_outside_a_step_that_ran_out_of_memory_go_on(capsys):
    """Both devices fail at once, in a step whose token budget was spent before the running sequences had their turn."""
    llm, failing = pools(2, max_num_batched_tokens=20, scheduling_policy="priority"), []
    for runner in llm.runners:
        let_fail(runner, torch.OutOfMemoryError("CUDA out of memory"),
                 lambda step, runner=runner: runner in failing and not failing.remove(runner))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for i in range(2):
        llm.add_request([1, 2, 3 + i], params)
    llm.step()
    for i in range(2):
        llm.add_request(list(range(60 * i, 60 * i + 40)), params, priority=-1)
    failing += llm.runners
    finished = [output for _ in range(60) for output in llm.step() if output.finished]
    assert len(finished) == 4 and not failing
    llm.scheduler.block_manager.check_idle()


def test_threads_streams_and_aborts():
    llm, prompts = pools(2), [PROMPT[:5]] * 4
    with ThreadPoolExecutor() as threads:
        results = [threads.submit(llm.generate, prompts, GREEDY) for _ in range(4)]
        llm.abort_request(llm.add_request(PROMPT, GREEDY))
    assert [tokens_of(result.result()) for result in results] == [tokens_of(pools(1).generate(prompts, GREEDY))] * 4
    llm.scheduler.block_manager.check_idle()


# ---- Around it

def test_numbers_are_sums_and_weights_are_read_once(monkeypatch):
    monkeypatch.setattr(assemble, "read_weights", read := Mock(wraps=assemble.read_weights))
    llm = pools(3)
    manager = llm.scheduler.block_manager
    assert read.call_count == 1 and len(llm.runners) == 3
    assert manager.num_blocks == manager.num_free_blocks == 600
    llm.generate(PROMPTS, GREEDY)
    assert manager.num_prompt_tokens == sum(map(len, PROMPTS)) and manager.num_free_blocks == 600
    assert llm.scheduler.num_generated_tokens == len(PROMPTS) * GREEDY.max_tokens


@pytest.mark.parametrize("size, model", [(2, "shakespeare"), (1, "qwen3")])  # qwen3 is a checkpoint without a tokenizer
def test_the_memory_of_an_engine_that_is_deleted_is_free_at_once(size, model):
    """The garbage collector is not needed, since nothing in an engine refers to the whole of it."""
    llm = pools(size, model)
    stop = "xyz" if model == "shakespeare" else None
    llm.generate([[1, 2, 3]] * 2, SamplingParams(max_tokens=3, n=2, logit_bias={1: 1.0}, logprobs=2, stop=stop))
    with freed_at_once(llm, *(part for runner in llm.runners for part in (runner, runner.model, runner.pool))):
        del llm


def traced(llm, prompts, **settings):
    lines = []
    trace = Trace(llm, lines.append)
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, **settings))
    trace.close()
    return lines


def test_the_trace_shows_each_pool_and_each_placement():
    lines = traced(pools(2, "shakespeare", num_blocks=20), [[1, 2, 3], [4] * 6, [5, 6, 7]])
    assert lines[0].startswith("on each of 2 GPUs, a pool of 20 blocks of 4 tokens")
    start = lines.index("step 0 on GPU 0: 6 of at most 8192 tokens, for 2 of 2 running sequences")
    assert "  placed      A on GPU 0: its next step has 3 tokens with it, 3 on GPU 1" in lines[start:]
    assert "  placed      B on GPU 1: its next step has 6 tokens with it, 9 on GPU 0" in lines[start:]
    assert lines[start + 6].startswith("  pool 0      AC________ __________  2 held")
    assert lines[start + 7].startswith("  pool 1      __________ __________  0 held")
    assert any(line.startswith("  pool 1      BB________") for line in lines)
    assert any(line.startswith("step 1 on GPU 1: 6 of at most") for line in lines)
    assert all(len(line) <= 100 for line in lines)


def test_the_trace_has_a_reason_for_each_placement_and_no_line_for_an_idle_gpu():
    llm = pools(2, "shakespeare", num_blocks=20)
    llm.generate([[9, 9], list(range(40))], GREEDY)
    lines = traced(llm, [[*range(40), 3]])  # the second pool has its prefix, and the first has nothing to compute
    assert "  placed      A on GPU 1: its next step has 1 tokens with it, 41 on GPU 0" in lines
    assert [line for line in lines if line.startswith("no step")] == ["no step on GPU 0: nothing can be computed now"]
    lines = traced(pools(2, "shakespeare", max_num_seqs=1), [[1, 2]], n=2)
    assert "  placed      A1 on GPU 0: its samples are there" in lines


def test_the_command_line(capsys):
    arguments = ["--prompt", "ROMEO:", "--device", "cpu", "--max-tokens", "4", "--temperature", "0"]
    one, two = (main(arguments + more) or capsys.readouterr()
                for more in ([], ["--data-parallel-size", "2", "--num-blocks", "20"]))
    assert one.out == two.out
    assert "on cpu (float32), 2 pools, together 40 blocks of 16 tokens" in two.err


def test_devices_of_several_pools(monkeypatch):
    for name, value in dict(is_available=True, device_count=2, current_device=0).items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert choices.pick_devices("cuda", 2) == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert choices.pick_devices("cuda:1", 1) == [torch.device("cuda", 1)]
    assert choices.pick_devices("cpu", 3) == [torch.device("cpu")] * 3
    assert "data_parallel_size is 3, and torch sees 2 CUDA" in complaint(choices.pick_devices, "auto", 3)
    assert "must be 'auto' or 'cuda', not 'cuda:1'" in complaint(choices.pick_devices, "cuda:1", 2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs; the tests above run the same on a CPU")
@pytest.mark.parametrize("graphs", [False, True])
def test_two_gpus(graphs):
    expected, _ = texts(load("qwen3", num_blocks=200, block_size=16, graphs=graphs))
    llm = load("qwen3", num_blocks=200, block_size=16, graphs=graphs, data_parallel_size=2)
    assert [runner.device.index for runner in llm.runners] == [0, 1]
    assert texts(llm)[0] == expected
    small = load("qwen3", num_blocks=6, block_size=16, graphs=graphs, data_parallel_size=2)
    found, num_preempted = texts(small)
    assert found == expected and num_preempted
