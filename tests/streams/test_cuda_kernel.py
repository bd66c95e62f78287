"""The kernel's source: compiled for the device where NVRTC is, and run as plain C++ where a compiler is."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kvlane.streams.cuda_kernel import MAPPED_BLOCKS, SOURCE, THREADS, UNITS, grid_blocks, unit_bytes

# What CUDA has and C++ lacks. Threads never look at one another's work, so one after the other will do.
AS_CPP = """
#include <cstdint>
#define __device__
#define __global__
struct uint4 { uint32_t x, y, z, w; };
struct uint2 { uint32_t x, y; };
struct Index { int x; };
static Index threadIdx, blockIdx, blockDim, gridDim;
"""
LAUNCH = """
extern "C" void launch(int unit, int blocks, int threads, const char* source, char* destination,
                       const long long* runs, long long count) {
    gridDim.x = blocks; blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) switch (unit) {
            case 16: kvlane_copy_runs_16(source, destination, runs, count); break;
            case 8: kvlane_copy_runs_8(source, destination, runs, count); break;
            case 4: kvlane_copy_runs_4(source, destination, runs, count); break;
            default: kvlane_copy_runs_1(source, destination, runs, count);
        }
}
"""


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "kernel.cpp").write_text(AS_CPP + SOURCE + LAUNCH)
    library = folder / "kernel.so"
    command = [compiler, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "kernel.cpp", "-o", str(library)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    function = ctypes.CDLL(str(library)).launch
    function.argtypes = [ctypes.c_int] * 3 + [ctypes.c_void_p] * 3 + [ctypes.c_longlong]
    return function


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("longest", [1, 40, 700])
@pytest.mark.parametrize("blocks", [1, 3])
def test_copies_every_run_and_nothing_else(launch, unit, longest, blocks):
    generator = np.random.default_rng(unit + longest)
    sizes = generator.integers(0, longest + 1, 50) * unit
    gaps = np.concatenate(([3], generator.integers(0, 3, 49))) * unit
    order = generator.permutation(50)
    to = np.cumsum(gaps + np.concatenate(([0], sizes[order][:-1])))
    starts = np.empty(50, np.int64)
    starts[order] = to
    from_ = generator.integers(0, 100, 50) * unit
    runs = np.column_stack((from_, starts, sizes)).astype(np.int64)
    room = int((runs[:, 1] + runs[:, 2]).max()) + 64
    source = generator.integers(1, 256, 200 * 16 + 800 * 16).astype(np.uint8)
    destination, expected = np.zeros(room, np.uint8), np.zeros(room, np.uint8)
    for origin, target, nbytes in runs.tolist():
        expected[target : target + nbytes] = source[origin : origin + nbytes]
    launch(unit, blocks, THREADS, source.ctypes.data, destination.ctypes.data, runs.ctypes.data, len(runs))
    np.testing.assert_array_equal(destination, expected)


@pytest.mark.parametrize(
    ("rows", "bases", "unit"),
    [
        ([[0, 32, 64]], (0, 16), 16),
        ([[0, 32, 64], [16, 96, 8]], (0, 0), 8),
        ([[0, 32, 64]], (0, 4), 4),
        ([[0, 33, 64]], (0, 0), 1),
        ([[2, 32, 64]], (0, 0), 1),
    ],
)
def test_the_unit_divides_everything(rows, bases, unit):
    assert unit_bytes(np.array(rows, np.int64), *bases) == unit


def test_a_warp_for_each_run_as_far_as_there_are_blocks():
    assert grid_blocks(1, MAPPED_BLOCKS) == 1
    assert grid_blocks(8, MAPPED_BLOCKS) == 1
    assert grid_blocks(9, MAPPED_BLOCKS) == 2
    assert grid_blocks(100_000, MAPPED_BLOCKS) == MAPPED_BLOCKS


def nvrtc():
    """The newest NVRTC there is, on the loader's path or in a package of NVIDIA's."""
    names = ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"]
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        names += [str(path) for path in Path(folder).glob("**/libnvrtc.so.*")]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_nvrtc_compiles_it(architecture):
    library = nvrtc()
    if library is None:
        pytest.skip("no NVRTC: pip install nvidia-cuda-nvrtc brings one, without a GPU")
    program = ctypes.c_void_p()
    code = library.nvrtcCreateProgram(ctypes.byref(program), SOURCE.encode(), b"kernel.cu", 0, None, None)
    assert code == 0
    options = [b"--std=c++17", f"--gpu-architecture={architecture}".encode()]
    code = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    assert code == 0, log.value.decode()
    assert library.nvrtcGetCUBINSize(program, ctypes.byref(size)) == 0
    cubin = ctypes.create_string_buffer(size.value)
    assert library.nvrtcGetCUBIN(program, cubin) == 0
    for unit in UNITS:
        assert f"kvlane_copy_runs_{unit}".encode() in cubin.raw
