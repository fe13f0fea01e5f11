"""The numpy backend: ops at once, in float32, with one of two ways of adding up (`arithmetic.py`)."""

from headrace.kernels.reference.backend import ReferenceBackend
from headrace.kernels.reference.blas import BlasArithmetic
from headrace.kernels.reference.ordered import OrderedArithmetic

__all__ = ["BlasArithmetic", "OrderedArithmetic", "ReferenceBackend"]
