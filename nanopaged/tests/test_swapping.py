"""Swapping. (test_random_operations.py has its books and those of windows, test_tensor_parallel.py several GPUs.)"""
import pytest

from nanopaged import SamplingParams
from nanopaged.features import swapping
from nanopaged.features.swapping import Swapping, SwapPool
from nanopaged.tests.fake_model import fake, sequence
from nanopaged.tests.helpers import assert_golden, from_one_pool, load, texts, tokens_of


def test_a_preempted_sequence_moves_to_the_host_and_computes_nothing_again():
    moved, cached, short = fakes = [fake(manager=Swapping(6, 4, caching, 0, num_host_blocks))
                                    for num_host_blocks, caching in ((20, False), (20, True), (1, True))]
    for one in fakes:
        one.run(*[sequence([i] * 7, max_new=13) for i in range(3)])
    assert moved.events["swaps_out"] == moved.events["swaps_in"] > 0
    assert moved.num_computed == 3 * 19  # every token once, but for the last: nothing follows it
    assert 0 < cached.events["swaps_in"] < cached.events["swaps_out"]  # some blocks were still in the prefix cache
    assert short.events["preempted"] > 0 == short.events["swaps_out"] and short.num_computed > 3 * 19  # no room there


@pytest.fixture
def moved(monkeypatch):
    """What moves from the host. It moves in several batches, as if the blocks were large."""
    pairs, move = [], SwapPool.move
    monkeypatch.setattr(swapping, "MOST_BYTES_MOVED", 10_000)
    monkeypatch.setattr(SwapPool, "move", lambda pool, step: pairs.extend(step.swaps_in) or move(pool, step))
    return pairs


@pytest.mark.parametrize("variant", ["mistral", "qwen3"])  # with a window and without
@pytest.mark.parametrize("options", [dict(), dict(graphs=True), dict(enable_prefix_caching=False)], ids=str)
def test_texts_do_not_depend_on_swapping(variant, options, moved):
    llm = load(variant, num_blocks=18, block_size=4, swap_space=0.05, **options)
    assert_golden(llm, variant, times=3)
    llm.scheduler.block_manager.check_idle()
    assert moved or variant == "mistral"


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("variant", ["mistral", "qwen3"])
def test_nor_do_those_of_mixed_requests(variant, lookahead, moved):
    """Samples, beams, penalties, log probabilities of both kinds."""
    llm = load(variant, num_blocks=13, block_size=4, swap_space=0.01, device="cpu", lookahead=lookahead)
    assert texts(llm)[0] == from_one_pool(model=variant) and moved


def test_a_window_lets_a_text_be_longer_than_the_pool():
    """The mistral golden's window is 8 tokens. The reference is a pool with room for every token."""
    prompt = [i * 7 % 200 for i in range(60)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    expected = tokens_of(load("mistral").generate(prompt, params))
    for options in (
            dict(num_blocks=5, block_size=4), dict(num_blocks=12, block_size=1), dict(num_blocks=3, block_size=16)):
        llm = load("mistral", **options)
        assert llm.max_model_len > options["num_blocks"] * options["block_size"]
        assert tokens_of(llm.generate([prompt, prompt], params)) == expected * 2
