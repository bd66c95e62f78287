"""What pyproject.toml asks for and what constraints.txt pins."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# No machine of CI has a GPU to try these on, so nothing pins them.
UNPINNED_EXTRAS = {"cuda12", "cuda13"}


def pins() -> dict[str, str]:
    pinned: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        requirement = Requirement(line)
        (exact,) = requirement.specifier
        assert exact.operator == "==", line
        assert "*" not in exact.version, line
        assert canonicalize_name(requirement.name) not in pinned, f"pinned twice: {line}"
        pinned[canonicalize_name(requirement.name)] = exact.version
    return pinned


def requirements() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"]
    listed = [*PROJECT["dependencies"]]
    for extra in set(extras) - UNPINNED_EXTRAS:
        listed += extras[extra]
    return [Requirement(line) for line in listed]


def test_every_requirement_is_pinned_to_a_version_it_allows() -> None:
    pinned = pins()
    for requirement in requirements():
        name = canonicalize_name(requirement.name)
        assert name in pinned, f"{requirement} has no pin"
        assert requirement.specifier.contains(pinned[name], prereleases=True), requirement


def test_what_the_requirements_require_is_pinned_too() -> None:
    pinned = pins()
    seen: set[tuple[str, str]] = set()
    waiting = [(requirement, "") for requirement in requirements()]
    unpinned = {}
    while waiting:
        requirement, wanted_by = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name not in pinned:
            unpinned[name] = wanted_by
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                further = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:  # another platform's or an extra left out here
                continue
            for line in further:
                dependency = Requirement(line)
                if dependency.marker is None or dependency.marker.evaluate({"extra": extra}):
                    waiting.append((dependency, name))
    assert not {
        name: by for name, by in unpinned.items() if not name.startswith(("nvidia-", "cuda-", "triton"))
    }


def test_core_dependencies_are_few_and_without_upper_bounds() -> None:
    core = [Requirement(line) for line in PROJECT["dependencies"]]
    assert {requirement.name for requirement in core} == {"numpy", "scipy", "aiohttp", "msgspec", "typer"}
    assert all(bound.operator == ">=" for requirement in core for bound in requirement.specifier)


def test_version_of_the_installation_is_the_project_s() -> None:
    assert importlib.metadata.version("kvlane") == PROJECT["version"]
