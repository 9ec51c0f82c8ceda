"""Importing nanopaged and starting the program: what it costs, what Ctrl-C does meanwhile, and that a user's own
kernel.py, model.py or engine.py stays his."""
import ast
import os
import re
import signal
import subprocess
import sys

import pytest

import engine
import kernel
import model
import nanopaged
from nanopaged.tests.helpers import GOLDEN, ROOT, needs, without_notes
from nanopaged.tests.programs import run_program

CHAPTERS = ("kernel", "model", "engine")


def python(*argv, cwd=ROOT, path=ROOT, **variables) -> subprocess.CompletedProcess:
    """A Python process, with PYTHONPATH."""
    environment = os.environ | dict(PYTHONPATH=str(path), PYTHONIOENCODING="utf-8") | variables
    done = subprocess.run([sys.executable, *argv], cwd=cwd, env=environment, capture_output=True, encoding="utf-8",
                          timeout=300)
    done.stderr = without_notes(done.stderr)
    return done


@pytest.fixture
def users_folder(tmp_path):
    """A folder with modules of the chapters' names."""
    for name in CHAPTERS:
        (tmp_path / f"{name}.py").write_text("OWNER = 'user'\n")
    return tmp_path


def test_nanopaged_offers_what_an_editor_sees_and_names_what_it_lacks():
    """Names that __getattr__ loads are imported where type checkers look. A chapter is one module."""
    assert all(getattr(nanopaged, name) is not None for name in nanopaged.__all__)
    with pytest.raises(AttributeError, match="Engine.*SamplingParams"):
        nanopaged.Engine
    tree = ast.parse((ROOT / "nanopaged" / "__init__.py").read_text())
    typed = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    homes = {alias.asname: getattr(node, "module", None) for node in typed.body for alias in node.names}
    assert homes == nanopaged._HOME | dict.fromkeys(CHAPTERS)
    assert {*CHAPTERS, *nanopaged.__all__, "__version__"} <= set(dir(nanopaged))
    assert (ROOT / "nanopaged" / "py.typed").exists()
    assert [getattr(nanopaged, name) for name in CHAPTERS] == [kernel, model, engine]


# ---- What an import costs

@pytest.mark.parametrize("argv", [["engine.py", "--help"], ["-c", "import engine"], *(
    ["-c", f"{statement}; import sys; assert 'engine' not in sys.modules"] for statement in (
        "import nanopaged", "from nanopaged import SamplingParams, RequestOutput; SamplingParams(top_p=0.9)",
        "import nanopaged.cli.main, nanopaged.sampling_params, nanopaged.outputs")),
    pytest.param(["-c", "import nanopaged.features.batch"], marks=needs("batch", "server"))], ids=str)
def test_the_help_the_scheduler_and_the_settings_need_no_torch(tmp_path, argv):
    for name in ("torch", "triton", "numpy", "tiktoken"):
        (tmp_path / f"{name}.py").write_text(f"raise AssertionError('{name} is imported')\n")
    done = python(*argv, path=f"{tmp_path}{os.pathsep}{ROOT}")
    assert (done.returncode, done.stderr) == (0, "")


# ---- Starting the program

# Torch, as far as Ctrl-C is concerned: an interrupt while it is imported is swallowed.
SWALLOWS = """
import os, signal, sys
try:
    os.kill(os.getpid(), signal.SIGINT)
    [None for _ in range(1000)]
except KeyboardInterrupt:
    pass
print("goes on")
sys.exit(5)
"""


@pytest.mark.parametrize("ignored", [False, True], ids=["", "in the background of a script"])
@pytest.mark.parametrize("argv", [["engine.py"], ["-m", "nanopaged"], ["-m", "nanopaged.cli.main"]], ids=" ".join)
def test_ctrl_c_ends_the_program_while_torch_is_imported(tmp_path, argv, ignored):
    (tmp_path / "torch.py").write_text(SWALLOWS)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)  # it is inherited
    try:
        done = python(*argv, "--prompt", "x", path=tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    expected = (5, "goes on\n", "") if ignored else (130, "", "interrupted\n")
    assert (done.returncode, done.stdout, done.stderr) == expected


@pytest.mark.parametrize("argv, expected", [
    *((["-m", module, "--version"], (0, f"nanopaged {nanopaged.__version__}\n", ""))
      for module in ("nanopaged", "nanopaged.cli.main")),
    ([ROOT / "engine.py", "--prompt", "x", "--top-p", "2"],
     (2, "", "error: top_p must be a number above 0 and at most 1, not 2.0\n"))])
def test_the_package_is_a_program(tmp_path, argv, expected):
    """From another folder too, with PYTHONPATH."""
    done = python(*argv, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == expected
    assert re.fullmatch(r"\d+\.\d+\.\d+\w*", nanopaged.__version__)


# ---- A user's modules of the same names

USERS_PROGRAM = """
import sys
from pathlib import Path
{before}
from nanopaged import LLM
import nanopaged
import kernel, model, engine
assert kernel.OWNER == model.OWNER == engine.OWNER == "user"
[output] = LLM({checkpoint!r}, device="cpu", num_blocks=8).generate([[1, 2, 3]])
assert output.finished
for name in ("kernel", "model", "engine"):
    file = Path({root!r}) / (name + ".py")
    loaded = {{id(module) for module in list(sys.modules.values()) if getattr(module, "__file__", None) == str(file)}}
    assert loaded == {{id(getattr(nanopaged, name))}}, name
from nanopaged import kernel as ours
from nanopaged import kernel as again
assert ours is again and ours is not kernel and sys.modules["kernel"] is kernel
"""


def test_a_users_modules_stay_his(users_folder):
    """They may be imported before nanopaged or after it. Nobody complains where there is no numpy."""
    imports = {"before.py": "import kernel, model, engine", "after.py": "sys.modules['numpy'] = None"}
    for name, before in imports.items():
        (users_folder / name).write_text(
            USERS_PROGRAM.format(before=before, checkpoint=str(GOLDEN / "qwen3"), root=str(ROOT)))
    before = run_program((users_folder / "before.py").read_text(), cwd=users_folder, PYTHONPATH=str(ROOT))
    for done in (before, python("after.py", cwd=users_folder)):
        assert (done.returncode, done.stdout, without_notes(done.stderr)) == (0, "", "")


def test_the_program_runs_from_anywhere_until_its_reader_goes_away(users_folder):
    """Beside modules of the same names, too. `| head -c 6` makes neither the program nor the interpreter complain."""
    argv = [sys.executable, str(ROOT / "engine.py"), "--prompt", "ROMEO:", "--ignore-eos", "--enforce-eager",
            "--num-blocks", "64"]  # on a GPU other tests share
    with subprocess.Popen(argv, cwd=users_folder, env=os.environ | dict(PYTHONPATH=str(users_folder)), text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout.read(6) == "ROMEO:", child.stderr.read()
        child.stdout.close()
        errors = child.stderr.read()
    assert child.returncode == 0 and "shakespeare on" in errors
    assert not any(word in errors for word in ("error", "Traceback", "Exception ignored"))
