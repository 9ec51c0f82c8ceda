"""The options of an engine in one table: it makes checks, LLM's docstring, and the command line's flags and help. And
`feature`, which loads what an option or a request asks for.
"""
import sys
import textwrap
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from nanopaged.inputs import MOST_TOKENS, Kind, always, between, check_number, is_one_of, refuse_unknown

MOST_GPUS = 64  # of one engine
MOST_SEQS = 2**20  # of a step; each has a row in tensors on the device
# Options of vLLM's LLM that are accepted without effect: with any value, or with a value that asks for nothing.
VLLM_OPTIONS = (
    "trust_remote_code", "disable_log_stats", "disable_custom_all_reduce", "compilation_config", "served_model_name",
    "async_scheduling", "distributed_executor_backend", "max_seq_len_to_capture")
VLLM_NEUTRAL: dict[str, tuple[Any, ...]] = dict(
    pipeline_parallel_size=(1,), enable_lora=(False, None), cpu_offload_gb=(0,),
    tokenizer_mode=("auto",), runner=("auto", "generate"), task=("auto", "generate"), kv_transfer_config=(None,),
    limit_mm_per_prompt=({}, None), mm_processor_kwargs=({}, None), logprobs_mode=("raw_logprobs",),
    enable_chunked_prefill=(True, None))


class Option(NamedTuple):
    """An option of LLM and of the command line. Without `expected`, whoever uses the value checks it."""
    default: Any  # that of LLM's signature. None may be given only where it is the default
    kind: type  # that the command line reads
    help: str
    in_range: Callable[[Any], object] = always
    expected: str = ""  # in the sentence that refuses a value
    feature: str = ""  # in nanopaged/features, that any other value than the default asks for


def _number(default: Any, help: str, kind: type, low: float, high: float, feature: str = "") -> Option:
    return Option(default, kind, help, *between(kind, low, high)[1:], feature)


def _choice(help: str, *choices: str, feature: str = "") -> Option:
    return Option(choices[0], str, help, lambda x: x in choices, " or ".join(map(repr, choices)), feature)


def _flag(default: bool | None, help: str, expected: str = "True or False") -> Option:
    return Option(default, bool, help, always, expected)


def _may_be_path(path: str | Path) -> bool:
    """Whether a file system can have this path."""
    return ("\0" not in str(path) and len(str(path)) < 2048
            and all(len(part.encode(errors="replace")) < 256 for part in Path(path).parts))


ACCEPTED: dict[type, Kind] = {float: (int, float), str: (str, Path)}  # by LLM
OPTIONS = dict(
    model=Option("shakespeare", str, "bundled (shakespeare), a directory in Hugging Face layout, or org/name on the "
                 "Hub", always, "a directory or a name on the Hub"),
    revision=Option(None, str, "branch, tag or commit of a model on the Hub [main, or what the cache has of it]"),
    tokenizer=Option(None, str, "of another model: a directory, or a name on the Hub [its own]", always,
                     "a directory or a name on the Hub"),
    tokenizer_revision=Option(None, str, "of that tokenizer on the Hub"),
    skip_tokenizer_init=_flag(False, "no tokenizer at all: prompts are token ids"),
    hf_token=Option(None, str, "token for the Hub [the stored one]",
                    lambda x: isinstance(x, str) and x.isascii() and x.isprintable(),
                    "a token of the Hugging Face Hub, or None for the stored one"),
    download_dir=Option(None, str, "cache for files of the Hub [that of Hugging Face's tools]", _may_be_path,
                        "a directory that can be made"),
    hf_overrides=Option(None, dict, 'what replaces entries of config.json, {"sliding_window": 24} for example', always,
                        "a dict of entries of config.json"),
    generation_config=_choice("auto: requests without settings follow the checkpoint's generation_config.json; "
                              "vllm: they do not", "auto", "vllm"),
    override_generation_config=Option(None, dict, 'what goes before entries of that file, {"temperature": 0.6} for '
                                      "example", always, "a dict of entries of generation_config.json"),
    warm_up=_flag(False, "record every step size before the first request, not when a step first needs it"),
    max_logprobs=Option(20, int, "log probabilities of a token that a request may ask for, at most; -1: any number",
                        lambda x: x >= -1, "an integer of at least 0, or -1 for any number"),
    load_format=_choice("dummy: random weights from config.json alone", "auto", "dummy"),
    dtype=Option("auto", str, "float32, float16 (half) or bfloat16. auto: the checkpoint's on CUDA (float16 for "
                 "bfloat16 on cards before Ampere), float32 on a CPU"),
    device=Option("auto", str, "cpu, cuda or cuda:1"),
    attention=Option("auto", str, "triton (kernel.py's kernel) or torch"),
    kv_cache_dtype=_choice("fp8: a byte per number, so twice the tokens of 16 bits", "auto", "fp8", "fp8_e4m3",
                           feature="fp8_cache"),
    quantization=Option(None, str, "fp8: matrices in 8 bits, of an ordinary checkpoint, too; int4: in 4 bits, of an "
                        "ordinary checkpoint only [as they are stored]", lambda x: x in ("fp8", "int4"),
                        "'fp8', 'int4', or None for weights as they are stored"),
    block_size=_number(None, "token slots of a block [64 on CUDA, 16 on a CPU]", int, 1, MOST_TOKENS),
    num_blocks=_number(None, "blocks of the pool [what fits in gpu_memory_utilization of the card; on a CPU 1 GiB or "
                       "max_num_seqs full sequences, whichever is less]", int, 1, MOST_TOKENS),
    num_gpu_blocks_override=_number(None, "vLLM's name for num_blocks", int, 1, MOST_TOKENS),
    gpu_memory_utilization=Option(0.9, float, "the part of the card's memory that weights and pool may take",
                                  lambda x: 0 < x <= 1, "a number above 0 and at most 1"),
    swap_space=Option(0, float, "GiB of host memory for the blocks of preempted sequences; 0: these are computed again",
                      lambda x: 0 <= x < 2**20, "a number of GiB, 0 for none", "swapping"),
    enable_prefix_caching=_flag(True, "let sequences share the blocks of a common beginning"),
    snapshot_memory=Option(0.1, float, "of a model with recurrent states: the part of the pool's memory, without the "
                           "states of running texts, for snapshots of states", lambda x: 0 <= x < 1,
                           "a number of at least 0 and below 1", "kinds"),
    disable_cascade_attn=_flag(None, "read shared blocks for each sequence by itself. Without it, only where a text's "
                               "bits would depend on its batch (fp8 cache, float32, head_dim above 128); False: not "
                               "there either, if it is possible", "None, True or False"),
    max_model_len=_number(None, "longest sequence, prompt included [the model's limit, or the pool's if that is less]",
                          int, 1, MOST_TOKENS),
    max_num_seqs=_number(256, "sequences that one step computes at most", int, 1, MOST_SEQS),
    max_num_batched_tokens=_number(8192, "tokens that one step computes at most", int, 1, MOST_TOKENS),
    scheduling_policy=_choice("priority: a request's priority goes before its arrival, smaller is sooner", "fcfs",
                              "priority"),
    data_parallel_size=_number(1, "GPUs, each with the weights and a pool; numbers of blocks, sequences and tokens and "
                               "swap_space are per GPU", int, 1, MOST_GPUS, "router"),
    tensor_parallel_size=_number(1, "GPUs that share one model: each has a part of the weights and of the pool", int, 1,
                                 MOST_GPUS, "tensor_parallel.workers"),
    speculative_config=Option(None, dict, 'drafts: guess tokens and compute them along, {"num_speculative_tokens": 5} '
                              "for example [none]", feature="drafts"),
    enforce_eager=_flag(False, "the plain path: no CUDA graphs, no small kernels, no lookahead; attention in torch "
                        "computes one sequence after the other"),
    seed=Option(0, int, "of random weights, and of the requests that bring none of their own",
                lambda x: -2**63 <= x < 2**63, "an integer of at most 64 bits"))
