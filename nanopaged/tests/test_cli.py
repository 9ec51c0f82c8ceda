"""The command line, mostly run inside this process: texts go to stdout, everything else to stderr, bad input gets one
sentence and exit code 2."""
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine import LLM
from nanopaged import SamplingParams
from nanopaged.cli import main
from nanopaged.runner import Runner

ROOT = Path(__file__).parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POOL = ["--num-blocks", "128"]  # small, so that many engines fit beside each other
ROMEO, JULIET = "ROMEO: But soft", "JULIET: Ay me"


@functools.cache
def loaded(model: str, **options) -> LLM:
    return LLM(model, **options)


def load(model: str = "shakespeare", **options) -> LLM:
    """Takes the place of the class LLM in main: the same options get the same engine, loaded once. The engine's own seed
    is for requests without one, which the command line does not make; without CUDA graphs an engine is there at once."""
    return loaded(model, **options | dict(enforce_eager=True, seed=0))


def run(*argv: str, llm_class=load) -> int:
    """The exit code."""
    try:
        return main(llm_class, list(argv))
    except SystemExit as exit:  # argparse's own way out, after --help
        return exit.code or 0


def run_engine(*argv: str, cwd=ROOT) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONIOENCODING": "utf-8"}
    return subprocess.run([sys.executable, str(ROOT / "engine.py"), *argv], cwd=cwd, env=env, capture_output=True,
                          encoding="utf-8", timeout=300)


def generate(prompts, **params):
    return load(num_blocks=128).generate(prompts, SamplingParams(**params))


def assert_refused(captured, *words: str):
    """One sentence on stderr that holds the words, and nothing on stdout."""
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert captured.err.startswith("error: ") and ". " not in captured.err and "Traceback" not in captured.err
    for word in words:
        assert word in captured.err


def nothing_left(llm: LLM) -> bool:
    manager, scheduler = llm.scheduler.block_manager, llm.scheduler
    return not (llm.requests or scheduler.running or scheduler.waiting) and manager.num_free_blocks == manager.num_blocks


# --------------------------------------------------------------------------------------------------
# One prompt
# --------------------------------------------------------------------------------------------------

def test_one_prompt_prints_it_with_its_continuation(capsys):
    """Greedy output is LLM.generate's; stdout holds the text and a line's end, nothing else."""
    assert run("--prompt", ROMEO, "--max-tokens", "40", "--temperature", "0", *POOL) == 0
    captured = capsys.readouterr()
    [expected] = generate(ROMEO, temperature=0, max_tokens=40)
    assert len(expected.outputs[0].token_ids) == 40
    assert captured.out == f"{ROMEO}{expected.outputs[0].text}\n"


def test_the_status_goes_to_stderr(capsys):
    assert run("--prompt", ROMEO, "--max-tokens", "20", "--temperature", "0", *POOL) == 0
    captured = capsys.readouterr()
    for word in ("shakespeare", DEVICE, "128 blocks", "20 new tokens", "tokens/s", "finished by length"):
        assert word in captured.err and word not in captured.out
    assert ROMEO not in captured.err and "error" not in captured.err


def test_the_text_streams(capsys, monkeypatch):
    """What is on stdout before each step grows as the steps are made, the prompt first."""
    seen, step = [], LLM.step
    monkeypatch.setattr(LLM, "step", lambda llm: seen.append(capsys.readouterr().out) or step(llm))
    assert run("--prompt", ROMEO, "--max-tokens", "30", "--temperature", "0", *POOL) == 0
    [expected] = generate(ROMEO, temperature=0, max_tokens=30)
    assert seen[0] == ROMEO
    assert sum(piece != "" for piece in seen) > 20
    assert "".join(seen) + capsys.readouterr().out == f"{ROMEO}{expected.outputs[0].text}\n"


def test_sampling_options_reach_the_sampler(capsys):
    """Drawn text depends on the seed and on nothing else, and is LLM.generate's with the same settings."""
    settings = dict(temperature=1.3, top_p=0.9, top_k=50, min_p=0.01, seed=-7, max_tokens=25, ignore_eos=True)
    argv = ["--prompt", ROMEO, "--temperature", "1.3", "--top-p", "0.9", "--top-k", "50", "--min-p", "0.01", "--seed", "-7",
            "--max-tokens", "25", "--ignore-eos", *POOL]
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
    ("--load-format", "dummy", dict(load_format="dummy")), ("--gpu-memory-utilization", "0.5", dict(gpu_memory_utilization=0.5)),
    ("--no-enable-prefix-caching", None, dict(enable_prefix_caching=False)), ("--seed", "5", dict(seed=5)),
    ("--model", "my/model", dict(model="my/model"))])
def test_engine_options_reach_the_engine(name, value, received):
    class Asked(Exception):
        pass

    def engine(model="shakespeare", **options):
        raise Asked(dict(model=model, **options))

    def asked(*argv):
        with pytest.raises(Asked) as error:
            main(engine, ["--prompt", "x", *argv])
        return error.value.args[0]

    plain = asked()
    assert asked(name, *([value] if value is not None else [])) == plain | received != plain


