"""KVGroup: layers whose KV blocks live and die together. Plain values that the core, a graph and a backend share."""

from dataclasses import dataclass
from typing import Literal

KVKind = Literal["full", "window", "latent", "state"]
KVDtype = Literal["bf16", "int8"]  # int8: with one f32 scale per token, KV head, and K or V


@dataclass(frozen=True, slots=True)
class KVGroup:
    """One block table per group, so that windowed layers free what has left their window."""

    kind: KVKind
    layers: tuple[int, ...]  # model layer indices, in order
    num_kv_heads: int
    head_dim: int
    window: int = 0  # tokens; 0 for kind "full"

    def bytes_per_token(self, dtype: KVDtype = "bf16") -> int:
        """KV bytes of one token over all layers of the group (K and V)."""
        head = 2 * self.head_dim if dtype == "bf16" else self.head_dim + 4
        return 2 * len(self.layers) * self.num_kv_heads * head
