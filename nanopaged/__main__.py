"""The program: `python engine.py ...`, or `python -m nanopaged ...`. nanopaged/cli/main.py is its command line."""
import sys

from nanopaged.cli.main import main


def run() -> None:
    """Run the command line, and exit with its code."""
    sys.exit(main())


if __name__ == "__main__":
    run()
