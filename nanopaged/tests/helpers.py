"""What many tests use: an engine of a tiny checkpoint, what transformers computed with it, and the engine's books."""
import gc
import json
import re
import time
import weakref
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from itertools import cycle
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import nanopaged
from engine import Status
from nanopaged import LLM, SamplingParams, optional_triton
from nanopaged.device.pool import GIB
from nanopaged.tests.without import feature_names, is_there
from nanopaged.weights.build import as_checkpoint, build_model
from nanopaged.weights.checkpoint import read_safetensors, read_tensors

torch.set_num_threads(1)  # models this small gain nothing from more, and on a busy machine threads wait for each other
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "nanopaged" / "golden"
BUNDLED = ROOT / "nanopaged" / "shakespeare"
MIXTURES = ["gpt-oss", "gpt-oss-mxfp4", "granite-moe", "granite-moe-shared", "granite4-h-moe", "lfm2-moe", "mixtral",
            "mixtral-stacked", "olmoe", "qwen3-moe", "qwen3-next", "qwen3-vl-moe",
            "qwen3.5-moe"]  # of experts, among the goldens
WITH_STATES = ["granite4-h", "granite4-h-moe", "lfm2", "lfm2-moe", "qwen3-next", "qwen3.5",
               "qwen3.5-moe"]  # recurrent states (features/kinds)
GEMMA4 = ["gemma4", "gemma4-e2b", "gemma4-moe", "gemma4-unified"]
OF_FEATURES = ["arcee", "cwm", "ernie4.5", "exaone4", "granite4", "ministral3", "seed-oss",  # more_families.py
               *GEMMA4, *WITH_STATES]
ALL_VARIANTS = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))
NULL = -1  # in a block table: a block that left the sliding window
needs_kernel = pytest.mark.skipif(
    optional_triton.triton is None or not (CUDA or optional_triton.INTERPRETED),
    reason="the kernel needs Triton and a GPU, or numpy for Triton's interpreter, and no TRITON_INTERPRET=0")
needs_gpu = pytest.mark.skipif(not CUDA, reason="needs a GPU; the same behaviour is tested in the interpreter")
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPT = list(range(60, 75))


if optional_triton.INTERPRETED:
    # Most of the interpreter's time would be work without an effect: every call of a function inside a kernel replaces
    # the members of triton.language, though the launch has replaced them; checks for overflow are computed and thrown
    # away; each operation makes types and shapes again that are those of operations before it; and equal shapes are
    # compared number by number, to find that nothing is to be broadcast.
    from triton.language import core, semantic
    from triton.runtime import interpreter

    def patch_lang_once(function, patch=interpreter._patch_lang):
        lang = function.__globals__.get("tl") or function.__globals__.get("core")
        return patch(function) if lang is None or interpreter.tl.core.is_builtin(lang.load) else None

    block_of, tensor_of, numpy_type_of = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    known = {}  # what follows from the name of a type

    def init_block_type(self, element_ty, shape):
        sizes = [size.value if isinstance(size, core.constexpr) else size for size in shape]
        if (key := (element_ty.name, *sizes)) not in known:
            block_of(self, element_ty, shape)
            known[key] = vars(self).copy()
        vars(self).update(known[key])

    def init_tensor(self, handle, type):
        if (key := ("tensor", type.name)) not in known:
            tensor_of(self, None, type)
            known[key] = vars(self).copy()
        vars(self).update(known[key], handle=handle)

    def find_numpy_type(type):
        if type.name not in known:
            known[type.name] = numpy_type_of(type)
        return known[type.name]

    broadcast = semantic.TritonSemantic.broadcast_impl_value

    def broadcast_what_differs(self, one, other):
        shapes = [type.shape.values if type.is_block() else None for type in (one.type, other.type)]
        return (one, other) if shapes[0] == shapes[1] else broadcast(self, one, other)

    semantic.TritonSemantic.broadcast_impl_value = broadcast_what_differs
    core.block_type.__init__, core.tensor.__init__ = init_block_type, init_tensor
    interpreter._get_np_dtype = find_numpy_type
    interpreter._patch_lang = patch_lang_once
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def needs(*features):
    """Skips a test where one of these was taken away. (A test that ends with the error about it is skipped anyway.)"""
    away = ", ".join(f"nanopaged/features/{name}" for name in features if not is_there(name))
    return pytest.mark.skipif(bool(away), reason=f"needs {away}, which is not there")


