"""The C functions' parameters after the number of threads: p an address, i an int64, f a float.

What each one means stands beside the C function in ``kernels/<op>/native.c``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

SIGNATURES: Mapping[str, str] = MappingProxyType(
    {
        "packed_linear": "ppp" "iiii" "ii",
        "packed_head_linear": "ppp" "iiiii" "ii",
        "packed_embedding": "ppp" "iiii",
        "rms_norm": "pppfp" "ii",
        "silu_mul": "pp" "ii",
        "rope": "pipp" "iiii",
        "store_kv": "pipippp" "iiiii",
        "store_latent": "pipipp" "iii",
        "paged_attention": "pippppp" "fp" "iiiiiii",
        "paged_mla_decode": "ppipppfp" "iiiiiii",
        "moe_gate": "pppp" "iiiiiif",
        "expert_mlp": "ppppppp" "iiiiiiii",
    }
)
