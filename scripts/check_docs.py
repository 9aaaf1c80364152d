#!/usr/bin/env python3
"""Checks that the pages speak of what is there:
  links       every relative link leads to a file, and to a heading where it names one
  names       every TURNOUT_ name is a variable of src/util/env.cc, an option of CMakeLists.txt, or a word of the sources
  variables   every variable of src/util/env.cc is used by the sources
  paths       every `path` that begins with a folder of the repository exists (build/ is not looked at)
  tests       every `Suite.Test`, `file.py::test` and `ctest_name` of docs/reliability.md is a test, and every report there
              has one
  commands    every `./dev COMMAND` is one of dev's, every preset one of CMakePresets.json's
  guides      (with --guides PYTHON) the programs of docs/guides, which begin with `# NAME.py`, run by the commands between them, print
              what the page says
  flags       (with --command) every --flag in a page about `turnout` is one that the command has, every flag of the command stands in
              a page, and a table's first value is the default

usage: check_docs.py [ROOT] [--command build/PRESET/tools/turnout]
       check_docs.py [ROOT] --guides PYTHON [PAGE]...
       check_docs.py --self-test
"""
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
FOLDERS = "bench|cmake|docs|examples|include|records|scripts|src|tests|tools"
PATH = re.compile(r"`((?:%s)/[\w./*{},<>-]+)" % FOLDERS)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
# Pages whose flags are those of the command.
COMMAND_PAGES = ["bench.md", "demo.md", "launch.md", "selftest.md"]


def anchors(page):
    """The names of the page's headings, as GitHub makes them."""
    text = FENCE.sub("", page.read_text())
    return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in re.findall(r"^#+ +(.*)$", text, re.MULTILINE)}


def check_links(root, pages):
    for page in pages:
        for target in LINK.findall(FENCE.sub("", page.read_text())):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, heading = target.partition("#")
            file = (page.parent / name) if name else page
            if not file.exists():
                yield page, target + " does not exist"
            elif heading and file.suffix == ".md" and heading not in anchors(file):
                yield page, target + ": no such heading"


def check_names(root, pages):
    known = set(re.findall(r"TURNOUT_\w+", (root / "CMakeLists.txt").read_text()))
    for folder in ("include", "src", "cmake"):
        for source in (root / folder).rglob("*.[hc]*"):
            known |= set(re.findall(r"TURNOUT_\w+", source.read_text(errors="replace")))
    for page in pages:
        for name in sorted(set(re.findall(r"\bTURNOUT_[A-Z_]*[A-Z]\b", page.read_text()))):
            if name not in known:
                yield page, name + " is nowhere in the sources"


def check_variables(root):
    """A row of the table fills a field of Env; something must read it."""
    table = root / "src/util/env.cc"
    rows = re.findall(r'{"(TURNOUT_\w+)".*?\be\.(\w+) =', table.read_text(), re.DOTALL)
    sources = "".join(p.read_text() for p in (root / "src").rglob("*.[hc]*") if p.name not in ("env.cc", "env.h"))
    if len(rows) != table.read_text().count('{"TURNOUT_'):
        yield table, "rows that this script cannot read"
    python = "".join(p.read_text() for p in (root / "python/turnout").rglob("*.py"))
    for name, field in rows:
        if f'environ.get("{name}")' in python:
            continue
        # TURNOUT_LOG is read by the log on its own, since reading the others may log.
        if not re.search(r"\b(?:env\(\)|env|e|turnout)\.%s\b" % field, sources) and not (field == "log_level" and "read_log_level" in sources):
            yield table, name + " is in the table, and nothing uses it"


def check_paths(root, pages):
    for page in pages:
        for path in sorted(set(PATH.findall(page.read_text()))):
            path = path.rstrip(".,")
            if re.search(r"[<>]", path) or (page.parent / path).exists():
                continue
            choices = re.search(r"\{([^}]*)\}", path)
            all_paths = [path.replace(choices[0], c) for c in choices[1].split(",")] if choices else [path]
            for one in all_paths:
                if not list(root.glob(one)):
                    yield page, one + " does not exist"


SUITE = re.compile(r"`([A-Z]\w*)\.([A-Z]\w*)`")
REPORT = re.compile(r"(?<![\w/#-])((?:[\w-]+/)?[A-Za-z][\w.-]*#\d+)")


