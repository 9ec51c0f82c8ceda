"""A feature is a file that can be taken away: a prompt still runs, and who asks for the feature gets a sentence.

Each case is a process forked from one that has imported torch; in it the feature's module cannot be imported. Then all
features are taken away at once, and test_paged.py runs. Last, the tests: test_NAME.py and test_NAME_*.py are those of
nanopaged/features/NAME and are deleted with it. The others are the core's and run without any feature; of these and of
other features' tests those are skipped that ask for one that is not there (conftest.py). All of them run so with
`python -m nanopaged.tests.without NAME`.
"""
import ast
import io
import multiprocessing
import os
import re
import shutil
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import nanopaged.features
from nanopaged import LLM, SamplingParams, kernel
from nanopaged.api.assemble import pick_runner
from nanopaged.cli import main as cli
from nanopaged.options import default_feature, feature
from nanopaged.tests.helpers import GOLDEN, ROOT, complaint, needs
from nanopaged.tests.programs import run_program
from nanopaged.tests.without import feature_of, files_of_tests, run_without
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


def states_on_a_gpu():
    _, _, modules = on_a_gpu()
    config = read_model_config(read_config(GOLDEN / "qwen3.5"))
    recurrent = feature("kinds.recurrent", "a model with recurrent states")
    recurrent.pick_kernels(config, modules, torch.float32, torch.device("cpu"))


PROMPT = "--prompt", "ROMEO:", "--max-tokens", "4"
# Who asks for each feature. Those that nobody asks for come with the line on stderr where they are missed.
ASK = dict(
    batch=command("--prompts", "x.txt"), beam=lambda: llm().beam_search("O", nanopaged.BeamSearchParams(2, 2)),
    chat_template=lambda: llm().chat([{"role": "user", "content": "Hi"}]), conversation=converse,
    drafts=command(*PROMPT, "--speculate", "3"), edits=ask(presence_penalty=1), fp8=lambda: llm(quantization="fp8"),
    fp8_cache=lambda: llm(kv_cache_dtype="fp8"), experts=lambda: llm(model=str(GOLDEN / "mixtral")),
    fused_experts=experts_on_a_gpu, four_bits=lambda: llm(model=str(GOLDEN / "gpt-oss-mxfp4")),
    **dict.fromkeys(("four_bit_kernels", "four_bit_codes", "four_bit_experts", "four_bit_streams", "four_bit_hopper"),
                    lambda: llm(model=str(GOLDEN / "int4" / "awq"))),
    gemma4=lambda: llm(model=str(GOLDEN / "gemma4")), gpt_oss=lambda: llm(model=str(GOLDEN / "gpt-oss")),
    structured=ask(structured_outputs=dict(regex="a+")), more_families=lambda: llm(model=str(GOLDEN / "arcee")),
    frames=command(*PROMPT, "--trace"), grammar=ask(structured_outputs=dict(regex="a+")),
    hub=command("--model", "org/name", *PROMPT), huggingface=lambda: load_tokenizer(GOLDEN / "tokenizers" / "llama2"),
    delta=lambda: llm(model=str(GOLDEN / "qwen3.5")), qwen3_5=lambda: llm(model=str(GOLDEN / "qwen3.5")),
    lfm2=lambda: llm(model=str(GOLDEN / "lfm2")), mamba=lambda: llm(model=str(GOLDEN / "granite4-h")),
    logprobs=ask(logprobs=1), page=command(*PROMPT, "--trace", os.devnull + ".html"),
    progress=command(*PROMPT, "--prompt", "JULIET:"), router=command(*PROMPT, "--data-parallel-size", "2"),
    samples=command(*PROMPT, "-n", "2"),
    sandbox=lambda: llm().chat([{"role": "user", "content": "Hi"}], chat_template="x"),
    query_scale=lambda: llm(model=str(GOLDEN / "ministral3")), server=command("--serve", "--port", "0"),
    simulate=command("--simulate", "--requests", "1"),
    swapping=command(*PROMPT, "--swap-space", "0.01"),
    stop=ask(stop="a"), tensor_parallel=lambda: llm(tensor_parallel_size=2), trace=command(*PROMPT, "--trace"))
MISSED = dict(
    cascade=on_a_gpu, delta_kernels=states_on_a_gpu, fused=on_a_gpu, graphs=on_a_gpu, hopper=on_a_gpu, pick=on_a_gpu,
    last_layer=llm, rectangles=llm,
    ray_data=None, ray_serve=None, ray_words=None, threads=llm,
    recovery=lambda: fail(llm()), warmup=None, kinds=lambda: llm(model=str(GOLDEN / "gemma3")),
    swapping=lambda: llm(model=str(GOLDEN / "mistral")))


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
        vars(nanopaged.features).pop(name, None)  # as `from nanopaged.features import name` would find it


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
        try:
            missed()
        except ValueError as error:  # needs another one, which was taken away
            sentence = str(error)
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
    asked = re.search(r"needs nanopaged/features/(\w+)", sentence)
    if asked and asked[1] != name:
        raise ValueError(sentence)  # of another one, which should be there
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


