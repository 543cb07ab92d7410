"""The codecs' inner loops on a GPU, in Triton: the same bytes as torch's way makes, at the speed of memory.

To pack, a first kernel writes the mask and counts each block's values, a sum over the counts says where each block's begin, and a second kernel
writes them; in between the host waits once, because it must know how many bytes to ask for.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl

PACKED = 1024  # bytes of a mask that one program writes
TOGETHER = 4096  # values that one program takes, in blocks side by side


def pack_nonzero(words: torch.Tensor) -> torch.Tensor:
    """A bit for each value that is not zero, the first in the lowest bit of a byte."""
    count = words.numel()
    mask = torch.empty(-(-count // 8), dtype=torch.uint8, device=words.device)
    if count:
        _pack[(-(-mask.numel() // PACKED),)](words, mask, count, BYTES=PACKED)
    return mask


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
def _pack(words, mask, count, BYTES: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    places = at[:, None] * 8 + tl.arange(0, 8)[None, :]
    there = tl.load(words + places, mask=places < count, other=0) != 0
    packed = tl.sum(there.to(tl.int32) << tl.arange(0, 8)[None, :], axis=1)
    tl.store(mask + at, packed.to(tl.uint8), mask=at * 8 < count)


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
