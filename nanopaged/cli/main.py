"""The command line behind `python engine.py`: prompts in, text on stdout, everything else on stderr.

    --prompt TEXT      one text streams, prompt first; of several, samples or beams, each is printed when all are done
    --prompts FILE     many: see nanopaged/features/batch.py
    --chat             conversations: see nanopaged/features/conversation.py
    --serve            OpenAI's API over HTTP: see nanopaged/features/server/app.py
    --simulate FILE    a clock in place of a card: see nanopaged/features/simulate.py

The exit code is 0; 1 if lines of a file were bad, or the model's output was not a number; 2 for bad input, with one
sentence; 130 after Ctrl-C. But in a conversation Ctrl-C only stops the answer, which is kept as far as it got, and
Ctrl-D leaves. A server ends with 0, after Ctrl-C too.
"""
import argparse
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import NoneType
from typing import Any

from nanopaged import __version__
from nanopaged.cli.status import Progress, counted, fold, say
from nanopaged.inputs import refuse_unknown
from nanopaged.options import OPTIONS, default_feature, describe, feature
from nanopaged.outputs import CompletionOutput, EngineDeadError, RequestError
from nanopaged.sampling_params import SamplingParams, read_settings

HELP = """\
usage: python engine.py (--prompt TEXT | --prompts FILE | --chat | --serve) [options]; [defaults]
for example: python engine.py --prompt "ROMEO:" --max-tokens 64 --temperature 0
             python engine.py --model Qwen/Qwen3-0.6B --chat
PROMPTS: texts go to stdout, everything else to stderr
  --prompt TEXT                continue this text; may be given several times
  --prompts FILE               .txt: a prompt per line; .jsonl: {"prompt": "Hi", "n": 2, ..} or
                               {"messages": [{"role": "user", "content": "Hi"}], ..}; - for stdin
  --output FILE.jsonl          results of --prompts as they finish; once more, and it goes on
  --chat                       a conversation, /? lists its commands; with --prompt, or stdin from a
                               file: one answer; --system TEXT
  --serve                      OpenAI's API on --host, --port [127.0.0.1, 8000], --api-key KEY or
     NANOPAGED_API_KEY, --allowed-hosts NAME,.. without a key, --served-model-name NAME [--model's]
  --chat-template FILE, --chat-template-kwargs JSON       in Jinja; {"enable_thinking": false}
  --tool-call-parser P         hermes, llama3_json, mistral, openai, qwen3_coder
  --reasoning-parser P         deepseek_r1, openai, qwen3
SAMPLING: the checkpoint's generation_config.json goes before the defaults
  --max-tokens N, --min-tokens N                 new tokens at most [256; --chat: all], at least [0]
  --temperature T              0 is greedy [0.8]
  --top-k K, --top-p P, --min-p P                keep the likeliest tokens [0, 1, 0: all]
  -n N, --n N; --seed S        samples per prompt [1]; seed [0; with --chat a random one]
  --presence-penalty P, --frequency-penalty P    against repetition [0, 0]
  --repetition-penalty P       against repetition, above 1 [1]
  --stop TEXT, --include-stop-str-in-output      end before this, or after; several times
  --stop-token-ids ID,ID,..    end at one of these
  --ignore-eos, --no-skip-special-tokens         go on after end tokens; show special tokens
  --bad-words TEXT             never generate this; may be given several times
  --logit-bias JSON            {"token id": what to add, ..}
  --allowed-token-ids ID,..    draw no others
  --logprobs N, --prompt-logprobs N              log probabilities of N tokens each, into --output
  --json-schema FILE, --regex R, --choice TEXT   the text must fit; --choice A --choice B: A or B
  --generation-config vllm, --override-generation-config JSON   leave it aside [auto]; go before it
  --beam-width N, --length-penalty X             beam search: N texts, longer or shorter [1.0]
  --speculate N                guess N tokens, and compute them along: --speculative-config in short
  --simulate [TRACE.jsonl]     serve a trace without a GPU, as --card NAME [H200] would; or
     --requests N, --rate R a second; --ttft S, --tpot S: the fewest cards on which 90% keep these
  --trace [FILE.html|.json]    print what each step computes, in which blocks; or a page, or data
  --version                    print the version
"""
DEFAULTS = dict(max_tokens=256, temperature=0.8, seed=0)  # of a prompt; the checkpoint's go before


