"""`import kvlane.policy` stays cheap, and the folders import under their full names only."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("numpy", "scipy", "torch", "transformers", "aiohttp", "matplotlib")


def test_policy_loads_nothing_heavy(tmp_path: Path) -> None:
    script = (
        "import sys, kvlane.policy\n"
        f"print(*[name for name in {HEAVY!r} if name in sys.modules])\n"
        "print(kvlane.policy.__file__)"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    heavy, file = run.stdout.split("\n")[:2]
    assert heavy == "", f"import kvlane.policy loads {heavy}"
    assert file


@pytest.mark.parametrize("name", ["policy", "transfer", "streams", "bench"])
def test_folders_do_not_import_unqualified(name: str) -> None:
    assert importlib.util.find_spec(f"kvlane.{name}") is not None
    assert importlib.util.find_spec(name) is None
