"""The bytes of small tensors, read without torch: a tokenizer, the numbers of a bias, an alpha."""

import math
import struct

from wangen.generator.errors import WangenError, unreadable
from wangen.generator.formats import DTYPE_BITS, TensorInfo, truncated

# dtype -> zero bytes to put before its own, and struct's code for the whole: some are the upper part of a longer one.
_NUMBERS = {
    "F64": (0, "<d"),
    "F32": (0, "<f"),
    "F16": (0, "<e"),
    "BF16": (2, "<f"),
    "F8_E5M2": (1, "<e"),
    "I64": (0, "<q"),
    "I32": (0, "<i"),
    "I16": (0, "<h"),
    "I8": (0, "<b"),
    "U8": (0, "<B"),
}
READABLE = (*_NUMBERS, "F8_E4M3")
"""The dtypes whose numbers are read here."""


def read_raw(info: TensorInfo) -> bytes:
    """The stored bytes of a small tensor, row by row.

    Raises:
        WangenError: the file can no longer be read, or is shorter than its header said.
    """
    place = info.place
    assert place is not None, "a header that was made up has nothing to read"
    try:
        with place.file.open("rb") as file:
            file.seek(place.offset)
            content = file.read(place.num_bytes)
    except OSError as error:
        raise unreadable(place.file, error) from error
    if len(content) < place.num_bytes:
        raise truncated(place.file, expected=str(place.offset + place.num_bytes), found=place.offset + len(content))
    if place.strides is None:
        return content
    size, starts = DTYPE_BITS[info.dtype] // 8, [0]
    for count, stride in zip(info.shape, place.strides, strict=True):
        starts = [start + number * stride * size for start in starts for number in range(count)]
    return b"".join(content[start : start + size] for start in starts)


def read_numbers(info: TensorInfo) -> list[float]:
    """The values of a small tensor of a dtype in `READABLE`, as they are stored.

    Raises:
        WangenError: as `read_raw`.
    """
    content = read_raw(info)
    if info.dtype == "F8_E4M3":
        return [float8(bits) for bits in content]
    num_zeros, code = _NUMBERS[info.dtype]
    size = struct.calcsize(code) - num_zeros
    if num_zeros:
        content = b"".join(b"\0" * num_zeros + content[at : at + size] for at in range(0, len(content), size))
    return [float(number) for (number,) in struct.iter_unpack(code, content)]


def read_scalar(info: TensorInfo) -> float:
    """The value of a tensor of one number.

    Raises:
        WangenError: it holds no single number, is stored in a form that has none, or cannot be read.
    """
    numbers = read_numbers(info) if info.dtype in READABLE else []
    if len(numbers) != 1:
        raise WangenError(f"a tensor of {info.dtype} and shape {list(info.shape)} where one number is due",
                          where=info.file)  # fmt: skip
    return numbers[0]


def float8(bits: int) -> float:
    """A number of float8_e4m3fn, which has no infinity.

    >>> [float8(bits) for bits in (0x38, 0xC0, 0x01, 0x7E)]
    [1.0, -2.0, 0.001953125, 448.0]
    """
    exponent, mantissa = bits >> 3 & 15, bits & 7
    if bits & 0x7F == 0x7F:
        return math.nan
    value = math.ldexp(8 + mantissa, exponent - 10) if exponent else math.ldexp(mantissa, -9)
    return -value if bits & 0x80 else value