def help_text() -> str:
    return f"{HELP}ENGINE; -m is --model\n{describe(as_flags=True)}\n"


def main(argv: list[str] | None = None, llm_class=None) -> int:
    """Run the command line; the exit code. llm_class: in place of LLM, for tests."""
    sys.stdout, sys.stderr = sys.stdout or _nowhere(), _Lossy(sys.stderr or _nowhere())  # None: the shell has closed it
    # A terminal without Unicode gets question marks, not a traceback.
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        return _run(_read_arguments(argv), llm_class)
    except BrokenPipeError:  # `| head` has read enough
        sys.stdout = _nowhere()
        return 0
    except (ValueError, OSError, EngineDeadError) as error:
        say(f"error: {error}")
        return 1 if isinstance(error, EngineDeadError) else 2
    except KeyboardInterrupt as error:
        say(": ".join(["interrupted", *map(str, error.args)]))
        return 130


# Options whose features do the work: prepare(args) refuses what can be refused before the model is loaded. It returns a
# function of the LLM, which does the rest and gives the exit code.
WAYS = dict(serve="server.command", simulate="simulate", prompts="batch", chat="conversation")


def _run(args, llm_class) -> int:
    settings_of(args)  # which checks them
    way = next((name for name in WAYS if vars(args)[name] not in (None, False)), None)
    act = feature(WAYS[way], option_name(way)).prepare(args) if way else prepare_prompts(args)
    watching: Any = nullcontext
    if (file := args.trace) is not None:
        watching = feature("page" if file else "trace", "--trace").prepare(args)
    llm = getattr(act, "llm", None) or _load(args, llm_class)  # a simulation brings its own
    with watching(llm):
        return act(llm)


def prepare_prompts(args) -> Callable[..., int]:
    """For --prompt: a function of the LLM that prints the text after it, or after what `render` makes of it. (A text
    that streams would run into printed steps.)"""
    if len(args.prompt) > 1 or args.n not in (None, 1) or args.beam_width is not None or args.prints_steps:
        return feature("progress", "a run of several texts").prepare(args)
    [text] = args.prompt
    return lambda llm, render=None, read=None: stream(llm, settings_of(args, llm), render(text) if render else text, [],
                                                      echo="" if render else text, read=read)


def renderer(args, llm) -> Callable[..., dict]:
    """What makes prompts of messages, with the options of the command line."""
    def render(messages: list[dict], tools: list[dict] | None = None, more: dict | None = None, **options) -> dict:
        try:
            return llm.chat_prompt(messages, chat_template=args.chat_template, tools=tools,
                                   chat_template_kwargs=(args.chat_template_kwargs or {}) | (more or {}), **options)
        except ValueError as error:  # what is a keyword of that method is an option here
            raise ValueError(str(error).replace("chat_template=", "--chat-template")) from None

    return render


def settings_of(args, llm=None) -> SamplingParams:
    """The settings of the command line. The checkpoint's are known once the model is loaded; without `llm` this call
    only checks the settings given."""
    ours = DEFAULTS | ({"seed": random.getrandbits(63)} if args.chat else {})  # every conversation draws anew
    if args.chat and args.beam_width is None:
        ours["max_tokens"] = None
    settings = given(args, SAMPLING)
    if structured := given(args, STRUCTURED):
        settings["structured_outputs"] = {name.removesuffix("_schema"): value for name, value in structured.items()}
    if llm is None:
        is_known = args.generation_config == "vllm" and not args.override_generation_config
        return SamplingParams(**(ours if is_known else dict(max_tokens=None)) | settings)
    return sampling_params(llm, ours, **settings)


def sampling_params(llm: Any, ours: dict[str, Any] = DEFAULTS, **given: Any) -> SamplingParams:
    """The settings that are given, then the checkpoint's, then ours."""
    theirs = read_settings(llm.default_params)
    return llm.get_default_sampling_params(**{name: ours[name] for name in ours if name not in theirs} | given)