def tests_of(root):
    """Names of all tests: (suite, test) of GoogleTest, (file, function) of pytest, names of ctest."""
    google, python, ctest = set(), set(), set()
    for source in (root / "tests").rglob("*.[ch]*"):
        google |= set(re.findall(r"^TEST(?:_P|_F)?\((\w+),\s*(\w+)\)", source.read_text(), re.MULTILINE))
    for source in (root / "tests/python").rglob("test_*.py"):
        python |= {(source.name, name) for name in re.findall(r"^def (test_\w+)\(", source.read_text(), re.MULTILINE)}
    for lists in (root / "tests").rglob("CMakeLists.txt"):
        ctest |= set(re.findall(r"(?:add_test|turnout_test|turnout_cuda_test)\(NAME (\w+)", lists.read_text()))
    return google, python, ctest


def check_tests(root, change=lambda text: text):
    page = root / "docs/reliability.md"
    text = change(page.read_text())
    google, python, ctest = tests_of(root)
    named = set(SUITE.findall(text))
    for suite, test in sorted(named - google):
        yield page, f"{suite}.{test} is no test"
    for file, test in sorted(set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", text)) - python):
        yield page, f"{file}::{test} is no test"
    for name in sorted(set(re.findall(r"`((?:docs|core|cuda|api|engine|issues|transport)_[a-z_]+)`", text)) - ctest):
        yield page, name + " is no test of ctest"
    if len(named) < 50:
        yield page, "names hardly any test: is the pattern still the page's?"
    # A row of the tables of reports has reports first and tests last.
    told = text.partition("## What others' users reported")[2]
    for row in re.findall(r"^\| .*#\d+.*$", told, re.MULTILINE):
        cells = row.strip("| ").split(" | ")
        if not all(REPORT.fullmatch(report.strip()) for report in cells[0].split(",")):
            yield page, f"{cells[0]}: not all are of the form repository#number"
        if not re.search(r"`[\w.]+(?:::\w+)?`", cells[-1]):
            yield page, f"{cells[0]}: no test is named"


def self_test(root):
    """A test that is renamed, a report without a test, and one that is none are found."""
    def wrong(old, new):
        return [why for _, why in check_tests(root, lambda text: text.replace(old, new, 1))]

    assert wrong("", "") == [], wrong("", "")
    assert wrong("`Issues.AnyHiddenIsTaken`", "`Issues.AnyHiddenWasTaken`") == ["Issues.AnyHiddenWasTaken is no test"]
    assert wrong("`test_torch.py::test_a_rank", "`test_torch.py::test_the_rank") == ["test_torch.py::test_the_rank_without_tokens_takes_part is no test"]
    assert wrong("`docs_symbols`", "`docs_symbol`") == ["docs_symbol is no test of ctest"]
    assert wrong("| `Issues.AnExpertChosenTwiceCountsTwice`, `ReferenceDispatch.DuplicatesCountTwice` |", "| nothing |") == [
        "ISEEKYAN/Megatron-LM#175: no test is named"]
    assert wrong("| xtuner#2053 |", "| xtuner 2053, DeepEP#1 |") == ["xtuner 2053, DeepEP#1: not all are of the form repository#number"]
    print("check_docs.py: self-test passed")


def check_commands(root, pages):
    dispatched = (root / "dev").read_text().rpartition("case $command in")[2].partition("esac")[0]
    commands = {c.strip() for line in re.findall(r"^ +([a-z][^)]*)\)", dispatched, re.MULTILINE) for c in line.split("|")}
    presets = {p["name"] for p in json.loads((root / "CMakePresets.json").read_text())["buildPresets"]}
    for page in pages:
        for command, argument in re.findall(r"\./dev ([\w-]+)(?: ([a-z]\w*)\b)?", page.read_text()):
            if command not in commands:
                yield page, "./dev " + command + " is no command of dev"
            if command == "build" and argument and argument not in presets:
                yield page, "./dev build " + argument + " is no preset"


def help_of(command, name):
    return subprocess.run([command, name, "--help"], check=True, capture_output=True, text=True).stdout


def check_flags(root, command):
    """A page with one command's table holds its defaults; other pages may speak of every command."""
    helps = {name: help_of(command, name) for name in ("launch", "bench", "demo", "selftest")}
    known = set(FLAG.findall("".join(helps.values()))) | set(FLAG.findall((root / "dev").read_text()))
    for script in ("bench/record.py", "scripts/gpu.py"):
        known |= set(FLAG.findall((root / script).read_text()))
    known |= {"--version", "--nproc", "--nnodes", "--node", "--master"}  # the latter are torchrun's, up to their underscores
    texts = {name: (root / "docs" / name).read_text() for name in COMMAND_PAGES}
    for name, text in texts.items():
        for flag in sorted(set(FLAG.findall(text)) - known):
            yield root / "docs" / name, flag + " is no flag of turnout"
    for name, text in helps.items():
        page = name + ".md"
        for flag in sorted(set(FLAG.findall(text)) - {"--help"}):
            if flag not in FLAG.findall("".join(texts.values())):
                yield root / "docs" / page, "%s of turnout %s is not told" % (flag, name)
    for page, name in (("bench.md", "bench"), ("demo.md", "demo"), ("selftest.md", "selftest")):
        for cell, value in re.findall(r"^\| (`--[^|]*`) \| ([^|]*?)[,;:(|]", texts[page].replace(" |\n", " ,|\n"), re.MULTILINE):
            flags, values = FLAG.findall(cell), re.split(r", ", value)
            default = re.search(re.escape(flags[0]) + r" \w+=(\S+)", helps[name])
            if len(flags) == 1 and default and default[1] != values[0].strip(" `"):
                yield root / "docs" / page, "%s has the default %s, not %s" % (flags[0], default[1], values[0])


BLOCK = re.compile(r"^```(python|sh|text)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run_guide(page, python):
    """Writes down the page's programs, runs its commands, and compares what they print with the text that follows each."""
    # What a user's shell would find: the package's Python, and its commands.
    words = {"python": [python], "turnout": [python, "-m", "turnout"], "torchrun": [python, "-m", "torch.distributed.run"]}
    blocks = BLOCK.findall(page.read_text())
    ran = 0
    with tempfile.TemporaryDirectory() as folder:
        for kind, text in blocks:
            if kind == "python":
                name = re.match(r"# (\w+\.py)\n", text)
                if not name:
                    yield page, "a program without a name: let it begin with # NAME.py"
                else:
                    pathlib.Path(folder, name[1]).write_text(text)
        for (kind, text), (following, expected) in zip(blocks, [*blocks[1:], ("", "")]):
            for line in text.splitlines() if kind == "sh" else ():
                command = [each for word in shlex.split(line) for each in words.get(word, [word])]
                if command[0] == "pip":
                    continue
                done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"})
                ran += 1
                if done.returncode != 0:
                    yield page, "%s: status %d\n%s" % (line, done.returncode, done.stdout + done.stderr)
                elif following == "text" and done.stdout != expected:
                    yield page, "%s: prints\n%sinstead of\n%s" % (line, done.stdout, expected)
    if not ran:
        yield page, "nothing to run"


def main(arguments):
    if "--self-test" in arguments:
        return self_test(pathlib.Path(__file__).resolve().parents[1])
    if "--guides" in arguments:
        at = arguments.index("--guides")
        root = pathlib.Path(arguments[0] if at else pathlib.Path(__file__).parents[1]).resolve()
        pages = [pathlib.Path(a) for a in arguments[at + 2 :]] or sorted((root / "docs/guides").glob("*.md"))
        wrong = [each for page in pages for each in run_guide(page, arguments[at + 1])]
        for page, why in wrong:
            print("%s: %s" % (page.name, why))
        print("guides: %d pages, %d wrong" % (len(pages), len(wrong)))
        return 1 if wrong or not pages else 0
    command = arguments[arguments.index("--command") + 1] if "--command" in arguments else None
    roots = [a for i, a in enumerate(arguments) if not a.startswith("--") and (i == 0 or arguments[i - 1] != "--command")]
    root = pathlib.Path(roots[0] if roots else pathlib.Path(__file__).resolve().parent.parent).resolve()
    pages = sorted(root.glob("*.md")) + sorted((root / "docs").rglob("*.md"))
    # Design pages also speak of what is to come: their links and variables must be right, paths and commands need not exist yet.
    done = [p for p in pages if p.name != "overview.md" and p.name != "STYLE.md"]
    wrong = [*check_links(root, pages), *check_names(root, pages), *check_variables(root), *check_paths(root, done), *check_commands(root, done),
             *check_tests(root)]
    if command:
        wrong += check_flags(root, command)
    for page, why in wrong:
        print("%s: %s" % (page.relative_to(root), why))
    print("docs: %d pages, %d wrong" % (len(pages), len(wrong)))
    return 1 if wrong or not pages else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
