"""Kernels: the op interface (`ops.py`) and the backends that give it a meaning."""

from __future__ import annotations

import importlib.util
from typing import Any

from headrace.errors import ConfigError
from headrace.kernels.ops import Backend

BACKENDS = ("auto", "native", "reference", "reference-exact")


def has_native() -> bool:
    """Whether the compiled kernels were built when the package was installed."""
    return importlib.util.find_spec("headrace.kernels.native._native") is not None


def describe(backend: str) -> str:
    """A backend's name, with the instructions that its kernels use on this machine."""
    if backend != "native":
        return f"{backend} (numpy)" if backend.startswith("reference") else backend
    from headrace.kernels.native import _native

    return f"native ({_native.instruction_set()})"


def create_backend(
    name: str,
    *,
    num_threads: int | None = None,
    kv_cache_dtype: str = "auto",
    quantization: str | None = None,
    group: Any = None,
) -> Backend:
    """A new backend by name; `auto` is the fastest that this installation has. `group` is for rank 0 of several, which
    are native.

    Raises ConfigError for an unknown name, native kernels that were not built, or an option that only these have.
    """
    if name not in BACKENDS:
        raise ConfigError(f"backend is {name[:40]!r}; allowed: {', '.join(BACKENDS)}")
    if name == "auto":
        name = "native" if has_native() else "reference"
    if name == "native":
        if not has_native():
            raise ConfigError(
                "backend is 'native', but it was not compiled: install a C++ compiler, then headrace again"
            )
        from headrace.kernels.native.backend import NativeBackend

        return NativeBackend(num_threads, quantization, kv_cache_dtype == "int8", group)
    if group is not None:
        raise ConfigError(f"--tensor-parallel-size above 1 needs the native kernels; the backend is {name!r}")
    if quantization is not None:
        raise ConfigError(
            f"quantization is {quantization!r}, which only the native kernels have; the backend is {name!r}"
        )
    if kv_cache_dtype != "auto":
        raise ConfigError(
            f"kv_cache_dtype is {kv_cache_dtype!r}, which only the native kernels have; the backend is {name!r}"
        )
    from headrace.kernels.reference import BlasArithmetic, OrderedArithmetic, ReferenceBackend

    if name == "reference":
        return ReferenceBackend("reference", BlasArithmetic())
    return ReferenceBackend("reference-exact", OrderedArithmetic())


__all__ = ["BACKENDS", "Backend", "create_backend", "describe", "has_native"]
