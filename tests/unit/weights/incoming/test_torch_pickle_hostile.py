"""Payloads made to harm: each is one clear InvalidRequest, runs nothing, and needs no more memory than it has bytes."""

from __future__ import annotations

import io
import os
import pickle  # noqa: TID251  (the attacker's side)
import struct
import tracemalloc
import zipfile
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.errors import InvalidRequest
from headrace.weights.incoming import read_pickled_tensors
from headrace.weights.incoming.pickle_machine import MAX_OPCODES

P = b"\x80\x04"


def refusal(payload: bytes, load_format: str | None = None) -> str:
    """The message that `payload` is refused with; fails if that allocates much more than the payload has."""
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest) as caught:
            read_pickled_tensors(payload, load_format=load_format)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 200 * len(payload) + (1 << 20)
    return caught.value.message


class Calls:
    """Pickles as a call of `function` with `arguments`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


ALLOWED = "allowed: torch tensors, dtypes and sizes, and plain data."


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("function", "name"),
    [
        (os.system, "posix.system"),
        (eval, "builtins.eval"),
        (getattr, "builtins.getattr"),
        (torch.hub.load, "torch.hub.load"),
        (bytearray, "builtins.bytearray"),
    ],
)
def test_no_function_is_called(function: Any, name: str, protocol: int) -> None:
    module = "__builtin__" if protocol == 2 and name.startswith("builtins.") else None
    shown = name if module is None else f"{module}.{name.partition('.')[2]}"
    message = refusal(pickle.dumps([("w", Calls(function, "1"))], protocol))
    assert message == f"the pickle asks for {shown}; {ALLOWED}"


def test_a_call_hidden_in_a_reduce() -> None:
    inner = pickle.dumps(Calls(os.system, "true"), 2)
    hidden = [
        Calls(torch._utils._rebuild_tensor_v2, Calls(os.system, "true"), 0, (1,), (1,), False, OrderedDict()),
        Calls(torch.storage._load_from_bytes, inner),
        Calls(torch.storage._load_from_bytes, pickle.dumps(Calls(torch.storage._load_from_bytes, inner))),
    ]
    for value in hidden:
        assert refusal(pickle.dumps([("w", value)])) == f"the pickle asks for posix.system; {ALLOWED}"


@pytest.mark.parametrize(
    "name",
    [
        "torch.multiprocessing.reductions\nrebuild_tensor",
        "torch.multiprocessing.reductions\nrebuild_cuda_tensor",
        "torch.multiprocessing.reductions\nrebuild_storage_filename",
        "sglang.srt.utils.patch_torch\n_rebuild_cuda_tensor_modified",
    ],
)
def test_handles_are_refused_with_advice(name: str) -> None:
    assert refusal(P + b"c" + name.encode() + b"\n.") == (
        f"the pickle holds a handle to memory of another process ({name.replace(chr(10), '.')}), not the numbers; send "
        "the tensors' bytes (pickle.dumps of CPU tensors, or safetensors), or a shared memory segment with a manifest."
    )


DTYPE, SIZE = b"ctorch\nfloat32\n", b"ctorch\nSize\n"
RECORD = b"csglang.srt.model_executor.model_runner\nLocalSerializedTensor\n"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the pickle is truncated or malformed at byte 2."),
        (b"]", "the pickle is truncated or malformed at byte 3."),
        (b".", "the pickle is truncated or malformed at byte 3."),
        (b"].x", "1 bytes follow the end of the pickle at byte 4; none may."),
        (b"]].", "the pickle is refused at byte 5: it ends with values that nothing took."),
        (b"(].", "the pickle is refused at byte 5: it ends with values that nothing took."),
        (b"\x8f.", "the pickle is refused at byte 3: operation EMPTY_SET is not allowed."),
        (b"I01\n.", "the pickle is refused at byte 3: operation INT is not allowed."),
        (b"\xff", "the pickle is refused at byte 3: operation 0xff is not allowed."),
        (b"\x82\x01.", "the pickle is refused at byte 3: operation EXT1 is not allowed."),
        (b"\x80\x09.", "the pickle is refused at byte 4: protocol 9; allowed: 2 to 5."),
        (b"K\x05Q.", "the pickle is refused at byte 5: a persistent id, which only a file written by torch.save may"),
        (b"h\x07.", "the pickle is refused at byte 4: memo index 7 was never set."),
        (b"]r\xff\xff\xff\xff.", "the pickle is refused at byte 8: memo index 4294967295; up to 2000000 are allowed."),
        (b"\x8a\xff" + bytes(255) + b".", "the pickle is refused at byte 4: an integer of 255 bytes; up to 16 are"),
        (b"\x8e" + struct.pack("<Q", 1 << 62) + b".", "the pickle is truncated or malformed at byte 11."),
        (b"X" + struct.pack("<I", 1 << 31) + b".", "the pickle is truncated or malformed at byte 7."),
        (b"\x95" + struct.pack("<Q", 1 << 40) + b"].", "the pickle is truncated or malformed at byte 11."),
        (b"\x8c\x01\xff.", "the pickle holds broken text before byte 5: 'utf-8' codec can't decode byte 0xff"),
        (b"X" + struct.pack("<I", 70_000) + "é".encode() * 35_000, "the pickle holds broken text before byte 70007: "),
        (b"cos\nsystem", "the pickle is truncated or malformed at byte 6."),
        (b"K\x01K\x02\x93.", "the pickle is refused at byte 7: a global whose name is no text."),
        (b"}K\x01K\x02s.", "the pickle is refused at byte 8: a dict key of type int; allowed: str."),
        (b"}(K\x01u.", "the pickle is truncated or malformed at byte 7."),
        (b"})Na.", "the pickle is refused at byte 6: items for a tuple; allowed: a list."),
        (b"]NNs.", "the pickle is refused at byte 6: keys for a list; allowed: a dict."),
        (b"])R.", "the pickle is refused at byte 5: a call of a list."),
        (DTYPE + b")R.", "the pickle is refused at byte 19: a call of a TorchDtype."),
        (RECORD + b")R.", "the pickle is refused at byte 66: a call of a LocalSerializedTensor."),
        (SIZE + b")\x81.", "the pickle is refused at byte 16: an instance of a torch.Size."),
        (SIZE + b")R.", "a torch.Size in the pickle is not built from one tuple."),
        (SIZE + b"(K\x01tR.", "a torch.Size is no tuple of at most 8 integers."),
        (RECORD + b"N\x85\x81.", "the pickle is refused at byte 67: an instance of a LocalSerializedTensor."),
        (RECORD + b"}b.", "the pickle is refused at byte 66: a state of type dict for a LocalSerializedTensor."),
        (RECORD + b")\x81]b.", "the pickle is refused at byte 68: a state of type list for a LocalSerializedTensor."),
        (
            RECORD + b")\x81}b.",
            "the pickle is refused at byte 68: a LocalSerializedTensor needs exactly the fields val",
        ),
        (DTYPE + b"}\x8c\x01xNsb.", "the pickle is refused at byte 24: a state of type dict for a TorchDtype."),
        (b"ccollections\nOrderedDict\n)R}b.", "the pickle is refused at byte 31: a state of type dict for a dict."),
        (b"ccollections\nOrderedDict\n]\x85R.", "an OrderedDict in the pickle is not built empty."),
        (b"ctorch._utils\n_rebuild_tensor_v2\n)R.", "a torch tensor in the pickle is not built from a storage and its"),
        (b"ctorch._utils\n_rebuild_parameter\n)R.", "a torch parameter in the pickle is not built from a tensor."),
        (b"ctorch.storage\n_load_from_bytes\n)R.", "a torch storage in the pickle is not built from bytes."),
        (b"(" * 5 + b"d.", "the pickle is refused at byte 8: operation DICT is not allowed."),
    ],
)
def test_opcodes(body: bytes, message: str) -> None:
    assert refusal(P + body).startswith(message)


def test_values_that_hold_themselves() -> None:
    itself: list[Any] = []
    itself.append(itself)
    assert refusal(pickle.dumps(itself)) == "element 0 of the pickled list is a list, not a (name, tensor)."
    assert refusal(pickle.dumps([("w", itself)])) == "tensor 'w' is a list; allowed: a torch tensor."


def test_deep_nesting() -> None:
    deep = b")" + b"\x85" * 200_000
    with pytest.raises(InvalidRequest, match=r"the pickle holds a tuple; needed: a list of \(name, tensor\)\."):
        read_pickled_tensors(P + deep + b".")
    with pytest.raises(InvalidRequest, match=r"a dict key of type tuple; allowed: str\."):
        read_pickled_tensors(P + b"}" + deep + b"Ns.")
    value: object = pickle.dumps([])
    for _ in range(4):
        value = pickle.dumps(Calls(torch.storage._load_from_bytes, value))
    assert isinstance(value, bytes)
    assert refusal(value) == "pickles are nested more than 4 deep."


def test_the_number_of_operations_is_bounded() -> None:
    message = f"the pickle has more than {MAX_OPCODES} operations, the most that are allowed."
    with pytest.raises(InvalidRequest, match=message):
        read_pickled_tensors(P + b"N" * MAX_OPCODES)
    inner = P + b"]" + b"Na" * 50_000 + b"."  # opened again and again through the memo
    call = b"ctorch.storage\n_load_from_bytes\nq\x00"
    again = b"h\x00h\x01\x85R"
    body = P + call + b"B" + struct.pack("<I", len(inner)) + inner + b"q\x01\x85R" + again * 100 + b"."
    with pytest.raises(InvalidRequest, match=message):
        read_pickled_tensors(body)


def saved(value: object, is_zip: bool) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=is_zip)
    return file.getvalue()


LEGACY, ZIP = (saved([("w", torch.arange(200, dtype=torch.float32))], is_zip) for is_zip in (False, True))


def test_a_gigabyte_that_is_declared_and_not_there() -> None:
    declared = LEGACY.replace(b"K\xc8Nt", b"J" + struct.pack("<i", 1 << 28) + b"Nt")  # numbers in the storage's id
    assert len(declared) == len(LEGACY) + 3
    message = refusal(declared)
    assert message.startswith("storage '")
    assert message.endswith(
        "is declared with 1073741824 bytes; the torch file has 800 bytes left for it and says 200 numbers."
    )
    inside = pickle.dumps([("w", Calls(torch.storage._load_from_bytes, declared))])
    assert refusal(inside) == message
    size_at = LEGACY.index(struct.pack("<Q", 200) + bytes(4))
    longer = LEGACY[:size_at] + struct.pack("<Q", 1 << 28) + LEGACY[size_at + 8 :]
    assert refusal(longer).endswith(
        "is declared with 800 bytes; the torch file has 800 bytes left for it and says 268435456 numbers."
    )


def test_a_tensor_that_reaches_past_its_storage() -> None:
    wide = Calls(torch._utils._rebuild_tensor_v2, torch.ones(4)._typed_storage(), 2, (3,), (1,), False, OrderedDict())
    assert (
        refusal(pickle.dumps([("w", wide)]))
        == "tensor 'w' of shape [3] and stride [1] reaches number 4 of a storage of 4."
    )


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ((0, (3, 2), (1,)), "a tensor of 2 dimensions has 1 strides."),
        ((-1, (3,), (1,)), "a tensor's offset holds int where an integer of 0 to 1099511627776 is needed."),
        ((0, (3,), (-1,)), "a tensor's stride holds int where an integer of 0 to 1099511627776 is needed."),
        ((0, (1.5,), (1,)), "a tensor's size holds float where an integer of 0 to 1099511627776 is needed."),
        ((0, (1,) * 9, (1,) * 9), "a tensor's size is no tuple of at most 8 integers."),
        (
            (0, (1 << 40,) * 8, (0,) * 8),
            "tensor 'w' has stride [0, 0, 0, 0, 0, 0, 0, 0] (send tensor.contiguous()): its",
        ),
        ((0, (1 << 40,) * 2, (1 << 40, 1)), "tensor 'w' of shape [1099511627776, 1099511627776] and stride"),
    ],
)
def test_layouts(layout: tuple[Any, ...], message: str) -> None:
    value = Calls(torch._utils._rebuild_tensor_v2, torch.ones(4)._typed_storage(), *layout, False, OrderedDict())
    assert refusal(pickle.dumps([("w", value)])).startswith(message)


def archive(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as zipped:
        for name, content in members.items():
            zipped.writestr(name, content)
    return file.getvalue()


def test_zip_archives() -> None:
    with zipfile.ZipFile(io.BytesIO(ZIP)) as zipped:
        members = {name: zipped.read(name) for name in zipped.namelist()}
    prefix = next(iter(members)).partition("/")[0]
    assert list(read_pickled_tensors(archive(members))) == ["w"]
    storage = f"{prefix}/data/0"
    cases = [
        (archive(members, zipfile.ZIP_DEFLATED), f"member '{prefix}/data.pkl' of the zip archive is compressed;"),
        (archive(members | {storage: bytes(8)}), "storage '0' is declared with 800 bytes; the file has 8 of them."),
        (archive({key: value for key, value in members.items() if key != storage}), "storage '0' is declared with 800"),
        (archive(members | {f"{prefix}/byteorder": b"big"}), "the torch file has byte order b'big'; allowed: little."),
        (archive({"x": b""}), "the zip archive has 0 members data.pkl; one is needed."),
        (archive(members | {"data.pkl": b""}), "the zip archive has 2 members data.pkl; one is needed."),
        (ZIP[:-10], "the zip archive that torch.save wrote is truncated or malformed."),
        (ZIP[:100], "the zip archive that torch.save wrote is truncated or malformed."),
    ]
    for payload, message in cases:
        assert refusal(payload).startswith(message)


def test_a_zip_directory_of_endless_entries() -> None:
    end64 = ZIP.index(b"PK\x06\x06")
    endless = ZIP[: end64 + 32] + struct.pack("<Q", 1 << 60) + ZIP[end64 + 40 :]
    assert refusal(endless).startswith("the pickle has more than")


PICKLED = pickle.dumps([("w", torch.arange(3, dtype=torch.bfloat16)), ("t", torch.ones(2, 2).t())])
FORMATS = st.sampled_from([None, "flattened_bucket"])


def read_or_refuse(payload: bytes, load_format: str | None) -> None:
    try:
        tensors = read_pickled_tensors(payload, load_format=load_format)
    except InvalidRequest as error:
        _ = error.message
        return
    for tensor in tensors.values():
        tensor.dequantize()


@given(st.binary(max_size=200), FORMATS)
@example(b"", None)
def test_random_bytes(payload: bytes, load_format: str | None) -> None:
    read_or_refuse(payload, load_format)
    read_or_refuse(P + payload, load_format)


OPCODES = [
    bytes([code]) for code in b"(NKMJGXCB]})tase uqrhjcRbQ.\x80\x81\x85\x86\x87\x88\x89\x8a\x8c\x8d\x8e\x93\x94\x95\x96"
]
PIECES = st.sampled_from(
    [*OPCODES, b"K\x01", b"\x8c\x01w", b"q\x00", b"h\x00", DTYPE, SIZE, RECORD, b"C\x02ab", b"\x94"]
)


@given(st.lists(PIECES, max_size=40), FORMATS)
def test_random_programs(pieces: list[bytes], load_format: str | None) -> None:
    read_or_refuse(P + b"".join(pieces) + b".", load_format)


@pytest.mark.parametrize("payload", [PICKLED, LEGACY, ZIP], ids=["pickle", "legacy", "zip"])
@given(data=st.data())
def test_changed_files(payload: bytes, data: st.DataObject) -> None:
    changed = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    start = data.draw(st.integers(0, len(changed)))
    size = data.draw(st.sampled_from([0, 0, 0, 1, 8]))
    del changed[start : start + size]
    read_or_refuse(bytes(changed), data.draw(FORMATS))
