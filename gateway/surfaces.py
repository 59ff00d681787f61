"""The public surfaces by name: what ``RunTarget.surface`` may be."""

from __future__ import annotations

from gateway.call import SurfaceForm
from gateway.catalog import Catalog
from gateway.config import LimitsConfig
from gateway.handlers.binding import BindingForm
from gateway.handlers.completions import CompletionsForm
from gateway.handlers.embeddings import EmbeddingsForm
from gateway.handlers.native import NativeForm
from gateway.handlers.openai import OpenAIForm
from gateway.handlers.responses import ResponsesForm
from gateway.wire.openai_errors import encode_openai_refusal, encode_responses_refusal
from gateway.wire.run_body import RunLimits
from gateway.wire.workers_ai import encode_refusal


def build_surfaces(catalog: Catalog, limits: LimitsConfig) -> dict[str, SurfaceForm]:
    """One form for each surface. Those below an account refuse in Workers AI's form, the plain ones (the
    account comes from the API token) in OpenAI's.
    """
    run_limits = RunLimits(limits.max_choices, limits.max_embedding_inputs)
    surfaces: dict[str, SurfaceForm] = {
        "run": NativeForm(catalog, run_limits),
        "binding": BindingForm(catalog, run_limits),
    }
    for prefix, encode in (("", encode_refusal), ("plain ", encode_openai_refusal)):
        surfaces[f"{prefix}v1"] = OpenAIForm(limits.max_choices, encode)
        surfaces[f"{prefix}completions"] = CompletionsForm(limits.max_choices, encode)
        surfaces[f"{prefix}embeddings"] = EmbeddingsForm(limits.max_embedding_inputs, encode)
    surfaces["responses"] = ResponsesForm(encode_responses_refusal)
    surfaces["plain responses"] = ResponsesForm(encode_openai_refusal)
    return surfaces
