"""A clock in place of a card. What the card itself says is a section of bench.py, `simulate`."""
import json
import random
from types import SimpleNamespace

import pytest

from nanopaged import SamplingParams
from nanopaged.cli.main import main
from nanopaged.features import simulate
from nanopaged.features.simulate import Card, Request, Simulation, Sizes, recorded_size
from nanopaged.options import OPTIONS
from nanopaged.tests.helpers import GOLDEN, complaint, load, shared, tokens_of
from nanopaged.weights.checkpoint import read_config
from nanopaged.weights.families import read_model_config

CARD = Card(copy=1e9, product=1e9, memory=1e9, layer=1e-3)


def simulation(model="qwen3", card=CARD, **options):
    options = {name: option.default for name, option in OPTIONS.items()} | dict(block_size=4, num_blocks=50) | options
    return Simulation(card, read_model_config(read_config(GOLDEN / model)), SimpleNamespace(**options))


def requests(prompts, num_new, gap=0.0):
    return [Request(i * gap, lambda prompt=prompt: list(prompt), len(prompt), num_new)
            for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("variant", ["qwen3", "gpt2", "qwen3-moe", "granite-moe-shared", "qwen3.5", "qwen3-next"])
def test_sizes_are_those_of_the_model(variant):
    """The matrices of a checkpoint, without the small ones of positions, routers and convolutions."""
    llm = shared(variant)
    matrices = {name: one for name, one in llm.runner.model.named_parameters()
                if one.dim() > 1 and not any(word in name for word in ("positions", "router", "conv"))}
    if llm.config.experts:  # a matrix of all experts of a layer is one tensor, and its parts are parameters
        assert any("experts" in name for name in matrices)
    bytes_of = llm.config.torch_dtype.itemsize
    assert Sizes.of(llm.config).num_bytes == sum(one.numel() for one in matrices.values()) * bytes_of
    num_attending = llm.config.num_layers - len(llm.config.states.get("layers", ()))
    assert Sizes.of(llm.config, 1).token_bytes * num_attending == (
        llm.runner.pool.block_bytes // llm.runner.block_size // 4)  # which has 4 bytes in place of 1


def test_recurrent_states():
    """Each is read and written in a step. The engine has slots for them, as many as the memory allows."""
    sizes = Sizes.of(shared("qwen3.5").config)
    assert sizes.state_bytes == shared("qwen3.5").runner.pool.slot_bytes and sizes.windows == ((0, 1),)
    slow = Card(1e9, 1e30)
    one, two = (slow.step_seconds(sizes, [1] * n, [10] * n, n) for n in (1, 2))
    assert two - one == pytest.approx((2 * sizes.state_bytes + 10 * sizes.token_bytes) / 1e9)
    simulated = simulation("qwen3.5", card=CARD._replace(memory=4e6), num_blocks=None, max_num_seqs=256,
                           max_num_batched_tokens=64)
    assert 1 < simulated.scheduler.max_num_seqs < 256
    simulated.run(requests([[1, 2, 3]] * 300, 5))
    assert len(simulated.times) == 300


def test_experts_that_are_read():
    sizes = Sizes.of(shared("qwen3-moe").config)
    assert [sizes.experts_read(n) for n in (1, 2)] == pytest.approx([3, 7 - 7 * (4 / 7) ** 2])
    assert Sizes.of(shared("qwen3").config).experts_read(5) == 1


def test_the_time_of_a_step():
    """Layers, bytes of weights and of K and V where few tokens are computed, FLOPs where many are; less of its rate,
    more time."""
    sizes = Sizes.of(shared("qwen3").config)._replace(windows=((0, 1),))
    slow, fast = Card(1e9, 1e30), Card(1e30, 1e9)
    weights = (sizes.body[0] + sizes.last[0]) * sizes.weight_bytes
    assert slow.step_seconds(sizes, [1, 1], [10, 30], 2) == pytest.approx((weights + 2 * 40 * sizes.token_bytes) / 1e9)
    flops = 2 * (sizes.body[0] * 8 + sizes.last[0]) + 4 * sizes.head_numbers * (8 * 2 + 8 * 9 / 2)
    assert fast.step_seconds(sizes, [8], [10], 1) == pytest.approx(flops / 1e9)
    known = ((1, 1.0), (100, 0.5))
    assert [simulate.fraction(known, n) for n in (1, 10, 100, 1000)] == pytest.approx([1, 0.75, 0.5, 0.5])
    half = slow._replace(products=known, decode=0.5, layer=1.0)
    assert half.step_seconds(sizes, [1] * 100, [1] * 100, 100) == pytest.approx(
        sizes.layers + 2 * slow.step_seconds(sizes, [1] * 100, [1] * 100, 100))
    in_window = slow.attention_seconds(sizes._replace(windows=((4, 1),)), [1], [1000], 0)
    assert in_window == pytest.approx(5 * sizes.token_bytes / 1e9)


def test_a_recorded_step_computes_its_padding():
    assert recorded_size([1] * 9, 9, 256) == (16, 16)
    assert recorded_size([600, 1, 1], 3, 256) == (1024, 16)
    assert recorded_size([600] + [1] * 40, 41, 256) == (1024, 256)
    assert recorded_size([3000, 1], 2, 256) == (3001, 2)


@pytest.mark.parametrize("model, options", [
    ("qwen3", dict(num_blocks=22)), ("qwen3", dict(max_num_batched_tokens=7, enable_prefix_caching=False)),
    ("qwen3", dict(num_blocks=22, swap_space=0.001)), ("mistral", dict(num_blocks=20))], ids=str)
def test_a_simulation_takes_the_steps_of_an_engine(model, options):
    """The same preemptions, swaps, cached tokens and steps as an LLM of these options."""
    rng = random.Random(0)
    start = [rng.randrange(100) for _ in range(20)]
    prompts = [start[:rng.randint(1, 20)] + [rng.randrange(100)] * 3 for _ in range(12)]
    llm, ours, steps = load(model, block_size=4, device="cpu", **dict(num_blocks=50) | options), [], []
    llm.engine.lookahead = 1
    simulated = simulation(model, **options)
    for one, seen in ((llm, steps), (simulated, ours)):
        launch = one.runner.launch
        one.runner.launch = lambda step, launch=launch, seen=seen: (
            seen.append((step.num_tokens, len(step.preempted), len(vars(step).get("swaps_in", ())))), launch(step))[1]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
    simulated.run(requests(prompts, 12))
    assert ours == steps and {len(tokens) for tokens in tokens_of(outputs)} == {12}
    assert simulated.num_cached_tokens == sum(output.num_cached_tokens for output in outputs)
    assert simulated.num_preemptions == llm.counts.num_preemptions
    assert simulated.max_model_len == llm.max_model_len


def test_the_clock():
    """Requests arrive at their times, the card is idle between them, and steps that move blocks take longer."""
    one = simulation()
    one.run(requests([[1] * 9, [2] * 9], 5, gap=1000.0))
    assert 1000 < one.clock.now < 1001 and one.runner.busy < 1
    first, second = one.times
    assert first == pytest.approx(second) and first.total == pytest.approx(first.first + 4 * first.each)
    prompts = [[i] * 30 for i in range(10)]
    times = []
    for swap in (1e3, 1e12):
        one = simulation(card=CARD._replace(swap=swap), swap_space=0.01, num_blocks=20)
        one.run(requests(prompts, 20))
        times.append(one.clock.now)
    assert times[0] > 2 * times[1]


@pytest.mark.parametrize("policy, order", [("fcfs", [0, 1, 2]), ("priority", [2, 1, 0])])
def test_priorities_count_with_their_policy(policy, order):
    lengths, one = [], simulation(max_num_seqs=1, scheduling_policy=policy, num_blocks=200)
    one._note = lambda seq, *_: lengths.append(seq.num_prompt_tokens - 9)
    one.run([each._replace(priority=-i) for i, each in enumerate(requests([[i] * (9 + i) for i in range(3)], 5))])
    assert lengths == order


def test_two_cards_take_half_the_time_and_one_host_bounds_them():
    prompts = [[i] * 20 for i in range(16)]

    def seconds(count, **more):
        one = simulation(card=CARD._replace(**more), data_parallel_size=count, num_blocks=200, max_num_seqs=4)
        one.run(requests(prompts, 10))
        assert len(one.times) == 16
        return one.clock.now

    assert seconds(2) == pytest.approx(seconds(1) / 2, rel=0.1)
    assert seconds(2, host=(1.0, 0.0)) > 0.9 * seconds(1, host=(1.0, 0.0))


def test_the_fewest_cards_by_bisection():
    asked = []
    assert simulate.fewest(lambda n: asked.append(n) or n >= 11, 64) == 11 and asked == [1, 2, 4, 8, 16, 12, 10, 11]
    assert simulate.fewest(lambda n: n >= 40, 48) == 40 and simulate.fewest(lambda n: False, 64) is None


# ---- Traces

LINE = {"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [7, 2**40]}


def test_equal_ids_are_equal_tokens(tmp_path):
    entries = [LINE, LINE | dict(timestamp=5000, hash_ids=[7, 8], output_length=0), LINE | dict(hash_ids=[])]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, entries)))
    first, third, second = simulate.read_requests(str(tmp_path / "trace.jsonl"))
    a, b, c = (one.prompt() for one in (first, second, third))
    assert len(a) == 700 and a[:512] == b[:512] and a[512:] != b[512:] and a[:4] != c[:4] and max(a + b + c) < 256
    assert [first.arrival, third.arrival, second.arrival] == [0, 0, 2] and second.num_new_tokens == 1
    stretched = simulate.read_requests(str(tmp_path / "trace.jsonl"), rate=0.3)
    assert [one.arrival for one in stretched] == pytest.approx([0, 0, 10])
    assert len(simulate.read_requests(str(tmp_path / "trace.jsonl"), count=1)) == 1


