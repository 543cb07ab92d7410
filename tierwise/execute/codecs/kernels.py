"""The codecs' inner loops on a GPU, in Triton: the same bytes as torch's way makes, at the speed of memory.

To pack, a first kernel writes the mask and counts each block's values, a sum over the counts says where each block's begin, and a second kernel
writes them; in between the host waits once, because it must know how many bytes to ask for. Nothing else waits.

Rounding reads the values twice: for the largest finite one, and to scale and round. Casts that cards or Triton's interpreter do differently, to and
from fp8 and bf16, are done on the bits. fp16 is cast: any card does that as torch does, denormals included.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl

PACKED = 1024  # bytes of a mask that one program writes
TOGETHER = 4096  # values that one program takes, in blocks side by side
FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # what signs are taken of, and what is rounded


def pack_nonzero(words: torch.Tensor) -> torch.Tensor:
    """A bit for each value that is not zero, the first in the lowest bit of a byte."""
    count = words.numel()
    mask = torch.empty(-(-count // 8), dtype=torch.uint8, device=words.device)
    if count:
        _pack[(-(-mask.numel() // PACKED),)](words, mask, count, BYTES=PACKED, SIGNS=False)
    return mask


def pack_signs(values: torch.Tensor) -> torch.Tensor:
    """A bit for each value of a row that is not at or below zero; a NaN is not."""
    count = values.numel()
    mask = torch.empty(-(-count // 8), dtype=torch.uint8, device=values.device)
    if count:
        _pack[(-(-mask.numel() // PACKED),)](_plain(values), mask, count, BYTES=PACKED, SIGNS=True)
    return mask


def unpack(packed: torch.Tensor, count: int) -> torch.Tensor:
    flags = torch.empty(count, dtype=torch.bool, device=packed.device)
    if count:
        _unpack[(-(-packed.numel() // PACKED),)](packed, flags.view(torch.uint8), count, BYTES=PACKED)
    return flags


def keep_where_set(words: torch.Tensor, packed: torch.Tensor, kept: torch.Tensor) -> None:
    """Each value whose bit is set, as it is, and zero for the others."""
    count = words.numel()
    if count:
        _keep[(-(-count // TOGETHER),)](words, packed, kept, count, BYTES=TOGETHER // 8)


def encode_rounded(values: torch.Tensor, narrow: torch.dtype, limit: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A row of FLOATS rounded to fp16 or fp8, as bytes, and the scale; `limit` and `most` as in rounding.RANGES."""
    count = values.numel()
    rounded = torch.empty(count, dtype=narrow, device=values.device)
    if not count:
        return rounded.view(torch.uint8), torch.ones(1, dtype=torch.float32, device=values.device)
    scale = torch.empty(1, dtype=torch.float32, device=values.device)
    programs = -(-count // TOGETHER)
    largest = torch.empty(programs, dtype=torch.int32, device=values.device)
    values = _plain(values)
    _largest[(programs,)](values, largest, count, BLOCK=TOGETHER)
    _round[(programs,)](values, largest.max(), _plain(rounded), scale, count, LIMIT=limit, MOST=most, BLOCK=TOGETHER)
    return rounded.view(torch.uint8), scale


def decode_rounded(rounded: torch.Tensor, scale: torch.Tensor, values: torch.Tensor) -> None:
    """What encode_rounded made, `rounded` in its own type, into a row of FLOATS."""
    count = values.numel()
    if count:
        _widen[(-(-count // TOGETHER),)](_plain(rounded), scale, _plain(values), count, BLOCK=TOGETHER)


def _plain(values: torch.Tensor) -> torch.Tensor:
    """fp32 and fp16 as they are; bf16 and fp8 as the whole numbers that kernels know them by."""
    plain = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}.get(values.dtype)
    return values if plain is None else values.view(plain)


def encode_zero_values(words: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count = words.numel()
    mask = torch.empty(-(-count // 8), dtype=torch.uint8, device=words.device)
    counts = torch.empty(-(-count // block), dtype=torch.int16, device=words.device)
    if count:
        _mask_and_count[(counts.numel(),)](words, mask, counts, count, BLOCK=block)
    starts, values = _room(words, counts)
    if values.numel():
        _gather[_programs(counts, block)](words, values, values, starts, count, counts.numel(), ROWS=TOGETHER // block, BLOCK=block, COLUMNS=False)
    return mask, values, counts


def decode_zero_values(mask: torch.Tensor, values: torch.Tensor, counts: torch.Tensor, words: torch.Tensor, block: int) -> None:
    if words.numel():
        _spread[(counts.numel(),)](mask, values, _starts(counts), words, words.numel(), BLOCK=block)


def encode_sparse_rows(words: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count = words.numel()
    counts = torch.empty(-(-count // width), dtype=torch.int16, device=words.device)
    if count:
        _count[_programs(counts, width)](words, counts, count, counts.numel(), ROWS=TOGETHER // width, BLOCK=width)
    starts, values = _room(words, counts)
    columns = torch.empty(values.numel(), dtype=torch.uint8, device=words.device)
    if values.numel():
        _gather[_programs(counts, width)](words, values, columns, starts, count, counts.numel(), ROWS=TOGETHER // width, BLOCK=width, COLUMNS=True)
    return columns, values, counts


def decode_sparse_rows(columns: torch.Tensor, values: torch.Tensor, counts: torch.Tensor, words: torch.Tensor, width: int) -> None:
    words.zero_()
    if values.numel():
        rows = counts.numel()
        _scatter[_programs(counts, width)](columns, values, _starts(counts), counts, words, rows, ROWS=TOGETHER // width, BLOCK=width)


def _programs(blocks: torch.Tensor, block: int) -> tuple[int]:
    return (-(-blocks.numel() // (TOGETHER // block)),)


def _room(words: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each block's values begin, and room for all of them."""
    starts = _starts(counts)
    total = int(starts[-1] + counts[-1]) if counts.numel() else 0
    return starts, torch.empty(total, dtype=words.dtype, device=words.device)


def _starts(counts: torch.Tensor) -> torch.Tensor:
    return counts.cumsum(0, dtype=torch.int64) - counts


# -- kernels ----------------------------------------------------------------------------------------------------------------------------


@triton.jit
def _pack(words, mask, count, BYTES: tl.constexpr, SIGNS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    places = at[:, None] * 8 + tl.arange(0, 8)[None, :]
    found = tl.load(words + places, mask=places < count, other=0)
    there = tl.where(_wide(found) <= 0.0, 0, 1) if SIGNS else tl.where(found != 0, 1, 0)
    packed = tl.sum(there << tl.arange(0, 8)[None, :], axis=1)
    tl.store(mask + at, packed.to(tl.uint8), mask=at * 8 < count)


@triton.jit
def _unpack(mask, flags, count, BYTES: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    places = at[:, None] * 8 + tl.arange(0, 8)[None, :]
    packed = tl.load(mask + at, mask=at * 8 < count, other=0).to(tl.int32)
    there = (packed[:, None] >> tl.arange(0, 8)[None, :]) & 1
    tl.store(flags + places, there.to(tl.uint8), mask=places < count)


@triton.jit
def _keep(words, mask, kept, count, BYTES: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    places = at[:, None] * 8 + tl.arange(0, 8)[None, :]
    packed = tl.load(mask + at, mask=at * 8 < count, other=0).to(tl.int32)
    there = (packed[:, None] >> tl.arange(0, 8)[None, :]) & 1
    found = tl.load(words + places, mask=places < count, other=0)  # all of them: a load that asks each bit first is not one wide load
    tl.store(kept + places, tl.where(there != 0, found, 0), mask=places < count)


@triton.jit
def _mask_and_count(words, mask, counts, count, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    at = block * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    places = at[:, None] * 8 + tl.arange(0, 8)[None, :]
    there = (tl.load(words + places, mask=places < count, other=0) != 0).to(tl.int32)
    tl.store(mask + at, tl.sum(there << tl.arange(0, 8)[None, :], axis=1).to(tl.uint8), mask=at * 8 < count)
    tl.store(counts + block, tl.sum(tl.sum(there, axis=1), axis=0).to(tl.int16))


@triton.jit
def _count(words, counts, count, rows, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    places = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = (tl.load(words + places, mask=places < count, other=0) != 0).to(tl.int32)
    tl.store(counts + row, tl.sum(there, axis=1).to(tl.int16), mask=row < rows)


@triton.jit
def _gather(words, values, columns, starts, count, rows, ROWS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    within = tl.arange(0, BLOCK)
    places = row[:, None] * BLOCK + within[None, :]
    found = tl.load(words + places, mask=places < count, other=0)
    there = (found != 0).to(tl.int32)
    start = tl.load(starts + row, mask=row < rows, other=0)
    to = start[:, None] + tl.cumsum(there, axis=1) - there
    tl.store(values + to, found, mask=there != 0)
    if COLUMNS:
        tl.store(columns + to, tl.broadcast_to(within[None, :], (ROWS, BLOCK)).to(tl.uint8), mask=there != 0)


@triton.jit
def _spread(mask, values, starts, words, count, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    within = tl.arange(0, BLOCK)
    places = block * BLOCK + within
    packed = tl.load(mask + places // 8, mask=places < count, other=0).to(tl.int32)
    there = (packed >> (within % 8)) & 1
    source = tl.load(starts + block) + tl.cumsum(there, axis=0) - there
    found = tl.load(values + source, mask=there != 0, other=0)
    tl.store(words + places, found, mask=places < count)


@triton.jit
def _scatter(columns, values, starts, counts, words, rows, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = tl.load(starts + row, mask=row < rows, other=0)
    count = tl.load(counts + row, mask=row < rows, other=0)
    source = start[:, None] + tl.arange(0, BLOCK)[None, :]
    mine = tl.arange(0, BLOCK)[None, :] < count[:, None]
    column = tl.load(columns + source, mask=mine, other=0).to(tl.int64)
    tl.store(words + row[:, None] * BLOCK + column, tl.load(values + source, mask=mine, other=0), mask=mine)


# -- rounding ---------------------------------------------------------------------------------------------------------------------------
# Sizes of fp32 numbers are compared as whole numbers: without the sign, bits are in the order of values, and 0x7F800000 is infinity.


@triton.jit
def _largest(values, largest, count, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    places = block * BLOCK + tl.arange(0, BLOCK)
    size = _wide(tl.load(values + places, mask=places < count, other=0)).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.store(largest + block, tl.max(tl.where(size < 0x7F800000, size, 0), axis=0))


@triton.jit
def _round(values, largest, rounded, scale, count, LIMIT: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    places = block * BLOCK + tl.arange(0, BLOCK)
    size = tl.load(largest)
    power = tl.where(size > 0, tl.minimum((LIMIT - size) >> 23, MOST), 0)  # as rounding.py's _scale
    factor = ((power + 127) << 23).to(tl.float32, bitcast=True)
    tl.store(scale, factor, mask=block == 0)
    scaled = _wide(tl.load(values + places, mask=places < count, other=0)) * factor
    if rounded.dtype.element_ty == tl.uint8:
        tl.store(rounded + places, _to_fp8(scaled), mask=places < count)
    else:
        tl.store(rounded + places, scaled.to(tl.float16), mask=places < count)


@triton.jit
def _widen(rounded, scale, values, count, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # Divided by a power of two, that is, multiplied by the opposite power: Triton's own division does not round as IEEE says.
    factor = ((254 << 23) - tl.load(scale).to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    value = _wide(tl.load(rounded + places, mask=places < count, other=0)) * factor
    if values.dtype.element_ty == tl.int16:
        tl.store(values + places, _to_bf16(value), mask=places < count)
    else:
        tl.store(values + places, value.to(values.dtype.element_ty), mask=places < count)


@triton.jit
def _wide(found):
    """fp32 from fp32, from fp16, from bf16 as int16 or from fp8 as uint8; always exact."""
    if found.dtype == tl.int16:
        wide = (found.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif found.dtype == tl.uint8:
        packed = found.to(tl.int32)
        size = packed & 0x7F
        small = (size.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)  # below eight, whole multiples of 2**-9
        bits = tl.where(size < 8, small, (size << 20) + (120 << 23))  # exponents begin at -7 and not at -127
        bits = tl.where(size == 0x7F, 0x7FC00000, bits)
        wide = (bits | ((packed >> 7) << 31)).to(tl.float32, bitcast=True)
    else:
        wide = found.to(tl.float32)
    return wide


@triton.jit
def _to_fp8(value):
    """To the nearest, ties to even; what is not finite is NaN without a sign. Nothing is there 448, for that is what it was scaled to."""
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    large = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 fp8 has steps of 2**-9, and so has fp32 from 2**14 on: the sum rounds as it must, and its last bits are the number of steps.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 0xF
    rounded = tl.where(size < (121 << 23), small, large) | ((bits >> 24) & 0x80)
    return tl.where(size < 0x7F800000, rounded, 0x7F).to(tl.uint8)


@triton.jit
def _to_bf16(value):
    """To the nearest, ties to even; a NaN as a GPU's arithmetic leaves it."""
    bits = value.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFF, rounded).to(tl.int16)
