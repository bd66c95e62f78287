"""Many copies in one call of the driver, `cuMemcpyBatchAsync` (CUDA 12.8), found by way of `cuda.bindings`.

Called by its address, so that the arrays of descriptors stay ours until the copies are done: nothing that documents the
call says when the driver is through with them. As of version 12.8 it also takes the index of the copy that failed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from kvlane.streams.cuda_runs import Runs
from kvlane.streams.cuda_setup import find_module

# A driver of the 580 series was seen to crash or hang on batches of some ten thousand (vllm issue 49276).
BATCH_COPIES = 1024

_SYMBOL, _VERSION = b"cuMemcpyBatchAsync", 12080
# destinations, sources, sizes, count, attributes, first copy of each attribute, attributes' count, failed copy, stream
PROTOTYPE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.c_void_p,
)


class BatchCopy:
    """Gives batches to a stream. Calls may come from any thread whose current device is the stream's.

    Args:
        function: the driver's, see `PROTOTYPE`.
        attributes: address of the one `CUmemcpyAttributes` that all copies have.
        keep: what must live as long as this does.
    """

    def __init__(self, function: Callable[..., int], attributes: int, keep: object = None) -> None:
        self._function = function
        self._attributes = attributes
        self._keep = keep

    @classmethod
    def of_driver(cls) -> BatchCopy:
        """With the driver's function.

        Raises:
            ImportError: there are no bindings, no driver, or an older one; the message says which.
        """
        driver, problem = find_module("cuda.bindings.driver")
        if driver is None:
            raise ImportError(problem)
        try:
            code, address, _ = driver.cuGetProcAddress(_SYMBOL, _VERSION, 0)
        except RuntimeError as error:
            raise ImportError(f"cuda.bindings finds no driver: {error}") from error
        if int(code) or not address:
            raise ImportError(f"the driver has no {_SYMBOL.decode()}: that of CUDA 12.8 or newer has")
        attributes = driver.CUmemcpyAttributes()
        # Any order: nobody writes to the source while it is copied, and nothing on the device ever does.
        attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_ANY
        return cls(PROTOTYPE(int(address)), int(attributes.getPtr()), attributes)

    def submit(self, stream: int, destination: int, source: int, runs: Runs, held: list[object]) -> None:
        """Give copies to a stream, in any order among themselves, after what it was given before.

        Args:
            stream: its address; the default stream's is refused by the driver.
            held: what has to live until the copies are done is appended.

        Raises:
            RuntimeError: the driver refused a batch; those before it were given.
        """
        for at in range(0, len(runs), BATCH_COPIES):
            part = runs[at : at + BATCH_COPIES]
            # One index a copy, though the driver's documents ask for one an attribute: right by either reading.
            table = np.zeros((4, len(part)), np.uint64)
            table[0] = part[:, 1] + destination
            table[1] = part[:, 0] + source
            table[2] = part[:, 2]
            held.append(table)
            first, row = table.ctypes.data, table.strides[0]
            failed = ctypes.c_size_t(0)
            code = self._function(
                first,
                first + row,
                first + 2 * row,
                len(part),
                self._attributes,
                first + 3 * row,
                1,
                ctypes.byref(failed),
                stream,
            )
            if code:
                raise RuntimeError(
                    f"cuMemcpyBatchAsync: error {code} at copy {at + failed.value} of {len(runs)}"
                )