def test_drawn_requests():
    drawn = simulate.read_requests("", 400, 20, seed=3)
    assert drawn[-1].arrival == pytest.approx(400 / 20, rel=0.2) and drawn[0].prompt() != drawn[1].prompt()
    assert 100 <= min(one.num_new_tokens for one in drawn) < 150
    assert len(drawn[5].prompt()) == drawn[5].num_prompt_tokens
    assert {one.arrival for one in simulate.read_requests("", 5)} == {0}
    assert [one[2:] for one in drawn] == [one[2:] for one in simulate.read_requests("", 400, 20, seed=3)]


# ---- The command

ARGUMENTS = ["--model", str(GOLDEN / "qwen3"), "--num-blocks", "400", "--block-size", "4"]


def run(capsys, *words):
    code = main([*ARGUMENTS, *words])
    return code, *capsys.readouterr()


def test_the_command_line(capsys, tmp_path):
    entries = [LINE | dict(timestamp=100 * i, input_length=60, hash_ids=[i % 2]) for i in range(10)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, [*entries, LINE | dict(input_length=10**6)])))
    page = tmp_path / "run.json"
    code, out, err = run(capsys, "--simulate", str(trace), "--card", '{"layer": 0.03}', "--trace", str(page),
                         "--ttft", "0.5", "--tpot", "0.2")
    lines = out.splitlines()
    assert code == 0 and "1 prompt of max_model_len" in err and "[10 in " in lines[0]
    for line, words in zip(lines, ("requests", "new tokens", "prompt tokens from the prefix cache",
                                   *["time to first token"] * 3, *["time per output token"] * 3, "preemptions",
                                   "idle, of 1 card", "cards that keep 90% within TTFT 0.5 s and TPOT 0.2 s"),
                           strict=True):
        assert line.startswith(words)
    assert float(lines[2].split()[-2]) == pytest.approx(80, abs=8) and int(lines[-1].split()[-1]) >= 1
    frames = json.loads(page.read_text())
    assert len([frame for frame in frames["frames"] if frame.get("arrived")]) > 1
    again = simulate.read_requests(str(page))
    assert [(one.num_prompt_tokens, one.num_new_tokens) for one in again] == [(60, 5)] * 10
    assert again[0].prompt() == again[2].prompt() != again[1].prompt()
    code, out, err = run(capsys, "--simulate", str(page), "--data-parallel-size", "2", "--trace", str(page) + ".html")
    assert code == 0 and "[10 in " in out and "plays the run" in err
    assert "step 3: " in run(capsys, "--simulate", str(page), "--trace")[2]


