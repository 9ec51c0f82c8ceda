"""Several engines in one process: where requests go, and the loop.

A CPU counts as any number of devices, so everything but speed is tested without a GPU. The random operations of
test_random_operations.py run with 1 to 3 engines, too.
"""
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import count, cycle
from unittest.mock import Mock

import pytest
import torch

from nanopaged import SamplingParams, engine
from nanopaged.api import assemble
from nanopaged.cli.main import main
from nanopaged.device import choices
from nanopaged.features.router import Router
from nanopaged.tests.helpers import (
    GREEDY,
    PROMPT,
    PROMPTS,
    SETTINGS,
    check_books,
    complaint,
    freed_at_once,
    from_one_pool,
    let_fail,
    load,
    pools,
    run,
    texts,
    tokens_of,
)


@pytest.mark.parametrize("size, options", [
    (2, dict(num_blocks=14)), (3, dict(num_blocks=14, swap_space=0.01)), (2, dict(max_num_seqs=2)),
    (3, dict(num_blocks=14, enable_prefix_caching=False)), (2, dict(max_num_batched_tokens=5)), (3, dict(lookahead=1)),
    (3, dict(num_blocks=14, lookahead=1)), (2, dict(model="mistral", num_blocks=14)), (2, dict(model="gpt2")),
    (3, dict(kv_cache_dtype="fp8"))], ids=str)
def test_outputs_do_not_depend_on_the_number_of_engines(size, options):
    """Nor on what the pools lack. A sliding window and an fp8 cache may change the outputs, and engines may not."""
    expected = from_one_pool(**{name: options[name] for name in ("model", "kv_cache_dtype") if name in options})
    found, num_preempted = texts(pools(size, **options))
    assert found == expected
    assert num_preempted or options.get("num_blocks") != 14 or "model" in options


# ---- Which engine gets a sequence

ARRIVALS = count()


class FakeRunner:
    """looks: whether a step is done, at each look."""
    looks = [True]

    def __init__(self):
        self.launched = []

    def launch(self, step):
        self.launched.append(Mock(return_value=engine.Sampled([1] * len(step.sampled)), num_tokens=step.num_tokens))
        self.launched[-1].is_done.side_effect = cycle(self.looks)
        return self.launched[-1]


def router(num_blocks=100, block_size=4, max_num_seqs=64, max_num_batched_tokens=512, lookahead=0):
    """A router of two engines, and the scheduler of each."""
    from nanopaged.features.recovery import recover
    parts = [engine.Scheduler(engine.BlockManager(num_blocks, block_size), max_num_seqs, max_num_batched_tokens)
             for _ in range(2)]
    engines = [engine.Engine(part, FakeRunner(), lookahead) for part in parts]
    return Router(engines, partial(recover, shortages={}), nullcontext), *parts


def add(whole, *prompts, max_new=4, priority=0):
    """Sequences in the queue of a router, or in that of one engine."""
    seqs = [engine.Sequence(list(tokens), engine.Order(priority, next(ARRIVALS), 0), len(tokens) + max_new)
            for tokens in prompts]
    for seq in seqs:
        whole.add(seq)
    return seqs


def compute(part):
    """A step of this scheduler, whose sequences all sample token 1."""
    step = part.schedule()
    part.update(step, engine.Sampled([1] * len(step.sampled)))
    return step


def test_a_sequence_goes_where_the_fewest_tokens_are_left_to_compute():
    """Those of sequences that wait there count, too, and for each sequence some that it will decode meanwhile."""
    whole, first, second = router(1000, max_num_batched_tokens=1500)
    long, *short = add(whole, range(1000), *([i] * 8 for i in range(6)))
    whole.step()
    assert first.running == [long, short[5]] and second.running == short[:5]
    assert [one.runner.launched[0].num_tokens for one in whole.engines] == [[1000, 8], [8] * 5]


def test_among_equals_a_sequence_goes_where_most_blocks_are_free():
    whole, first, second = router()
    add(first, range(20)), add(second, [1])
    compute(first), compute(second)
    [seq] = add(whole, range(30, 40))
    whole.step()
    assert whole.of(seq) is second


def test_a_sequence_follows_its_cached_prefix_unless_another_device_has_less_to_compute():
    whole, first, second = router()
    add(second, range(40), max_new=1)
    compute(second)
    [seq] = add(whole, [*range(40), 99])
    whole.step()
    assert second.running == [seq] and seq.num_found_tokens == 40
    add(second, range(100, 180))
    [other] = add(whole, [*range(40), 98])
    whole.step()
    assert whole.of(other) is first


