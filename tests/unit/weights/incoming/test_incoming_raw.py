"""One buffer and a manifest: what agrees is viewed, and every disagreement is one error that says which."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidRequest
from headrace.weights.incoming import Manifest, parse_dtype, parse_manifest, read_raw
from headrace.weights.tensor import TensorKind


def manifest(**changes: Any) -> Manifest:
    """Two tensors: "a" of 2 x 3 float32 at byte 0, "b" of 4 float16 after it: 32 bytes."""
    fields: dict[str, Any] = {
        "names": ("a", "b"),
        "dtypes": ("float32", "torch.float16"),
        "shapes": ((2, 3), (4,)),
        "offsets": None,
    }
    return Manifest(**(fields | changes))


def test_views_of_the_buffer() -> None:
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(4, dtype=np.float16)
    buffer = bytearray(a.tobytes() + b.tobytes())
    tensors = read_raw(buffer, manifest())
    np.testing.assert_array_equal(tensors["a"].dequantize(), a)
    np.testing.assert_array_equal(tensors["b"].dequantize(), b)
    assert np.shares_memory(tensors["a"].data, np.frombuffer(buffer, np.uint8))
    assert not tensors["a"].data.flags.writeable


def test_offsets_order_and_alignment() -> None:
    buffer = bytes(64) + np.ones(6, np.float32).tobytes()
    tensors = read_raw(buffer, manifest(offsets=(64, 0)))
    assert (tensors["a"].dequantize() == 1).all()
    assert (tensors["b"].dequantize() == 0).all()


def test_scalars_empty_tensors_and_odd_addresses() -> None:
    given_manifest = Manifest(names=("e", "s", "t"), dtypes=("BF16",) * 3, shapes=((0, 5), (), (1,)), offsets=(0, 1, 3))
    tensors = read_raw(b"\0\x80\x3f\x00\x40", given_manifest)
    assert tensors["e"].dequantize().shape == (0, 5)
    assert tensors["s"].dequantize() == 1.0
    assert tensors["t"].dequantize().tolist() == [2.0]


def test_an_empty_manifest_of_an_empty_buffer() -> None:
    assert read_raw(b"", Manifest(names=(), dtypes=(), shapes=())) == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtypes": ("float32",)}, "the manifest has 2 names and 1 dtypes; one each is needed."),
        ({"shapes": ()}, "the manifest has 2 names and 0 shapes; one each is needed."),
        ({"offsets": (0,)}, "the manifest has 2 names and 1 offsets; one each is needed."),
        ({"names": ("a", "a")}, "tensor 'a' is given twice; each name may come once."),
        ({"names": ("a", "")}, "tensor '' has a name of 0 characters; 1 to 512 are allowed."),
        ({"names": ("a", "b" * 513)}, "tensor '" + "b" * 80 + "' has a name of 513 characters; 1 to 512 are allowed."),
        (
            {"dtypes": ("int8", "float16")},
            "tensor 'a' has dtype 'int8'; allowed: bfloat16, float16, float32 (or BF16, F16, F32).",
        ),
        ({"shapes": ((2, -3), (4,))}, "tensor 'a' has dimension -3; 0 to 1099511627776 are allowed."),
        ({"shapes": ((10**5000, 1), (4,))}, "tensor 'a' has dimension of more than 30 digits; 0 to 1099511627776 are"),
        ({"shapes": ((1,) * 9, (4,))}, "tensor 'a' has 9 dimensions; 8 are allowed."),
        (
            {"shapes": ((2, 3), (5,))},
            "tensor 'b' of shape [5] and dtype F16 lies at bytes 24 to 34; the buffer has 32.",
        ),
        ({"shapes": ((2, 3), (3,))}, "bytes 30 to 32 of 32 belong to no tensor; none may be left over."),
        ({"offsets": (0, -8)}, "tensor 'b' of shape [4] and dtype F16 lies at bytes -8 to 0; the buffer has 32."),
        ({"offsets": (0, 23)}, "tensors 'a' and 'b' overlap at byte 23."),
        ({"offsets": (8, 8)}, "tensors 'b' and 'a' overlap at byte 8."),
    ],
)
def test_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_raw(bytes(32), manifest(**changes))
    assert caught.value.message.startswith(message)


def test_gaps_are_for_alignment_only() -> None:
    with pytest.raises(InvalidRequest, match=r"bytes 24 to 8192 of 8200 belong to no tensor; up to 4095 may not\."):
        read_raw(bytes(8200), manifest(offsets=(0, 8192)))


@pytest.mark.parametrize(
    ("spelling", "kind"),
    [
        ("bfloat16", TensorKind.BF16),
        ("torch.bfloat16", TensorKind.BF16),
        ("BF16", TensorKind.BF16),
        ("float32", TensorKind.F32),
        ("torch.float", TensorKind.F32),
        ("F32", TensorKind.F32),
        ("torch.half", TensorKind.F16),
        ("Float16", TensorKind.F16),
    ],
)
def test_dtype_spellings(spelling: str, kind: TensorKind) -> None:
    assert parse_dtype("w", spelling) is kind


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"names": ["a"], "dtypes": ["F32"]}, "missing required field `shapes`"),
        ({"names": [1], "dtypes": [], "shapes": []}, "Expected `str`, got `int` - at `$.names[0]`"),
        ({"names": [], "dtypes": [], "shapes": [[True]]}, "Expected `int`, got `bool` - at `$.shapes[0][0]`"),
        (["names"], "Expected `object`, got `array`"),
    ],
)
def test_a_manifest_of_the_wrong_types(raw: object, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_manifest(raw)
    assert message in caught.value.message


arrays = st.lists(
    st.tuples(st.sampled_from(["float32", "float16"]), st.lists(st.integers(0, 4), max_size=3)), max_size=5
)


@given(arrays, st.booleans(), st.binary(min_size=4, max_size=4))
def test_round_trip(described: list[tuple[str, list[int]]], with_offsets: bool, fill: bytes) -> None:
    contents = {
        f"t{i}": (dtype, shape, (fill * math.prod(shape))[: math.prod(shape) * np.dtype(dtype).itemsize])
        for i, (dtype, shape) in enumerate(described)
    }
    sizes = [len(data) for _, _, data in contents.values()]
    raw: dict[str, object] = {
        "names": list(contents),
        "dtypes": [dtype for dtype, _, _ in contents.values()],
        "shapes": [shape for _, shape, _ in contents.values()],
    }
    if with_offsets:
        raw["offsets"] = [sum(sizes[:i]) for i in range(len(sizes))]
    tensors = read_raw(b"".join(data for _, _, data in contents.values()), parse_manifest(raw))
    assert {name: (tensor.shape, tensor.data.tobytes()) for name, tensor in tensors.items()} == {
        name: (tuple(shape), data) for name, (_, shape, data) in contents.items()
    }


numbers = st.one_of(st.integers(-2, 40), st.integers(), st.just(2**62))
manifests = st.fixed_dictionaries(
    {
        "names": st.lists(st.sampled_from(["a", "b", "c", ""]), max_size=3),
        "dtypes": st.lists(st.sampled_from(["F32", "BF16", "int8", "torch."]), max_size=3),
        "shapes": st.lists(st.lists(numbers, max_size=3), max_size=3),
    },
    optional={"offsets": st.lists(numbers, max_size=3)},
)


@given(manifests, st.binary(max_size=40))
def test_any_manifest_is_read_or_refused(raw: dict[str, Any], buffer: bytes) -> None:
    try:
        tensors = read_raw(buffer, parse_manifest(raw))
    except InvalidRequest:
        return
    assert list(tensors) == raw["names"]
    assert sum(tensor.data.size for tensor in tensors.values()) <= len(buffer)
