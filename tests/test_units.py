from __future__ import annotations

from pathlib import Path

import pytest

from tierwise.errors import BadInput
from tierwise.units import exact_bytes, format_bytes, format_seconds, parse_bytes, parse_store

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("24GiB", 24 * GIB),
        (" 1.5 GiB ", 3 * GIB // 2),
        (".5KiB", 512),
        ("800MB", 800_000_000),
        ("2TB", 2 * 10**12),
        ("7B", 7),
        ("4096", 4096),
        (4096, 4096),
        (2**60 + 1, 2**60 + 1),
    ],
)
def test_bytes_as_people_write_them(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(("text", "nbytes"), [("0.5", 50), (0.25, 25), ("1", 100), ("1.0", 100)])
def test_a_fraction_is_a_share_of_the_whole(text, nbytes):
    assert parse_bytes(text, of=100) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        "24G",
        "24gb",
        "24GIB",
        "GiB",
        "",
        "-3GiB",
        "0",
        "0GiB",
        "1e9",
        "24 GiB please",
        "0.5",
        "1.5",
        "٣GiB",
        True,
        "9" * 400,
        "9" * 400 + "GiB",
        float("nan"),
    ],
)
def test_nonsense_is_refused(text):
    with pytest.raises(BadInput, match=r"bytes"):
        parse_bytes(text)


def test_a_share_too_small_for_a_byte_is_refused():
    with pytest.raises(BadInput, match="larger than 0"):
        parse_bytes("0.001", of=100)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (24 * GIB, "24.0 GiB"), (143 * GIB, "143 GiB"), (3 << 50, "3072 TiB"), (-2048, "-2.00 KiB")],
)
def test_bytes_for_people(nbytes, text):
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize("nbytes", [1, 12345, (1 << 24) - 1, 1 << 24, (1 << 24) + 1, 10**11])
def test_a_size_to_paste_is_enough_and_not_a_mebibyte_more(nbytes):
    assert 0 <= parse_bytes(exact_bytes(nbytes)) - nbytes < 1 << 20


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2.50 s"), (123.4, "123 s"), (0.0513, "51.3 ms"), (4e-6, "4.00 µs"), (0.0, "0.00 µs"), (1e-9, "0.00 µs")]
)
def test_seconds_for_people(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("text", "directory", "nbytes"),
    [("/scratch:200GiB", "/scratch", 200 * GIB), ("D:\\scratch:1TB", "D:\\scratch", 10**12), ("here: 5MB ", "here", 5_000_000)],
)
def test_a_directory_and_how_much_of_it_may_be_used(text, directory, nbytes):
    assert parse_store(text) == (Path(directory), nbytes)


@pytest.mark.parametrize("text", ["/scratch", "/scratch:", ":5GiB", "/scratch:5G", "D:\\scratch"])
def test_a_store_without_a_directory_or_a_clear_size_is_refused(text):
    with pytest.raises(BadInput):
        parse_store(text)
