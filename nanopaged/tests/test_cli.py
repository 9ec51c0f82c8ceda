"""The command line, mostly run inside this process: texts go to stdout, everything else to stderr, bad input gets one
sentence and exit code 2."""
import functools
import io
import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

import nanopaged
from nanopaged import LLM, BeamSearchParams, SamplingParams
from nanopaged.api.request import Request
from nanopaged.cli import chat as cli_chat
from nanopaged.cli import main as cli
from nanopaged.cli.main import main
from nanopaged.cli.status import Progress
from nanopaged.device.runner import Runner
from nanopaged.outputs import RequestMetrics

ROOT = Path(__file__).parents[2]
POOL = ["--num-blocks", "128", "--block-size", "16"]  # small, so that many engines fit beside each other
SMALL = dict(num_blocks=128, block_size=16)  # the same
ROMEO, JULIET = "ROMEO: But soft", "JULIET: Ay me"


loaded = functools.cache(LLM)


def shared_llm(model: str = "shakespeare", **options) -> LLM:
    """The engine for main in place of the class LLM: the same options get the same engine, which is loaded once. The
    engine's own seed is for requests without one, which the command line does not make. An engine on a CPU is ready at
    once; test_package.py runs the program on a GPU."""
    return loaded(model, **dict(device="cpu") | options | dict(enforce_eager=True, seed=0))


def run(*argv: str, llm_class=shared_llm) -> int:
    """Run the program and return its exit code."""
    try:
        return main(list(argv), llm_class)
    except SystemExit as exit:  # argparse's own way out, after --help
        return exit.code or 0


def run_engine(*argv: str, cwd=ROOT) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONIOENCODING": "utf-8"}
    return subprocess.run([sys.executable, str(ROOT / "engine.py"), *argv], cwd=cwd, env=env, capture_output=True,
                          encoding="utf-8", timeout=300)


def generate(prompts, **params):
    return shared_llm(**SMALL).generate(prompts, SamplingParams(**params))


def assert_refused(captured, *words: str):
    """stderr holds one sentence with the words, and stdout holds nothing."""
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert captured.err.startswith("error: ") and ". " not in captured.err and "Traceback" not in captured.err
    for word in words:
        assert word in captured.err


def nothing_left(llm: LLM) -> bool:
    manager, scheduler = llm.scheduler.block_manager, llm.scheduler
    busy = llm.requests or scheduler.running or scheduler.waiting
    return not busy and manager.num_free_blocks == manager.num_blocks


# --------------------------------------------------------------------------------------------------
# One prompt
# --------------------------------------------------------------------------------------------------

def test_one_prompt_prints_it_with_its_continuation(capsys):
    """Greedy output is LLM.generate's; stdout holds the text and a line's end, and nothing else."""
    assert run("--prompt", ROMEO, "--max-tokens", "40", "--temperature", "0", *POOL) == 0
    captured = capsys.readouterr()
    [expected] = generate(ROMEO, temperature=0, max_tokens=40)
    assert len(expected.outputs[0].token_ids) == 40
    assert captured.out == f"{ROMEO}{expected.outputs[0].text}\n"


def test_the_status_goes_to_stderr(capsys):
    assert run("--prompt", ROMEO, "--max-tokens", "20", "--temperature", "0", *POOL) == 0
    captured = capsys.readouterr()
    for word in ("shakespeare", "on cpu", "128 blocks", "20 new at ", "/s, ", ", length"):
        assert word in captured.err and word not in captured.out
    assert ROMEO not in captured.err and "error" not in captured.err


def test_the_text_streams(capsys, monkeypatch):
    """What is on stdout before each step grows as the steps are made, the prompt first."""
    seen, step = [], LLM._step
    monkeypatch.setattr(LLM, "_step", lambda llm: seen.append(capsys.readouterr().out) or step(llm))
    assert run("--prompt", ROMEO, "--max-tokens", "30", "--temperature", "0", *POOL) == 0
    [expected] = generate(ROMEO, temperature=0, max_tokens=30)
    assert seen[0] == ROMEO
    assert sum(piece != "" for piece in seen) > 20
    assert "".join(seen) + capsys.readouterr().out == f"{ROMEO}{expected.outputs[0].text}\n"


def test_sampling_options_reach_the_sampler(capsys):
    """Drawn text depends on the seed and on nothing else, and equals that of LLM.generate with the same settings."""
    settings = dict(temperature=1.3, top_p=0.9, top_k=50, min_p=0.01, seed=-7, max_tokens=25, ignore_eos=True)
    argv = ["--prompt", ROMEO, "--temperature", "1.3", "--top-p", "0.9", "--top-k", "50", "--min-p", "0.01",
            "--seed", "-7", "--max-tokens", "25", "--ignore-eos", *POOL]
    [expected] = generate(ROMEO, **settings)
    for _ in range(2):
        assert run(*argv) == 0
        assert capsys.readouterr().out == f"{ROMEO}{expected.outputs[0].text}\n"
    argv[argv.index("-7")] = "-8"
    assert run(*argv) == 0
    assert capsys.readouterr().out != f"{ROMEO}{expected.outputs[0].text}\n"


@pytest.mark.parametrize("name, value, received", [
    ("--block-size", "32", dict(block_size=32)), ("--num-blocks", "9", dict(num_blocks=9)),
    ("--max-model-len", "100", dict(max_model_len=100)), ("--max-num-seqs", "3", dict(max_num_seqs=3)),
    ("--max-num-batched-tokens", "64", dict(max_num_batched_tokens=64)), ("--dtype", "float16", dict(dtype="float16")),
    ("--device", "cpu", dict(device="cpu")), ("--attention", "torch", dict(attention="torch")),
    ("--load-format", "dummy", dict(load_format="dummy")),
    ("--gpu-memory-utilization", "0.5", dict(gpu_memory_utilization=0.5)),
    ("--no-enable-prefix-caching", None, dict(enable_prefix_caching=False)), ("--seed", "5", dict(seed=5)),
    ("--revision", "main", dict(revision="main")), ("--kv-cache-dtype", "fp8", dict(kv_cache_dtype="fp8")),
    ("--swap-space", "0.5", dict(swap_space=0.5)), ("--enforce-eager", None, dict(enforce_eager=True)),
    ("--scheduling-policy", "priority", dict(scheduling_policy="priority")),
    ("--generation-config", "vllm", dict(generation_config="vllm")), ("--tokenizer", "my/t", dict(tokenizer="my/t")),
    ("--tokenizer-revision", "v1", dict(tokenizer_revision="v1")), ("--hf-token", "t", dict(hf_token="t")),
    ("--download-dir", "d", dict(download_dir="d")),
    ("--override-generation-config", '{"top_k": 5}', dict(override_generation_config={"top_k": 5})),
    ("--skip-tokenizer-init", None, dict(skip_tokenizer_init=True)),
    ("--num-gpu-blocks-override", "9", dict(num_gpu_blocks_override=9)),
    ("--data-parallel-size", "2", dict(data_parallel_size=2)),
    ("--model", "my/model", dict(model="my/model")), ("-m", "my/model", dict(model="my/model"))])
def test_engine_options_reach_the_engine(name, value, received):
    class Asked(Exception):
        pass

    def engine(model="shakespeare", **options):
        raise Asked(dict(model=model, **options))

    def asked(*argv):
        with pytest.raises(Asked) as error:
            main(["--prompt", "x", *argv], engine)
        return error.value.args[0]

    plain = asked()
    assert asked(name, *([value] if value is not None else [])) == plain | received != plain


def test_what_is_not_given_is_left_to_the_engine():
    received = {}

    def engine(model, **options):
        received.update(options, model=model)
        raise ValueError("seen enough")

    assert run("--prompt", "x", llm_class=engine) == 2
    assert received == dict(model="shakespeare")


