"""Reading sections of a file into arrays, checked piece by piece."""

from pathlib import Path

import numpy as np
import pytest

from headrace import _C

MIB = 1 << 20


def test_sections_come_back_where_they_belong(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sizes = [1, 7, 8, 63, 64, 65, MIB - 1, MIB, MIB + 1, 3 * MIB + 12345]
    parts = [rng.integers(0, 256, size, np.uint8) for size in sizes]
    path = tmp_path / "sections"
    path.write_bytes(b"head" + b"".join(part.tobytes() for part in parts))
    offsets = (4 + np.cumsum([0, *sizes[:-1]])).tolist()
    sums = [_C.checksums(part) for part in parts]
    assert [len(of_part) for of_part in sums] == [-(-size // MIB) for size in sizes]
    for threads in (1, 3):
        targets = [np.zeros(size, np.uint8) for size in sizes]
        with path.open("rb") as file:
            sound = _C.read_sections(_C.Pool(threads, False), file.fileno(), targets, offsets, sums)
        assert all(sound)
        assert all(np.array_equal(target, part) for target, part in zip(targets, parts, strict=True))


@pytest.mark.parametrize("size", [1, 8, 71, 136])
def test_one_or_two_changed_bits_change_the_checksum(size: int) -> None:
    data = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    seen = {_C.checksums(data)[0]}
    for bit in range(8 * size):
        data[bit // 8] ^= 1 << bit % 8
        seen.add(_C.checksums(data)[0])
        data[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 8 * size + 1  # all differ from each other: no second bit makes up for a first


def test_moved_and_missing_bytes_change_the_checksum() -> None:
    data = np.random.default_rng(2).integers(0, 256, 1024, np.uint8)
    whole = _C.checksums(data)
    for shift in (1, 8, 64, 512):
        assert _C.checksums(np.roll(data, shift)) != whole
    zeros = [_C.checksums(np.zeros(size, np.uint8))[0] for size in range(1, 130)]
    assert len(set(zeros)) == len(zeros)


def test_what_is_wrong_is_said_of_its_section_only(tmp_path: Path) -> None:
    path = tmp_path / "sections"
    data = np.arange(3 * MIB, dtype=np.uint32).view(np.uint8)[: 3 * MIB]
    sums = _C.checksums(data)
    path.write_bytes(data.tobytes())
    spoiled = [sums[0], sums[1] ^ 1, sums[2]]
    targets = [np.zeros(3 * MIB, np.uint8) for _ in range(4)]
    with path.open("rb") as file:  # right, one piece wrong, past the end of the file, too few checksums
        given = ([0, 0, MIB, 0], [sums, spoiled, sums, sums[:2]])
        sound = _C.read_sections(_C.Pool(2, False), file.fileno(), targets, *given)
    assert sound == [True, False, False, False]
    with pytest.raises(ValueError, match="unequal"):
        _C.read_sections(_C.Pool(1, False), 0, targets, [0], [sums])