def _load(args, llm_class):
    started = time.perf_counter()
    options = given(args, ENGINE) | ({"warm_up": True} if args.serve else {})
    if args.speculate is not None:
        options["speculative_config"] = {"num_speculative_tokens": args.speculate}
    llm = (llm_class or _import_llm())(args.model, **options)
    runners, pool = llm.runners, llm.scheduler.block_manager
    devices = ", ".join(dict.fromkeys(str(runner.device) for runner in runners))
    groups = max(llm.config.groups, default=0) + 1  # of layers (features/kinds)
    groups = f" for {groups} groups of layers" if groups > 1 else ""
    pools = f"{len(runners)} pools, together" if len(runners) > 1 else "pool of"
    say(fold(f"{args.model} on {devices} ({str(llm.runner.dtype).removeprefix('torch.')}), {pools} "
             f"{counted(pool.num_blocks, 'block')} of {counted(pool.block_size, 'token')}{groups}, "
             f"loaded in {time.perf_counter() - started:.1f} s"))
    return llm


def _import_llm() -> type:
    """LLM, imported here, so that --help does not wait for torch. Meanwhile Ctrl-C ends the process at once: torch's
    own `except` clauses would swallow a KeyboardInterrupt, or Python's callbacks would be left with a traceback."""
    def end(*_: Any) -> None:
        try:
            os.write(2, b"interrupted\n")
        finally:
            os._exit(130)

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a script's job with & ignores Ctrl-C
        signal.signal(signal.SIGINT, end)
    if threads := default_feature("threads", "a CPU's threads, which wait for each other on a busy machine,"):
        threads.start()
    from nanopaged.api.llm import LLM
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, before)
    return LLM


def stream(llm, params: SamplingParams, prompt: Any, said: list[str], echo: str = "",
           read: Callable[[Any], Any] | None = None) -> int:
    """Print one text as it comes, after the echo; the exit code. Its pieces are in the list `said`, even after an
    interruption. read: what makes the pieces to print of the model's"""
    progress = Progress(llm)
    pieces = llm.stream(prompt, params)
    pieces = read(pieces) if read else pieces
    try:
        print(echo, end="", flush=True)
        while True:
            said.append(next(pieces))
            progress.note_text()
            print(said[-1], end="", flush=True)
    except StopIteration as end:
        output = end.value
    except RequestError as error:
        output = error.output
    finally:
        pieces.close()
        print(flush=True)
    progress.note_end(output)
    sample = output.outputs[0]
    return conclude(progress, [("the text", sample)], after_first=True, end=sample.finish_reason)


def conclude(progress: Progress, samples: list[tuple[str, CompletionOutput]], **status: Any) -> int:
    """Say which of the named texts went wrong, and the status line; the exit code."""
    wrong = [f"{name} went wrong: {sample.stop_reason}" for name, sample in samples if sample.finish_reason == "error"]
    say("\n".join([*wrong, progress.report(**status)]))
    return int(bool(wrong))


def _nowhere():
    """Takes the place of a stream that is closed."""
    return open(os.devnull, "w", errors="replace")


