"""The command line behind `python engine.py`: prompts in, text on stdout, everything else on stderr."""
import argparse
import os
import sys
import time

from nanopaged.params import SamplingParams


def main(llm_class, argv: list[str] | None = None) -> int:
    """Run the command line with engine.py's LLM class; the exit code: 0, 2 for bad input, 130 after Ctrl-C."""
    sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode gets question marks, not a traceback
    try:
        args = _parser().parse_args(argv)
        params = SamplingParams(n=args.n, temperature=args.temperature, top_p=args.top_p, top_k=args.top_k,
                                min_p=args.min_p, seed=args.seed, max_tokens=args.max_tokens,
                                ignore_eos=args.ignore_eos)
        started = time.perf_counter()
        llm = llm_class(args.model, **{name: getattr(args, name) for name in ENGINE_OPTIONS})
        _say(f"{args.model} on {llm.runner.device} ({str(llm.runner.dtype).removeprefix('torch.')}), pool of "
             f"{llm.scheduler.block_manager.num_blocks} blocks of {llm.runner.block_size} tokens, loaded in "
             f"{time.perf_counter() - started:.1f} s")
        if len(args.prompt) == 1 and args.n == 1:
            _stream(llm, args.prompt[0], params)
        else:
            _print_all(llm, args.prompt, params)
        return 0
    except BrokenPipeError:  # `| head` has read enough
        sys.stdout = open(os.devnull, "w")
        return 0
    except (ValueError, OSError) as error:
        _say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        _say("interrupted")
        return 130


ENGINE_OPTIONS = ("dtype", "device", "attention", "load_format", "block_size", "num_blocks", "gpu_memory_utilization",
                  "max_model_len", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching",
                  "scheduling_policy", "enforce_eager", "seed")


def _stream(llm, prompt: str, params: SamplingParams) -> None:
    """One prompt: its text as it comes, prompt first."""
    started, first = time.perf_counter(), None
    most_blocks, pool = 0, llm.scheduler.block_manager
    request_id, shown, output = llm.add_request(prompt, params), 0, None
    try:
        print(prompt, end="", flush=True)
        while llm.has_unfinished_requests():
            for output in llm.step():
                first = first or time.perf_counter()
                print(output.outputs[0].text[shown:], end="", flush=True)
                shown = len(output.outputs[0].text)
            most_blocks = max(most_blocks, pool.num_blocks - pool.num_free_blocks)
    finally:
        llm.abort_request(request_id)
        print(flush=True)
    new = len(output.outputs[0].token_ids)
    _say(f"{len(output.prompt_token_ids)} prompt tokens, first token after {first - started:.2f} s, {new} new tokens at "
         f"{(new - 1) / max(time.perf_counter() - first, 1e-9):.1f} tokens/s, at most {most_blocks} blocks in use, "
         f"finished by {output.outputs[0].finish_reason}")


def _print_all(llm, prompts: list[str], params: SamplingParams) -> None:
    """Several texts: each under its prompt, when all are done."""
    started = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - started
    for output in outputs:
        for sample in output.outputs:
            print(f"=== {output.prompt!r}" + (f" [{sample.index}]" if params.n > 1 else ""))
            print(f"{sample.text}\n")
    new = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    _say(f"{len(prompts)} prompts, {new} new tokens in {seconds:.2f} s: {new / seconds:.1f} tokens/s")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        """One sentence instead of the whole usage."""
        raise ValueError(f"{message} (python engine.py --help lists the options)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="engine.py", description="Generate text with a paged-attention engine.", allow_abbrev=False,
                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--prompt", action="append", required=True, metavar="TEXT", help="may be given several times")
    parser.add_argument("--model", default="shakespeare", help="bundled name or checkpoint directory")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=256, help="new tokens at most")
    sampling.add_argument("--temperature", type=float, default=0.8, help="0: greedy")
    sampling.add_argument("--top-p", type=float, default=1.0)
    sampling.add_argument("--top-k", type=int, default=0, help="0: all tokens")
    sampling.add_argument("--min-p", type=float, default=0.0)
    sampling.add_argument("--n", type=int, default=1, help="samples per prompt")
    sampling.add_argument("--seed", type=int, default=0, help="of weights and draws")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after end-of-sequence tokens")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--dtype", default="auto", help="auto, float32, float16, bfloat16")
    engine.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    engine.add_argument("--attention", default="auto", help="auto, triton, torch")
    engine.add_argument("--load-format", default="auto", help="auto, dummy")
    engine.add_argument("--block-size", type=int, help="token slots per block; 64 on CUDA, else 16, if not given")
    engine.add_argument("--num-blocks", type=int, help="size of the pool; what fits, if not given")
    engine.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    engine.add_argument("--max-model-len", type=int, help="longest sequence, prompt included")
    engine.add_argument("--max-num-seqs", type=int, default=256)
    engine.add_argument("--max-num-batched-tokens", type=int, default=8192)
    engine.add_argument("--no-enable-prefix-caching", dest="enable_prefix_caching", action="store_false")
    engine.add_argument("--scheduling-policy", default="fcfs", help="fcfs, priority")
    engine.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs, no compiling: starts sooner, runs slower")
    return parser
