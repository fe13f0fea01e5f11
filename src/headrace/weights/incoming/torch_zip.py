"""Finds the stored members of a zip archive in memory, as torch.save writes it. Nothing is copied or decompressed.

Called by `torch_file.py`. Not Python's `zipfile`, which wants a file object and would copy each member, inflate what
claims to be small, and list as many members as the archive names. torch never compresses, and always adds zip64 fields.

Format: PKWARE's APPNOTE.TXT, sections 4.3.7 (local header), 4.3.12 (central directory) and 4.3.14 to 4.3.16 (its end).
"""

from __future__ import annotations

import struct

from headrace.errors import InvalidRequest
from headrace.weights.incoming.base import MAX_NAME_LENGTH
from headrace.weights.incoming.pickle_machine import Budget

MAGIC = b"PK\x03\x04"
_END = struct.Struct("<4s6xHII2x")  # signature, entries, bytes and offset of the central directory
_LOCATOR = struct.Struct("<4s4xQ4x")  # signature, offset of the zip64 end
_END64 = struct.Struct("<4s28xQQQ")  # signature, entries, bytes and offset of the central directory
_ENTRY = struct.Struct("<4s4xHH8xIIHHH8xI")  # signature, flags, method, sizes, lengths of the tail, header offset
_LOCAL = struct.Struct("<4s22xHH")  # signature, lengths of the tail
_MAX_COMMENT = 0xFFFF
_IN_ZIP64 = 0xFFFFFFFF
_ENCRYPTED = 1


def read_zip(data: memoryview, budget: Budget) -> dict[str, memoryview]:
    """Contents of all members by name; raises InvalidRequest for anything that is no archive of stored members."""
    try:
        return _read_members(data, budget)
    except (struct.error, UnicodeDecodeError):
        raise InvalidRequest("the zip archive that torch.save wrote is truncated or malformed.") from None


def _read_members(data: memoryview, budget: Budget) -> dict[str, memoryview]:
    num_entries, position = _find_directory(data)
    budget.spend_opcodes(num_entries)
    members: dict[str, memoryview] = {}
    for _ in range(num_entries):
        entry = _ENTRY.unpack_from(data, position)
        signature, flags, method, packed, size, name_length, extra_length, comment_length, offset = entry
        position += _ENTRY.size
        if signature != b"PK\x01\x02" or name_length > MAX_NAME_LENGTH:
            raise struct.error
        name = str(data[position : position + name_length], "utf-8")
        extra = data[position + name_length : position + name_length + extra_length]
        position += name_length + extra_length + comment_length
        size, packed, offset = _zip64_fields(extra, [size, packed, offset])
        if flags & _ENCRYPTED or method != 0 or packed != size:
            raise InvalidRequest(f"member {name[:80]!r} of the zip archive is compressed; torch.save stores members.")
        if name in members:
            raise InvalidRequest(f"member {name[:80]!r} is twice in the zip archive.")
        members[name] = _contents(data, name, offset, size)
    return members


def _find_directory(data: memoryview) -> tuple[int, int]:
    """Number of entries of the central directory, and where it begins."""
    tail_at = max(0, len(data) - _END.size - _MAX_COMMENT)
    found = bytes(data[tail_at:]).rfind(b"PK\x05\x06")
    if found < 0:
        raise struct.error
    _, num_entries, _, position = _END.unpack_from(data, tail_at + found)
    locator_at = tail_at + found - _LOCATOR.size
    if locator_at >= 0:
        signature, end_at = _LOCATOR.unpack_from(data, locator_at)
        if signature == b"PK\x06\x07":
            if end_at > len(data):
                raise struct.error
            signature, num_entries, _, position = _END64.unpack_from(data, end_at)
            if signature != b"PK\x06\x06":
                raise struct.error
    if position > len(data):
        raise struct.error
    return num_entries, position


def _zip64_fields(extra: memoryview, fields: list[int]) -> list[int]:
    """`fields` (size, packed size, header offset) with those that did not fit taken from the zip64 extra field."""
    while len(extra) >= 4:
        tag, length = struct.unpack_from("<HH", extra)
        if tag == 1:
            values = extra[4 : 4 + length]
            for i, value in enumerate(fields):
                if value == _IN_ZIP64:
                    (fields[i],) = struct.unpack_from("<Q", values)
                    values = values[8:]
            return fields
        extra = extra[4 + length :]
    return fields


def _contents(data: memoryview, name: str, offset: int, size: int) -> memoryview:
    if offset > len(data):
        raise struct.error
    signature, name_length, extra_length = _LOCAL.unpack_from(data, offset)
    start = offset + _LOCAL.size + name_length + extra_length
    if signature != MAGIC or start + size > len(data):
        raise InvalidRequest(f"member {name[:80]!r} of the zip archive has {size} bytes, more than the archive holds.")
    return data[start : start + size]