def test_a_run_s_own_frames_are_a_trace(tmp_path, capsys):
    path = str(tmp_path / "run.json")
    assert main(["--prompt", "ROMEO:", "--prompt", "JULIET:", "--n", "2", "--max-tokens", "7", "--trace", path,
                 "--ignore-eos", "--device", "cpu"]) == 0
    assert [one.num_new_tokens for one in simulate.read_requests(path)] == [7] * 4
    assert capsys.readouterr().out


@pytest.mark.parametrize("words, sentence", [
    (["--simulate"], "there is nothing to simulate; give --simulate a file with requests, or --requests N"),
    (["--simulate", "--requests", "0"], "--requests must be a number above 0, not 0"),
    (["--simulate", "nowhere.jsonl"], "--simulate 'nowhere.jsonl' cannot be opened: No such file or directory"),
    (["--simulate", "--requests", "5", "--card", "H20"], "there is no card 'H20'; did you mean 'H200'?"),
    (["--simulate", "--requests", "5", "--card", '{"copi": 1}'], "a card has no number 'copi'; did you mean 'copy'?"),
    (["--simulate", "--requests", "5", "--card", '{"copy": 0}'], "copy of a card must be a number above 0, not 0"),
    (["--simulate", "--requests", "5", "--card", "{"], "--card '{' is not JSON ("),
    (["--simulate", "--requests", "5", "--speculative-config", "{}"], "no times of steps with speculative_config"),
    (["--simulate", "--requests", "5", "--quantization", "fp8"], "knows no times of steps with quantization"),
    (["--simulate", "--requests", "5", "--speculate", "3"], "--simulate does not go with --speculate"),
    (["--simulate", "--requests", "5", "--regex", "a"], "--simulate does not go with --regex"),
    (["--requests", "5"], "--requests needs --simulate"),
    (["--simulate", "--requests", "5", "--max-model-len", "20"], "no prompt is shorter than max_model_len")],
    ids=lambda value: " ".join(value)[-20:] if isinstance(value, list) else "")
