"""The program: `python engine.py ...`, or `python -m nanopaged ...`. nanopaged/cli/main.py is its command line."""
import os
import signal
import sys
from typing import Any


def run() -> None:
    """Run the command line, and exit with its code.

    While torch is imported, Ctrl-C ends the process at once. A KeyboardInterrupt would be swallowed by torch's own
    `except` clauses, or would leave Python's callbacks with a traceback.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a script's job with & ignores Ctrl-C
        signal.signal(signal.SIGINT, _end)
    from nanopaged.cli.main import main
    sys.exit(main(llm_class=_load))


def _load(*args: Any, **options: Any) -> Any:
    """LLM(..). From here on Ctrl-C raises KeyboardInterrupt, which the engine and the command line handle."""
    from nanopaged.api.llm import LLM
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return LLM(*args, **options)


def _end(*_: Any) -> None:
    try:
        os.write(2, b"interrupted\n")
    finally:
        os._exit(130)


if __name__ == "__main__":
    run()