METAVARS = {int: "N", float: "X", dict: "JSON", str: "S"}


def describe(as_flags: bool) -> str:
    """What each option is for: a text for the command line's help, or for LLM's docstring."""
    lines = []
    for name, option in OPTIONS.items():
        default = "" if option.default in (None, False, True) or "[" in option.help else f" [{option.default}]"
        if as_flags:
            no, metavar = "[no-]" * (option.default is True), METAVARS.get(option.kind, "")
            flag = f"  --{no}{name.replace('_', '-')} {metavar}"
            lines += textwrap.wrap(option.help + default, 100, initial_indent=f"{flag:<36}", subsequent_indent=" " * 36)
        else:
            lines += textwrap.wrap(f"{name}: {option.help}{default}", 112, initial_indent="    ",
                                   subsequent_indent="        ")
    return "\n".join(lines)


def check_options(options: Mapping[str, Any], vllm_options: Mapping[str, Any]) -> None:
    """Raise ValueError for an unusable value, an unknown option, one of vLLM that asks for a missing feature, and one
    whose feature was taken away. options: those of OPTIONS, and maybe other names"""
    others = [name for name, value in vllm_options.items() if not is_one_of(value, VLLM_NEUTRAL.get(name, ()))]
    refuse_unknown("LLM has no option", others, [*OPTIONS, *VLLM_OPTIONS], "help(nanopaged.LLM) lists its options")
    for name, option in OPTIONS.items():
        value = options[name]
        if option.expected and (value is not None or option.default is not None):
            check_number(name, value, ACCEPTED.get(option.kind, option.kind), option.in_range, option.expected)
        if option.feature and value != option.default:
            feature(option.feature, name)
    if options["num_blocks"] is not None and options["num_gpu_blocks_override"] is not None:
        raise ValueError("num_blocks and num_gpu_blocks_override are two names of one option; give one of them")
    data_parallel, tensor_parallel = options["data_parallel_size"], options["tensor_parallel_size"]
    if data_parallel > 1 < tensor_parallel:
        raise ValueError(f"data_parallel_size {data_parallel} and tensor_parallel_size {tensor_parallel} do not go "
                         "together; use one of them")


# --------------------------------------------------------------------------------------------------
# Features: files that can be taken away
# --------------------------------------------------------------------------------------------------

def feature(name: str, asked: str) -> ModuleType:
    """The module nanopaged.features.NAME. ValueError if its file, or one that it needs, was taken away.

    asked: what asks for it, the subject of the error's sentence
    """
    try:
        return import_module(f"nanopaged.features.{name}")
    except ModuleNotFoundError as error:
        missing = str(error.name)
        if not missing.startswith("nanopaged.features"):
            raise
    if missing == "nanopaged.features":
        missing += f".{name}"
    raise ValueError(f"{asked} needs {missing.replace('.', '/')}, which is not there; bring it back, or do without")


@cache
def default_feature(name: str, instead: str) -> ModuleType | None:
    """The module of a feature that nobody asks for, because it is on by default. None if its file was taken away; then
    one line on stderr says what runs instead."""
    try:
        return feature(name, instead)
    except ValueError as error:
        print(error, file=sys.stderr)
        return None
