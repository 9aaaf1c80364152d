"""What the guides say runs and prints what they say."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
NEEDS = {"pytorch": "torch", "jax": "jax"}


def check(page):
    command = [sys.executable, str(ROOT / "scripts/check_docs.py"), "--guides", sys.executable, str(page)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("page", sorted((ROOT / "docs/guides").glob("*.md")), ids=lambda page: page.stem)
def test_guide(page):
    if page.stem in NEEDS:
        pytest.importorskip(NEEDS[page.stem])
    done = check(page)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "text, words",
    [
        ("```python\n# a.py\nprint(1)\n```\n```sh\npython a.py\n```\n```text\n2\n```\n", "python a.py: prints\n1\ninstead of\n2"),
        ("```python\n# a.py\nraise SystemExit('no')\n```\n```sh\npython a.py\n```\n", "python a.py: status 1\nno"),
        ("```python\nprint(1)\n```\n```sh\npython a.py\n```\n", "a program without a name"),
        ("Nothing but words.\n", "nothing to run"),
    ],
)
def test_a_page_that_says_what_is_not(text, words, tmp_path):
    (tmp_path / "page.md").write_text(text)
    done = check(tmp_path / "page.md")
    assert done.returncode == 1 and words in done.stdout
