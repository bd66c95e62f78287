"""Where results go: refused before minutes are spent on what could not be written."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from kvlane.policy.errors import InputError


def check_file(out: Path) -> None:
    """Raises `InputError` naming `--out` for a file that cannot be written."""
    if out.is_dir():
        raise InputError("--out", f"{out} is a folder", "a file")
    if not out.parent.is_dir():
        raise InputError("--out", f"there is no folder {out.parent}", "a file in a folder that exists")
    if not os.access(out.parent, os.W_OK):
        raise InputError("--out", f"{out.parent} cannot be written", "a file in a folder that can")


def check_folder(out: Path, names: Iterable[str]) -> None:
    """Makes the folder; raises `InputError` naming `--out` where it, or one of these files in it, cannot be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.touch()
        probe.unlink()
        for name in names:
            if (out / name).exists():
                (out / name).open("ab").close()
    except OSError as error:
        raise InputError(
            "--out", f"{error.filename or out}: {error.strerror or error}", "a folder that can be written"
        ) from None
