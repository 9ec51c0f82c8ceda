"""README.md held to the code: its commands, traces, numbers, names and paths."""
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

import bench
from nanopaged import engine, kernel, model
from nanopaged.api.llm import LLM
from nanopaged.cli.main import help_text, main
from nanopaged.device import choices, pool, runner
from nanopaged.features import cascade, graphs
from nanopaged.tests.helpers import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCED = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S)
DRAWINGS = [text.splitlines() for language, text in FENCED if not language]
COMMANDS = re.findall(r"^    ((?:.*\\\n)*.*)$", re.sub(r"^```.*?^```$", "", README, flags=re.M | re.S), re.M)
PLAIN = " ".join(README.split())
SOURCE = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "nanopaged").rglob("*.py")
                 if file.parent.name != "tests")


# ---- Commands and traces

def test_every_line_of_the_traces_is_printed_in_this_order(capsys):
    _, first = (shlex.split(command.replace("\\\n", " "))[2:] for command in COMMANDS if "--trace" in command)
    swapping = [*first, "--swap-space", "1"]
    excerpts = [lines for lines in DRAWINGS if lines[0].startswith(("step", "  preempted"))]
    assert len(excerpts) == 4 and "`--swap-space 1`" in README
    for arguments, wanted in ((first, sum(excerpts[:3], [])), (swapping, excerpts[3])):
        assert main([*arguments, "--device", "cpu"]) == 0
        printed = iter([line.rstrip() for line in capsys.readouterr().err.splitlines()])
        for line in wanted:
            assert line in printed, f"the trace does not print this line, or not behind those before it: {line!r}"


def test_the_python_example_runs(capsys):
    code, _ = (text for language, text in FENCED if language == "python")  # test_server.py runs the second one
    exec(code.replace("LLM()", "LLM(device='cpu')"), {})
    assert len(capsys.readouterr().out) > 100


def test_every_option_exists():
    of_bench, of_others = (ROOT / "bench.py").read_text(), {
        "--help", "--headless", "--hide-scrollbars", "--index-url", "--screenshot", "--window-size"}
    known = help_text().replace("--[no-]", "--no-")
    for option in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README)) - of_others:
        assert re.search(option + r"\b(?!-)", known) or f'"{option}"' in of_bench, option


# ---- Paths and names

def test_every_path_and_every_heading_that_is_linked_exists():
    paths = set(re.findall(r"`([\w./]+\.(?:py|txt|toml|yml)|nanopaged/[\w/]*)`", README))
    assert len(paths) > 15
    ours = {path for path in paths - {"merges.txt"} if not path.startswith(("basic/", "features/"))}  # those are vLLM's
    assert not [path for path in ours if not (ROOT / path).exists()]
    modules = re.findall(r"python -m nanopaged\.tests\.(\w+)", README)
    assert modules and all((ROOT / "nanopaged" / "tests" / f"{module}.py").exists() for module in modules)
    headings = {heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", README, re.M)}
    assert not set(re.findall(r"\]\(#([\w-]+)\)", README)) - headings


def test_every_field_variable_and_setting_of_the_reference_exists():
    """Names with an underscore stand in the source, but for those of Ray, of the tests and of clients."""
    lines = [line for line in README.split("## Reference")[1].splitlines() if not line.startswith("| tried with")]
    names = set(re.findall(r"`\"?((?:[a-z]+|[A-Z]+)(?:_[a-zA-Z]+)+)\b", "\n".join(lines)))
    assert len(names) > 50
    missing = {name for name in names if not re.search(rf"\b{name}\b", SOURCE)}
    assert missing <= {"num_gpus", "NANOPAGED_VLLM_EXAMPLES"}


def test_the_figures_are_those_of_the_bench():
    """Every section that is named exists, here and in the source. vLLM's figures are those that bench.py prints."""
    named = set(",".join(re.findall(r"bench\.py --only ([\w,]+)", SOURCE + README)).split(","))
    assert named <= {section.__name__ for section in bench.ANYWHERE + bench.ON_CUDA} and len(named) > 10
    theirs = [figure for name, figure in bench.VLLM.items() if "start" not in name]
    theirs += [peer.replace(", ratio ", " (") + ")" for _, peer, _ in bench.ON_TWO.values()]
    figures = README.split("### Figures")[1]
    assert not [figure for figure in theirs if not re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d.,])", figures)]


