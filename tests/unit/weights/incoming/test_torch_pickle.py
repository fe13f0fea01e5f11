"""Pickles that torch itself wrote, in every form that holds the numbers: what is read equals what torch had."""

from __future__ import annotations

import base64
import io
import pickle  # noqa: TID251  (the trainer's side)
import sys
import types
from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
import torch

from headrace.errors import InvalidRequest
from headrace.weights.incoming import read_pickled_tensors, read_serialized_tensors
from headrace.weights.tensor import CheckpointTensor, TensorKind


def tensors() -> list[tuple[str, torch.Tensor]]:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    return [
        ("bf16", base.to(torch.bfloat16)),
        ("f16", base.to(torch.float16)),
        ("f32", base),
        ("row", base[2]),
        ("transposed", base.t()),
        ("columns", base[:, 1:3]),
        ("parameter", torch.nn.Parameter(torch.ones(2, 2))),
        ("scalar", torch.tensor(3.5)),
        ("empty", torch.empty(0, 3)),
        ("one_row", base[:1].t()),
    ]


def check(found: dict[str, CheckpointTensor], sent: list[tuple[str, torch.Tensor]]) -> None:
    assert list(found) == [name for name, _ in sent]
    for name, tensor in sent:
        assert found[name].shape == tuple(tensor.shape)
        assert not found[name].data.flags.writeable
        np.testing.assert_array_equal(found[name].dequantize(), tensor.detach().float().numpy())


def saved(value: object, is_zip: bool) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=is_zip)
    return file.getvalue()


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_a_plain_pickle(protocol: int) -> None:
    check(read_pickled_tensors(pickle.dumps(tensors(), protocol)), tensors())


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("form", [list, dict, OrderedDict])
def test_torch_save(is_zip: bool, form: Any) -> None:
    check(read_pickled_tensors(saved(form(tensors()), is_zip)), tensors())


def test_a_storage_whose_inner_file_is_a_zip() -> None:
    class Storage:
        def __reduce__(self) -> tuple[Any, ...]:
            return torch.storage._load_from_bytes, (saved(torch.arange(6).float()._typed_storage(), True),)

    class Tensor:
        def __reduce__(self) -> tuple[Any, ...]:
            return torch._utils._rebuild_tensor_v2, (Storage(), 1, (2, 2), (2, 1), False, OrderedDict())

    assert read_pickled_tensors(pickle.dumps([("w", Tensor())]))["w"].dequantize().tolist() == [[1, 2], [3, 4]]


def test_base64_per_rank() -> None:
    serialized = [base64.b64encode(pickle.dumps([(f"rank{i}", torch.ones(i + 1))])).decode() for i in range(2)]
    assert list(read_serialized_tensors(serialized)) == ["rank0"]
    assert read_serialized_tensors(serialized, rank=1, load_format="direct")["rank1"].shape == (2,)


def test_contiguous_tensors_are_views() -> None:
    payload = pickle.dumps([("w", torch.ones(1000))])
    assert np.shares_memory(read_pickled_tensors(payload)["w"].data, np.frombuffer(payload, np.uint8))


def test_many_views_of_one_storage_cost_nothing_but_copies_are_bounded() -> None:
    base = torch.ones(100, 100)
    check(
        read_pickled_tensors(saved([(str(i), base[i]) for i in range(100)], True)),
        [(str(i), base[i]) for i in range(100)],
    )
    with pytest.raises(
        InvalidRequest, match=r"has stride \[1, 100\] \(send tensor.contiguous\(\)\): its copy of 40000"
    ):
        read_pickled_tensors(saved([(str(i), base.t()) for i in range(3)], True))
    with pytest.raises(InvalidRequest, match=r"'w' has stride \[0\] .*: its copy of 4000000000 bytes would need more"):
        read_pickled_tensors(saved([("w", torch.ones(1).expand(10**9))], True))


# SGLang's classes, under the modules in which trainers find them.


@dataclass
class FlattenedTensorMetadata:
    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


@dataclass
class LocalSerializedTensor:
    values: list[Any]


@pytest.fixture(
    params=[
        ("sglang.srt.weight_sync.tensor_bucket", "sglang.srt.model_executor.model_runner"),
        ("slime.backends.megatron_utils.weight_sync_utils", "sglang.srt.model_executor.weight_updater"),
        ("lmdeploy.utils", "sglang.srt.model_executor.model_runner_components.weight_updater"),
    ]
)
def sglang(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for cls, name in zip((FlattenedTensorMetadata, LocalSerializedTensor), request.param, strict=True):
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:length]), types.ModuleType(name))
        setattr(sys.modules[name], cls.__name__, cls)
        monkeypatch.setattr(cls, "__module__", name)


def bucket(sent: list[tuple[str, torch.Tensor]], in_bytes: bool) -> dict[str, Any]:
    metadata, parts, start = [], [], 0
    for name, tensor in sent:
        part = tensor.flatten().view(torch.uint8) if in_bytes else tensor.flatten()
        metadata.append(
            FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, start, start + part.numel(), part.numel())
        )
        parts.append(part)
        start += part.numel()
    return {"flattened_tensor": torch.cat(parts), "metadata": metadata}


MIXED = [("a", torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)), ("b", torch.arange(3, dtype=torch.float32))]
SAME = [("a", torch.arange(6, dtype=torch.float16).reshape(2, 3)), ("b", torch.arange(3, dtype=torch.float16))]