def test_what_is_refused(capsys, words, sentence):
    code, out, err = run(capsys, *words) if "--requests" not in words or "--simulate" in words else (
        main([*ARGUMENTS, "--prompt", "a", *words]), *capsys.readouterr())
    assert (code, out) == (2, "") and sentence in err


@pytest.mark.parametrize("line", ["no JSON", "\udcff", "[]", '{"timestamp": 1}', json.dumps(LINE | dict(timestamp="x")),
                                  json.dumps(LINE | dict(input_length=0)), json.dumps(LINE | dict(hash_ids=[-1])),
                                  json.dumps(LINE | dict(hash_ids=3)), json.dumps(LINE | dict(timestamp=-5))])
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(LINE)}\n{line}\n", errors="surrogateescape")
    assert "trace.jsonl': line 2 must be a JSON object with a timestamp" in complaint(simulate.read_requests, str(path))
    (tmp_path / "run.json").write_text(line, errors="surrogateescape")
    assert "is not what --trace FILE.json writes" in complaint(simulate.read_requests, str(tmp_path / "run.json"))


def test_a_card_that_is_too_small():
    assert "5 GiB of the card do not hold the model" in complaint(
        simulation, card=CARD._replace(memory=5 * 2**30), num_blocks=None, max_num_batched_tokens=10**7)
