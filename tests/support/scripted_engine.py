"""An engine process that follows a script, for tests of the client's end. Starts in a fraction of a second.

``config.model.path`` names the script: ``echo`` answers each sequence with its own prompt, a token a frame;
``never`` answers nothing but aborts; ``fail`` cannot start; ``exit`` ends with code 3 before it is ready;
``hang`` is never ready; ``garbage`` sends an unreadable frame with the first sequence; ``die`` sends one
token of it and kills itself; ``deaf`` does not notice that its parent is gone.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

import msgspec

from backend.engine.frames import FrameBuffer, encode_frame
from backend.engine.messages import (
    AbortSequences,
    Configure,
    EngineInfo,
    EngineStats,
    SequenceRequest,
    StartFailed,
    StartProgress,
    StepOutputs,
    ToEngine,
    TokenOutput,
)

INFO = EngineInfo(
    max_model_len=64,
    vocab_size=300,
    eos_token_ids=(256,),
    block_size=16,
    num_blocks=8,
    kv_bytes_per_token=1,
    device="none",
    max_running=2,
    max_waiting=1,
)


class Script:
    """Reads messages and acts on them as its name says."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._name = ""
        self._num_seen = 0

    def run(self) -> None:
        frames, decoder = FrameBuffer(), msgspec.msgpack.Decoder(ToEngine)
        while data := self._sock.recv(65536):
            for payload in frames.feed(data):
                self._act(decoder.decode(payload))
        if self._name == "deaf":
            time.sleep(60)

    def _send(self, message: object) -> None:
        self._sock.sendall(encode_frame(message))

    def _put(self, *outputs: TokenOutput) -> None:
        self._send(StepOutputs(list(outputs), EngineStats(num_requests=self._num_seen)))

    def _act(self, message: ToEngine) -> None:
        if isinstance(message, Configure):
            self._start(message)
        elif isinstance(message, SequenceRequest):
            self._num_seen += 1
            self._answer(message)
        elif isinstance(message, AbortSequences):
            for sequence_id in message.sequence_ids:
                self._put(TokenOutput(sequence_id=sequence_id, finish_reason="abort"))

    def _start(self, message: Configure) -> None:
        self._name = message.config.model.path
        assert message.config.pool_token == "", "the pool token does not belong here"
        self._send(StartProgress(0.5, "half way"))
        if self._name == "exit":
            sys.exit(3)
        if self._name == "fail":
            self._send(StartFailed("config.json: architecture Unheard is not supported"))
            sys.exit(1)
        if self._name != "hang":
            self._send(INFO)

    def _answer(self, request: SequenceRequest) -> None:
        if self._name == "garbage":
            self._sock.sendall(b"\x01\x00\x00\x00\xc1")
        elif self._name == "die":
            self._put(TokenOutput(sequence_id=request.sequence_id, token_ids=[1]))
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._name == "echo":
            last = len(request.prompt_token_ids) - 1
            for place, token_id in enumerate(request.prompt_token_ids):
                self._put(
                    TokenOutput(
                        sequence_id=request.sequence_id,
                        token_ids=[token_id],
                        finish_reason="length" if place == last else None,
                        cached_prompt_tokens=16,
                    )
                )


if __name__ == "__main__":
    Script(socket.socket(fileno=int(sys.argv[1]))).run()
