"""The built-in models and machines, by the names people use for them."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from kvlane.policy.errors import InputError
from kvlane.policy.machine import Machine
from kvlane.policy.model import ModelSpec


def _profiles() -> Any:
    return resources.files("kvlane.policy").joinpath("profiles")


@cache
def _models() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(_profiles().joinpath("models.toml").read_text(encoding="utf-8"))


@cache
def _model_ids() -> Mapping[str, str]:
    """Every accepted spelling, in lower case, to its short name."""
    ids = {}
    for short, fields in _models().items():
        for name in (short, *fields["huggingface"]):
            ids[name.lower()] = short
    return ids


def model_names() -> list[str]:
    """Short names of the built-in models."""
    return sorted(_models())


def machine_names() -> list[str]:
    """Names of the built-in machines."""
    folder = _profiles().joinpath("machines")
    return sorted(
        entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")
    )


def _unknown(field: str, name: str, known: list[str], kind: str) -> InputError:
    near = difflib.get_close_matches(name.lower(), [entry.lower() for entry in known], n=1, cutoff=0.5)
    hint = f", did you mean {near[0]}?" if near else ""
    return InputError(
        field,
        f"{name!r} is neither a built-in {kind} nor a file{hint}",
        f"a path, or one of {', '.join(known)}",
    )


def _is_file(name: str | Path) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # a name no file can have: too long, or with a NUL
        return False


def load_model(name: str | Path) -> ModelSpec:
    """A built-in model by short name or Hugging Face id, or a `config.json` by its path.

    Raises `InputError` naming `model`, with the nearest built-in name, when it is neither.
    """
    short = _model_ids().get(str(name).lower())
    if short is not None:
        fields = {
            key: value for key, value in _models()[short].items() if key not in ("huggingface", "source")
        }
        return ModelSpec.from_config(fields, name=short)
    if _is_file(name) or str(name).endswith(".json"):
        return ModelSpec.from_config(Path(name))
    raise _unknown("model", str(name), model_names(), "model")


def load_machine(name: str | Path) -> Machine:
    """A built-in machine by name, or a TOML profile by its path.

    Raises `InputError` naming `machine`, with the nearest built-in name, when it is neither.
    """
    wanted = str(name).lower()
    if wanted in machine_names():
        text = _profiles().joinpath("machines", f"{wanted}.toml").read_text(encoding="utf-8")
        return Machine.from_text(text, f"built-in machine {wanted}")
    if _is_file(name) or str(name).endswith(".toml"):
        return Machine.from_toml(name)
    raise _unknown("machine", str(name), machine_names(), "machine")
