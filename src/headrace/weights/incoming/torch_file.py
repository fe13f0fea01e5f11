"""Reads what torch pickled into inert records: a bare pickle, or either container of torch.save (legacy and zip).

Called by `torch_pickle.py`. A tensor in a bare pickle is a call of `torch.storage._load_from_bytes` on the bytes of a
whole legacy file, so readers nest; depth, operations and copies are bounded over all of them together.

Legacy file: four pickles (magic number, version, system, value), a fifth with the storages' keys, then per storage its
length in numbers (int64) and its bytes. Zip: data.pkl, byteorder, and one stored member data/KEY per storage.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.errors import InvalidRequest
from headrace.weights.incoming import torch_zip
from headrace.weights.incoming.pickle_machine import Budget, Builder, PickleMachine, type_name
from headrace.weights.incoming.torch_values import StorageClass, TorchStorage, find_global, whole_number

MAX_NESTING = 4  # a pickle, a LocalSerializedTensor's pickle, and the file of its storage make three

_LEGACY_MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."  # 0x1950a86a20f9469cfc6c, pickled
_LEGACY_VERSION = 1001
_LOAD_FROM_BYTES = ("torch.storage", "_load_from_bytes")


class TorchReader:
    """Reads one payload and what is nested in it; `budget` is spent on all of it."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._nesting = 0

    def read(self, data: memoryview) -> object:
        """The value in `data`: plain data, `TorchTensor`, `TorchStorage` and `Record`, views of `data` throughout."""
        if self._nesting == MAX_NESTING:
            raise InvalidRequest(f"pickles are nested more than {MAX_NESTING} deep.")
        self._nesting += 1
        try:
            if bytes(data[: len(torch_zip.MAGIC)]) == torch_zip.MAGIC:
                return self._read_zip(data)
            if bytes(data[: len(_LEGACY_MAGIC)]) == _LEGACY_MAGIC:
                return self._read_legacy(data)
            value, end = self._run(data, 0)
            _check_end(data, end)
            return value
        finally:
            self._nesting -= 1

    def _run(
        self, data: memoryview, position: int, find_persistent: Callable[[object], object] | None = None
    ) -> tuple[object, int]:
        return PickleMachine(data, position, self._budget, self._find_global, find_persistent).run()

    def _find_global(self, module: str, name: str) -> object:
        if (module, name) == _LOAD_FROM_BYTES:
            return Builder("torch.storage._load_from_bytes", self._load_from_bytes)
        return find_global(module, name)

    def _load_from_bytes(self, arguments: tuple[object, ...]) -> object:
        if len(arguments) != 1 or not isinstance(arguments[0], memoryview):
            raise InvalidRequest("a torch storage in the pickle is not built from bytes.")
        return self.read(arguments[0])

    def _read_legacy(self, data: memoryview) -> object:
        version, position = self._run(data, len(_LEGACY_MAGIC))
        if version != _LEGACY_VERSION:
            raise InvalidRequest(f"the torch file is not of version {_LEGACY_VERSION}, the only one that is read.")
        system, position = self._run(data, position)
        if not isinstance(system, dict) or system.get("little_endian") is not True:
            raise InvalidRequest("the torch file does not say that it is little-endian, as it must be.")
        storages: dict[str, TorchStorage] = {}

        def find_storage(persistent_id: object) -> TorchStorage:
            key, storage = _declared_storage(persistent_id)
            known = storages.setdefault(key, storage)
            if (known.dtype, known.num_bytes) != (storage.dtype, storage.num_bytes):
                raise InvalidRequest(f"storage {key[:80]!r} is declared twice, in different ways.")
            return known

        value, position = self._run(data, position, find_storage)
        keys, position = self._run(data, position)
        if not isinstance(keys, list):
            raise InvalidRequest("the torch file has no list of storages.")
        for key in keys:
            known = storages.get(key) if isinstance(key, str) else None
            if known is None or known.data is not None:
                raise InvalidRequest("the torch file lists a storage that no tensor has, or one twice.")
            num_elements = int.from_bytes(data[position : position + 8], "little")
            start, position = position + 8, position + 8 + known.num_bytes
            if num_elements * known.dtype.itemsize != known.num_bytes or position > len(data):
                raise InvalidRequest(
                    f"storage {key[:80]!r} is declared with {known.num_bytes} bytes; the torch file has "
                    f"{max(0, len(data) - start)} bytes left for it and says {num_elements} numbers."
                )
            known.data = data[start:position]
        _check_end(data, position)
        return value

    def _read_zip(self, data: memoryview) -> object:
        members = torch_zip.read_zip(data, self._budget)
        pickles = [name for name in members if name == "data.pkl" or name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise InvalidRequest(f"the zip archive has {len(pickles)} members data.pkl; one is needed.")
        prefix = pickles[0].removesuffix("data.pkl")
        order = bytes(members.get(f"{prefix}byteorder", memoryview(b"little"))[:16])
        if order != b"little":
            raise InvalidRequest(f"the torch file has byte order {order!r}; allowed: little.")
        storages: dict[str, TorchStorage] = {}

        def find_storage(persistent_id: object) -> TorchStorage:
            key, storage = _declared_storage(persistent_id)
            known = storages.get(key)
            if known is not None and known.dtype == storage.dtype:
                return known
            content = members.get(f"{prefix}data/{key}")
            if content is None or len(content) != storage.num_bytes:
                found = "none" if content is None else str(len(content))
                raise InvalidRequest(
                    f"storage {key[:80]!r} is declared with {storage.num_bytes} bytes; the file has {found} of them."
                )
            storage.data = content
            storages[key] = storage
            return storage

        value, end = self._run(members[pickles[0]], 0, find_storage)
        _check_end(members[pickles[0]], end)
        return value


def _declared_storage(persistent_id: object) -> tuple[str, TorchStorage]:
    """Key and still empty storage of an id ("storage", class, key, device, length in numbers, and None if legacy).

    The device does not matter: the bytes are in the file wherever the tensor was.
    """
    if isinstance(persistent_id, tuple) and len(persistent_id) in (5, 6):
        tag, cls, key, device, num_elements, *view = persistent_id
        if tag == "storage" and isinstance(cls, StorageClass) and isinstance(key, str) and isinstance(device, str):
            if view not in ([], [None]):
                raise InvalidRequest(f"storage {key[:80]!r} is a view of another, a form that torch no longer writes.")
            size = whole_number(num_elements, "a storage's length") * cls.dtype.itemsize
            return key, TorchStorage(cls.dtype, size)
    raise InvalidRequest(f"a persistent id in the torch file is a {type_name(persistent_id)} that names no storage.")


def _check_end(data: memoryview, end: int) -> None:
    if end != len(data):
        raise InvalidRequest(f"{len(data) - end} bytes follow the end of the pickle at byte {end}; none may.")