class _Lossy:
    """stderr that loses what it cannot take: neither the texts nor the exit code are to suffer from that."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self.stream.flush()


# --------------------------------------------------------------------------------------------------
# Options
# --------------------------------------------------------------------------------------------------

def _file(path: str) -> str:
    """The text of a file."""
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(f"{path!r} is no text in UTF-8: {error}") from None
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path!r} cannot be opened: {error.strerror or error}") from None


def _ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected token ids as in 5,6,7, not {text!r}") from None


def _object(text: str) -> dict:
    try:
        if isinstance(value := json.loads(text), dict):
            return value
    except (ValueError, RecursionError):
        pass
    raise argparse.ArgumentTypeError(f"expected a JSON object, not {text!r:.80}")


# Name -> what reads its value; list: it may be given several times; True, False: a flag that makes it so; None: a value
# may follow; What is not given is None, and the default is that of SamplingParams and LLM, or
# the one in _run.
SAMPLING = dict(
    max_tokens=int, min_tokens=int, temperature=float, top_k=int, top_p=float, min_p=float, n=int, seed=int,
    presence_penalty=float, frequency_penalty=float, repetition_penalty=float, stop=list, stop_token_ids=_ids,
    include_stop_str_in_output=True, ignore_eos=True, skip_special_tokens=False, bad_words=list, logit_bias=_object,
    allowed_token_ids=_ids, logprobs=int, prompt_logprobs=int)
ENGINE = {name: {bool: not option.default, dict: _object}.get(option.kind, option.kind)
          for name, option in OPTIONS.items() if name != "model"}
STRUCTURED = dict(json_schema=_file, regex=str, choice=list)
OTHERS = dict(
    prompt=list, prompts=str, output=str, chat=True, system=str, chat_template=_file, chat_template_kwargs=_object,
    beam_width=int, length_penalty=float, model=str, speculate=int, trace=None, simulate=None, card=str, requests=int,
    rate=float, ttft=float, tpot=float, serve=True, host=str, port=int,
    api_key=str, allowed_hosts=str, served_model_name=str, tool_call_parser=str, reasoning_parser=str)
KINDS: dict[str, Any] = SAMPLING | STRUCTURED | ENGINE | OTHERS
SHORT = dict(model=["-m"], n=["-n"])
NEEDS = {name: needed.split() for needed, names in {  # any of these, for each of those
    "prompts": "output", "output": "logprobs prompt_logprobs", "beam_width": "length_penalty", "chat": "system",
    "simulate": "card requests rate ttft tpot",
    "chat prompts serve": "chat_template chat_template_kwargs", "serve": "host port api_key allowed_hosts",
    "serve prompts": "served_model_name tool_call_parser reasoning_parser"}.items() for name in names.split()}
EXCLUDES = dict(prompts=["prompt", "chat", "beam_width"], speculate=["speculative_config"],
                serve=["prompt", "prompts", "chat", "beam_width",
                       *(name for name in SAMPLING | STRUCTURED if name != "seed")],
                simulate=["prompt", "prompts", "chat", "beam_width", "serve", "speculate",
                          *(name for name in SAMPLING | STRUCTURED if name != "seed")],
                beam_width=[name for name in SAMPLING | STRUCTURED if name not in ("max_tokens", "ignore_eos", "seed")])


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        """One sentence instead of the whole usage, with a hint for a typo."""
        advice, unknown = "python engine.py --help lists the options", re.search(r"unrecognized arg.*?: (\S*)", message)
        if unknown and unknown[1].startswith("-"):
            name, *_ = unknown[1].split("=")
            refuse_unknown("there is no option", [name], [*map(option_name, KINDS)], advice)
        raise ValueError(f"{message}; " + ('write a prompt as --prompt "TEXT"' if unknown else advice))

    def format_help(self):
        return help_text()


def given(args, names) -> dict:
    return {name: value for name in names if (value := vars(args)[name]) is not None}


def check_stdin() -> None:
    if sys.stdin is None:
        raise ValueError("stdin is closed, and the prompts were to come from there; open it, or give --prompt TEXT")


def option_name(name: str) -> str:
    return f"--{'no-' * (KINDS[name] is False)}{name.replace('_', '-')}"


def _read_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="engine.py", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"nanopaged {__version__}")
    for name, kind in KINDS.items():
        ways: dict[type, dict[str, Any]] = {
            bool: dict(action=argparse.BooleanOptionalAction), NoneType: dict(nargs="?", const="")}
        how = dict(action="append") if kind is list else ways.get(type(kind), dict(type=kind))
        parser.add_argument(*SHORT.get(name, ()), option_name(name).replace("--no-", "--"), dest=name, **how)
    parser.set_defaults(model=OPTIONS["model"].default, words=sys.argv[1:] if argv is None else argv)
    # --max_tokens=8 is --max-tokens=8
    args = parser.parse_args([re.sub(r"^--[a-z_-]+(?==|\Z)", lambda name: name[0].replace("_", "-"), word)
                              for word in parser.get_default("words")])
    args.prints_steps = args.trace == ""
    _check_combination(args)
    return args


def _check_combination(args) -> None:
    """ValueError for options that do not go together."""
    has = set(given(args, KINDS))
    if all(vars(args)[name] in (None, False) for name in ("prompt", *WAYS)):
        raise ValueError("there is nothing to do; give --prompt TEXT, --prompts FILE, --chat, --serve or --simulate")
    for name, others in NEEDS.items():
        if name in has and has.isdisjoint(others):
            raise ValueError(f"{option_name(name)} needs {' or '.join(map(option_name, others))}; give both, or none")
    for name, others in EXCLUDES.items():
        if name in has and (both := [option_name(other) for other in others if other in has]):
            raise ValueError(f"{option_name(name)} does not go with {' and '.join(both)}; leave one out")


if __name__ == "__main__":
    sys.exit(main())