def test_chats_with_one_system_prompt_spread_and_each_device_computes_it_once():
    whole, *parts = router(1000, 16, 64, 8192)
    add(whole, *(list(range(1000)) + [2000 + i] * 20 for i in range(64)), max_new=30)
    for _ in range(3):
        whole.step()
    for one in whole.engines:
        num_computed = sum(sum(launched.num_tokens) for launched in one.runner.launched)
        assert 28 <= len(one.scheduler.running) <= 36 and num_computed < 1000 + 36 * 40


def test_a_sequence_waits_for_its_prefix_behind_others_and_is_looked_up_once():
    """The first device has the prefix, and its next steps are full. The last sequence fits nowhere and stays in the
    queue for some steps."""
    whole, first, second = router(num_blocks=300, max_num_batched_tokens=64)
    add(whole, range(800), max_new=1)
    while first.waiting or first.running or whole.queue.waiting:
        whole.step()
    others = add(whole, range(1000, 1300), range(2000, 2300))
    [follows], [large] = add(whole, [*range(800), 7]), add(whole, range(3000, 4190))
    for one in (first, second):
        one.block_manager.find_prefix = Mock(wraps=one.block_manager.find_prefix)
    for _ in range(3):
        whole.step()
    assert [whole.of(seq) for seq in (*others, follows, large)] == [first, second, first, whole.queue]
    for one in (first, second):
        asked = [call.args[0] for call in one.block_manager.find_prefix.call_args_list]
        assert asked.count(large) == 1
    while not whole.is_idle:
        whole.step()
    assert follows.num_cached_tokens == 800 and large.num_cached_tokens == 0


@pytest.mark.parametrize("limits", [dict(max_num_seqs=1), dict(num_blocks=4)], ids=str)
def test_a_sequence_is_placed_once_a_device_has_room(limits):
    whole, first, second = router(**limits)
    seqs = add(whole, [1] * 13, [2] * 13)
    whole.step()
    [seq] = add(whole, [3] * 13)
    whole.step()
    assert [first.running, second.running, whole.queue.waiting] == [seqs[:1], seqs[1:], [seq]]
    whole.finish(seqs[1], "abort")
    whole.step()
    assert whole.of(seq) is second


def test_a_device_where_one_waits_for_blocks_gets_no_other():
    whole, first, second = router(num_blocks=10)
    add(first, range(36)), add(second, [1])
    compute(first), compute(second)
    [waits], [seq] = add(first, range(50, 70)), add(whole, [7])
    second.max_num_seqs = 1
    for expected in (whole.queue, second):
        whole.step()
        assert whole.of(seq) is expected and first.waiting == [waits]
        second.max_num_seqs = 2


def test_an_urgent_sequence_preempts_the_last_one_of_all_which_stays_where_it_was():
    whole, first, second = router(num_blocks=10, lookahead=1)
    seqs = add(whole, range(36), range(100, 136))
    whole.step()
    urgent = add(whole, range(300, 336), range(400, 436), range(500, 536), priority=-1)
    whole._place()
    assert second.waiting == urgent[:1] and first.waiting == urgent[1:2] and whole.queue.waiting == urgent[2:]
    for _ in range(3):
        whole.step()
    assert [first.running, second.running] == [[urgent[1]], [urgent[0]]]
    assert first.waiting == [seqs[0]] and second.waiting == [seqs[1]] and whole.queue.waiting == urgent[2:]
    while not whole.is_idle:
        whole.step()
        check_books(first), check_books(second)
    assert {seq.finish_reason for seq in seqs + urgent} == {"length"}
    whole.block_manager.check_idle()


def test_an_abort_ends_a_sequence_wherever_it_is():
    whole, first, second = router(max_num_seqs=1)
    seqs = add(whole, range(8), range(10, 18), range(20, 28))
    whole.step()
    for seq in seqs:
        whole.finish(seq, "abort")
        whole.finish(seq, "stop", "!")  # a finished one, by its stop string
    assert {(seq.status, seq.finish_reason, seq.stop_reason) for seq in seqs} == {
        (engine.Status.FINISHED, "stop", "!")}
    assert not (whole.waiting or whole.running)
    while not whole.is_idle:
        whole.step()
    whole.block_manager.check_idle()


# ---- The loop

@pytest.mark.parametrize("lookahead", [0, 1])
def test_no_device_waits_for_another_ones_step(lookahead):
    whole, *_ = router(100, 4, 8, 64, lookahead)
    busy, quick = [one.runner for one in whole.engines]
    busy.looks, quick.looks = [False], [False, False, True]
    add(whole, range(60), range(100, 104), max_new=50)  # the first device has a long prompt
    for _ in range(10):
        assert whole.step()
    assert len(quick.launched) >= 10 and len(busy.launched) == 1 + lookahead
    assert len(whole.running[1].token_ids) == 4 + 10 - lookahead


