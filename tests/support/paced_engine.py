"""An engine process that makes a token of every sequence at a steady pace, for measuring the HTTP side.

``config.scheduler.max_queue_wait_s`` is read as the pace, in seconds per step.
"""

from __future__ import annotations

import select
import socket
import sys
import time

import msgspec

from backend.engine.frames import FrameBuffer, encode_frame
from backend.engine.messages import (
    Configure,
    EngineInfo,
    EngineStats,
    SequenceRequest,
    StepOutputs,
    ToEngine,
    TokenOutput,
)

INFO = EngineInfo(
    max_model_len=8192,
    vocab_size=49152,
    eos_token_ids=(2,),
    block_size=16,
    num_blocks=1024,
    kv_bytes_per_token=1,
    device="none",
    max_running=256,
    max_waiting=256,
)


class PacedEngine:
    """Steps as long as there are sequences; sleeps on the socket otherwise."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._frames = FrameBuffer()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._num_left: dict[int, int] = {}
        self._pace_s = 0.0

    def run(self) -> None:
        due = time.monotonic()
        while self._receive(wait_s=0 if self._num_left else None):
            if not self._num_left:
                due = time.monotonic()
                continue
            self._step()
            due += self._pace_s
            time.sleep(max(0.0, due - time.monotonic()))

    def _receive(self, wait_s: float | None) -> bool:
        """Act on what has come; whether the parent is still there."""
        while select.select([self._sock], [], [], wait_s)[0]:
            data = self._sock.recv(1 << 16)
            if not data:
                return False
            for payload in self._frames.feed(data):
                self._act(self._decoder.decode(payload))
            wait_s = 0
        return True

    def _act(self, message: ToEngine) -> None:
        if isinstance(message, Configure):
            self._pace_s = message.config.scheduler.max_queue_wait_s
            self._sock.sendall(encode_frame(INFO))
        elif isinstance(message, SequenceRequest):
            self._num_left[message.sequence_id] = message.sampling.max_tokens

    def _step(self) -> None:
        outputs = []
        for sequence_id, num_left in list(self._num_left.items()):
            is_last = num_left == 1
            outputs.append(
                TokenOutput(
                    sequence_id=sequence_id,
                    token_ids=[32 + num_left % 90],
                    finish_reason="length" if is_last else None,
                    queue_wait_s=0.001,
                )
            )
            self._num_left[sequence_id] = num_left - 1
            if is_last:
                del self._num_left[sequence_id]
        self._sock.sendall(encode_frame(StepOutputs(outputs, EngineStats())))


if __name__ == "__main__":
    PacedEngine(socket.socket(fileno=int(sys.argv[1]))).run()
