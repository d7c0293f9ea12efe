"""What we are made of: packages pinned by hash, none older than its known holes, nothing that runs by itself."""

from __future__ import annotations

import re
import site
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tests.house import ROOT

LOCKS = ("requirements.lock", "tests/requirements.lock")
# The oldest version that is known to be sound, and why.
FLOORS = {
    "aiohttp": (3, 13, 4),  # trailers without a limit before it
    "h11": (0, 16),  # a lenient end of chunks, by which requests are smuggled
    "werkzeug": (3, 1, 6),  # names of devices as file names on Windows
    "jinja2": (3, 1, 6),  # ways out of the sandbox
    "h2": (4, 3),  # requests split by a header
}
# Python runs a line of a .pth that begins with "import" at every start. These are known, and theirs.
KNOWN_PTH = {"distutils-precedence.pth", "_virtualenv.pth", "a1_coverage.pth", "pip-system-certs.pth"}


def pinned(lock: str) -> Iterator[tuple[str, str, int]]:
    """Yield name, version and number of hashes of every package in a lock."""
    text = (ROOT / lock).read_text().replace("\\\n", " ")
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            name, version = re.match(r"([A-Za-z0-9._-]+)==([^\s;]+)", line).groups()
            yield name.lower(), version, len(re.findall(r"--hash=sha256:[0-9a-f]{64}(?:\s|$)", line))


@pytest.mark.parametrize("lock", LOCKS)
def test_every_package_is_pinned_by_its_hash(lock: str) -> None:
    packages = list(pinned(lock))
    assert len(packages) > 20
    assert not [name for name, _, hashes in packages if not hashes]


def test_what_is_tested_is_what_is_shipped() -> None:
    shipped, tested = ({name: version for name, version, _ in pinned(lock)} for lock in LOCKS)
    assert {name: tested.get(name) for name in shipped} == shipped


@pytest.mark.parametrize("name", FLOORS)
def test_no_package_is_older_than_its_known_holes(name: str) -> None:
    for lock in LOCKS:
        [version] = [version for each, version, _ in pinned(lock) if each == name] or ["0"]
        assert tuple(int(part) for part in re.findall(r"\d+", version)[:3]) >= FLOORS[name], (lock, version)


def test_the_packages_that_call_others_for_us_are_not_among_them() -> None:
    """They once came with code of a stranger's; we do without."""
    for lock in LOCKS:
        assert not {"litellm", "python-dotenv", "pickle5"} & {name for name, _, _ in pinned(lock)}
    # Stripe's library wants `requests` though we give it another client; nothing else of ours may.
    text = (ROOT / LOCKS[0]).read_text()
    assert re.search(r"^requests==(?:.*\\\n)*.*\n    # via stripe\n(?!    #)", text, re.MULTILINE)


def test_nothing_runs_by_itself_when_python_starts() -> None:
    if sys.prefix == sys.base_prefix:
        pytest.skip("not in a virtual environment of our own")
    for folder in {sysconfig.get_path("purelib"), *site.getsitepackages()}:
        for path in Path(folder).glob("*.pth"):
            lines = [line for line in path.read_text().splitlines() if re.match(r"import[ \t]", line)]
            assert not lines or path.name in KNOWN_PTH, f"{path}: {lines}"


def test_no_shipped_package_brings_a_pth() -> None:
    shipped = {name.replace("_", "-") for name, _, _ in pinned("requirements.lock")}
    found = {
        str(file) for each in distributions() if each.metadata["Name"].lower().replace("_", "-") in shipped
        for file in each.files or () if file.suffix == ".pth"
    }
    assert not found


def test_the_image_is_built_by_hash_and_runs_as_nobody() -> None:
    text = (ROOT / "Dockerfile").read_text()
    installs = re.findall(r"^.*pip.* install(?:.*\\\n)*.*$", text, re.MULTILINE)
    assert installs and all("--require-hashes" in line and "--only-binary :all:" in line for line in installs)
    server = text.partition(" AS server")[2].partition("\nFROM ")[0]
    assert re.findall(r"^USER (.*)$", server, re.MULTILINE) == ["10001:10001"]
    assert text.rstrip().endswith("FROM server"), "the image that is built when none is named"
    assert not re.search(r"^(ARG|ENV) .*(KEY|TOKEN|SECRET|PASSWORD)", text, re.MULTILINE)
    assert not re.search(r"curl|wget|ADD http|git clone", text)
    fly = text.partition(" AS fly")[2]
    assert "--reuid 10001" in fly and "--no-new-privs" in fly
