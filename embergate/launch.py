"""Brings an installation up, in the foreground or detached, and takes it down again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from billing.accounts import AccountDirectory
from billing.store import Store, StoreError
from embergate.children import plan_children
from embergate.config import ModelConfig
from embergate.config_file import CONFIG_VARIABLE, DATA_DIR_VARIABLE, Settings
from embergate.dev_account import DevAccount, ensure_dev_account
from embergate.embedded_model import prepare
from embergate.embedding_model import prepare_embeddings
from embergate.layout import DataLayout
from embergate.log_rotation import open_log, rotate, tail
from embergate.preflight import check_data_dir, check_ports, warn_of_slowness
from embergate.refusal import Refusal
from embergate.run_state import (
    InstanceLock,
    ProcessIdentity,
    RunState,
    StateFile,
    is_locked,
    stop_leftovers,
    wait_until,
)
from embergate.supervisor import Supervisor
from embergate.voice import Voice

_LEFTOVER_TIMEOUT_S = 10.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def make_ready(settings: Settings, voice: Voice) -> tuple[InstanceLock, DevAccount]:
    """Everything that has to be done before the first process starts. The caller releases the lock.

    Raises:
        Refusal: when something is in the way.
    """
    config, layout = settings.config, DataLayout(settings.data_dir)
    check_data_dir(layout.root)
    lock = InstanceLock.acquire(layout.run_dir)
    try:
        state_file = StateFile(layout.run_dir)
        if left := stop_leftovers(state_file.read(), _LEFTOVER_TIMEOUT_S):
            voice.say(f"Stopped what an earlier run had left behind: {', '.join(left)}.")
        state_file.remove()
        check_ports(config)
        warn_of_slowness(config, voice)
        resolve_model(settings, voice)
        if config.embedding_model is not None:
            resolve_embedding_model(settings, config.embedding_model, voice)
        return lock, open_dev_account(settings)
    except BaseException:
        lock.release()
        raise


def resolve_model(settings: Settings, voice: Voice) -> Path:
    """The path of the checkpoint that the local replicas load; what Embergate makes itself is prepared.

    Raises:
        Refusal: when it is missing or cannot be prepared.
    """
    model = settings.config.local_model
    if model.is_embedded:
        return prepare(DataLayout(settings.data_dir), model.form, voice.progress, voice.say)
    if model.tiny_form is not None:
        from embergate.tiny_model import (
            prepare_tiny,
        )  # brings the tokenizers, which the gateway has no use for

        return prepare_tiny(DataLayout(settings.data_dir), model.tiny_form, voice)
    path = source_path(settings, model)
    if not path.exists():
        raise Refusal(f"the model {model.id} is not at {path}: set its source in config.yaml.")
    return path


def resolve_embedding_model(settings: Settings, model: ModelConfig, voice: Voice) -> Path:
    """The directory that local replicas of the embedding model ``model`` load; the embedded one is prepared.

    Raises:
        Refusal: when it is missing or cannot be prepared.
    """
    if model.is_embedded:
        return prepare_embeddings(DataLayout(settings.data_dir), voice.say)
    path = source_path(settings, model)
    if not path.is_dir():
        raise Refusal(f"the model {model.id} is not at {path}: set its source in config.yaml.")
    return path


def source_path(settings: Settings, model: ModelConfig) -> Path:
    """Where a model that is not embedded lies, relative to the configuration file."""
    return (settings.path.parent / Path(model.source).expanduser()).resolve()


def open_dev_account(settings: Settings) -> DevAccount:
    """Make or check the development account.

    Raises:
        Refusal: when the database cannot be used.
    """
    layout = DataLayout(settings.data_dir)
    try:
        store = Store.of_config(settings.config.billing, layout.root)
    except StoreError as error:
        raise Refusal(str(error)) from error
    try:
        return ensure_dev_account(AccountDirectory(store), layout.dev_env, settings.config.gateway_url)
    finally:
        store.close()


def supervise(settings: Settings, say: Callable[[str], None], on_ready: Callable[[], None]) -> None:
    """Run the processes until SIGINT or SIGTERM; the lock must be held.

    Raises:
        Refusal: when they do not come up.
    """
    layout = DataLayout(settings.data_dir)
    identity = ProcessIdentity.of(os.getpid())
    if identity is None:
        raise Refusal("this system does not show process start times: /proc must be mounted.")
    state_file = StateFile(layout.run_dir)

    async def run() -> None:
        supervisor = Supervisor(
            plan_children(settings), settings.config.supervisor, state_file, identity, say
        )
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, supervisor.stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
        await supervisor.run(on_ready)

    # A signal that comes while the loop is being made waits for its handler.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        asyncio.run(run())
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
    state_file.remove()


def detach(settings: Settings, lock: InstanceLock) -> None:
    """Start a supervisor of its own session that inherits ``lock``, and return once everything is ready.

    Raises:
        Refusal: when it does not come up; everything is stopped again then.
    """
    layout = DataLayout(settings.data_dir)
    log_path = layout.logs_dir / "supervisor.log"
    rotate(log_path, settings.config.supervisor.log_max_bytes, settings.config.supervisor.log_num_backups)
    log = open_log(log_path)
    child = subprocess.Popen(
        [sys.executable, "-m", "embergate", "supervise", "--lock", str(lock.descriptor)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(lock.descriptor,),
        env={
            **os.environ,
            CONFIG_VARIABLE: str(settings.path),
            DATA_DIR_VARIABLE: str(settings.data_dir),
        },
        start_new_session=True,
    )
    os.close(log)
    state_file = StateFile(layout.run_dir)
    try:
        while True:
            state = state_file.read()
            if state is not None and state.supervisor.pid == child.pid and state.phase == "ready":
                return
            if child.poll() is not None:
                raise Refusal(_why_detached_failed(state, log_path))
            time.sleep(0.1)
    except KeyboardInterrupt:
        child.send_signal(signal.SIGTERM)
        child.wait()
        raise


def take_down(settings: Settings, say: Callable[[str], None]) -> bool:
    """Stop what runs with this data directory; returns whether anything did.

    The supervisor stops its processes in order; what is still alive after its graces are over is killed.
    """
    layout, config = DataLayout(settings.data_dir), settings.config
    state_file = StateFile(layout.run_dir)
    state = state_file.read()
    if state is None:
        return False
    was_running = state.supervisor.is_alive() and is_locked(layout.run_dir)
    if was_running:
        say("Stopping: requests in flight are answered first ...")
        os.kill(state.supervisor.pid, signal.SIGTERM)
        grace_s = config.gateway.shutdown_grace_s + config.replicas.shutdown_grace_s
        grace_s += 2 * config.supervisor.stop_timeout_s + 5.0
        if not wait_until(lambda: not state.supervisor.is_alive(), grace_s):
            say("The supervisor did not stop in time; killing it.")
            with contextlib.suppress(ProcessLookupError):
                os.kill(state.supervisor.pid, signal.SIGKILL)
    left = stop_leftovers(state_file.read() or state, config.supervisor.stop_timeout_s)
    state_file.remove()
    return was_running or bool(left)


def _why_detached_failed(state: RunState | None, log: Path) -> str:
    if state is not None and state.phase == "failed" and state.message:
        return state.message
    last = tail(log, 1)
    return f"the supervisor ended{': ' + last[0] if last else ''} (more in {log})"
