"""Every command in the documentation runs, and prints what the documentation says it prints.

A console block is run in a directory that holds the TOML blocks before it, each named by its first line (`# my.toml`).
Comments before a block say how: `<!-- test: fails -->` (exit code 2, output compared), `<!-- test: skip, WHY -->`.
What would take minutes is made small: the size of the model, the steps and the text in TOML blocks.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("README*.md"), *ROOT.glob("docs/*.md")])
SMALLER = {
    '"/path/to/text"': f'"{Path(json.__file__).parent}"',
    "layers = 8": "layers = 1",
    "hidden = 512": "hidden = 32",
    "ffn = 1376": "ffn = 64",
    "vocab = 8192": "vocab = 600",
    "sequence_length = 512": "sequence_length = 64",
    "steps = 1000": "steps = 2",
}


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    how: str


def blocks(page: Path) -> Iterator[Block]:
    pattern = r"(?:<!-- test: ([^>]*) -->\n)?```(\w*)\n(.*?)```"
    for how, language, text in re.findall(pattern, page.read_text(), flags=re.DOTALL):
        yield Block(language, text, how)


def steps(block: Block) -> Iterator[tuple[str, str]]:
    """(command, what the page shows of its output)."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        yield command, shown.strip()


@pytest.mark.parametrize("page", [p for p in PAGES if "zh" not in p.name], ids=lambda page: page.name)
def test_commands_run(page: Path, tmp_path: Path) -> None:
    tools = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    for block in blocks(page):
        if block.language == "toml":
            text = block.text
            for large, small in SMALLER.items():
                text = text.replace(large, small)
            (tmp_path / text.splitlines()[0].removeprefix("# ")).write_text(text)
        if block.language != "console":
            continue
        for command, shown in steps(block):
            if command.startswith("make"):
                subprocess.run(
                    ["make", "-n", *command.split()[1:]], cwd=ROOT, check=True, capture_output=True
                )
            elif block.how.startswith("skip"):
                assert shutil.which(command.split()[0]) or block.how.count(",") >= 1, "a skip says why"
            else:
                done = subprocess.run(
                    command,
                    shell=True,
                    cwd=tmp_path,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=120,
                )
                assert done.returncode == (2 if block.how == "fails" else 0), (
                    command + done.stdout + done.stderr
                )
                assert shown in done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_exist(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / link).exists(), link
    for path in re.findall(r"`((?:tests|benchmarks|docs|src)/[\w./*-]+)`", page.read_text()):
        assert list(ROOT.glob(path)), path


def test_translations_have_the_same_commands() -> None:
    """So running one language's is enough."""
    english, chinese = (list(blocks(ROOT / name)) for name in ("README.md", "README.zh-CN.md"))
    assert [block.language for block in english] == [block.language for block in chinese]
    for mine, theirs in zip(english, chinese, strict=True):
        if mine.language == "console":
            assert mine.text == theirs.text
