"""What CUDA needs to be there, and what is said when it is not. Nothing here touches a device when it is imported."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from kvlane.policy.errors import InputError


def check_cuda(index: int = 0) -> torch.device:
    """The CUDA device of this number.

    Raises:
        InputError: torch has no CUDA, no driver or device is found, or not so many devices.
    """
    if torch.version.cuda is None:
        raise InputError(
            "device",
            f"is cuda, and torch {torch.__version__} is built without it",
            "a CUDA build of torch",
        )
    if not torch.cuda.is_available():
        raise InputError(
            "device",
            f"is cuda, and torch {torch.__version__} (CUDA {torch.version.cuda}) finds no device or no driver for one",
            "a GPU whose driver is as new as that CUDA (nvidia-smi shows both)",
        )
    count = torch.cuda.device_count()
    if not 0 <= index < count:
        raise InputError("device", f"is cuda:{index}, and there are {count}", f"cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", index)


def check_not_capturing(kind: str) -> None:
    """Raises InputError while the current stream's work is captured into a graph, on a device of kind `cuda`.

    A replay runs what the device was given and none of the waits on the host: layers would read KV that has not come.
    """
    if kind == "cuda" and torch.cuda.is_current_stream_capturing():
        raise InputError(
            "cuda_graph",
            "is being captured over the whole forward, and a replay of it would wait for no layer",
            "eager attention, or graphs of the pieces between the layers' waits: torch.compile without"
            " fullgraph=True, cudagraph_mode PIECEWISE in vLLM",
        )


def extra() -> str:
    """The extra that brings cupy and the bindings for torch's CUDA."""
    return f"cuda{(torch.version.cuda or '13').partition('.')[0]}"


def find_module(name: str) -> tuple[ModuleType | None, str]:
    """A module of an extra, or None and why it cannot be used."""
    try:
        return importlib.import_module(name), ""
    except ImportError as error:
        # Also one whose libraries are not found: the message names them.
        return None, f"{name} cannot be imported ({error}): pip install 'kvlane[{extra()}]'"
