"""The C functions' parameters after the crew of threads: p an address, i an int64, f a float.

What each one means stands beside the C function in ``kernels/<op>/native.c``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

SIGNATURES: Mapping[str, str] = MappingProxyType(
    {
        "packed_linear": "pppiiiiii",
        "packed_head_linear": "pppiiiiiii",
        "packed_embedding": "pppiiii",
        "rms_norm": "pppfpii",
        "silu_mul": "ppii",
        "rope": "pippiiii",
        "store_kv": "pipipppiiiii",
        "store_latent": "pipippiii",
        "paged_attention": "pipppppfpiiiiiii",
        "paged_mla_decode": "ppipppfpiiiiiii",
        "moe_gate": "ppppiiiiiif",
        "moe_weigh_all": "ppiiiif",
        "expert_mlp": "pppppppiiiiiiii",
    }
)
