"""The house's rules that a program can check: the arrows, the names, what may lie where."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import missing
from tests.house import ROOT

ROOMS = ("models", "api", "portal")
TOP_LEVEL = {
    "pyproject.toml", "portal", "api", "models", "templates", "static", "tests", "fly.toml",
    "README.md", "CHANGELOG.md", "LICENSE", "Makefile", "Dockerfile", "requirements.lock", ".ci",
}


def tracked() -> list[str]:
    """Return the files of the repository; in a tree without one, whatever is not hidden or made."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    return listed.stdout.splitlines()


def sources() -> Iterator[tuple[str, str]]:
    """Yield every source file of the rooms with its text."""
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text()


def test_the_arrows_hold() -> None:
    lint = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports"))], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert lint.returncode == 0, lint.stdout + lint.stderr


def test_the_style_holds() -> None:
    ruff = subprocess.run(
        [str(Path(sys.executable).with_name("ruff")), "check", "."], cwd=ROOT, capture_output=True, text=True,
        check=False,
    )
    assert ruff.returncode == 0, ruff.stdout


def test_nothing_else_stands_at_the_top_level() -> None:
    if not tracked():
        missing("git's list of files: this tree is no checkout")
    top = {name.split("/")[0] for name in tracked()}
    assert {name for name in top if not name.startswith(".") or name == ".ci"} <= TOP_LEVEL


def test_every_module_and_every_public_name_says_what_it_is_for() -> None:
    silent = []
    for name, text in sources():
        tree = ast.parse(text)
        if not ast.get_docstring(tree):
            silent.append(name)
        for node in tree.body:
            if (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                and not node.name.startswith("_")
                and not ast.get_docstring(node)
            ):
                silent.append(f"{name}: {node.name}")
    assert not silent


def test_no_float_comes_near_money() -> None:
    """No float constant, no `float(` and no true division in the files that compute with money."""
    found = []
    for name in ("money", "rate_card", "wallet", "ledger", "call", "included_calls", "api_key", "top_up", "refund"):
        for node in ast.walk(ast.parse((ROOT / "models" / f"{name}.py").read_text())):
            is_float = isinstance(node, ast.Constant) and isinstance(node.value, float)
            is_call = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "float"
            divides = (
                isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
                # Fractions and decimals divide exactly.
                and name not in ("rate_card", "money")
            )
            if is_float or is_call or divides:
                found.append(f"{name}:{node.lineno}")
    assert not found


def test_no_room_is_called_utils() -> None:
    unwanted = re.compile(r"(^|/)(utils?|helpers?|common|managers?|misc)(\.py|/|$)")
    assert not [name for name, _ in sources() if unwanted.search(name)]


def test_the_locks_name_no_host_and_no_place() -> None:
    """A lock pins by hash; where its packages are fetched from is each machine's own affair."""
    for name in ("requirements.lock", "tests/requirements.lock", "tests/node/package-lock.json"):
        text = (ROOT / name).read_text()
        assert "://" not in text and "file:" not in text and "--find-links" not in text, name
        assert "sha256:" in text or "sha512-" in text, name


def test_the_command_line_and_the_supervisor_import_nothing_that_serves() -> None:
    """It would be half of the time from a start to the first answer, and the memory of another process."""
    program = (
        "import sys, portal.__main__\n"
        "print([name for name in ('quart', 'hypercorn', 'aiohttp', 'webauthn', 'stripe', 'jinja2')"
        " if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
