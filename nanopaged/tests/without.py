"""Tests without a feature: `python -m nanopaged.tests.without NAME.. [--all] [PYTEST'S OPTIONS AND FILES]`.

For each NAME pytest runs in a copy of the source, from which nanopaged/features/NAME and its tests are deleted; of
NAME,NAME both are. It runs test_paged.py and the core's tests, with --all those of the other features, too. Exit code 1
if a run fails.

A feature's tests are nanopaged/tests/test_NAME.py and test_NAME_*.py. All others are the core's. A test that needs a
feature is skipped where the feature's file is not there, and the reason names the file (conftest.py).
"""
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def feature_names() -> set[str]:
    """The features of README's table, taken away or not."""
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("## Features")[1]
    cells = re.findall(r"^\| (`[^|]*`) \| [\d, ]+ \|", table, re.M)
    return {name.removesuffix(".py").removesuffix("/") for cell in cells for name in re.findall("`(.*?)`", cell)}


def is_there(name: str, root: Path = ROOT) -> bool:
    path = root / "nanopaged" / "features" / name
    return path.is_dir() or path.with_suffix(".py").exists()


def feature_of(test_file: str) -> str | None:
    """The feature that the tests of this file belong to; None: the core."""
    owners = [name for name in feature_names() if re.fullmatch(rf"test_{name}(_\w+)?(\.py)?", test_file)]
    return max(owners, key=len, default=None)


def files_of_tests(root: Path = ROOT) -> list[Path]:
    return sorted((root / "nanopaged" / "tests").glob("test_*.py"))


def copy_without(names: list[str], folder: Path):
    """A copy of the source in this folder, which is made, without the features and their tests."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache"))
    for name in names:
        path = folder / "nanopaged" / "features" / name
        shutil.rmtree(path) if path.is_dir() else path.with_suffix(".py").unlink()
    for file in files_of_tests(folder):
        if feature_of(file.name) in names:
            file.unlink()


def run_without(names: list[str], arguments: list[str], with_features: bool = False) -> int:
    """pytest's exit code. It runs the files that are among its arguments, or else all."""
    with tempfile.TemporaryDirectory() as parent:
        copy_without(names, folder := Path(parent) / "nanopaged")
        if not any(re.match(r"[^-].*\.py\b", argument) for argument in arguments):
            arguments = [*arguments, "test_paged.py", *(
                str(file.relative_to(folder)) for file in files_of_tests(folder)
                if with_features or not feature_of(file.name))]
        return subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
                              cwd=folder).returncode


def main(words: list[str]) -> int:
    groups = [word for word in words if {*word.split(",")} <= feature_names()]
    arguments = [word for word in words if word not in groups and word != "--all"]
    if not groups:
        print(__doc__, file=sys.stderr)
        return 2
    failed = []
    for group in groups:
        print(f"== without {group}", flush=True)
        if run_without(group.split(","), arguments, "--all" in words):
            failed.append(group)
    if failed:
        print(f"failed without {' '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
