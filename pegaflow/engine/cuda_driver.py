"""CUDA's driver as far as CuPy does not have it, and its errors as ours."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import ClassVar, Final, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from pegaflow.errors import ConfigError, DeviceLost, MemoryGone

Addresses = NDArray[np.uint64]

# Errors after which the context still works, so that only the memory that was named is suspect:
# invalid value, out of memory, mapping failed, invalid handle, not found.
_ABOUT_MEMORY: Final = frozenset({1, 2, 205, 400, 500})
_CONTEXT_BROKEN: Final = 700  # illegal address, and everything behind it

_IN_STREAM_ORDER: Final = 1


class _Location(ctypes.Structure):
    _fields_: ClassVar = (  # type: ignore[mutable-override]  # a tuple, so that nobody appends
        ("type", ctypes.c_int),
        ("id", ctypes.c_int),
    )


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes.  Locations are hints for managed memory only."""

    _fields_: ClassVar = (  # type: ignore[mutable-override]  # a tuple, so that nobody appends
        ("source_access_order", ctypes.c_int),
        ("source", _Location),
        ("destination", _Location),
        ("flags", ctypes.c_uint),
    )


class Driver(Protocol):
    """What CuPy does not have, called on a thread whose device is selected."""

    @property
    def batched(self) -> bool:
        """Whether :meth:`copy_batch` works: CUDA 12.8 or later."""

    def allocation(self, pointer: int) -> tuple[int, int]:
        """Start and bytes of the allocation around ``pointer``."""

    def copy_batch(
        self, targets: Addresses, origins: Addresses, lengths: Addresses, stream: int
    ) -> None:
        """Queue all copies on ``stream``, which is not the default stream.

        The arrays may be dropped when this returns, the memories when the stream is there.
        """


@attrs.define(eq=False)
class CudaDriver:
    """The driver's library by ctypes; calls run without the GIL."""

    batched: bool
    _library: ctypes.CDLL
    _second_form: bool

    @classmethod
    def load(cls) -> CudaDriver:
        """Raises :exc:`ConfigError` when there is no driver."""
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ConfigError(f"CUDA's driver is missing: {error}") from error
        second = hasattr(library, "cuMemcpyBatchAsync_v2")
        return cls(second or hasattr(library, "cuMemcpyBatchAsync"), library, second)

    def allocation(self, pointer: int) -> tuple[int, int]:
        """See :class:`Driver`."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        code = self._library.cuMemGetAddressRange_v2(
            ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer)
        )
        if code:
            raise _trouble(code, f"cuMemGetAddressRange failed with CUDA error {code}")
        return base.value, size.value

    def copy_batch(
        self, targets: Addresses, origins: Addresses, lengths: Addresses, stream: int
    ) -> None:
        """See :class:`Driver`."""
        attributes = _Attributes(source_access_order=_IN_STREAM_ORDER)
        which = (ctypes.c_size_t * 1)(0)  # the one attribute applies from the first copy on
        failed_at = ctypes.c_size_t(0)
        common = (
            ctypes.c_void_p(targets.ctypes.data),
            ctypes.c_void_p(origins.ctypes.data),
            ctypes.c_void_p(lengths.ctypes.data),
            ctypes.c_size_t(lengths.size),
            ctypes.byref(attributes),
            which,
            ctypes.c_size_t(1),
        )
        if self._second_form:  # CUDA 13 took the index of the failure away
            code = self._library.cuMemcpyBatchAsync_v2(*common, ctypes.c_void_p(stream))
        else:
            code = self._library.cuMemcpyBatchAsync(
                *common, ctypes.byref(failed_at), ctypes.c_void_p(stream)
            )
        if code:
            raise _trouble(code, f"cuMemcpyBatchAsync failed with CUDA error {code}")


def _trouble(code: int, text: str) -> MemoryGone | DeviceLost:
    return MemoryGone(text) if code in _ABOUT_MEMORY else DeviceLost(text)


@contextmanager
def translated(
    cupy: ModuleType,
    doing: str,
    unless_broken: Callable[[str], MemoryGone | DeviceLost] | None = None,
) -> Iterator[None]:
    """CuPy's errors as ours; ``unless_broken`` where a working context means the memory is bad."""
    try:
        yield
    except cupy.cuda.runtime.CUDARuntimeError as error:
        if unless_broken is not None and error.status < _CONTEXT_BROKEN:
            raise unless_broken(f"{doing}: {error}") from error
        raise _trouble(error.status, f"{doing}: {error}") from error