def test_the_names_beside_those_of_vllm_exist():
    table = README.split("### vLLM's names")[1].split("###")[0]
    names = [name for line in re.findall(r"\| ([^|]*) \|$", table, re.M) for name in re.findall(r"`([\w.]+)`", line)]
    names += re.findall(r"`((?:Scheduler|BlockManager|Runner)\.\w+|_\w+)`", README)
    assert len(names) > 25
    homes = (runner, pool, graphs, cascade, engine, kernel, model, choices,
             SimpleNamespace(LLM=LLM, choices=choices, block_size=0))
    for name in names:
        first, *rest = name.split(".")
        found = next((getattr(home, first) for home in homes if hasattr(home, first)), None)
        for attribute in rest:
            found = getattr(found, attribute, None)
        assert found is not None, name


def test_a_room_imports_from_no_room_above():
    ranks = dict(cli=5, api=4, device=3, weights=1, text=1)
    rooms = "`cli`, `api`, `device`, then `weights` and `text`, then the single files"
    assert rooms in PLAIN

    for file in (ROOT / "nanopaged").rglob("*.py"):
        room, *_ = parts = file.relative_to(ROOT / "nanopaged").parts
        if room in ranks or len(parts) == 1 and room not in ("__init__.py", "__main__.py"):  # these offer all rooms
            text = file.read_text(encoding="utf-8")
            others = set(re.findall(r"^\s*(?:from|import) nanopaged(?:\.| import )(\w+)", text, re.M)) - {room}
            assert not {other for other in others if ranks.get(other, 0) >= max(1, ranks.get(room, 0))}, file
    assert not re.search(r"^\s*(import|from) torch", (ROOT / "engine.py").read_text(encoding="utf-8"), re.M)


# ---- Numbers

def test_the_drawing_of_the_pool():
    """A, then a sequence that holds block 2 for a while, then B."""
    manager = engine.BlockManager(num_blocks=6, block_size=4)
    a, other, b = (engine.Sequence(list(map(ord, text)), engine.Order(0, i, 0), 20)
                   for i, text in enumerate(("abcdefg", "....", "abcdxyzwv")))
    for seq in (a, other, b):
        assert manager.admit(seq) and manager.allocate(seq, seq.num_tokens)
        seq.num_computed_tokens = seq.num_tokens
        manager.cache_full_blocks(seq)
    manager.free(other)
    drawing = next(block for block in DRAWINGS if "block_size 4" in block[0])
    tables = [list(map(int, re.findall(r"\d", line.split("block")[0]))) for line in drawing if "  table  " in line]
    assert tables == [a.block_table, b.block_table]
    ref_counts = re.findall(r"block \d [^\d\n]*(\d)", "\n".join(drawing))
    assert list(map(int, ref_counts)) == manager.ref_counts


def test_how_many_lines_there_are_to_read():
    """The numbers are right within a fifth, for they are a guide."""
    def num_lines(*files: Path) -> int:
        return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)

    tour = README.split("## The tour")[1].split("## Reference")[0]
    chapters = [ROOT / f"{name}.py" for name in ("kernel", "model", "engine")]
    rooms = [file for folder in ("", "cli", "api", "features", "device", "weights", "text")
             for file in (ROOT / "nanopaged" / folder).glob("*.py" if not folder else "**/*.py")]
    plain_kernel = chapters[0].read_text().split("\n# In Triton")[0].count("\n")
    device = [ROOT / "nanopaged" / "device" / name for name in ("step_input.py", "runner.py", "transfer.py")]
    plain_path = plain_kernel + num_lines(*chapters[1:], *device)
    lines = [tour.count("\n"), plain_path, num_lines(*chapters, *rooms)]
    rows = re.findall(r"^\|[^|\n]*\| ([\d,]+) \| (\d+) \|$", tour, re.M)
    assert len(rows) == len(lines)
    for actual, (stated, minutes) in zip(lines, rows):
        stated = int(stated.replace(",", ""))
        assert stated == pytest.approx(actual, rel=0.2) and int(minutes) == pytest.approx(stated / 15, rel=0.1), actual