def without_notes(err: str) -> str:
    """What was told on stderr, without the lines about features that are on by default and were taken away."""
    away = "|".join(name for name in feature_names() if not is_there(name))
    return re.sub(rf"(?m)^.* needs nanopaged/features/({away}), which is not there; .*\n", "", err) if away else err


def if_there(feature: str):
    """The module of a feature, or None where it, or one that it needs, was taken away."""
    try:
        return import_module(f"nanopaged.features.{feature}")
    except ImportError:
        if all(map(is_there, feature_names())):
            raise


def load(model="short", *, graphs=False, lookahead=None, **options) -> LLM:
    """An engine in float32, where outputs do not depend on batch and chunk sizes.

    model: a golden checkpoint, or whatever LLM takes; "short" is the first 2 of the bundled model's 6 layers, for tests
        that ask for text and not for sense
    graphs: on a GPU, with CUDA graphs and the small kernels. Making them takes some seconds, so only tests of these
        ask for them; the others run the plain path there. On a CPU `enforce_eager` is what users have.
    lookahead: None leaves it to the runner
    """
    if model == "short":
        model, options["hf_overrides"] = "shakespeare", dict(num_hidden_layers=2)
    path = GOLDEN / model
    defaults = dict(dtype="float32", block_size=16, max_num_seqs=64, num_blocks=4096 // options.get("block_size", 16),
                    enforce_eager=CUDA and not graphs and str(options.get("device")) != "cpu")
    llm = LLM(str(path) if path.is_dir() else model, **defaults | options)
    for one in llm.engines:
        one.lookahead = one.lookahead if lookahead is None else lookahead
    return llm


def share_of_cards(gib):
    """gpu_memory_utilization with which an engine gets so many GiB of each card beside what is in use now: other
    processes test there, too. Skips a test for which some card has too little left."""
    cards = [torch.cuda.mem_get_info(index) for index in range(torch.cuda.device_count())]
    if (free := min(free for free, _ in cards) / GIB) < gib:
        pytest.skip(f"needs {gib} GiB of each card, and one has only {free:.1f} GiB left")
    return max((total - free + gib * GIB) / total for free, total in cards)


def use_modules(llm, modules):
    """Make the engine's model of other modules, with the same weights."""
    r = llm.runner
    tensors = as_checkpoint(r.model.named_parameters(), r.config)
    r.model = build_model(r.config, tensors, r.dtype, r.device, r.max_model_len, modules)


@cache
def shared(model="short", **options) -> LLM:
    """An engine that `load` made once, for tests that leave it as it was."""
    return load(model, **options)


@contextmanager
def freed_at_once(*parts):
    """What is deleted in this context frees these objects without the garbage collector."""
    refs = [weakref.ref(part) for part in parts]
    del parts
    gc.collect()
    gc.disable()
    try:
        yield
        assert [ref() for ref in refs] == [None] * len(refs)
    finally:
        gc.enable()


def expectations(variant):
    """prompts, continuations, logits: what transformers computed."""
    folder = BUNDLED if variant == "shakespeare" else GOLDEN / variant
    expected = dict(read_safetensors(folder / "expected.safetensors"))
    indices = range(sum(name.startswith("prompt.") for name in expected))
    return tuple([expected[f"{kind}.{i}"] for i in indices] for kind in ("prompt", "continuation", "logits"))


