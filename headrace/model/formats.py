"""Block formats: how tensors are stored. Names, type numbers and sizes only; `quantize` reads the values.

A row of `k` values is `k / block_size` blocks of `block_bytes` bytes each; a block never spans two rows. Type numbers
are GGUF's (safetensors dtypes F32, F16 and BF16 are the same as the formats of one value a block).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockFormat:
    name: str
    type_number: int  # GGUF's
    block_size: int  # values in a block
    block_bytes: int

    def row_bytes(self, k: int) -> int:
        """Bytes of a row of `k` values; `k` is a multiple of block_size."""
        return k // self.block_size * self.block_bytes


FORMATS: dict[str, BlockFormat] = {
    name: BlockFormat(name, number, block_size, block_bytes)
    for name, number, block_size, block_bytes in (
        ("F32", 0, 1, 4),
        ("F16", 1, 1, 2),
        ("Q4_0", 2, 32, 18),
        ("Q4_1", 3, 32, 20),
        ("Q5_0", 6, 32, 22),
        ("Q5_1", 7, 32, 24),
        ("Q8_0", 8, 32, 34),
        ("Q4_K", 12, 256, 144),
        ("Q5_K", 13, 256, 176),
        ("Q6_K", 14, 256, 210),
        ("BF16", 30, 1, 2),
    )
}

# Formats that exist in GGUF files but not here: only to say their name when refusing them.
UNSUPPORTED_NAMES: dict[int, str] = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


def format_of_type(type_number: int) -> BlockFormat | None:
    """The format with GGUF's `type_number`, or None where it is not supported."""
    return next((f for f in FORMATS.values() if f.type_number == type_number), None)
