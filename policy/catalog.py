"""The built-in models and machines, by the names people use for them."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from kvlane.policy import machine_text
from kvlane.policy.errors import InputError
from kvlane.policy.machine import Machine
from kvlane.policy.model import ModelSpec
from kvlane.policy.model_config import read_json


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


def model_ids(name: str) -> list[str]:
    """Hugging Face ids of a built-in model by its short name."""
    return list(_models()[name]["huggingface"])


def machine_names() -> list[str]:
    """Names of the built-in machines."""
    return list(_machine_texts())


@cache
def _machine_texts() -> Mapping[str, str]:
    folder = _profiles().joinpath("machines")
    files = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".toml"))
    return {name.removesuffix(".toml"): folder.joinpath(name).read_text(encoding="utf-8") for name in files}


@cache
def _machine_ids() -> Mapping[str, str]:
    """Every accepted spelling of a built-in machine, in lower case, to its name."""
    ids = {}
    for name, text in _machine_texts().items():
        ids[name] = name
        for alias in machine_text.aliases(text, f"built-in machine {name}"):
            ids[alias.lower()] = name
    return ids


def machine_aliases(name: str) -> list[str]:
    """Other names that a built-in machine goes by."""
    return [alias for alias, known in _machine_ids().items() if known == name and alias != name]


def _unknown(field: str, name: str, known: Iterable[str], kind: str) -> InputError:
    near = difflib.get_close_matches(name.lower(), [entry.lower() for entry in known], n=1, cutoff=0.5)
    hint = f", did you mean {near[0]}?" if near else ""
    shown = name if len(name) <= 80 else f"{name[:80]}..."
    return InputError(
        field,
        f"{shown!r} is neither a built-in {kind} nor a file{hint}",
        f"a path, or a name that `kvlane {kind}s` lists",
    )


def _is_file(name: str | Path, suffix: str) -> bool:
    """Whether that can only be meant as a file; what no file could be named is none."""
    try:
        return Path(name).is_file() or str(name).endswith(suffix)
    except (OSError, ValueError):
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
    if _is_file(name, ".json"):
        return ModelSpec.from_config(Path(name))
    raise _unknown("model", str(name), _model_ids(), "model")


def load_machine(name: str | Path) -> Machine:
    """A built-in machine by name or by another name its device goes by, or a TOML profile by its path.

    Raises `InputError` naming `machine`, with the nearest built-in name, when it is neither.
    """
    known = _machine_ids().get(str(name).lower())
    if known is not None:
        return Machine.from_text(_machine_texts()[known], f"built-in machine {known}")
    if _is_file(name, ".toml"):
        return Machine.from_toml(name)
    raise _unknown("machine", str(name), _machine_ids(), "machine")


def model_config(name: str | Path) -> tuple[str, dict[str, Any]]:
    """What to call a model, and its config.json's fields: of a built-in one, or of a `config.json` by its path.

    Raises `InputError` as `load_model` does.
    """
    short = _model_ids().get(str(name).lower())
    if short is not None:
        return short, {
            key: value for key, value in _models()[short].items() if key not in ("huggingface", "source")
        }
    if not _is_file(name, ".json"):
        raise _unknown("model", str(name), _model_ids(), "model")
    path = Path(name)
    return path.stem, dict(read_json(path))