def assert_golden(llm, variant, prompts=slice(None), times=1, num_tokens=16):
    """The engine generates what transformers did from these prompts of the golden checkpoint: of 24 tokens the first
    ones, as each token is a step."""
    texts, continuations, _ = expectations(variant)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    outputs = llm.generate([text.tolist() for text in texts[prompts]] * times, params)
    assert tokens_of(outputs) == [text.tolist()[:num_tokens] for text in continuations[prompts]] * times


def as_rows(text, start):
    """The lines of a table in a docstring, from the one that begins with `start` to the next empty one. Each line is
    split by columns."""
    lines = text[text.index(start):].split("\n\n")[0].splitlines()
    return [re.split(r" {2,}", line.strip()) for line in lines]


def complaint(function, *arguments, kind=ValueError, **more) -> str:
    """The one sentence of the error that a call must raise; in parentheses it may quote."""
    with pytest.raises(kind) as caught:
        function(*arguments, **more)
    message = str(caught.value)
    assert type(caught.value) is kind and "\n" not in message and ". " not in re.sub(r"\(.*\)", "", message)
    return message


def let_fail(runner, error, when):
    """From now on the launch of a step raises the error if when(step)."""
    launch = runner.launch

    def call(step):
        if when(step):
            raise error
        return launch(step)

    runner.launch = call


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def prompt_logits(llm, prompt):
    """Logits of every position of a prompt: each of its beginnings is a prompt of its own."""
    captured, compute = [], llm.runner._compute

    def capture(*args):
        launched = compute(*args)
        captured.append(launched.logits.clone())
        return launched

    with patch.object(llm.runner, "_compute", capture):
        llm.generate([prompt[:n + 1] for n in range(len(prompt))], SamplingParams(temperature=0, max_tokens=1))
    return torch.cat(captured)


def relative_error(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def check_books(scheduler):
    """What the block manager promises, after every step."""
    manager = scheduler.block_manager
    num_holders, most_blocks = [0] * manager.num_blocks, getattr(manager, "max_blocks_per_seq", manager.num_blocks)
    host_tables = getattr(manager, "host_tables", {})  # features/swapping.py
    host_blocks = [host_block for host_block, _ in getattr(manager.step, "swaps_in", ())]
    host_blocks += getattr(manager, "free_host_blocks", ())
    for seq in scheduler.running + scheduler.waiting:
        tables = [(seq.block_table, most_blocks)]
        for name, part in vars(seq).get("parts", {}).items():  # features/kinds
            if hasattr(part, "live"):  # states
                continue
            tables.append((part.block_table, manager.kinds[name].max_blocks_per_seq))
            assert part.num_null_blocks == part.block_table.count(NULL)
        for table, most in tables:
            assert len(table) == len(seq.block_table)
            held = table[table.count(NULL):]
            assert len({*held}) == len(held) <= most and NULL not in held  # only the first entries are NULL
            assert not held or seq.status is Status.RUNNING
            for block in held:
                num_holders[block] += 1
        assert (seq in host_tables) == (seq.status is Status.SWAPPED)
    host_blocks += [block for table in host_tables.values() for block in table if block != NULL]
    assert sorted(host_blocks) == list(range(getattr(manager, "num_host_blocks", 0)))
    assert manager.ref_counts[:manager.num_blocks] == num_holders
    assert {*manager.free_queue} == {block for block, count in enumerate(manager.ref_counts) if count == 0}
    assert manager.key_of_block == {block: key for key, (block, _) in manager.prefix_cache.items()}
    assert len(manager.prefix_cache) == len(manager.key_of_block)
    assert len(scheduler.running) <= scheduler.max_num_seqs
    assert sorted([seq.row for seq in scheduler.running] + scheduler.free_rows) == list(range(scheduler.max_num_seqs))
    for queue in (scheduler.running, scheduler.waiting):
        assert [seq.order for seq in queue] == sorted(seq.order for seq in queue)


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def write_files(folder, contents, links=()) -> Path:
    """A folder with files of these bytes, of this text, or of this as JSON, and with links to files of other names."""
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, (bytes, str)) else json.dumps(content)
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    for file in links:
        if file.name not in contents:
            (folder / file.name).symlink_to(file)
    return folder


