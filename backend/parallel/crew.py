"""Whole replicas that share the experts of one model out among themselves: data-parallel attention.

Each member is an engine of its own, with its own sequences, KV cache, attention and prefix cache; the
gateway sees a replica like any other. Only the experts are held once for all: in each of their layers the
members send tokens to each other, all to all. So they step together. A member without work takes part with
no tokens.

Steps come in *waves*. A member that gets work while all rest calls the others; every step begins with a
count of those that have work, and when nobody has any the wave ends and all rest again, at no cost. The
calls go through the first member, over connections that also tell when a member is gone: the model has lost
a part then, and the rest of it ends too.

Wide expert parallelism in this form is described for DeepSeek-V3's deployment (arXiv:2412.19437, section 3.4)
and is what other engines call DP attention.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from collections.abc import Sequence

from torch._C._distributed_c10d import Store

from backend.parallel.group import RankGroup

_CALL = struct.Struct("!Q")
_HELLO_BYTES = 32
_HUB_KEY = "embergate/hub"


class MemberLostError(Exception):
    """Another member is gone; what it held is missing from the model."""


class Line:
    """A connection between two members that carries calls: numbers of waves."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(None)
        self._sock = sock
        self._unread = b""

    def fileno(self) -> int:
        return self._sock.fileno()

    def call(self, wave: int) -> None:
        """Say that ``wave`` begins. Raises MemberLostError."""
        try:
            self._sock.sendall(_CALL.pack(wave))
        except OSError as error:
            raise MemberLostError("a member of the crew does not take calls") from error

    def calls(self) -> list[int]:
        """What has come, without waiting. Raises MemberLostError at the end of the connection."""
        try:
            data = self._sock.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError as error:
            raise MemberLostError("the connection to a member of the crew broke") from error
        if not data:
            raise MemberLostError("a member of the crew is gone")
        whole = len(self._unread + data) // _CALL.size * _CALL.size
        text, self._unread = (self._unread + data)[:whole], (self._unread + data)[whole:]
        return [wave for (wave,) in _CALL.iter_unpack(text)]

    def close(self) -> None:
        self._sock.close()


class Crew:
    """This member among the others: when to step, and who has work.

    Args:
        group: the members, along its expert axis.
        lines: to every other member for the first, to the first for the others.
    """

    def __init__(self, group: RankGroup, lines: Sequence[Line]) -> None:
        self._group = group
        self._lines = tuple(lines)
        self._wave = 1
        self.is_stepping = False

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Readable when there may be a call."""
        return tuple(line.fileno() for line in self._lines)

    def look_up(self) -> None:
        """Join the wave that others began, if they did. Raises MemberLostError."""
        for line in self._lines:
            if self._wave in line.calls() and not self.is_stepping:
                self._begin(line)

    def count_work(self, has_work: bool) -> int:
        """The beginning of a step, for all: how many have work. Nobody: the wave is over.

        Raises:
            MemberLostError, RuntimeError: a member is gone.
        """
        if not self.is_stepping:
            self._begin(None)
        num_working = self._group.count(has_work)
        if not num_working:
            self._wave += 1
            self.is_stepping = False
        return num_working

    def close(self) -> None:
        """Leave; the others notice."""
        for line in self._lines:
            line.close()

    def _begin(self, caller: Line | None) -> None:
        """Step from now on, and pass the call on: the first member knows everybody, the others only it."""
        self.is_stepping = True
        for line in self._lines:
            if line is not caller:
                line.call(self._wave)


def connect_crew(store: Store, place_rank: int, world: int, host: str, timeout_s: float) -> list[Line]:
    """The lines of one member; every member calls this at the same time.

    Args:
        store: where the members meet.
        host: the address at which the first one listens.

    Raises:
        OSError, RuntimeError: a member does not come.
    """
    if place_rank == 0:
        return _listen(store, world, host, timeout_s)
    address, port, word = store.get(_HUB_KEY).decode().rsplit(" ", 2)
    sock = socket.create_connection((address, int(port)), timeout_s)
    sock.sendall(bytes.fromhex(word))
    return [Line(sock)]


def _listen(store: Store, world: int, host: str, timeout_s: float) -> list[Line]:
    word = secrets.token_bytes(_HELLO_BYTES)
    lines: list[Line] = []
    with socket.create_server((host, 0)) as listener:
        listener.settimeout(timeout_s)
        store.set(_HUB_KEY, f"{host} {listener.getsockname()[1]} {word.hex()}")
        while len(lines) < world - 1:
            sock, _ = listener.accept()
            sock.settimeout(timeout_s)
            if hmac.compare_digest(_read_exactly(sock, _HELLO_BYTES), word):
                lines.append(Line(sock))
            else:
                sock.close()
    return lines


def _read_exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (part := sock.recv(size - len(data))):
        data += part
    return data