@needs("experts", "tensor_parallel")
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
    """Without any feature a prompt runs, and test_paged.py passes. Left out are tests of attention alone and of the
    scheduler alone, whose files know of no feature; and what takes the same way through the ring as another case: of
    the logits all but one model's, which has no continuation here, of Triton's path all but one with windows in some
    layers, of the cuts those of a model without windows and of graphs, which are a feature."""
    for file in ("kernel.py", "engine.py", "nanopaged/tiles.py", "nanopaged/optional_triton.py",
                 "nanopaged/device/choices.py", "nanopaged/tests/fake_model.py"):
        assert not {"features", "feature", "default_feature"} & {*identifiers(ROOT / file)}
    for name in ("engine.py", "kernel.py", "model.py", "test_paged.py"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "nanopaged", tmp_path / "nanopaged", ignore=shutil.ignore_patterns(
        "features", "test_*.py", "__pycache__"))
    alone = "float64 or programs_that_share or random_operations or attention_ or without_its_interpreter or padding"
    chosen = (f"not ({alone} or triton or logits or cut or greedy and shakespeare) "
              "or triton and gemma3 and not groups or logits and shakespeare or cut and mistral and not graphs")
    program = f"""if True:
        import sys
        import pytest
        from nanopaged.cli.main import main
        words = {[*PROMPT, "--temperature", "0", "--enforce-eager", "--device", "cpu"]}
        sys.exit(main(words) or pytest.main(["-q", "-p", "no:cacheprovider", "test_paged.py", "-k", {chosen!r}]))"""
    run = run_program(program, cwd=tmp_path)
    assert run.returncode == 0 and "ROMEO:\nI'll be\n" in run.stdout and "failed" not in run.stdout, run


# ---- Whose tests

def imported(path: Path) -> set[str]:
    """The modules that are imported when this file is."""
    found, nodes = set(), [*ast.parse(path.read_text(encoding="utf-8")).body]
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            nodes += ast.iter_child_nodes(node)
    return found


# Names of nanopaged and of nanopaged.sampling_params that features have
HOMES = {f"{home}.{name}": f"nanopaged.features.{feature}.{name}" for home in ("nanopaged", "nanopaged.sampling_params")
         for name, feature in (("BeamSearchParams", "beam"), ("StructuredOutputsParams", "structured"))}


def features_imported(path: Path) -> set[str]:
    """The features that are imported with this file of tests, or with a file of tests that it imports."""
    found = {HOMES.get(name, name) for name in imported(path)}
    helpers = [ROOT / f"{name.replace('.', '/')}.py" for name in found if name.startswith("nanopaged.tests.")]
    return {name.split(".")[2] for name in found if name.startswith("nanopaged.features.")}.union(
        *(features_imported(helper) for helper in helpers if helper.exists()))


def test_the_cores_tests_import_no_feature():
    """When they are collected, that is."""
    files = {file: feature_of(file.name) for file in [ROOT / "test_paged.py", *files_of_tests()]}
    assert {feature for feature in files.values() if feature} <= {*NAMES}
    assert len([feature for feature in files.values() if feature]) > 20 < len(files)
    assert {file.name: features for file, feature in files.items()
            if not feature and (features := features_imported(file))} == {}


@needs("beam", "samples")
def test_tests_of_a_feature_that_is_not_there_are_skipped_and_say_so(monkeypatch):
    """A file that imports it, a test that asks for it, and one that looks at what the program prints. Others run."""
    runs, program = [], "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"

    def run_pytest(words, cwd):
        runs.append(run_program(program, *words[words.index("pytest") + 1:], cwd=cwd))
        return runs[0]

    monkeypatch.setattr("nanopaged.tests.without.subprocess", SimpleNamespace(run=run_pytest))
    files = [f"nanopaged/tests/test_{name}.py" for name in ("beam", "outputs", "readme")]
    assert run_without(["samples"], ["-q", "-rs", *files, "-k", "beam or samples or traces or three_texts"]) == 0
    told = runs[0].stdout
    counts = re.findall(r"SKIPPED \[(\d)\] \S+ needs nanopaged/features/samples, which is not there", told)
    assert sum(map(int, counts)) == 3 and "1 passed, 3 skipped" in told, told


# ---- What the other files know of a feature

# Words of its identifiers, the files that are its own, and the most identifiers elsewhere
KNOWN = dict(
    beams=("beam", "beam", 15), drafts=("draft|speculat|proposer", "drafts|kinds", 25),
    grammars=("grammar|structured|masks", "grammar|structured", 25),
    windows_and_swapping=("swap|host_(table|block)|window", "swapping|kinds", 20),
    kinds_of_layers=("layer_heads|with_groups|attention_shapes|shape_of|num_query_tiles", "kinds|gemma4", 16),
    edits=("^edit|repetition|frequency_|presence_|logit_bias|bad_words|logits_processor", "edits", 15),
    trace=("(^|_)traced?$", "trace|frames|page", 8), server=("^serv(e|er|ing|ed)(_|$)", "server|ray_.*", 8),
    router=("pools|data_parallel|^routers?$", "router|(fused_)?experts|ray_data", 12))
# What is neither a feature's nor the engine's: the table of options, settings and output formats. The trace shows what
# all features do, a simulation does it, and attention and the model's settings have sliding windows of their own.
FORMATS = {"options.py", "sampling_params.py", "outputs.py", "trace.py", "frames.py", "page.py", "simulate.py"}
ATTENTION = {"kernel.py", "model.py", "tiles.py", "families.py", "rectangles.py", "warmup.py", "cascade.py",
             "hopper.py", "experts.py", "more_families.py", "gpt_oss.py", "gemma4.py"}


@cache
def identifiers(path: Path) -> list[str]:
    """The names in a file's code, those of imported modules among them."""
    names = [getattr(node, field, None) for node in ast.walk(ast.parse(path.read_text()))
             for field in ("id", "attr", "arg", "name", "module")]
    return [part for name in names if isinstance(name, str) for part in name.split(".")]


def files_of_the_source():
    yield from (ROOT / f"{name}.py" for name in ("engine", "kernel", "model"))
    for path in (ROOT / "nanopaged").rglob("*.py"):
        if not {"tests", "golden", "shakespeare"} & {*path.relative_to(ROOT).parts} and path.name not in FORMATS:
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