@pytest.mark.parametrize("lookahead", [0, 1])
def test_one_busy_device_has_its_lookahead(lookahead):
    whole, *_ = router(100, 4, 8, 64, lookahead)
    (first, second), depths = whole.engines, []
    update = first.update
    first.update = lambda: (depths.append(len(first.launched)), update())
    add(whole, range(6), max_new=5)
    while not whole.is_idle:
        whole.step()
    assert depths[:4] == [1 + lookahead] * 4 and not second.runner.launched
    assert not whole.step()


def test_a_step_tells_the_blocks_that_are_held_on_all_devices():
    whole, *_ = router(num_blocks=10)
    add(whole, range(6), range(10, 22))
    whole.step()
    assert [step.num_held_blocks for step, _, _ in whole.updates] == [5, 5]


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


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_device_out_of_memory_computes_smaller_steps_alone(capsys, lookahead):
    llm = pools(2, max_num_batched_tokens=64, lookahead=lookahead)
    let_fail(llm.runners[1], torch.OutOfMemoryError("CUDA out of memory"), lambda step: sum(step.num_tokens) > 20)
    assert tokens_of(llm.generate(PROMPTS, GREEDY)) == tokens_of(pools(1).generate(PROMPTS, GREEDY))
    assert [one.scheduler.max_num_batched_tokens for one in llm.engines] == [64, 16]
    assert "out of memory" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["is_done", "side_effect"])
def test_a_step_that_fails_when_it_is_looked_at_or_read_starts_over(name):
    """With a grammar a step is sampled then. The other device goes on."""
    whole, first, second = router(max_num_batched_tokens=64)
    seqs, runner, error = add(whole, range(40), range(50, 90)), whole.engines[0].runner, torch.OutOfMemoryError("once")
    failing = Mock(side_effect=error)
    failing.is_done = failing if name == "is_done" else Mock(return_value=True)
    runner.launch = Mock(return_value=failing)
    assert whole.step()
    assert first.waiting == seqs[:1] and seqs[1].token_ids[40:] == [1] and first.max_num_batched_tokens == 32
    del runner.launch
    while not whole.is_idle:
        whole.step()
    assert [len(seq.token_ids) for seq in seqs] == [44, 44]
    whole.block_manager.check_idle()


def test_threads_streams_and_aborts():
    llm, prompts = pools(2), [PROMPT[:5]] * 4
    with ThreadPoolExecutor() as threads:
        results = [threads.submit(llm.generate, prompts, GREEDY) for _ in range(4)]
        llm.abort_request(llm.add_request(PROMPT, SETTINGS[2]))
    assert [tokens_of(result.result()) for result in results] == [tokens_of(pools(1).generate(prompts, GREEDY))] * 4
    llm.scheduler.block_manager.check_idle()


# ---- Around it

def test_numbers_are_sums_and_weights_are_read_once(monkeypatch):
    monkeypatch.setattr(assemble, "read_ordinary", read := Mock(wraps=assemble.read_ordinary))
    llm = pools(3)
    manager = llm.scheduler.block_manager
    assert read.call_count == 1 and len(llm.runners) == 3
    assert manager.num_blocks == manager.num_free_blocks == 600
    llm.generate(PROMPTS, GREEDY)
    assert manager.num_free_blocks == 600 and llm.counts.num_prompt_tokens == sum(map(len, PROMPTS))
    assert llm.counts.num_generated_tokens == len(PROMPTS) * GREEDY.max_tokens
    assert llm.counts.most_blocks_held > sum(len(prompt) // 4 for prompt in PROMPTS)


@pytest.mark.parametrize("size, model", [(2, "shakespeare"), (1, "qwen3")])  # qwen3 is a checkpoint without a tokenizer
def test_the_memory_of_an_engine_that_is_deleted_is_free_at_once(size, model):
    """The garbage collector is not needed, since nothing in an engine refers to the whole of it."""
    llm = pools(size, model)
    stop = "xyz" if model == "shakespeare" else None
    llm.generate([[1, 2, 3]] * 2, SamplingParams(max_tokens=3, n=2, logit_bias={1: 1.0}, logprobs=2, stop=stop))
    with freed_at_once(llm, *(part for runner in llm.runners for part in (runner, runner.model, runner.pool))):
        del llm


def test_the_command_line(capsys):
    arguments = ["--prompt", "ROMEO:", "--device", "cpu", "--max-tokens", "4", "--temperature", "0"]
    one, two = (main(arguments + more) or capsys.readouterr()
                for more in ([], ["--data-parallel-size", "2", "--num-blocks", "20"]))
    assert one.out == two.out
    assert "on cpu (float32), 2 pools, together 40 blocks of 16 tokens" in two.err


def test_devices_of_several_engines(monkeypatch):
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
