"""The kernel that copies many small runs at once, where the copy engine's cost per copy would be most of the time.

The source is page-locked host memory, which the device reads through its own address, or a staging buffer on the
device. It is compiled by cupy (NVRTC) at its first launch, for the device at hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvlane.streams.cuda_setup import find_module

if TYPE_CHECKING:
    import torch

    from kvlane.streams.cuda_runs import Runs

# A warp copies a run, with four units of each lane in flight: many warps of them hide a host link's latency.
SOURCE = r"""
template <typename Unit>
__device__ void copy_runs(const char* source, char* destination, const long long* runs, long long count)
{
    const long long lane = threadIdx.x % 32;
    const long long first = (blockIdx.x * (long long)blockDim.x + threadIdx.x) / 32;
    const long long warps = gridDim.x * (long long)blockDim.x / 32;
    for (long long run = first; run < count; run += warps) {
        const Unit* from = reinterpret_cast<const Unit*>(source + runs[3 * run]);
        Unit* to = reinterpret_cast<Unit*>(destination + runs[3 * run + 1]);
        const long long units = runs[3 * run + 2] / (long long)sizeof(Unit);
        for (long long at = lane; at < units; at += 32 * 4) {
            Unit held[4];
#pragma unroll
            for (int step = 0; step < 4; ++step)
                if (at + 32 * step < units) held[step] = from[at + 32 * step];
#pragma unroll
            for (int step = 0; step < 4; ++step)
                if (at + 32 * step < units) to[at + 32 * step] = held[step];
        }
    }
}

#define KVLANE_COPY_RUNS(name, Unit) \
extern "C" __global__ void name(const char* source, char* destination, const long long* runs, long long count) \
{ copy_runs<Unit>(source, destination, runs, count); }

KVLANE_COPY_RUNS(kvlane_copy_runs_16, uint4)
KVLANE_COPY_RUNS(kvlane_copy_runs_8, uint2)
KVLANE_COPY_RUNS(kvlane_copy_runs_4, unsigned int)
KVLANE_COPY_RUNS(kvlane_copy_runs_1, unsigned char)
"""
# cudaDevAttrCanUseHostPointerForRegisteredMem
_USES_HOST_ADDRESS = 91

UNITS = (16, 8, 4, 1)
THREADS = 256
# What one warp is given at most, so that a few long runs are shared out among many.
RUN_BYTES = 32 << 10
# Few blocks saturate a host link and leave the rest of the device to the model; device memory takes all of it.
MAPPED_BLOCKS = 48
STAGED_BLOCKS = 512


def unit_bytes(runs: Runs, *bases: int) -> int:
    """The widest unit that every run's begin, end and length, and both blocks' addresses, are multiples of."""
    together = int(np.bitwise_or.reduce(runs, axis=None)) if runs.size else 0
    for base in bases:
        together |= base
    return next(unit for unit in UNITS if together % unit == 0)


def grid_blocks(count: int, most: int) -> int:
    """Blocks to launch for so many runs: a warp each, as far as `most` blocks have them."""
    warps = THREADS // 32
    return max(1, min(most, -(-count // warps)))


class RunsKernel:
    """Launches the kernel on torch's streams. Launches may come from any thread.

    Attributes:
        reads_host: whether kernels on the device may use the host's address of page-locked host memory.

    Raises:
        ImportError: cupy is not there; its message says what to install.
        RuntimeError: cupy does not get along with the driver.
    """

    def __init__(self, device: int) -> None:
        cupy, problem = find_module("cupy")
        if cupy is None:
            raise ImportError(problem)
        self._cupy = cupy
        self.reads_host = bool(cupy.cuda.runtime.deviceGetAttribute(_USES_HOST_ADDRESS, device))
        self._kernels = {
            unit: cupy.RawKernel(SOURCE, f"kvlane_copy_runs_{unit}", options=("--std=c++17",))
            for unit in UNITS
        }

    def launch(
        self,
        stream: torch.cuda.Stream,
        source: int,
        destination: int,
        runs: torch.Tensor,
        unit: int,
        blocks: int,
    ) -> None:
        """Copy runs between two blocks of memory that begin at device addresses, in order on a stream.

        Args:
            runs: page-locked int64 [count, 3] on the host (source, destination, bytes), kept until the kernel is done.
            unit: see `unit_bytes`.
            blocks: see `grid_blocks`.

        Raises:
            Exception: what cupy raises where it cannot compile or launch; nothing has been given to the stream then.
        """
        arguments = (source, destination, runs.data_ptr(), len(runs))
        with (
            self._cupy.cuda.Device(stream.device_index),
            self._cupy.cuda.Stream.from_external(_Pointer(stream)),
        ):
            self._kernels[unit]((blocks,), (THREADS,), arguments)


class _Pointer:
    """A torch stream as other libraries ask for one."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, Any]:
        return 0, self._stream.cuda_stream
