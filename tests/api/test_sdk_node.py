"""The official OpenAI SDK for Node against a running Tollgate; its checks are in tests/node/sdk.mjs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess

import pytest

from models.database import Database
from tests.cast import enter
from tests.conftest import missing
from tests.house import ROOT, House

FOLDER = ROOT / "tests" / "node"
SCRIPT = FOLDER / "sdk.mjs"
CHECKS = re.findall(r"^  async (\w+)\(\) \{$", SCRIPT.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def node() -> str:
    """Give the node command, with the SDK installed beside the script."""
    command = shutil.which("node")
    if command is None:
        missing("Node")
    if not (FOLDER / "node_modules" / "openai").exists():
        npm = shutil.which("npm")
        if npm is None:
            missing("npm, to install the Node SDK in tests/node")
        installed = subprocess.run([npm, "ci", "--silent"], cwd=FOLDER, capture_output=True, text=True, check=False)
        if installed.returncode:
            missing(f"the Node SDK: npm ci said {installed.stderr[-300:]!r}")
    return command


@pytest.fixture(scope="module")
def told() -> dict[str, dict[str, str | None]]:
    """Keep what the script said, so that it runs once per database."""
    return {}


@pytest.fixture
async def outcomes(
    house: House, house_books: Database, database_kind: str, node: str, told: dict[str, dict[str, str | None]]
) -> dict[str, str | None]:
    """Give what each check came to: None, or what went wrong."""
    if database_kind not in told:
        keys = {
            "rich": (await enter(house_books, "rich", plan="wallet", credit_microusd=10_000_000)).key,
            "poor": (await enter(house_books, "poor", plan="wallet")).key,
            "mute": (await enter(house_books, "mute", plan="mute")).key,
            "slow": (await enter(house_books, "slow", plan="slow")).key,
        }
        environ = {**os.environ, "TOLLGATE_URL": house.base_url, "KEYS": json.dumps(keys)}
        environ = {name: value for name, value in environ.items() if not name.startswith("OPENAI_")}
        process = await asyncio.create_subprocess_exec(
            node, str(SCRIPT), env=environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(60):
            printed, complaint = await process.communicate()
        lines = [json.loads(line) for line in printed.splitlines()]
        broken_off = f"the script ended with code {process.returncode} before this check: {complaint.decode()}"
        told[database_kind] = dict.fromkeys(CHECKS, broken_off) | {line["name"]: line["error"] for line in lines}
    return told[database_kind]


@pytest.mark.parametrize("check", CHECKS)
async def test_the_node_sdk(outcomes: dict[str, str | None], check: str) -> None:
    error = outcomes[check]
    assert error is None, error


async def test_every_check_of_the_script_is_known_here(outcomes: dict[str, str | None]) -> None:
    assert list(outcomes) == CHECKS and len(CHECKS) > 25
