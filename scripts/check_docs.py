#!/usr/bin/env python3
"""Checks the links between the pages: every relative link of a Markdown file leads to a file, and to a heading where it names one.

usage: check_docs.py [ROOT]
"""
import pathlib
import re
import sys

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page):
    """The names of the page's headings, as GitHub makes them."""
    text = FENCE.sub("", page.read_text())
    return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in re.findall(r"^#+ +(.*)$", text, re.MULTILINE)}


def main(root):
    pages = sorted(root.glob("*.md")) + sorted((root / "docs").rglob("*.md"))
    broken, num_links = [], 0
    for page in pages:
        for target in LINK.findall(FENCE.sub("", page.read_text())):
            if re.match(r"[a-z]+:", target):
                continue
            num_links += 1
            name, _, heading = target.partition("#")
            file = (page.parent / name) if name else page
            if not file.exists():
                broken.append(f"{page.relative_to(root)}: {target} does not exist")
            elif heading and file.suffix == ".md" and heading not in anchors(file):
                broken.append(f"{page.relative_to(root)}: {target}: no such heading")
    print("\n".join(broken + [f"docs: {len(pages)} pages, {num_links} relative links, {len(broken)} broken"]))
    return 1 if broken or not pages else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent.parent).resolve()))