def asked_params(monkeypatch, *argv, **options) -> SamplingParams:
    """The sampling parameters that a command line ends in."""
    asked = []

    def read_request(llm, prompt, params, priority=0):
        asked.append(params)
        raise ValueError("seen enough")

    with monkeypatch.context() as patch:
        patch.setattr(LLM, "_read_request", read_request)
        assert run(*argv, *POOL, **options) == 2
    [params] = asked
    return params


SAMPLING_OPTIONS = {
    "--max-tokens 7": dict(max_tokens=7), "--min-tokens 3": dict(min_tokens=3),
    "--temperature 1.5": dict(temperature=1.5), "--top-k 5": dict(top_k=5), "--top-p 0.5": dict(top_p=0.5),
    "--min-p 0.1": dict(min_p=0.1), "--n 2": dict(n=2), "-n 2": dict(n=2), "-n2": dict(n=2),
    "--seed -3": dict(seed=-3), "--presence-penalty -1": dict(presence_penalty=-1),
    "--frequency-penalty 0.5": dict(frequency_penalty=0.5), "--repetition-penalty 1.1": dict(repetition_penalty=1.1),
    "--stop ACT --stop ' SCENE'": dict(stop=["ACT", " SCENE"]), "--stop-token-ids 5,6": dict(stop_token_ids=[5, 6]),
    "--include-stop-str-in-output": dict(include_stop_str_in_output=True), "--ignore-eos": dict(ignore_eos=True),
    "--no-skip-special-tokens": dict(skip_special_tokens=False), "--bad-words thou": dict(bad_words=["thou"]),
    """--logit-bias '{"5": -1.5, "7": 3}'""": dict(logit_bias={5: -1.5, 7: 3}),
    "--allowed-token-ids 3": dict(allowed_token_ids=[3])}


@pytest.mark.parametrize("argv, fields", SAMPLING_OPTIONS.items(), ids=SAMPLING_OPTIONS)
def test_sampling_options_become_sampling_parameters(monkeypatch, argv, fields):
    ours = SamplingParams(max_tokens=256, temperature=0.8, seed=0)
    assert asked_params(monkeypatch, "--prompt", "x") == ours
    assert asked_params(monkeypatch, "--prompt", "x", *shlex.split(argv)) == replace(ours, **fields) != ours


