"""A feature is a file that can be taken away: a prompt still runs, and who asks for the feature gets a sentence.

Each case is a process forked from one that has imported torch; in it the feature's module cannot be imported. Then all
features are taken away at once, and test_paged.py runs.
"""
import ast
import io
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import nanopaged
from nanopaged import LLM, SamplingParams, kernel
from nanopaged.api.assemble import pick_runner
from nanopaged.cli import main as cli
from nanopaged.options import default_feature
from nanopaged.tests.helpers import GOLDEN, ROOT, complaint
from nanopaged.text.tokenizer import load_tokenizer
from nanopaged.weights.build import modules_for
from nanopaged.weights.checkpoint import read_config
from nanopaged.weights.families import read_model_config

CONTEXT = multiprocessing.get_context("fork")
FEATURES = ROOT / "nanopaged" / "features"
NAMES = sorted(path.stem for path in FEATURES.iterdir() if path.suffix == ".py" and path.stem != "__init__"
               or path.is_dir() and path.stem != "__pycache__")


# ---- One away

def llm(**options) -> LLM:
    return LLM(**dict(device="cpu", num_blocks=64) | options)


def ask(**settings):
    return lambda: llm().generate("ROMEO:", SamplingParams(max_tokens=2, **settings))


def command(*words):
    """The command line's error, as an exception."""
    def run():
        sys.stderr = told = io.TextIOWrapper(io.BytesIO(), write_through=True)
        if cli.main([*words, "--device", "cpu", "--num-blocks", "64"]) == 2:
            raise ValueError(told.buffer.getvalue().decode().splitlines()[-1].removeprefix("error: "))
    return run


def converse():
    sys.stdin = SimpleNamespace(isatty=lambda: True)
    command("--chat", "--chat-template", __file__)()


def on_a_gpu():
    """What runs on a GPU with Triton, as far as it is decided on a CPU."""
    options = SimpleNamespace(enforce_eager=False, attention="auto")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanopaged.api.assemble.pick_kernels", lambda *_: kernel.TRITON)
        patch.setattr("nanopaged.api.assemble.has_dependent_launch", lambda device: True)
        return pick_runner(options, torch.device("cuda"))


def experts_on_a_gpu():
    """The MLP of a mixture of experts beside the small kernels, where these can be had."""
    _, _, modules = on_a_gpu()
    config = read_model_config(read_config(GOLDEN / "mixtral"))
    modules_for(config, modules).mlp(config, 0, modules)


PROMPT = "--prompt", "ROMEO:", "--max-tokens", "4"
# Who asks for each feature. Those that nobody asks for come with the line on stderr where they are missed.
ASK = dict(
    batch=command("--prompts", "x.txt"), beam=lambda: llm().beam_search("O", nanopaged.BeamSearchParams(2, 2)),
    chat_template=lambda: llm().chat([{"role": "user", "content": "Hi"}]), conversation=converse,
    drafts=command(*PROMPT, "--speculate", "3"), edits=ask(presence_penalty=1), fp8=lambda: llm(quantization="fp8"),
    experts=lambda: llm(model=str(GOLDEN / "mixtral")), fused_experts=experts_on_a_gpu,
    gpt_oss=lambda: llm(model=str(GOLDEN / "gpt-oss")), four_bits=lambda: llm(model=str(GOLDEN / "gpt-oss-mxfp4")),
    structured=ask(structured_outputs=dict(regex="a+")),
    frames=command(*PROMPT, "--trace"), grammar=ask(structured_outputs=dict(regex="a+")),
    hub=command("--model", "org/name", *PROMPT), huggingface=lambda: load_tokenizer(GOLDEN / "tokenizers" / "llama2"),
    logprobs=ask(logprobs=1), page=command(*PROMPT, "--trace", os.devnull + ".html"), router=command(
        *PROMPT, "--data-parallel-size", "2"), samples=command(*PROMPT, "-n", "2"),
    sandbox=lambda: llm().chat([{"role": "user", "content": "Hi"}], chat_template="x"),
    server=command("--serve", "--port", "0"), swapping=command(*PROMPT, "--swap-space", "0.01"),
    stop=ask(stop="a"), tensor_parallel=lambda: llm(tensor_parallel_size=2), trace=command(*PROMPT, "--trace"))
MISSED = dict(
    cascade=on_a_gpu, fused=on_a_gpu, graphs=on_a_gpu, hopper=on_a_gpu, pick=on_a_gpu, last_layer=llm, rectangles=llm,
    ray_data=None, ray_serve=None, threads=llm,
    recovery=lambda: fail(llm()), warmup=None, swapping=lambda: llm(model=str(GOLDEN / "mistral")))


def fail(engine):
    def launch(step):
        raise OSError("the launch failed")

    engine.runner.launch = launch
    with pytest.raises(OSError, match="the launch failed"):
        engine.generate("ROMEO:")


def block(*names):
    """No module of these features can be imported from now on."""
    for name in names:
        module = f"nanopaged.features.{name}"
        for loaded in [loaded for loaded in sys.modules if loaded == module or loaded.startswith(f"{module}.")]:
            del sys.modules[loaded]
        sys.modules[module] = None


