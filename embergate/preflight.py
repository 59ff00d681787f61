"""Looks for what would make a start fail before anything is started, so that the answer is one sentence."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import psutil

from embergate.config import Config
from embergate.disk import require_space
from embergate.refusal import Refusal
from embergate.voice import Voice

_COMPILERS = ("cc", "gcc", "clang")
_MIN_FREE_BYTES = 64 * 1024 * 1024


def check_data_dir(data_dir: Path) -> None:
    """Make sure that the data directory exists, can be written and has room.

    Raises:
        Refusal: when one of these is not so.
    """
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise Refusal(
            f"the data directory {data_dir} cannot be made ({error.strerror}): set data_dir in config.yaml."
        ) from error
    if not os.access(data_dir, os.W_OK | os.X_OK):
        raise Refusal(
            f"the data directory {data_dir} cannot be written: "
            "change its owner, or set data_dir in config.yaml."
        )
    require_space(data_dir, _MIN_FREE_BYTES, "Embergate")


def warn_of_slowness(config: Config, voice: Voice) -> None:
    """Say what works but is slow, since nothing else would tell."""
    wants_compiler = config.replicas.count and config.replicas.device.device in ("auto", "cpu")
    if wants_compiler and not any(map(shutil.which, filter(None, (os.environ.get("CC"), *_COMPILERS)))):
        voice.say(
            "No C compiler was found: replicas on the CPU compute without native kernels, which is slow. "
            "Install gcc or clang."
        )


def check_ports(config: Config) -> None:
    """Make sure that every port can be listened on.

    Raises:
        Refusal: for the first that cannot, naming who has it and the key to change.
    """
    replicas = config.replicas
    check_port(config.gateway.host, config.gateway.port, "gateway.port")
    for index in range(replicas.count):
        check_port(replicas.host, replicas.base_port + index, "replicas.base_port")
    embeddings = config.embeddings
    for index in range(len(config.embedding_addresses())):
        check_port(embeddings.host, embeddings.base_port + index, "embeddings.base_port")


def check_port(host: str, port: int, key: str) -> None:
    """Raises Refusal when ``host:port`` cannot be listened on; ``key`` is where the port is configured."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise Refusal(
            f"the host {host} is unknown: change {key.split('.')[0]}.host in config.yaml."
        ) from error
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except PermissionError as error:
            raise Refusal(f"port {port} needs privileges: set {key} in config.yaml above 1023.") from error
        except OSError as error:
            raise Refusal(
                f"port {port} is taken{_owner_of(port)}: "
                f"stop that, or set {key} in config.yaml to a free one."
            ) from error


def _owner_of(port: int) -> str:
    """Who listens on a port, as far as this user may know."""
    try:
        for connection in psutil.net_connections("tcp"):
            is_listening = connection.status == psutil.CONN_LISTEN and connection.pid
            if is_listening and connection.laddr and connection.laddr.port == port:
                return f" by {psutil.Process(connection.pid).name()} (process {connection.pid})"
    except psutil.Error:
        pass
    return ""