def test_the_defaults_of_the_command_line_are_those_of_the_engine():
    received = {}

    def engine(model, **options):
        received.update(options, model=model)
        raise ValueError("seen enough")

    assert run("--prompt", "x", llm_class=engine) == 2
    assert received == {name: LLM.__init__.__kwdefaults__.get(name, "shakespeare") for name in received}


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
    assert_in_order(captured.out, [part for output in outputs for sample in output.outputs for part in (output.prompt, sample.text)])
    assert captured.out.count(ROMEO) == n * prompts.count(ROMEO)
    assert f"{15 * n * len(prompts)} new tokens" in captured.err and "tokens/s" in captured.err
    assert not any(prompt in captured.err for prompt in prompts)


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

INTEGER_OPTIONS = ["--max-tokens", "--top-k", "--n", "--seed", "--block-size", "--num-blocks", "--max-model-len", "--max-num-seqs",
                   "--max-num-batched-tokens"]
FLOAT_OPTIONS = ["--temperature", "--top-p", "--min-p", "--gpu-memory-utilization"]
OUT_OF_RANGE = {
    "--max-tokens": ["0", "-1"], "--n": ["0", "-1"], "--top-k": ["-2", str(2**63)], "--seed": [str(2**63), str(-2**63 - 1)],
    "--temperature": ["-0.1", "nan", "inf"], "--top-p": ["0", "-0.1", "1.1", "nan", "inf"],
    "--min-p": ["-0.1", "1.1", "nan", "inf"],
    "--block-size": ["0", "-16"], "--num-blocks": ["0", "-1", str(10**20)], "--max-model-len": ["0", "-1", "1025"],
    "--max-num-seqs": ["0", "-1"], "--max-num-batched-tokens": ["0", "-1"],
    "--gpu-memory-utilization": ["0", "-0.5", "1.1", "nan", "inf"],
    "--dtype": ["int8", "", "Float32"], "--device": ["tpu", "", "cuda:99", "cuda:x"], "--attention": ["flash", ""],
    "--load-format": ["gguf", ""]}


@pytest.mark.parametrize("name, value", [
    *((name, value) for name in INTEGER_OPTIONS for value in ("many", "1.5", "", "nan")),
    *((name, value) for name in FLOAT_OPTIONS for value in ("warm", "", "1,5", "0.5x"))])
def test_a_wrong_type_is_refused(capsys, name, value):
    assert run("--prompt", "x", name, value) == 2
    assert_refused(capsys.readouterr(), name, repr(value))


@pytest.mark.parametrize("name, value", [(name, value) for name, values in OUT_OF_RANGE.items() for value in values])
def test_a_value_out_of_range_is_refused(capsys, name, value):
    pool = POOL if name != "--num-blocks" else []
    assert run("--prompt", "x", "--max-tokens", "1", *pool, name, value, llm_class=LLM) == 2
    field = name.removeprefix("--").replace("-", "_")
    captured = capsys.readouterr()
    assert_refused(captured, value)
    assert name in captured.err or field in captured.err


@pytest.mark.parametrize("argv, word", [
    ([], "--prompt"), (["--max-tokens", "8"], "--prompt"), (["--prompt"], "--prompt"),
    (["--prompt", "x", "--frobnicate"], "--frobnicate"), (["--prompt", "x", "--frobnicate", "7"], "--frobnicate"),
    (["--prompt", "x", "--max_tokens", "8"], "--max_tokens"), (["--prompt", "x", "-n", "2"], "-n"),
    (["--prompt", "x", "--max-tok", "8"], "--max-tok"),  # no abbreviations: what they mean changes as options are added
    (["--prompt", "x", "more"], "more"), (["--prompt", "x", "--top-k"], "--top-k"), (["x"], "--prompt"),
    (["--prompt", "x", "--no-enable-prefix-caching=yes"], "--no-enable-prefix-caching"),
    (["--prompt", "x", "--ignore-eos=1"], "--ignore-eos")], ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_unknown_incomplete_and_missing_options_are_refused(capsys, argv, word):
    assert run(*argv) == 2
    assert_refused(capsys.readouterr(), word)


@pytest.mark.parametrize("more", [[], ["--prompt", "y"]], ids=["one prompt", "two prompts"])
def test_models_that_are_not_there(capsys, tmp_path, monkeypatch, more):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    file = tmp_path / "model.gguf"
    file.touch()
    for model, word in [("no/such", "no/such"), (str(tmp_path / "nowhere"), "nowhere"), (str(tmp_path), "config.json"),
                        (str(file), "model.gguf")]:
        assert run("--prompt", "x", *more, "--model", model, llm_class=LLM) == 2
        assert_refused(capsys.readouterr(), word)


@pytest.mark.parametrize("files, word", [
    ({"config.json": "{"}, "config.json"), ({"config.json": "[]"}, "config.json"), ({"config.json": "{}"}, "config.json"),
    ({"config.json": (ROOT / "nanopaged/shakespeare/config.json").read_text()}, "model.safetensors")],
    ids=["broken json", "no object", "empty", "no weights"])
def test_a_damaged_checkpoint_is_refused(capsys, tmp_path, files, word):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert run("--prompt", "x", "--model", str(tmp_path), *POOL, llm_class=LLM) == 2
    assert_refused(capsys.readouterr(), *([word] if word != "config.json" else []))


@pytest.mark.parametrize("argv, word", [
    (["--prompt", ""], "empty"), (["--prompt", ROMEO, "--prompt", ""], "empty"), (["--prompt", "", "--n", "2"], "empty"),
    (["--prompt", "what light " * 2000], "max_model_len 1024"), (["--prompt", ROMEO, "--prompt", "la " * 9000], "max_model_len 1024"),
    (["--prompt", "what light through yonder window breaks", "--max-model-len", "4"], "max_model_len 4"),
    (["--prompt", "broken \udce9 text"], "surrogate"), (["--prompt", "x", "--load-format", "dummy"], "tokenizer")],
    ids=["empty", "second is empty", "empty, n = 2", "too long", "second is too long", "longer than max_model_len",
         "lone surrogate", "no tokenizer"])
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
    ["--top-k", "99999999"], ["--top-k", "-1"], ["--top-p", "1e-9"], ["--min-p", "1"], ["--seed", str(2**63 - 1), "--n", "2"],
    ["--seed", str(-2**63)], ["--block-size", "1"], ["--block-size", "256", "--num-blocks", "1"], ["--max-num-seqs", "1", "--n", "3"],
    ["--max-num-batched-tokens", "1"], ["--no-enable-prefix-caching"], ["--dtype", "float16"], ["--attention", "torch"]],
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


