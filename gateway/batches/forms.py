"""How items are read and their answers written: as on the surface that they were meant for, but bare."""

from __future__ import annotations

import msgspec

from billing.usage import Surface
from gateway.call import InferenceRequest, SurfaceForm
from gateway.errors import Refusal, bad_input
from gateway.wire.embeddings import NativeVectors
from gateway.wire.openai import with_usage
from gateway.wire.openai_errors import encode_openai_refusal


class ItemForm:
    """Items of one surface's form: metered as ``batch``, never streamed, never waiting for room ahead of live
    requests.
    """

    name: Surface = "batch"

    def __init__(self, surface: SurfaceForm) -> None:
        """``surface`` reads the bodies."""
        self._surface = surface

    def decode(self, body: bytes, path_model: str | None, query: str) -> InferenceRequest:
        request = self._surface.decode(body, path_model, query)
        if request.is_stream:
            raise bad_input("/stream", "the requests of a batch are answered in one piece")
        form = request.answer_form
        if isinstance(form, NativeVectors):
            form = form.bare()
        return msgspec.structs.replace(request, rejects_if_busy=True, answer_form=form)

    def completion(self, completion: bytes, usage: bytes) -> bytes:
        return with_usage(completion, usage)

    def stream_end(self, final_chunk: bytes, usage: bytes, *, includes_usage: bool) -> bytes:
        return b""  # nothing is streamed

    def refusal(self, refusal: Refusal, request_id: str) -> bytes:
        """The body of an OpenAI line; native items have the message alone."""
        return encode_openai_refusal(refusal, request_id)
