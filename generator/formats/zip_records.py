"""The directory of a zip file: which records it has and where each lies.

Python's `zipfile` would make an object of half a kilobyte of every entry before anything can be checked; here the
number of records is bounded first. PyTorch stores its records uncompressed, so that a record is a range of the file.
The format: APPNOTE.TXT of PKWARE, sections 4.3.7 to 4.4.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from wangen.generator.errors import WangenError
from wangen.generator.formats import DOWNLOAD_AGAIN, quoted

MAGIC = b"PK\x03\x04"
MAX_RECORDS = 100_000
MAX_DIRECTORY_BYTES = 32 * 2**20
MAX_COMMENT_BYTES = 2**16 - 1

LOCAL = struct.Struct("<4s22xHH")  # signature; lengths of name and extra field
ENTRY = struct.Struct("<4s4xHH4xLLLHHH8xL")  # signature, flags, method, CRC, two sizes, three lengths, offset
END = struct.Struct("<4s6xHLLH")  # signature, records, bytes and offset of the directory, length of the comment
LOCATOR_64 = struct.Struct("<4s4xQ4x")  # signature, offset of the longer end
END_64 = struct.Struct("<4s28xQQQ")  # signature, records, bytes and offset of the directory
ENCRYPTED, UTF_8 = 0x1, 0x800
IN_EXTRA_FIELD = 0xFFFFFFFF


class NoDirectoryError(Exception):
    """The file does not end with a zip directory: it is cut short."""


@dataclass(frozen=True)
class Record:
    """One record of a zip file.

    Attributes:
        num_bytes: of its content.
        crc: CRC-32 of its content, as the directory says.
        header_offset: where the record's own header begins, from the beginning of the file.
    """

    num_bytes: int
    crc: int
    header_offset: int


def read_records(path: Path) -> dict[str, Record]:
    """All records by name, from the directory at the end of the file.

    Raises:
        NoDirectoryError: there is no such directory.
        WangenError: a directory that PyTorch does not write: compressed or encrypted records, a name twice.
    """
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        num_records, num_bytes, offset = _find_directory(file, size_bytes)
        if num_records > MAX_RECORDS or num_bytes > MAX_DIRECTORY_BYTES:
            raise WangenError(f"this zip file would hold {num_records} records", where=str(path), cure=DOWNLOAD_AGAIN)
        if offset + num_bytes > size_bytes:
            raise NoDirectoryError
        file.seek(offset)
        directory = file.read(num_bytes)
    records: dict[str, Record] = {}
    position = 0
    for _ in range(num_records):
        name, record, position = _entry(path, directory, position)
        if name in records:
            raise WangenError(f"this zip file holds {quoted(name)} twice", where=str(path), cure=DOWNLOAD_AGAIN)
        if record.header_offset + LOCAL.size + record.num_bytes > offset:
            raise WangenError(f"the record {quoted(name)} reaches beyond the file", where=str(path),
                              cure=DOWNLOAD_AGAIN)  # fmt: skip
        records[name] = record
    return records


def content_begin(path: Path, file: BinaryIO, name: str, record: Record, file_bytes: int) -> int:
    """Where the content of a record begins: behind the record's own header, whose length varies.

    Raises:
        WangenError: there is no record at that place, or it reaches beyond the file.
    """
    file.seek(record.header_offset)
    header = file.read(LOCAL.size)
    if len(header) == LOCAL.size and header.startswith(MAGIC):
        _, name_bytes, extra_bytes = LOCAL.unpack(header)
        begin = record.header_offset + LOCAL.size + int(name_bytes) + int(extra_bytes)
        if begin + record.num_bytes <= file_bytes:
            return begin
    raise WangenError(f"the record {quoted(name)} is not where the directory says", where=str(path),
                      cure=DOWNLOAD_AGAIN)  # fmt: skip


def _find_directory(file: BinaryIO, size_bytes: int) -> tuple[int, int, int]:
    """Number of records, length and offset of the directory."""
    tail_begin = max(0, size_bytes - END.size - LOCATOR_64.size - MAX_COMMENT_BYTES)
    file.seek(tail_begin)
    tail = file.read(size_bytes - tail_begin)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) - at < END.size:
        raise NoDirectoryError
    _, num_records, num_bytes, offset, comment_bytes = END.unpack_from(tail, at)
    if at + END.size + comment_bytes != len(tail):
        raise NoDirectoryError
    if at >= LOCATOR_64.size and tail.startswith(b"PK\x06\x07", at - LOCATOR_64.size):
        _, end_offset = LOCATOR_64.unpack_from(tail, at - LOCATOR_64.size)
        if end_offset + END_64.size > size_bytes:
            raise NoDirectoryError
        file.seek(end_offset)
        signature, num_records, num_bytes, offset = END_64.unpack(file.read(END_64.size))
        if signature != b"PK\x06\x06":
            raise NoDirectoryError
    return num_records, num_bytes, offset


def _entry(path: Path, directory: bytes, position: int) -> tuple[str, Record, int]:
    """The entry at a position of the directory, and the position behind it."""
    content = position + ENTRY.size
    fields = ENTRY.unpack_from(directory, position) if content <= len(directory) else (b"",) * 10
    signature, flags, method, crc, packed, num_bytes, name_bytes, extra_bytes, comment_bytes, offset = fields
    if signature != b"PK\x01\x02" or content + name_bytes + extra_bytes + comment_bytes > len(directory):
        raise NoDirectoryError
    raw = directory[content : content + name_bytes]
    name = raw.decode("utf-8" if flags & UTF_8 else "cp437", "backslashreplace")
    extra = directory[content + name_bytes : content + name_bytes + extra_bytes]
    num_bytes, packed, offset = _widened(extra, (num_bytes, packed, offset))
    if flags & ENCRYPTED:
        raise WangenError("this zip file is encrypted; PyTorch weights never are", where=str(path))
    if method or packed != num_bytes:
        raise WangenError("this zip file is compressed; PyTorch weights never are", where=str(path),
                          cure="unpack it, and give the weight file inside")  # fmt: skip
    return name, Record(num_bytes, crc, offset), content + name_bytes + extra_bytes + comment_bytes


def _widened(extra: bytes, numbers: tuple[int, int, int]) -> tuple[int, int, int]:
    """Numbers that need more than 32 bits stand in the extra field with the id 1, in this order."""
    if IN_EXTRA_FIELD not in numbers:
        return numbers
    position = 0
    while position + 4 <= len(extra):
        kind, num_bytes = struct.unpack_from("<HH", extra, position)
        if kind == 1:
            content = extra[position + 4 : position + 4 + num_bytes]
            wide = list(struct.unpack_from(f"<{len(content) // 8}Q", content))
            if len(wide) < numbers.count(IN_EXTRA_FIELD):
                break
            first, second, third = (wide.pop(0) if number == IN_EXTRA_FIELD else number for number in numbers)
            return first, second, third
        position += 4 + num_bytes
    raise NoDirectoryError
