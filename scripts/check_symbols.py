#!/usr/bin/env python3
"""Checks that a built libturnout.so shows public names and nothing else, and every function of the C header, and that nothing in it can end
the process that it is loaded into.

usage: check_symbols.py LIBRARY INCLUDE_DIR
"""
import pathlib
import re
import subprocess
import sys

# Public C++ names lie in the versioned namespace; what belongs to classes there (tables, type information) has a prefix.
CPP = re.compile(r"^(vtable for |typeinfo for |typeinfo name for )?turnout::v0::(?!internal::)")
C = re.compile(r"^turnout_[a-z_]+$")
DECLARED = re.compile(r"TURNOUT_API[^;()]*?\b(turnout_[a-z_]+)\(")
# Some of C++, so that a library that shows nothing does not pass.
NEEDED = ["turnout::v0::Buffer::dispatch(", "turnout::v0::Communicator::from_env(", "turnout::v0::required_bytes(",
          "typeinfo for turnout::v0::PeerTimeout"]

# What ends a process, or sends it a signal. (std::terminate() stays: exceptions must not leave a thread or a destructor.)
ENDS = {"abort", "exit", "_exit", "_Exit", "quick_exit", "raise", "kill"}

HEAD = re.compile(r"^(?:class|struct) (?!TURNOUT_API )(\w+)[^;]*\{")
MEMBER = re.compile(r"^  (?!friend |using |typedef |//)[^={}]*\([^{}]*\)(?: const| noexcept| override)*;")


def hidden_members(header):
    """Member functions that are declared without a body in a class that is not shown: programs cannot link them."""
    found, name = [], None
    for line in header.splitlines():
        head = HEAD.match(line)
        name = head.group(1) if head else None if line.startswith("}") else name
        if name and MEMBER.match(line):
            found.append(f"{name}: {line.strip()}")
    return found


assert hidden_members("struct A {\n  int f() const;\n};\nstruct TURNOUT_API B {\n  void g();\n};\nclass C {\n  int h() { return 1; }\n};") == ["A: int f() const;"]


def main():
    library, include = sys.argv[1], pathlib.Path(sys.argv[2])
    output = subprocess.run(["nm", "-D", "--defined-only", "-C", library], check=True, capture_output=True, text=True).stdout
    names = [line.split(" ", 2)[2] for line in output.splitlines()]
    problems = [f"shown, but not public: {name}" for name in names if not CPP.match(name) and not C.match(name)]
    problems += [f"missing: {name}" for name in NEEDED if not any(shown.startswith(name) for shown in names)]
    declared = {name for header in sorted(include.glob("turnout/c/*.h")) for name in DECLARED.findall(header.read_text())}
    problems += [f"declared in the C header, but missing: {name}" for name in sorted(declared - set(names))]
    problems += [f"shown, but not in the C header: {name}" for name in sorted({n for n in names if C.match(n)} - declared)]
    for header in sorted(include.glob("turnout/*.h")):
        problems += [f"{header.name}: declared in a class without TURNOUT_API: {member}" for member in hidden_members(header.read_text())]
    undefined = subprocess.run(["nm", "-D", "--undefined-only", library], check=True, capture_output=True, text=True).stdout
    used = {line.split()[-1].partition("@")[0] for line in undefined.splitlines()}
    problems += [f"may end the process of the caller: {name}" for name in sorted(used & ENDS)]
    if not used:
        problems.append("nothing of other libraries is used, which cannot be")
    if not declared:
        problems.append(f"no functions found in {include}/turnout/c")
    for problem in problems:
        print(problem)
    print(f"{len(names)} names, {len(declared)} of C, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