def checkpoint(folder: Path, **generation_config) -> str:
    """The bundled model with another generation_config.json."""
    for file in (ROOT / "nanopaged/shakespeare").iterdir():
        if file.name != "generation_config.json":
            (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return str(folder)


def test_the_checkpoint_may_say_the_defaults(monkeypatch, tmp_path):
    """The command line goes before what the checkpoint recommends, and the checkpoint before our defaults."""
    model = checkpoint(tmp_path, temperature=0.5, top_k=9, max_new_tokens=20)
    plain = "--prompt", "x", "--model", model
    ours = SamplingParams(max_tokens=256, temperature=0.8, seed=0)
    expected = SamplingParams(max_tokens=20, temperature=0.5, top_k=9, seed=0)
    assert asked_params(monkeypatch, *plain) == expected
    assert asked_params(monkeypatch, *plain, "--generation-config", "auto") == expected
    assert asked_params(monkeypatch, *plain, "--generation-config", "vllm") == ours
    override = "--override-generation-config", '{"temperature": 0.1}'
    made = dict(llm_class=functools.partial(LLM, device="cpu"))
    assert asked_params(monkeypatch, *plain, *override, **made) == replace(expected, temperature=0.1)
    without = "--generation-config", "vllm"
    assert asked_params(monkeypatch, *plain, *override, *without, **made) == replace(ours, temperature=0.1)
    more = "--top-k", "0", "--max-tokens", "5"
    assert asked_params(monkeypatch, *plain, *more) == replace(expected, top_k=0, max_tokens=5)
    monkeypatch.setattr(cli, "_load", lambda *_: engine)
    engine = shared_llm(**SMALL)
    for config, temperature in [(dict(do_sample=True), 0.8), ({}, 0.8), (dict(do_sample=False), 0.0)]:
        monkeypatch.setattr(engine, "default_params", config)
        assert asked_params(monkeypatch, *plain) == replace(ours, temperature=temperature)


def test_every_conversation_draws_anew(monkeypatch, chat):
    first, second = (asked_params(monkeypatch, *chat, "--prompt", "Hi").seed for _ in range(2))
    assert first != second and None not in (first, second)
    assert asked_params(monkeypatch, *chat, "--prompt", "Hi", "--seed", "5").seed == 5


def test_the_status_line_tells_of_tokens_time_and_blocks(capsys):
    argv = ["--prompt", "What news on the Rialto? " * 5, "--max-tokens", "4", *POOL]
    statuses = []
    for more in ([], [], ["--n", "2"]):
        assert run(*argv, *more) == 0
        statuses.append(capsys.readouterr().err.splitlines()[-1])
    pattern = (r"(\d+) (?:prompt )?tokens \((\d+) cached\), first token \d+\.\d\d s, "
               r"(\d+) new at \d+/s, (\d+)/128 blocks")
    assert statuses[2].startswith("1 prompt, ")
    first, second, third = (tuple(map(int, re.search(pattern, status).groups())) for status in statuses)
    num_prompt = first[0]
    assert first[1:3] == (0, 4) and first[3] >= num_prompt // 16
    assert second[1] == num_prompt // 16 * 16
    assert third[0] == 2 * num_prompt and third[2] == 8


@pytest.mark.parametrize("more", [[], ["--n", "2"]], ids=["streaming", "n = 2"])
def test_a_text_that_went_wrong_says_so(capsys, monkeypatch, more):
    make_output = Request.output

    def broken(request):
        output = make_output(request)
        for sample in output.outputs:
            if output.finished:
                sample.finish_reason, sample.stop_reason = "error", "it is not a number"
        return output

    monkeypatch.setattr(Request, "output", broken)
    assert run("--prompt", ROMEO, "--max-tokens", "3", *POOL, *more) == 1
    assert capsys.readouterr().err.count("went wrong: it is not a number") == (2 if more else 1)


@pytest.mark.parametrize("options, said", [
    ("--num-blocks 2 --block-size 16",
     "the pool of 2 blocks ended {}; raise --num-blocks or --gpu-memory-utilization"),
    ("--num-blocks 1 --block-size 16", "the pool of 1 block ended {}; raise --num-blocks or --gpu-memory-utilization"),
    ("--num-blocks 2 --block-size 16 --data-parallel-size 2",
     "the pool of 2 blocks ended {}; raise --num-blocks or --gpu-memory-utilization"),
    ("--num-blocks 128 --block-size 16 --max-model-len 24", "max_model_len 24 ended {}; raise --max-model-len"),
    ("--num-blocks 128 --block-size 16 --max-tokens 2000", "the model's limit of 1024 tokens ended {}"),
    ("--num-blocks 128 --block-size 16 --max-tokens 4", None)])
def test_the_last_line_says_what_cut_a_text(capsys, options, said):
    """max_tokens is what was asked for."""
    prompt = "what light " * 335 if "2000" in options else ROMEO  # so that the model's limit is near
    for more, texts in (([], "the text"), (["--n", "2"], "2 texts"), (["--beam-width", "2"], "2 texts")):
        assert run("--prompt", prompt, "--ignore-eos", *options.split(), *more) == 0
        last = capsys.readouterr().err.splitlines()[-1]
        assert last == said.format(texts) if said else "ended" not in last


def test_one_is_no_plural(capsys):
    assert run("--prompt", ROMEO, "--num-blocks", "20", "--block-size", "1", "--max-tokens", "1") == 0
    assert "pool of 20 blocks of 1 token, " in capsys.readouterr().err
    assert run("--prompt", "O", "--num-blocks", "1", "--block-size", "16", "--max-tokens", "1") == 0
    assert "pool of 1 block of 16 tokens, " in capsys.readouterr().err


def test_underscores_in_the_names_of_options(monkeypatch):
    assert asked_params(monkeypatch, "--prompt", "x", "--max_tokens", "7", "--min_tokens=3").max_tokens == 7
    assert cli._read_arguments(["--prompt", "a_b", "--system=--c_d", "--chat", "--model", "x"]).system == "--c_d"


def test_a_trace_on_request(capsys):
    """The trace goes to stderr, and the texts are the same. One text does not stream into it, but is printed like
    several."""
    argv = ["--prompt", ROMEO, "--prompt", "O", "--max-tokens", "5", *POOL, "--device", "cpu", "--num-blocks", "20"]
    assert run(*argv, llm_class=LLM) == 0
    plain = capsys.readouterr()
    assert run(*argv, "--trace", llm_class=LLM) == 0
    traced = capsys.readouterr()
    assert traced.out == plain.out and "step 1" in traced.err and "step 1" not in plain.err


# --------------------------------------------------------------------------------------------------
# Several texts
# --------------------------------------------------------------------------------------------------

def assert_in_order(text: str, parts: list[str]):
    position = 0
    for part in parts:
        assert part in text[position:], f"{part!r} is missing after {text[:position]!r}"
        position = text.index(part, position) + len(part)
    assert text[position:].strip() == "", "something else follows"


@pytest.mark.parametrize("prompts, n", [([ROMEO, JULIET], 1), ([ROMEO], 3), ([JULIET, ROMEO, JULIET], 2)])
def test_several_texts_are_printed_each_under_its_prompt(capsys, prompts, n):
    argv = [word for prompt in prompts for word in ("--prompt", prompt)]
    assert run(*argv, "--n", str(n), "--max-tokens", "15", "--seed", "3", "--temperature", "0.9", *POOL) == 0
    captured = capsys.readouterr()
    outputs = generate(prompts, n=n, max_tokens=15, seed=3, temperature=0.9)
    assert len({sample.text for sample in outputs[0].outputs}) == n
    assert_in_order(captured.out, [
        part for output in outputs for sample in output.outputs for part in (output.prompt, sample.text)])
    assert captured.out.count(ROMEO) == n * prompts.count(ROMEO)
    assert f"{15 * n * len(prompts)} new at " in captured.err
    assert not any(prompt in captured.err for prompt in prompts)


class Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("more", [[], ["--beam-width", "2"]], ids=["samples", "beams"])
def test_several_prompts_have_a_progress_bar(capsys, monkeypatch, more):
    argv = ["--prompt", ROMEO, "--prompt", JULIET, "--max-tokens", "5", "--device", "cpu", *more]
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    assert run(*argv, *POOL) == 0
    assert re.search(r"\r\[\.{20}\] 0/2 prompts, \d:\d\d, \d+ tokens/s", screen.getvalue())
    assert re.fullmatch("2 prompts, .*\n", screen.getvalue().split("\r")[-1])
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    assert run(*argv, "--num-blocks", "20", "--trace", llm_class=LLM) == 0
    assert "step 1" in screen.getvalue() and "\r" not in screen.getvalue()


def test_greedy_texts_of_several_prompts_are_those_of_each_alone(capsys):
    alone = []
    for prompt in (ROMEO, JULIET):
        assert run("--prompt", prompt, "--temperature", "0", "--max-tokens", "20", *POOL) == 0
        alone.append(capsys.readouterr().out.removeprefix(prompt).removesuffix("\n"))
    assert run("--prompt", ROMEO, "--prompt", JULIET, "--temperature", "0", "--max-tokens", "20", *POOL) == 0
    assert_in_order(capsys.readouterr().out, [ROMEO, alone[0], JULIET, alone[1]])


# --------------------------------------------------------------------------------------------------
# Bad input
# --------------------------------------------------------------------------------------------------

INTEGER_OPTIONS = ["--max-tokens", "--top-k", "--n", "--seed", "--block-size", "--num-blocks", "--max-model-len",
                   "--max-num-seqs", "--max-num-batched-tokens", "--min-tokens", "--logprobs", "--prompt-logprobs",
                   "--beam-width"]
FLOAT_OPTIONS = ["--temperature", "--top-p", "--min-p", "--gpu-memory-utilization", "--presence-penalty",
                 "--frequency-penalty", "--repetition-penalty", "--length-penalty", "--swap-space"]
LIST_OPTIONS = ["--stop-token-ids", "--allowed-token-ids"]
OBJECT_OPTIONS = ["--logit-bias", "--chat-template-kwargs"]
OUT_OF_RANGE = {
    "--max-tokens": ["0", "-1"], "--n": ["0", "-1"], "--top-k": ["-2", str(2**63)],
    "--seed": [str(2**63), str(-2**63 - 1)],
    "--temperature": ["-0.1", "nan", "inf"], "--top-p": ["0", "-0.1", "1.1", "nan", "inf"],
    "--min-p": ["-0.1", "1.1", "nan", "inf"],
    "--block-size": ["0", "-16"], "--num-blocks": ["0", "-1", str(10**20)], "--max-model-len": ["0", "-1", "1025"],
    "--max-num-seqs": ["0", "-1"], "--max-num-batched-tokens": ["0", "-1"],
    "--gpu-memory-utilization": ["0", "-0.5", "1.1", "nan", "inf"],
    "--dtype": ["int8", "", "Float32"], "--device": ["tpu", "", "cuda:99", "cuda:x"], "--attention": ["flash", ""],
    "--load-format": ["gguf", ""], "--min-tokens": ["-1", "2"], "--stop": [""], "--bad-words": [""],
    "--presence-penalty": ["2.1", "-2.1", "nan"], "--frequency-penalty": ["2.1", "-2.1", "nan"],
    "--repetition-penalty": ["0", "-1", "nan", "inf"], "--stop-token-ids": ["-1"],
    "--allowed-token-ids": ["-1"], "--logit-bias": ['{"-1": 1}', '{"x": 1}', '{"5": "a"}', '{"5": NaN}'],
    "--kv-cache-dtype": ["int4", ""], "--swap-space": ["-1", "nan", "inf"], "--scheduling-policy": ["lifo", ""],
    "--generation-config": ["checkpoint", ""], "--beam-width": ["0", "-1"]}


@pytest.mark.parametrize("name, value", [
    *((name, value) for name in INTEGER_OPTIONS for value in ("many", "1.5", "", "nan")),
    *((name, value) for name in FLOAT_OPTIONS for value in ("warm", "", "1,5", "0.5x")),
    *((name, value) for name in LIST_OPTIONS for value in ("five", "", "5,", "5 6", "[5]", "1.5")),
    *((name, value) for name in OBJECT_OPTIONS for value in ("five", "", "5", "[5]", "{", "{5: 1}"))])
def test_a_wrong_type_is_refused(capsys, name, value):
    assert run("--prompt", "x", name, value) == 2
    assert_refused(capsys.readouterr(), name, repr(value))


@pytest.mark.parametrize("name, value", [(name, value) for name, values in OUT_OF_RANGE.items() for value in values])
def test_a_value_out_of_range_is_refused(capsys, name, value):
    pool = POOL if name != "--num-blocks" else []
    assert run("--prompt", "x", "--max-tokens", "1", "--enforce-eager", *pool, name, value, llm_class=LLM) == 2
    field = name.removeprefix("--").replace("-", "_")
    captured = capsys.readouterr()
    assert_refused(captured, value if name != "--logit-bias" else "")
    assert name in captured.err or field in captured.err


@pytest.mark.parametrize("argv, word", [
    ([], "--prompt"), (["--max-tokens", "8"], "--prompt"), (["--prompt"], "--prompt"),
    (["--prompt", "x", "--frobnicate"], "--frobnicate"), (["--prompt", "x", "--frobnicate", "7"], "--frobnicate"),
    (["--prompt", "x", "-p", "2"], "-p"),
    (["--prompt", "x", "--max-tok", "8"], "--max-tok"),  # no abbreviations: what they mean changes as options are added
    (["--prompt", "x", "more"], "more"), (["--prompt", "x", "--top-k"], "--top-k"),
    (["hi"], 'hi; write a prompt as --prompt "TEXT"'), (["--prompt", "But", "soft, what"], '--prompt "TEXT"'),
    (["--prompt", "x", "--no-enable-prefix-caching=yes"], "--no-enable-prefix-caching"),
    (["--prompt", "x", "--ignore-eos=1"], "--ignore-eos"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_unknown_incomplete_and_missing_options_are_refused(capsys, argv, word):
    assert run(*argv) == 2
    assert_refused(capsys.readouterr(), word)


@pytest.mark.parametrize("typed, meant", [
    ("--max-tokes", "--max-tokens"), ("--max_tokes=8", "--max-tokens"), ("--tempature", "--temperature"),
    ("--modle", "--model"), ("--no-prefix-caching", "--no-enable-prefix-caching"), ("--frobnicate", None),
    ("-q", None)])
def test_a_typo_gets_a_hint(capsys, typed, meant):
    assert run("--prompt", "x", typed, "8") == 2
    captured = capsys.readouterr()
    assert_refused(captured, typed.replace("_", "-"), f"; did you mean {meant}?" if meant else "")
    assert ("did you mean" in captured.err) == (meant is not None)


def test_the_status_lines_fit_100_columns(capsys):
    def report(num_prompt: int, num_new: int, drafting=None, **how) -> list[str]:
        manager = SimpleNamespace(num_prompt_tokens=num_prompt, num_cached_tokens=num_prompt * 3 // 4, num_blocks=16384,
                                  block_size=16, num_free_blocks=0, most_blocks_held=0)
        llm = SimpleNamespace(scheduler=SimpleNamespace(block_manager=manager, num_generated_tokens=num_new),
                              config=SimpleNamespace(max_position_embeddings=2**20), max_model_len=2**18,
                              limited_by="pool", drafting=drafting)
        progress = Progress(llm)
        progress.before = 0, 0, 0
        progress.started, progress.first, progress.num_cut = time.perf_counter() - 12.3, time.perf_counter(), 1
        return progress.report(**how).splitlines()

    assert len(report(1000, 2000, end="length")) == 2  # the second line is about the pool
    for numbers in ((1, 1), (10**3, 10**3), (10**9, 10**9)):
        for how in (dict(end="length", after_first=True), dict(start="1000000 lines, 999999 of them done before")):
            for drafting in (None, SimpleNamespace(metrics=RequestMetrics(*numbers))):
                assert all(len(line) <= 100 for line in report(*numbers, drafting, **how))
    assert run("--prompt", ROMEO, "--max-tokens", "2", "-n", "2", *POOL) == 0
    lines = capsys.readouterr().err.splitlines()
    assert all(len(line) <= 100 for line in lines) and lines[-1].startswith("1 prompt, 14 tokens (")


@pytest.mark.parametrize("argv, words", [
    ("--chat --prompts FILE.txt", ["--chat", "--prompts"]),
    ("--prompt x --prompts FILE.txt", ["--prompt", "--prompts"]),
    ("--prompts FILE.txt --beam-width 2", ["--prompts", "--beam-width"]),
    ("--prompts FILE.txt --no-history", ["--no-history", "--chat"]),
    ("--prompts FILE.txt --system S", ["--system", "--chat"]), ("--prompt x --system S", ["--system", "--chat"]),
    ("--prompt x --output OUT.jsonl", ["--output", "--prompts"]), ("--output OUT.jsonl", ["--prompts"]),
    ("--chat --output OUT.jsonl", ["--output", "--prompts"]),
    ("--prompts FILE.txt --output FILE.txt", ["--output", "FILE.txt"]),
    ("--prompts FILE.txt --output ./FILE.txt", ["--output", "FILE.txt"]),
    ("--prompt x --chat-template FILE.txt", ["--chat-template", "--chat", "--prompts"]),
    ("--prompt x --chat-template-kwargs {}", ["--chat-template-kwargs", "--chat"]),
    ("--chat --prompt x --chat-template nowhere.jinja", ["--chat-template", "nowhere.jinja", "No such file"]),
    ("--chat --prompt x --chat-template .", ["--chat-template", "directory"]),
    ("--chat --prompt x --chat-template latin.txt", ["--chat-template", "latin.txt", "UTF-8"]),
    ("--prompt x --logprobs 2", ["--logprobs", "--output"]),
    ("--prompts FILE.txt --prompt-logprobs 2", ["--prompt-logprobs", "--output"]),
    ("--prompt x --length-penalty 2", ["--length-penalty", "--beam-width"]),
    ("--prompt x --beam-width 2 --n 2", ["--n", "--beam-width"]),
    ("--prompt x --beam-width 2 --temperature 0 --stop ACT", ["--temperature", "--stop", "--beam-width"]),
    ("--prompt x --beam-width 2 --no-skip-special-tokens", ["--no-skip-special-tokens", "--beam-width"]),
    ("--prompt x --beam-width 2 --length-penalty nan", ["length_penalty", "nan"]),
    ("--prompt x --beam-width 2 --length-penalty 31", ["length_penalty", "31"]),
    ("--prompt x --beam-width 2 --max-tokens 0", ["max_tokens", "0"]),
    ("--prompt x --max-tokens 4 --min-tokens 5", ["min_tokens", "max_tokens 4", "5"]),
    ("--prompt x --min-tokens 300 --generation-config vllm", ["max_tokens 256"]),
    ("--chat --model x", ["stdin", "--prompt"])])  # the tests' stdin is empty
def test_options_that_do_not_go_together(capsys, tmp_path, monkeypatch, argv, words):
    """Such options are refused before anything is loaded."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE.txt").write_text("ROMEO:\n")
    (tmp_path / "latin.txt").write_bytes(b"\xe9t\xe9")
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert run(*argv.split(), llm_class=lambda *args, **options: pytest.fail("it is loaded")) == 2
    assert_refused(capsys.readouterr(), *words)
    assert not (tmp_path / "OUT.jsonl").exists()


@pytest.mark.parametrize("more", [[], ["--prompt", "y"]], ids=["one prompt", "two prompts"])
def test_models_that_are_not_there(capsys, tmp_path, monkeypatch, more):
    if find_spec("huggingface_hub"):  # otherwise the sentence asks for that package
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    file = tmp_path / "model.gguf"
    file.touch()
    for model, word in [("no/such", "no/such"), (str(tmp_path / "nowhere"), "nowhere"), (str(tmp_path), "config.json"),
                        (str(file), "model.gguf")]:
        assert run("--prompt", "x", *more, "--model", model, llm_class=LLM) == 2
        assert_refused(capsys.readouterr(), word)


@pytest.mark.parametrize("files, word", [
    ({"config.json": "{"}, "config.json"), ({"config.json": "[]"}, "config.json"),
    ({"config.json": "{}"}, "config.json"),
    ({"config.json": (ROOT / "nanopaged/shakespeare/config.json").read_text()}, "model.safetensors")],
    ids=["broken json", "no object", "empty", "no weights"])
def test_a_damaged_checkpoint_is_refused(capsys, tmp_path, files, word):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert run("--prompt", "x", "--model", str(tmp_path), *POOL, llm_class=LLM) == 2
    assert_refused(capsys.readouterr(), *([word] if word != "config.json" else []))


def test_a_damaged_tokenizer_is_no_matter_for_token_ids(tmp_path):
    model = checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").write_text("{}")
    llm = LLM(model, enforce_eager=True, **SMALL)
    assert len(llm.generate([5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True))[0].outputs[0].token_ids) == 4
    with pytest.raises(ValueError, match="tokenizer.json that cannot be read"):
        llm.generate(ROMEO)


@pytest.mark.parametrize("argv, word", [
    (["--prompt", ""], "empty"), (["--prompt", ROMEO, "--prompt", ""], "empty"),
    (["--prompt", "", "--n", "2"], "empty"), (["--prompt", "what light " * 2000], "max_model_len 1024"),
    (["--prompt", ROMEO, "--prompt", "la " * 9000], "max_model_len 1024"),
    (["--prompt", "what light through yonder window breaks", "--max-model-len", "4"], "max_model_len 4"),
    (["--prompt", "broken \udce9 text"], "surrogate"), (["--prompt", "x", "--skip-tokenizer-init"], "tokenizer"),
    (["--prompt", "", "--beam-width", "2"], "empty"), (["--prompt", "x", "--allowed-token-ids", "5,1024"], "1024"),
    (["--prompt", "x", "--logit-bias", '{"99999": 1}'], "99999"), (["--prompt", "x", "--chat"], "--chat-template")],
    ids=["empty", "second is empty", "empty, n = 2", "too long", "second is too long", "longer than max_model_len",
         "lone surrogate", "no tokenizer", "empty, beams", "no such token", "no such token either", "no chat template"])
def test_prompts_that_can_never_run(capsys, argv, word):
    """The model is loaded by then, which stderr may say; the error comes last, and stdout stays empty."""
    assert run(*argv, *POOL) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    *status, error = captured.err.splitlines()
    assert error.startswith("error: ") and word in error and len(error) < 300
    assert len(status) <= 1 and not any("error" in line for line in status)


def test_a_bad_prompt_leaves_a_usable_engine(capsys):
    assert run("--prompt", "la " * 9000, "--temperature", "0", *POOL) == 2
    capsys.readouterr()
    assert run("--prompt", ROMEO, "--temperature", "0", "--max-tokens", "5", *POOL) == 0
    assert capsys.readouterr().out.startswith(ROMEO)


# --------------------------------------------------------------------------------------------------
# Edges that are no errors
# --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("argv", [
    ["--max-tokens", "1"], ["--max-tokens", "99999999", "--max-model-len", "24"], ["--temperature", "1e-6"],
    ["--top-k", "99999999"], ["--top-k", "-1"], ["--top-p", "1e-9"], ["--min-p", "1"],
    ["--seed", str(2**63 - 1), "--n", "2"], ["--seed", str(-2**63)], ["--block-size", "1"],
    ["--block-size", "256", "--num-blocks", "1"], ["--max-num-seqs", "1", "--n", "3"],
    ["--max-num-batched-tokens", "1"], ["--no-enable-prefix-caching"], ["--dtype", "float16"],
    ["--attention", "torch"]],
    ids=" ".join)
def test_edge_values_run(capsys, argv):
    assert run("--prompt", ROMEO, "--max-tokens", "4", *POOL, *argv) == 0
    captured = capsys.readouterr()
    assert captured.out.count(ROMEO) == (int(argv[-1]) if "--n" in argv else 1)
    assert "error" not in captured.err


@pytest.mark.parametrize("prompt", ["\n", " ", "ÄÖÜ ß", "日本語 🙂", "\x00", "two\nlines\n"], ids=repr)
def test_any_text_is_a_prompt(capsys, prompt):
    assert run(f"--prompt={prompt}", "--max-tokens", "4", "--temperature", "0", *POOL) == 0
    [expected] = generate(prompt, max_tokens=4, temperature=0)
    assert capsys.readouterr().out == f"{prompt}{expected.outputs[0].text}\n"


def test_a_dict_may_say_that_there_are_no_token_ids():
    prompts = [{"prompt": ROMEO, "prompt_token_ids": None}, ROMEO]
    first, second = generate(prompts, max_tokens=4, temperature=0)
    assert first.prompt == ROMEO and first.outputs[0].text == second.outputs[0].text


def test_the_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"nanopaged {nanopaged.__version__}\n"


def test_help_fits_a_screen_and_names_every_option(capsys):
    assert run("--help") == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert captured.err == "" and len(lines) <= 50 and max(map(len, lines)) <= 100
    named = set(re.findall(r"(?<![\w-])--[a-z-]+", captured.out))
    known = {cli._option(name, kind) for name, kind in
             (cli.SAMPLING | cli.STRUCTURED | cli.ENGINE | cli.OTHERS).items()}
    assert named - {"--version"} == known
    assert named >= {*INTEGER_OPTIONS, *FLOAT_OPTIONS, *LIST_OPTIONS, *OBJECT_OPTIONS, *OUT_OF_RANGE}


def test_help_tells_the_defaults():
    """Each of these options has one default, in brackets on its line."""
    sampling, engine = SamplingParams(max_tokens=256, temperature=0.8, seed=0), LLM.__init__.__kwdefaults__
    lines = [line for line in cli.HELP.splitlines() if line.startswith("  -")]
    for name in ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "n", "seed", "presence_penalty",
                 "frequency_penalty", "repetition_penalty"):
        line = next(line for line in lines if cli._option(name) + " " in line)
        assert re.search(rf"\[.*\b{getattr(sampling, name):g}\b.*\]", line), line
    for name in ("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "swap_space", "scheduling_policy",
                 "dtype", "device", "kv_cache_dtype", "attention", "load_format"):
        line = next(line for line in lines if cli._option(name) + " " in line)
        assert re.search(rf"\[.*\b{engine[name]}\b.*\]", line), line
    assert BeamSearchParams(2).length_penalty == 1.0 and "shorter [1.0]" in cli.HELP


def test_sampling_parameters_without_an_option():
    """Functions have no place on a command line, and neither have the refused parameters; every other one has an
    option."""
    assert {field.name for field in fields(SamplingParams)} - set(cli.SAMPLING) == {
        "logits_processors", "detokenize", "structured_outputs", "guided_decoding"}
    assert set(LLM.__init__.__kwdefaults__) == set(cli.ENGINE)


# --------------------------------------------------------------------------------------------------
# Streams that are closed or full
# --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("argv", [["--chat"], ["--prompts", "-"]], ids=" ".join)
def test_a_closed_stdin(capsys, monkeypatch, argv):
    """After <&- in the shell the interpreter has None for stdin."""
    monkeypatch.setattr(sys, "stdin", None)
    assert run(*argv, llm_class=None) == 2
    assert_refused(capsys.readouterr(), "stdin is closed", "--prompt TEXT")


@pytest.mark.parametrize("name", ["stdin", "stdout", "stderr"])
def test_a_closed_stream_that_is_not_needed(capsys, monkeypatch, name):
    monkeypatch.setattr(sys, name, None)
    assert run("--prompt", ROMEO, "--max-tokens", "4", "--temperature", "0", *POOL) == 0
    captured, [expected] = capsys.readouterr(), generate(ROMEO, max_tokens=4, temperature=0)
    assert captured.out == ("" if name == "stdout" else f"{ROMEO}{expected.outputs[0].text}\n")
    assert ("4 new at" in captured.err) == (name != "stderr") and "error" not in captured.err


class Full(io.StringIO):
    """A stream as /dev/full is: it still has what it could not write when the interpreter flushes it at its end."""

    def flush(self):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("argv, code", [(["--max-tokens", "4"], 0), (["--max-tokens", "4", "--n", "2"], 0),
                                        (["--top-p", "2"], 2)], ids=["one text", "two texts", "an error"])
def test_what_a_full_stderr_cannot_take_is_lost(capsys, monkeypatch, argv, code):
    monkeypatch.setattr(sys, "stderr", Full())
    assert run("--prompt", ROMEO, *argv, *POOL) == code
    sys.stderr.flush()
    captured = capsys.readouterr()
    assert captured.out.count(ROMEO) == (0 if code else argv.count("--n") + 1) and captured.err == ""


# --------------------------------------------------------------------------------------------------
# Ctrl-C
# --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("argv", [
    ["--prompt", ROMEO], ["--prompt", ROMEO, "--prompt", JULIET], ["--prompt", ROMEO, "--n", "3"]],
    ids=["streaming", "two prompts", "n = 3"])
@pytest.mark.parametrize("when", [0, 4])
def test_an_interrupt_inside_a_step_ends_cleanly(capsys, monkeypatch, argv, when):
    steps, launch = [], Runner.launch

    def interrupted(runner, step):
        if len(steps) == when:
            raise KeyboardInterrupt
        steps.append(step)
        return launch(runner, step)

    def remembered_llm(*args, **kwargs):
        engines.append(shared_llm(*args, **kwargs))
        return engines[-1]

    options = dict(zip(["--temperature", "--max-tokens", *POOL[::2]], ["0", "50", *POOL[1::2]]))
    options = [word for pair in options.items() for word in pair]
    engines = []
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "launch", interrupted)
        code = run(*argv, *options, llm_class=remembered_llm)
    captured = capsys.readouterr()
    assert code == 130 and len(steps) == when
    assert "Traceback" not in captured.err and "error" not in captured.err
    assert nothing_left(engines[0])
    if len(argv) == 2:
        [expected] = generate(ROMEO, temperature=0, max_tokens=50)
        assert captured.out.startswith(ROMEO) and captured.out.endswith("\n")
        assert f"{ROMEO}{expected.outputs[0].text}".startswith(captured.out[:-1])
    else:
        assert captured.out == ""
    assert run("--prompt", ROMEO, "--temperature", "0", "--max-tokens", "5", *POOL) == 0  # with the same engine


def test_an_interrupt_while_the_model_loads(capsys):
    def engine(*args, **options):
        raise KeyboardInterrupt
    assert run("--prompt", "x", llm_class=engine) == 130
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err


# --------------------------------------------------------------------------------------------------
# Beams
# --------------------------------------------------------------------------------------------------

def test_beams_with_their_scores(capsys):
    argv = ["--prompt", ROMEO, "--prompt", JULIET, "--beam-width", "3", "--max-tokens", "6"]
    assert run(*argv, "--length-penalty", "0.5", "--ignore-eos", *POOL) == 0
    captured = capsys.readouterr()
    params = BeamSearchParams(3, 6, length_penalty=0.5, ignore_eos=True)
    outputs = shared_llm(**SMALL).beam_search([ROMEO, JULIET], params)
    assert_in_order(captured.out, [f"=== {output.prompt!r} [{beam.index}] score {beam.score:.4f}\n{beam.text}\n"
                                   for output in outputs for beam in output.outputs])
    assert captured.out.count("===") == 6
    assert "36 new at" in captured.err and "2 prompts, " in captured.err
    assert run(*argv, *POOL) == 0
    assert capsys.readouterr().out != captured.out


def test_one_beam_is_greedy(capsys):
    assert run("--prompt", ROMEO, "--beam-width", "1", "--max-tokens", "8", *POOL) == 0
    [expected] = generate(ROMEO, temperature=0, max_tokens=8)
    assert f"\n{expected.outputs[0].text}\n" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------
# Chat
# --------------------------------------------------------------------------------------------------

TEMPLATE = """{% for message in messages %}{{ message.role | upper }}:
{{ message.content }}

{% endfor %}{% if add_generation_prompt %}{{ speaker or 'ASSISTANT' }}:
{% endif %}"""


@pytest.fixture
def chat(tmp_path) -> list[str]:
    """Options for a greedy chat with the bundled model, which has no chat template."""
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    return ["--chat", "--chat-template", str(tmp_path / "chat.jinja"), "--temperature", "0", *POOL]


def answer_to(*turns: str, max_tokens: int = 12, **options) -> str:
    """The model's answer to a conversation, which is a list of the texts of user, assistant, user ..."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    llm = shared_llm(**SMALL)
    prompt = llm.chat_prompt(messages, chat_template=TEMPLATE, **options)
    return llm.generate(prompt, SamplingParams(temperature=0, max_tokens=max_tokens))[0].outputs[0].text


def test_chat_answers_a_message(capsys, chat):
    """The answer alone streams to stdout."""
    assert run(*chat, "--prompt", "Who is there?", "--max-tokens", "12") == 0
    captured = capsys.readouterr()
    assert captured.out == answer_to("Who is there?") + "\n"
    assert "12 new at" in captured.err and "Who" not in captured.err


def test_chat_with_a_system_message_and_variables(capsys, chat):
    more = "--system", "Brief!", "--chat-template-kwargs", '{"speaker": "JULIET"}'
    assert run(*chat, "--prompt", "Hi", "--max-tokens", "12", *more) == 0
    messages = [{"role": "system", "content": "Brief!"}, {"role": "user", "content": "Hi"}]
    llm = shared_llm(**SMALL)
    prompt = llm.chat_prompt(messages, chat_template=TEMPLATE, chat_template_kwargs={"speaker": "JULIET"})
    assert prompt["prompt"] == "SYSTEM:\nBrief!\n\nUSER:\nHi\n\nJULIET:\n"
    [expected] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=12))
    assert capsys.readouterr().out == expected.outputs[0].text + "\n"


def test_several_messages_are_conversations_of_their_own(capsys, chat):
    assert run(*chat, "--prompt", "Who is there?", "--prompt", "Hi", "--max-tokens", "12") == 0
    assert_in_order(capsys.readouterr().out, [f"=== {text!r}\n{answer_to(text)}\n" for text in ("Who is there?", "Hi")])
    assert run(*chat[:3], *POOL, "--prompt", "Hi", "--max-tokens", "12", "--beam-width", "2") == 0
    assert "=== 'Hi' [1] score -" in capsys.readouterr().out


def test_what_is_piped_in_is_one_message(capsys, chat, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who\nis there?\n"))
    assert run(*chat, "--max-tokens", "12") == 0
    assert capsys.readouterr().out == answer_to("Who\nis there?") + "\n"


def test_an_answer_is_as_long_as_the_model_likes(monkeypatch, chat):
    assert asked_params(monkeypatch, *chat, "--prompt", "Hi").max_tokens is None
    assert asked_params(monkeypatch, *chat, "--prompt", "Hi", "--max-tokens", "3").max_tokens == 3


def test_a_template_that_refuses(capsys, chat, tmp_path):
    (tmp_path / "chat.jinja").write_text("{{ raise_exception('no questions') }}")
    assert run(*chat, "--prompt", "Hi") == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.splitlines()[-1].startswith("error: the chat template refuses")
    (tmp_path / "chat.jinja").write_text("")
    assert run(*chat, "--prompt", "Hi") == 2
    assert "empty" in capsys.readouterr().err


class Terminal:
    """A stand-in for input(): it gives the lines, raises what is to be raised, and ends with Ctrl-D."""

    def __init__(self, monkeypatch, *lines):
        self.lines, self.at_each = list(lines), []
        monkeypatch.setattr("builtins.input", self.read)
        monkeypatch.setattr(sys, "stdin", self)

    def isatty(self) -> bool:
        return True

    def read(self, prompt: str = "") -> str:
        line = self.lines.pop(0) if self.lines else EOFError
        if isinstance(line, str):
            return line
        raise line


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch) -> Path:
    """The history file of the tests' conversations."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "nanopaged" / "chat_history.jsonl"


def cached_tokens(err: str) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in re.findall(r"(\d+) prompt tokens \((\d+) cached", err)]


def test_a_conversation(capsys, chat, monkeypatch):
    """Every question comes with the turns before it, whose blocks are in the pool. Empty lines are no questions."""
    Terminal(monkeypatch, "What is your name?", "", "  ", "Whence come you?", "And whither?")
    assert run(*chat, "--max-tokens", "12") == 0
    captured = capsys.readouterr()
    turns = []
    for question in ("What is your name?", "Whence come you?", "And whither?"):
        turns += [question, answer_to(*turns, question)]
    assert captured.out == "".join(answer + "\n" for answer in turns[1::2])
    (first_prompt, _), (second_prompt, second), (third_prompt, third) = cached_tokens(captured.err)
    assert first_prompt - 16 < second < second_prompt and second_prompt - 16 < third < third_prompt
    assert captured.err.endswith("> \n") and "error" not in captured.err and nothing_left(shared_llm(**SMALL))


def test_quotes_begin_and_end_a_message_of_several_lines(capsys, chat, monkeypatch):
    Terminal(monkeypatch, '"""Who', "", 'is there?"""', '"""', " Hi", '"""', '"""one line"""', '"""', "dropped",
             KeyboardInterrupt, "Go on.", '"""', "no end")
    assert run(*chat, "--max-tokens", "12") == 0
    turns = []
    for question in ("Who\n\nis there?", " Hi", "one line", "Go on."):
        turns += [question, answer_to(*turns, question)]
    assert capsys.readouterr().out == "".join(answer + "\n" for answer in turns[1::2])


def test_commands_of_a_conversation(capsys, chat, monkeypatch):
    """/clear forgets the turns and not the system message; other words after a slash are messages."""
    asked, prompt_of = [], LLM.chat_prompt
    monkeypatch.setattr(LLM, "chat_prompt", lambda llm, messages, **how: (
        asked.append([message["content"] for message in messages]) or prompt_of(llm, messages, **how)))
    Terminal(monkeypatch, "Hi", "/clear", "/etc/hosts is what?", "/?", "/quit", "/bye ", AssertionError("asked again"))
    assert run(*chat, "--max-tokens", "4", "--system", "Brief!") == 0
    captured = capsys.readouterr()
    assert asked[1:] == [["Brief!", "Hi"], ["Brief!", "/etc/hosts is what?"]]  # the first is a trial
    assert "forgotten, but not the system message" in captured.err and "no command /quit" in captured.err
    assert all(word in captured.err for word in ('"""', "/clear ", "/bye ", "/? "))


def test_messages_are_kept_for_the_next_session(capsys, chat, monkeypatch, state):
    """In a file of the user alone. An entry of several lines is one entry; commands are none."""
    pytest.importorskip("readline")
    monkeypatch.setattr(cli_chat, "readline", editor := SimpleNamespace(entries=[]))
    editor.parse_and_bind = editor.set_auto_history = lambda _: None
    editor.clear_history, editor.add_history = editor.entries.clear, editor.entries.append
    Terminal(monkeypatch, "Hi", '"""two', 'lines\u2028"""', "/?", " ")
    assert run(*chat, "--max-tokens", "1") == 0
    assert state.stat().st_mode & 0o777 == 0o600 and state.parent.stat().st_mode & 0o777 == 0o700
    state.chmod(0o644)
    Terminal(monkeypatch, "And now?")
    assert run(*chat, "--max-tokens", "1") == 0
    assert editor.entries == ["Hi", "two\nlines\u2028", "And now?"] and state.stat().st_mode & 0o777 == 0o600
    state.write_text('"a"\nbroken\n5\n' + "".join(f'"{i}"\n' for i in range(2500)))
    kept = state.read_bytes()
    Terminal(monkeypatch, "Secret")
    assert run(*chat, "--max-tokens", "1", "--no-history") == 0
    assert state.read_bytes() == kept and editor.entries == ["Secret"]
    Terminal(monkeypatch)
    assert run(*chat, "--max-tokens", "1") == 0
    assert editor.entries == [str(i) for i in range(1500, 2500)] and state.read_text().count("\n") == 1000


def test_a_history_that_cannot_be_kept_is_no_error(capsys, chat, monkeypatch, state):
    state.parent.parent.write_text("a file where a directory should be")
    Terminal(monkeypatch, "Hi", "Hi")
    assert run(*chat, "--max-tokens", "1") == 0
    assert capsys.readouterr().err.count("no history of messages is kept") == 1


def test_a_conversation_with_a_system_message_streams(capsys, chat, monkeypatch):
    Terminal(monkeypatch, "Hi")
    seen, step = [], LLM._step
    monkeypatch.setattr(LLM, "_step", lambda llm: seen.append(capsys.readouterr().out) or step(llm))
    assert run(*chat, "--max-tokens", "9", "--system", "Be brief.") == 0
    assert sum(piece != "" for piece in seen) > 4


def test_ctrl_c_stops_an_answer_and_ctrl_d_leaves(capsys, chat, monkeypatch):
    """The part of an answer that came before Ctrl-C belongs to the conversation; a question without any answer does
    not."""
    Terminal(monkeypatch, "Speak, speak!", "Too soon.", KeyboardInterrupt, "Go on.")
    steps, step = [], LLM._step

    def interrupted(llm):
        steps.append(llm)
        if len(steps) in (6, 7):  # after five tokens of the first answer, and before the second
            raise KeyboardInterrupt
        return step(llm)

    with monkeypatch.context() as patch:
        patch.setattr(LLM, "_step", interrupted)
        assert run(*chat, "--max-tokens", "12") == 0
    captured = capsys.readouterr()
    half = answer_to("Speak, speak!", max_tokens=5)
    assert captured.out == f"{half}\n\n{answer_to('Speak, speak!', half, 'Go on.')}\n"
    assert captured.err.count("stopped") == 2 and captured.err.count("Ctrl-D leaves") == 2
    assert nothing_left(shared_llm(**SMALL))


def test_a_bad_question_does_not_end_the_conversation(capsys, chat, monkeypatch):
    Terminal(monkeypatch, "Who is there?", "la " * 2000, "broken \udce9 text", "Hi")
    assert run(*chat, "--max-tokens", "12") == 0
    captured = capsys.readouterr()
    first = answer_to("Who is there?")
    assert captured.out == f"{first}\n{answer_to('Who is there?', first, 'Hi')}\n"
    assert captured.err.count("error: ") == 2 and "max_model_len" in captured.err and "surrogate" in captured.err


def test_a_conversation_may_go_on_for_ever(capsys, chat, monkeypatch):
    """The oldest part of the conversation is forgotten, and the system message is not."""
    asked, prompt_of = [], LLM.chat_prompt
    monkeypatch.setattr(LLM, "chat_prompt", lambda llm, messages, **how: (
        asked.append(messages) or prompt_of(llm, messages, **how)))
    Terminal(monkeypatch, *(f"Question {i}, my lord?" for i in range(8)))
    assert run(*chat, "--max-tokens", "12", "--system", "Brief!", "--max-model-len", "96") == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") >= 8 and "error" not in captured.err and captured.err.count("forgotten") >= 4
    roles = ["system", *["user", "assistant"] * (len(asked[-1]) // 2 - 1), "user"]
    assert [message["role"] for message in asked[-1]] == roles
    assert asked[-1][0]["content"] == "Brief!" and asked[-1][-1]["content"] == "Question 7, my lord?"
    assert all(prompt <= 72 for prompt, _ in cached_tokens(captured.err))


def test_nothing_is_forgotten_for_a_question_that_does_not_fit(capsys, chat, monkeypatch):
    Terminal(monkeypatch, "Who is there?", "la " * 2000, "Hi")
    assert run(*chat, "--max-tokens", "12") == 0
    captured = capsys.readouterr()
    assert captured.out.endswith(answer_to("Who is there?", answer_to("Who is there?"), "Hi") + "\n")
    assert captured.err.count("error: ") == 1 and "forgotten" not in captured.err


@pytest.mark.parametrize("more, words", [
    ("--n 2", ["--n", "conversation"]), ("--beam-width 2", ["--beam-width", "conversation"]),
    ("--output OUT.jsonl", ["--output"])])
def test_options_that_a_conversation_cannot_have(capsys, chat, monkeypatch, more, words):
    Terminal(monkeypatch)
    assert run(*chat[:3], *more.split()) == 2
    assert_refused(capsys.readouterr(), *words)


@pytest.mark.parametrize("more", [[], ["--prompt", "Hi"]], ids=["conversation", "message"])
def test_no_template_no_conversation(capsys, monkeypatch, tmp_path, more):
    """The program says so before it asks for anything; of the bundled model before it loads anything."""
    Terminal(monkeypatch, AssertionError("asked"))
    assert run("--chat", *more, llm_class=lambda *_, **__: pytest.fail("it is loaded")) == 2
    assert_refused(capsys.readouterr(), "bundled model cannot chat", "--model Qwen/Qwen3-0.6B", "--chat-template")
    assert run("--chat", *more, "--model", checkpoint(tmp_path), *POOL) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "--chat-template" in captured.err


def test_lines_that_are_pasted_together_are_one_message():
    """A terminal sends the marks of a paste around the lines, and carriage returns between them."""
    pytest.importorskip("readline")
    pty = pytest.importorskip("pty")
    code = ("from nanopaged.cli.chat import Keyboard; keyboard = Keyboard(None); "
            "print(repr(keyboard.read_message()), repr(keyboard.read_message()))")
    master, slave = pty.openpty()
    child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=slave, stdout=slave, stderr=slave,
                             env=os.environ | {"TERM": "xterm", "PYTHONIOENCODING": "utf-8", "INPUTRC": os.devnull})
    os.close(slave)
    try:
        for keys in (b"\x1b[200~def f():\r    return 5\x1b[201~\r", b"Hi\r"):
            shown = ""
            while "> " not in shown:
                shown += os.read(master, 10_000).decode()
            assert "\x1b[?2004h" in shown  # asks the terminal for these marks
            os.write(master, keys)
        while "'Hi'" not in shown:
            shown += os.read(master, 10_000).decode()
    finally:
        child.kill()
        child.wait()
        os.close(master)
    assert r"'def f():\n    return 5' 'Hi'" in shown


def test_a_conversation_in_a_terminal(chat):
    """The terminal is a real one: keys are typed, Ctrl-C and Ctrl-D among them."""
    fcntl, termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")
    master, slave = os.openpty()

    def take_terminal():
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a job in the background passes on that it ignores Ctrl-C

    child = subprocess.Popen([sys.executable, str(ROOT / "engine.py"), *chat, "--device", "cpu", "--ignore-eos"],
                             stdin=slave, stdout=slave, stderr=slave, preexec_fn=take_terminal,
                             env=os.environ | {"TERM": "dumb", "PYTHONIOENCODING": "utf-8"})
    os.close(slave)
    shown, start_time = "", time.monotonic()

    def is_shown(text: str, after: int, seconds: float) -> bool:
        nonlocal shown
        deadline = time.monotonic() + seconds
        while text not in shown[after:] and time.monotonic() < deadline:
            if select.select([master], [], [], 0.1)[0]:
                shown += os.read(master, 10_000).decode("utf-8", "replace")
        return text in shown[after:]

    def read_until(text: str, after: int = 0) -> None:
        assert is_shown(text, after, 120), shown

    try:
        read_until("> ")
        os.write(master, b"What light?\n")
        read_until("What light?")
        start = len(shown)
        # From the answer's beginning on the terminal shows no keys.
        while not re.sub(r"\x1b\[[?0-9]*[a-z]", "", shown[start:]).strip():
            shown += os.read(master, 10_000).decode("utf-8", "replace")
        while shown.count("\n", start) < 4:
            read_until("\n", len(shown))
            os.write(master, b"typed meanwhile ")  # Ctrl-C drops it
        os.write(master, b"\x03")
        read_until("stopped")
        read_until("> ", shown.index("stopped"))
        os.write(master, b"not asked\x03")
        # Python notices a Ctrl-C that comes just before it waits for a key only with the next one.
        while not is_shown("Ctrl-D leaves", shown.index("stopped"), 2):
            assert time.monotonic() < start_time + 120, shown
            os.write(master, b"\x03")
        read_until("> ", shown.rindex("Ctrl-D leaves"))
        os.write(master, b"\x04")
        assert child.wait(timeout=60) == 0
    finally:
        child.kill()
        child.wait()
        os.close(master)
    assert "Traceback" not in shown and "error" not in shown and "typed" not in shown


def type_into(code: str, before: str, keys: bytes, after: str, term: str) -> str:
    """Run Python code in a terminal with the real line editor: type the keys once `before` is shown. Returns what is
    shown, up to `after`."""
    pytest.importorskip("readline")
    master, slave = pytest.importorskip("pty").openpty()
    child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=slave, stdout=slave, stderr=slave,
                             env=os.environ | {"TERM": term, "INPUTRC": os.devnull})
    os.close(slave)
    shown = ""
    try:
        while before not in shown:
            shown += os.read(master, 10_000).decode()
        os.write(master, keys)
        while after not in shown:
            shown += os.read(master, 10_000).decode()
    finally:
        child.kill()
        child.wait()
        os.close(master)
    return shown


def test_an_arrow_key_brings_back_a_message_of_several_lines(state):
    """The entry of an earlier session comes back whole, and is kept as one entry again."""
    state.parent.mkdir(parents=True)
    state.write_text(json.dumps("two\nlines") + "\n")
    code = ("from nanopaged.cli.chat import Keyboard, history_file; keyboard = Keyboard(history_file()); "
            "print(repr(keyboard.read_message()))")
    type_into(code, "> ", b"\x1b[A\r", r"'two\nlines'", term="xterm")  # the key up
    assert state.read_text().splitlines() == [json.dumps("two\nlines")] * 2


def test_what_is_typed_during_an_answer_waits_for_the_next_question():
    code = ("import time; from nanopaged.cli.chat import Keyboard; keyboard = Keyboard(None)\n"
            "with keyboard.silent():\n  print('an', flush=True); time.sleep(0.5); print('swer', flush=True)\n"
            "print(repr(keyboard.read_message()))")
    shown = type_into(code, "an", b"next\n", "'next'", term="dumb")
    assert re.match(r"an\s+swer\s+> next\s+'next'", shown), shown  # a dumb terminal gets no escape sequences


# --------------------------------------------------------------------------------------------------
# As a program
# --------------------------------------------------------------------------------------------------

def test_the_program_refuses_a_bad_option():
    done = run_engine("--prompt", "ROMEO:", "--top-p", "2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: top_p must be ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("words", ["nosuch", "scheduler,nosuch"])
def test_a_benchmark_that_there_is_not(capsys, monkeypatch, words):
    import bench
    monkeypatch.setattr(sys, "argv", ["bench.py", "--only", words])
    with pytest.raises(SystemExit) as error:
        bench.main()
    captured = capsys.readouterr()
    assert error.value.code == 2 and captured.out == "" and repr(words) in captured.err
    assert "scheduler, fragmentation, batching, server" in captured.err


def test_nobody_complains_where_there_is_no_numpy():
    code = "import sys; sys.modules['numpy'] = None; import engine, bench"  # bench takes LLM from nanopaged
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert (done.returncode, done.stdout) == (0, b"")


def test_a_reader_that_goes_away_is_no_error_of_ours():
    """`python engine.py ... | head -c 6` prints no traceback, and the interpreter prints none at its end."""
    argv = ["--prompt", "ROMEO:", "--max-tokens", "100", "--ignore-eos", "--device", "cpu", *POOL]
    child = subprocess.Popen([sys.executable, str(ROOT / "engine.py"), *argv], cwd=ROOT, encoding="utf-8",
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout.read(6) == "ROMEO:"
    child.stdout.close()
    errors = child.stderr.read()
    child.stderr.close()
    assert child.wait(timeout=300) != 1
    assert "Traceback" not in errors and "Exception ignored" not in errors