def rewritten(tmp_path, variant, change):
    """A copy of a golden checkpoint as a .bin file, its tensors changed."""
    (tmp_path / "config.json").write_text((GOLDEN / variant / "config.json").read_text())
    torch.save(change({name: tensor.clone() for name, tensor in read_tensors(GOLDEN / variant)}),
               tmp_path / "pytorch_model.bin")
    return str(tmp_path)


def stack_experts(tensors, is_turned=False):
    """A mixture's tensors with all experts' matrices of a layer in two, as transformers 5 names them. is_turned:
    [experts, in, out]"""
    layers, result = {}, {}
    for name, tensor in tensors.items():
        for old, new in (("router.layer.", "router."), ("moe.input_linear.weight", "moe.experts.gate_up_proj"),
                         ("moe.output_linear.weight", "moe.experts.down_proj")):  # of Granite
            name = name.replace(old, new)
        found = re.fullmatch(r"(.*\.experts\.)\d+\.(gate|up|down)_proj\.weight", name)
        if found:  # in the order of the experts
            layers.setdefault(found[1], {}).setdefault(found[2], []).append(tensor)
        else:
            result[name] = tensor
    for name, experts in layers.items():
        gate, up, down = (torch.stack(experts[part]) for part in ("gate", "up", "down"))
        result |= {f"{name}gate_up_proj": torch.cat([gate, up], 1), f"{name}down_proj": down}
    return {name: tensor.transpose(1, 2).contiguous() if is_turned and tensor.dim() == 3 else tensor
            for name, tensor in result.items()}


# ---- mixed requests, whose texts do not depend on how an engine is built

PROMPTS = [PROMPT[:n] + list(range(n)) for n in (3, 9, 15, 15, 4, 12)] + [PROMPT + PROMPT, [7], PROMPT]
SETTINGS = [SamplingParams(temperature=0, max_tokens=16, ignore_eos=True),
            SamplingParams(temperature=0.9, seed=5, max_tokens=14, ignore_eos=True, repetition_penalty=1.3),
            SamplingParams(temperature=0.8, seed=6, n=3, max_tokens=12, ignore_eos=True, logprobs=2),
            SamplingParams(temperature=0, max_tokens=9, prompt_logprobs=1, presence_penalty=0.7)]


def pools(count, model="qwen3", **options):
    return load(model, **dict(data_parallel_size=count, device="cpu", block_size=4, num_blocks=200) | options)


def run(llm, prompts, params):
    """The requests' outputs. After each step all books are right, and no sequence has changed its engine."""
    requests, done, homes = [llm.add_request(*pair) for pair in zip(prompts, params)], {}, {}
    while llm.has_unfinished_requests():
        done |= {output.request_id: output for output in llm.step()}
        for one in llm.engines:
            check_books(one.scheduler)
            assert all(homes.setdefault(seq, one) is one for seq in one.scheduler.running + one.scheduler.waiting)
    llm.scheduler.block_manager.check_idle()
    return [done[request] for request in requests]


def texts(llm):
    """What mixed requests generate, and the number of preemptions."""
    outputs, num_preempted = run(llm, PROMPTS, cycle(SETTINGS)), llm.counts.num_preemptions
    beams = llm.beam_search([PROMPT, PROMPT[:4]], nanopaged.BeamSearchParams(beam_width=3, max_tokens=6))
    llm.scheduler.block_manager.check_idle()
    found = [[(sample.token_ids, sample.finish_reason) for sample in output.outputs] for output in outputs]
    return found + [[beam.tokens for beam in output.sequences] for output in beams], num_preempted


@cache
def from_one_pool(**options):
    return texts(pools(1, **options))[0]
