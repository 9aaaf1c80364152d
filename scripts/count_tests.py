#!/usr/bin/env python3
"""Counts what a run of ctest did: GoogleTest cases where a test wrote them, else one per ctest entry.

usage: count_tests.py BUILD_DIR    reads BUILD_DIR/results.xml (ctest --output-junit) and BUILD_DIR/gtest/*.xml
Prints a line per failure and, last, `N passed, N failed, N skipped`. Exit 1 if anything failed or nothing ran.
"""
import pathlib
import sys
import xml.etree.ElementTree as ElementTree


def count_cases(path):
    """(passed, names of failed, skipped) of one GoogleTest report; None if it is missing or cut short."""
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError):
        return None
    passed, failed, skipped = 0, [], 0
    for case in root.iter("testcase"):
        if case.find("failure") is not None:
            failed.append(f"{case.get('classname')}.{case.get('name')}")
        elif case.get("status") == "notrun" or case.get("result") in ("skipped", "suppressed"):
            skipped += 1
        else:
            passed += 1
    return passed, failed, skipped


def entry_outcome(entry):
    """passed, failed or skipped, as ctest saw the process end. What could not be started has failed."""
    if entry.find("failure") is not None or entry.get("status") == "fail":
        return "failed"
    note = entry.find("skipped")
    if note is not None or entry.get("status") in ("notrun", "disabled"):
        text = (note.get("message") if note is not None else "") or ""
        return "skipped" if text.startswith(("SKIP_", "Disabled")) or entry.get("status") == "disabled" else "failed"
    return "passed"


def main(build_dir):
    build = pathlib.Path(build_dir)
    passed, failed, skipped = 0, [], 0
    try:
        entries = list(ElementTree.parse(build / "results.xml").getroot().iter("testcase"))
    except (OSError, ElementTree.ParseError) as error:
        print(f"{build}/results.xml: {error}")
        entries = []
    for entry in entries:
        name, outcome = entry.get("name"), entry_outcome(entry)
        cases = count_cases(build / "gtest" / f"{name}.xml") if outcome != "skipped" else None
        if cases is not None:
            passed, failed, skipped = passed + cases[0], failed + [f"{name}: {c}" for c in cases[1]], skipped + cases[2]
            if outcome == "failed" and not cases[1]:  # e.g. a sanitizer that complained at exit
                failed.append(f"{name}: the process failed after its cases")
        elif outcome == "failed":
            failed.append(name)
        elif outcome == "skipped":
            skipped += 1
        else:
            passed += 1
    for name in failed:
        print("FAILED", name)
    print(f"{passed} passed, {len(failed)} failed, {skipped} skipped")
    return 1 if failed or passed == 0 else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
