"""Batches as the driver is handed them: its function is played by a C callback that copies between host blocks."""

from __future__ import annotations

import ctypes
import gc

import numpy as np
import pytest

from kvlane.streams import cuda_batch
from kvlane.streams.cuda_batch import BATCH_COPIES, PROTOTYPE, BatchCopy


class Driver:
    """Copies what it is given, on the host, once `run` is called: as late as a device would read its descriptors."""

    def __init__(self, refuse_batch=None):
        self.batches = []
        self.refuse_batch = refuse_batch
        self.function = PROTOTYPE(self._call)

    def _call(self, to, from_, sizes, count, attributes, indices, kinds, failed, stream):
        if len(self.batches) == self.refuse_batch:
            failed[0] = 5
            return 1
        self.batches.append((to, from_, sizes, count, attributes, indices, kinds, stream))
        return 0

    def run(self):
        for to, from_, sizes, count, _, indices, kinds, _ in self.batches:
            rows = [self._array(address, count) for address in (to, from_, sizes)]
            assert kinds == 1
            assert not self._array(indices, count).any()
            for target, origin, nbytes in zip(*(row.tolist() for row in rows), strict=True):
                ctypes.memmove(target, origin, nbytes)

    @staticmethod
    def _array(address, count):
        return np.ctypeslib.as_array((ctypes.c_uint64 * count).from_address(address))


def submit(driver, runs, held):
    source = np.random.default_rng(0).integers(1, 256, 1 << 16).astype(np.uint8)
    destination = np.zeros(1 << 16, np.uint8)
    BatchCopy(driver.function, 77).submit(11, destination.ctypes.data, source.ctypes.data, runs, held)
    return source, destination


def runs_of_size(count):
    order = np.random.default_rng(1).permutation(count)
    return np.column_stack((np.arange(count) * 8, order * 8, np.full(count, 8))).astype(np.int64)


@pytest.mark.parametrize("count", [1, BATCH_COPIES, BATCH_COPIES + 1, 3 * BATCH_COPIES + 5])
def test_every_copy_is_in_one_batch_and_no_batch_is_too_long(count):
    driver = Driver()
    held: list[object] = []
    runs = runs_of_size(count)
    source, destination = submit(driver, runs, held)
    # The arrays are read only now, when nothing but `held` keeps them.
    gc.collect()
    driver.run()
    assert [batch[3] for batch in driver.batches][:-1] == [BATCH_COPIES] * ((count - 1) // BATCH_COPIES)
    assert max(batch[3] for batch in driver.batches) <= BATCH_COPIES
    assert {(batch[4], batch[7]) for batch in driver.batches} == {(77, 11)}
    expected = np.zeros(1 << 16, np.uint8)
    for from_, to, nbytes in runs.tolist():
        expected[to : to + nbytes] = source[from_ : from_ + nbytes]
    np.testing.assert_array_equal(destination, expected)


def test_a_refusal_names_the_copy_and_keeps_what_was_given_before():
    driver = Driver(refuse_batch=1)
    held: list[object] = []
    with pytest.raises(RuntimeError, match=f"error 1 at copy {BATCH_COPIES + 5} of {BATCH_COPIES + 9}"):
        submit(driver, runs_of_size(BATCH_COPIES + 9), held)
    assert len(held) >= 1
    assert len(driver.batches) == 1


class TestWhatIsMissing:
    def test_no_bindings(self, monkeypatch):
        monkeypatch.setattr(cuda_batch, "find_module", lambda name: (None, f"{name} cannot be imported: pip"))
        with pytest.raises(ImportError, match=r"cuda\.bindings\.driver cannot be imported"):
            BatchCopy.of_driver()

    @pytest.mark.parametrize("found", [(500, None, None), (0, 0, None)])
    def test_a_driver_without_the_call(self, monkeypatch, found):
        class Bindings:
            @staticmethod
            def cuGetProcAddress(symbol, version, flags):  # noqa: N802
                assert (symbol, version, flags) == (b"cuMemcpyBatchAsync", 12080, 0)
                return found

        monkeypatch.setattr(cuda_batch, "find_module", lambda name: (Bindings, ""))
        with pytest.raises(ImportError, match=r"CUDA 12\.8 or newer"):
            BatchCopy.of_driver()

    def test_no_driver_at_all(self, monkeypatch):
        class Bindings:
            @staticmethod
            def cuGetProcAddress(*arguments):  # noqa: N802
                raise RuntimeError("Failed to dlopen libcuda.so.1")

        monkeypatch.setattr(cuda_batch, "find_module", lambda name: (Bindings, ""))
        with pytest.raises(ImportError, match=r"no driver: Failed to dlopen libcuda\.so\.1"):
            BatchCopy.of_driver()