@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize(("sent", "in_bytes"), [(MIXED, True), (SAME, True), (SAME, False)])
def test_flattened_bucket(sent: list[tuple[str, torch.Tensor]], in_bytes: bool) -> None:
    payload = pickle.dumps(bucket(sent, in_bytes))
    found = read_pickled_tensors(payload, load_format="flattened_bucket")
    check(found, sent)
    assert np.shares_memory(found["a"].data, np.frombuffer(payload, np.uint8))


@pytest.mark.usefixtures("sglang")
def test_a_bucket_that_torch_has_converted() -> None:
    payload = pickle.dumps(bucket(MIXED, in_bytes=False))  # torch.cat made all of it float32
    with pytest.raises(InvalidRequest) as caught:
        read_pickled_tensors(payload, load_format="flattened_bucket")
    assert caught.value.message == (
        "tensor 'a' has dtype bfloat16 in a flattened_tensor of float32; needed: the same, or uint8."
    )


@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": torch.Size([2, 4])}, "tensor 'a' of shape [2, 4] and dtype BF16 needs 16 bytes; start_idx 0 and"),
        ({"shape": (2, -3)}, "tensor 'a''s shape holds int where an integer of 0 to"),
        ({"shape": 6}, "metadata 0 has no name or no shape."),
        ({"start_idx": 100, "end_idx": 112}, "tensor 'a' of shape [2, 3] and dtype BF16 lies at bytes 100 to 112; the"),
        ({"start_idx": True}, "tensor 'a''s start_idx holds bool where an integer"),
        ({"end_idx": -1}, "tensor 'a''s end_idx holds int where an integer"),
        ({"dtype": torch.int8}, "tensor 'a' has dtype 'int8'; allowed:"),
        ({"dtype": None}, "tensor 'a' has a dtype of type NoneType; allowed: a torch dtype."),
        ({"name": "b"}, "tensor 'b' is given twice; each name may come once."),
    ],
)
def test_wrong_buckets(changes: dict[str, Any], message: str) -> None:
    value = bucket(MIXED, in_bytes=True)
    for name, wrong in changes.items():
        setattr(value["metadata"][0], name, wrong)
    with pytest.raises(InvalidRequest) as caught:
        read_pickled_tensors(pickle.dumps(value), load_format="flattened_bucket")
    assert caught.value.message.startswith(message)


@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize("is_text", [False, True])
def test_local_serialized_tensors(is_text: bool) -> None:
    def value(number: int) -> bytes | str:
        pickled = pickle.dumps(torch.full((2,), float(number)))
        return base64.b64encode(pickled).decode() if is_text else pickled

    payload = pickle.dumps([("w", LocalSerializedTensor([value(0), value(1)]))])
    assert read_pickled_tensors(payload)["w"].dequantize().tolist() == [0, 0]
    assert read_pickled_tensors(payload, rank=1)["w"].dequantize().tolist() == [1, 1]
    with pytest.raises(InvalidRequest, match="tensor 'w' is a LocalSerializedTensor without a value for rank 2"):
        read_pickled_tensors(payload, rank=2)


@pytest.mark.usefixtures("sglang")
def test_the_fields_are_what_the_classes_have() -> None:
    from headrace.weights.incoming.torch_values import BUCKET_METADATA

    assert {field.name for field in fields(FlattenedTensorMetadata)} == BUCKET_METADATA.fields
    payload = pickle.dumps([("w", LocalSerializedTensor([7]))])
    with pytest.raises(InvalidRequest, match=r"tensor 'w' holds a int for rank 0; allowed: bytes\."):
        read_pickled_tensors(payload)


@pytest.mark.parametrize(
    ("value", "load_format", "message"),
    [
        ([("w", torch.ones(2))], "sharded", "load_format 'sharded' is not supported; allowed: None, direct, flattened"),
        ([("w", torch.ones(2))], "flattened_bucket", "load_format flattened_bucket needs a dict of flattened_tensor"),
        (5, None, "the pickle holds a int; needed: a list of (name, tensor)."),
        ([5], None, "element 0 of the pickled list is a int, not a (name, tensor)."),
        ([("w", 5)], None, "tensor 'w' is a int; allowed: a torch tensor."),
        ([("w", torch.ones(1)), ("w", torch.ones(1))], None, "tensor 'w' is given twice; each name may come once."),
        ([("w", torch.ones(2, dtype=torch.float64))], None, "tensor 'w' has dtype 'float64'; allowed: bfloat16,"),
        ([("w", torch.ones(1).to(torch.float8_e4m3fn))], None, "the pickle asks for torch._utils._rebuild_tensor_v3;"),
    ],
)
def test_values_that_are_no_named_tensors(value: object, load_format: str | None, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_pickled_tensors(pickle.dumps(value), load_format=load_format)
    assert caught.value.message.startswith(message)


def test_no_element_for_the_rank_and_no_base64() -> None:
    with pytest.raises(InvalidRequest, match="serialized_named_tensors has 0 elements; rank 0 has none"):
        read_serialized_tensors([])
    for text in ("%%%%", "abc", "ü"):
        with pytest.raises(InvalidRequest, match="serialized_named_tensors is no base64: "):
            read_serialized_tensors([text])


def test_kinds_are_kept() -> None:
    found = read_pickled_tensors(pickle.dumps(tensors()))
    assert [found[name].kind for name in ("bf16", "f16", "f32")] == [TensorKind.BF16, TensorKind.F16, TensorKind.F32]