def test_help_names_every_option(capsys):
    assert run("--help") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    for name in ["--prompt", "--model", *INTEGER_OPTIONS, *FLOAT_OPTIONS, *OUT_OF_RANGE, "--ignore-eos", "--no-enable-prefix-caching"]:
        assert name in captured.out


# --------------------------------------------------------------------------------------------------
# Ctrl-C
# --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("argv", [["--prompt", ROMEO], ["--prompt", ROMEO, "--prompt", JULIET], ["--prompt", ROMEO, "--n", "3"]],
                         ids=["streaming", "two prompts", "n = 3"])
@pytest.mark.parametrize("when", [0, 4])
def test_an_interrupt_inside_a_step_ends_cleanly(capsys, monkeypatch, argv, when):
    steps, launch = [], Runner.launch

    def interrupted(runner, step):
        if len(steps) == when:
            raise KeyboardInterrupt
        steps.append(step)
        return launch(runner, step)

    options = dict(zip(["--temperature", "--max-tokens", *POOL[::2]], ["0", "50", *POOL[1::2]]))
    options = [word for pair in options.items() for word in pair]
    engines = []
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "launch", interrupted)
        code = run(*argv, *options, llm_class=lambda *args, **kwargs: engines.append(load(*args, **kwargs)) or engines[-1])
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
# As a program
# --------------------------------------------------------------------------------------------------

def test_the_program_runs_from_anywhere(tmp_path):
    done = run_engine("--prompt", "ROMEO:", "--max-tokens", "8", cwd=tmp_path)
    assert (done.returncode, done.stdout[:6], done.stdout[-1]) == (0, "ROMEO:", "\n")
    assert "8 new tokens" in done.stderr and "Traceback" not in done.stderr


def test_the_program_refuses_a_bad_option():
    done = run_engine("--prompt", "ROMEO:", "--top-p", "2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: top_p must be ") and done.stderr.count("\n") == 1


def test_a_reader_that_goes_away_is_no_error_of_ours():
    """`python engine.py ... | head -c 6`: no traceback, and none from the interpreter's end either."""
    argv = ["--prompt", "ROMEO:", "--max-tokens", "100", "--ignore-eos", "--device", "cpu", *POOL]
    child = subprocess.Popen([sys.executable, str(ROOT / "engine.py"), *argv], cwd=ROOT, encoding="utf-8",
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout.read(6) == "ROMEO:"
    child.stdout.close()
    errors = child.stderr.read()
    child.stderr.close()
    assert child.wait(timeout=300) != 1
    assert "Traceback" not in errors and "Exception ignored" not in errors


@pytest.mark.parametrize("statement", ["import nanopaged", "from nanopaged import SamplingParams, RequestOutput",
                                       "import nanopaged.cli, nanopaged.params, nanopaged.outputs"])
def test_importing_nanopaged_does_not_import_torch(statement):
    code = f"import sys; {statement}; print(*sys.modules.keys() & {{'torch', 'triton', 'numpy', 'tiktoken', 'engine'}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def test_nanopaged_offers_what_it_says_and_names_what_it_lacks():
    import nanopaged
    assert nanopaged.LLM is LLM and nanopaged.SamplingParams is SamplingParams
    assert all(getattr(nanopaged, name) is not None for name in nanopaged.__all__)
    with pytest.raises(AttributeError, match="Engine.*SamplingParams"):
        nanopaged.Engine
