"""The noise generator against the published vectors, plain integers, and what its fields have to be."""

from __future__ import annotations

import math

import pytest
import torch

from finetune.methods.primitives.hash_noise import (
    _mix,
    _mix_integer,
    derive_key,
    hash_integers,
    hash_tile,
    noise_of_hash,
    row_tiles,
    row_vectors,
)

CPU = torch.device("cpu")


def field(key: int, rows: int, columns: int, *, first_row: int = 0, first_column: int = 0) -> torch.Tensor:
    a, b = row_vectors(key, first_row, rows, CPU)
    return hash_tile(a, b, torch.arange(first_column, first_column + columns, dtype=torch.int32))


def unsigned(hashed: torch.Tensor) -> list[int]:
    return [value & 0xFFFFFFFF for value in hashed.reshape(-1).tolist()]


# zeroth-order specification, section 11: run seed 42.
def test_keys_are_those_of_the_specification() -> None:
    assert derive_key(0) == 0xE220A8397B1DCDAF
    assert derive_key(1) == 0x910A2DEC89025CC1
    assert derive_key(42, 0, 0, 0) == 0xC16129ECD0DC5B93
    assert derive_key(42, 0, 0, 1) == 0x6BD1868732F4640C
    assert derive_key(42, 1, 0, 3) == 0xF475F3A10120426A


def test_the_mixer_is_that_of_the_specification() -> None:
    given, expected = [0, 1, -1], [0, 0x688990C0, 0x6768824A]
    assert unsigned(_mix(torch.tensor(given, dtype=torch.int32))) == expected
    assert [_mix_integer(value & 0xFFFFFFFF) for value in given] == expected


def test_hashes_are_those_of_the_specification() -> None:
    hashed = field(derive_key(42, 0, 0, 0), 2, 4)
    assert unsigned(hashed[0]) == [0x655B3D65, 0x0BA81F14, 0xDAD78858, 0xC47D6C24]
    assert unsigned(hashed[1]) == [0xE8558FCA, 0x7082C1AD, 0x414F8CD3, 0xD166EDBC]


def test_signs_and_counts_are_those_of_the_specification() -> None:
    signs = noise_of_hash(field(derive_key(42, 0, 0, 0), 1, 16), "rademacher")[0]
    assert "".join("+" if sign > 0 else "-" for sign in signs) == "++--+++--+-+--+-"
    other = noise_of_hash(field(derive_key(42, 0, 0, 1), 2, 4), "rademacher")
    assert ["".join("+" if sign > 0 else "-" for sign in row) for row in other] == ["---+", "--+-"]
    binomial = noise_of_hash(field(derive_key(42, 0, 0, 0), 1, 8), "binomial")[0]
    counts = [18, 13, 16, 15, 16, 19, 16, 14]
    expected = torch.tensor([(count - 16) / math.sqrt(8) for count in counts])
    torch.testing.assert_close(binomial, expected, rtol=1e-6, atol=0)


def test_a_tensor_of_hashes_is_what_plain_integers_give() -> None:
    key = derive_key(7, 123456, 3, 99)
    hashed = field(key, 5, 6, first_row=2**20, first_column=70_000)
    expected = [hash_integers(key, 2**20 + row, 70_000 + column) for row in range(5) for column in range(6)]
    assert unsigned(hashed) == expected


@pytest.mark.parametrize("noise", ["rademacher", "binomial", "gaussian"])
def test_slices_of_rows_and_columns_are_slices_of_the_field(noise: str) -> None:
    key = derive_key(1, 2, 3, 4)
    whole = noise_of_hash(field(key, 48, 64), noise)  # type: ignore[arg-type]
    part = noise_of_hash(field(key, 20, 31, first_row=17, first_column=9), noise)  # type: ignore[arg-type]
    assert torch.equal(part, whole[17:37, 9:40])


@pytest.mark.parametrize(("noise", "kurtosis"), [("rademacher", 1.0), ("binomial", 2.9375), ("gaussian", 3.0)])
def test_moments_and_neighbours(noise: str, kurtosis: float) -> None:
    # Binomial of 32 fair bits: kurtosis 3 - 2/32. With n = 1e6 entries a mean of products of two independent entries
    # has a standard deviation of 1e-3; five of them are allowed.
    first, second = (noise_of_hash(field(derive_key(5, 0, 0, p), 1000, 1000), noise).double() for p in (0, 1))  # type: ignore[arg-type]
    for product in (first[1:] * first[:-1], first[:, 1:] * first[:, :-1], first[1:, 1:] * first[:-1, :-1]):
        assert abs(product.mean()) < 5e-3
    assert abs((first * second).mean()) < 5e-3
    assert abs(first.mean()) < 5e-3
    assert abs(first.square().mean() - 1) < 7e-3
    # The fourth power of a Gaussian has a standard deviation of sqrt(96).
    assert abs(first.pow(4).mean() - kurtosis) < 5e-2


def test_the_largest_singular_value_of_signs_is_that_of_a_random_matrix() -> None:
    size = 600
    signs = noise_of_hash(field(derive_key(3, 1, 0, 0), size, size), "rademacher")
    assert torch.linalg.matrix_norm(signs, 2) / math.sqrt(size) == pytest.approx(2.0, abs=0.05)


def test_no_generator_of_torch_is_touched() -> None:
    before = torch.get_rng_state()
    noise_of_hash(field(derive_key(1), 4, 4), "gaussian")
    assert torch.equal(torch.get_rng_state(), before)


def test_tiles_cover_the_rows_once() -> None:
    rows = [row for tile in row_tiles(1000, 4096) for row in range(tile.start, tile.stop)]
    assert rows == list(range(1000))