def without(name, connection):
    """A prompt, and the sentence for who asks."""
    for loaded in [loaded for loaded in sys.modules if loaded.startswith("nanopaged.features.")]:
        del sys.modules[loaded]  # as in a process that has run no test
    block(name)
    default_feature.cache_clear()
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2))
    code = cli.main([*PROMPT, "--device", "cpu", "--temperature", "0", "--num-blocks", "64"])
    text = sys.stdout.buffer.getvalue().decode()
    sentence = complaint(ASK[name]) if name in ASK else ""
    if missed := MISSED.get(name):
        missed()
    told = getattr(sys.stderr, "stream", sys.stderr)
    connection.send((code, text, sentence, told.buffer.getvalue().decode()))


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_runs_without_it_and_who_asks_gets_a_sentence(name):
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=without, args=[name, theirs])
    process.start()
    theirs.close()
    code, text, sentence, told = ours.recv()
    process.join()
    assert (code, text) == (0, "ROMEO:\nI'll be\n")
    file = rf"needs nanopaged/features/{name}\b.*, which is not there; bring it back, or do without"
    assert name not in ASK or re.search(file, sentence), sentence
    assert MISSED.get(name) is None or re.search(file, told, re.M), told
    assert name in ASK.keys() | MISSED


def run_a_mixture(name, connection):
    block(name)
    default_feature.cache_clear()
    for enforce_eager in (False, True):
        model = llm(model=str(GOLDEN / "qwen3-moe"), enforce_eager=enforce_eager)
        connection.send(model.generate([[5, 6, 7]])[0].outputs[0].token_ids)
    from nanopaged.features.tensor_parallel import workers
    connection.send(workers.__name__)


@pytest.mark.parametrize("name", sorted({*MISSED} - {"ray_data", "ray_serve"}))
def test_no_feature_needs_one_that_is_on_by_default(name):
    """A mixture of experts runs without it, and the code for several GPUs can be imported."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=run_a_mixture, args=[name, theirs])
    process.start()
    theirs.close()
    assert ours.recv() == ours.recv() and ours.recv()
    process.join()


# ---- All away

def test_the_chapters_and_the_ring_alone(tmp_path):
    """Without any feature test_paged.py passes. (Left out are forms of attention that differ in a constant only: a GPU
    compiles each, and test_paged.py itself tests them.)"""
    for name in ("engine.py", "kernel.py", "model.py", "test_paged.py"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "nanopaged", tmp_path / "nanopaged", ignore=shutil.ignore_patterns(
        "features", "test_*.py", "__pycache__"))
    run = [subprocess.Popen([sys.executable, *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True) for words in (
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_paged.py",
         "-k", "not (float64 and (head_dim or group or size))"],
        ["engine.py", *PROMPT, "--temperature", "0", "--enforce-eager", "--device", "cpu"])]
    outputs = [process.communicate()[0] for process in run]
    assert [process.returncode for process in run] == [0, 0], outputs
    assert "ROMEO:\nI'll be\n" in outputs[1] and "failed" not in outputs[0]


# ---- What the other files know of a feature

# Words of its identifiers, the files that are its own, and the most identifiers elsewhere
KNOWN = dict(
    beams=("beam", "beam", 15), drafts=("draft|speculat|proposer", "drafts", 25),
    grammars=("grammar|structured|masks", "grammar|structured", 25),
    windows_and_swapping=("swap|host_(table|block)|window", "swapping", 20),
    edits=("^edit|repetition|frequency_|presence_|logit_bias|bad_words|logits_processor", "edits", 15),
    trace=("(^|_)traced?$", "trace|frames|page", 8), server=("^serv(e|er|ing|ed)(_|$)", "server|ray_.*", 8),
    router=("pools|data_parallel|^routers?$", "router|(fused_)?experts|ray_data", 12))
# What is neither a feature's nor the engine's: the table of options, settings and output formats. The trace shows what
# all features do, and attention and the model's settings have sliding windows of their own.
FORMATS = {"options.py", "sampling_params.py", "outputs.py", "trace.py", "frames.py", "page.py"}
ATTENTION = {"kernel.py", "model.py", "tiles.py", "families.py", "rectangles.py", "warmup.py", "cascade.py",
             "hopper.py", "experts.py", "gpt_oss.py"}


def identifiers(path: Path):
    """The names in a file's code, those of imported modules among them."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [getattr(node, field, None) for field in ("id", "attr", "arg", "name", "module")]
        yield from (part for name in names if isinstance(name, str) for part in name.split("."))


def files_of_the_source():
    yield from (ROOT / f"{name}.py" for name in ("engine", "kernel", "model"))
    for path in (ROOT / "nanopaged").rglob("*.py"):
        if not {"tests", "golden", "shakespeare"} & {*path.parts} and path.name not in FORMATS:
            yield path


def mentions(words: str, own: str) -> list[str]:
    return [f"{path.name}: {name}" for path in files_of_the_source()
            if not re.fullmatch(own, path.relative_to(FEATURES).parts[0].removesuffix(".py")
                                if path.is_relative_to(FEATURES) else "")
            for name in identifiers(path) if re.search(words, name.lower())
            and not ("window" in name.lower() and path.name in ATTENTION)]


@pytest.mark.parametrize("name", KNOWN)
def test_other_files_know_little_of_it(name):
    words, own, most = KNOWN[name]
    found = mentions(words, own)
    assert len(found) <= most, found
