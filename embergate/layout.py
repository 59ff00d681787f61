"""Where everything lies in the data directory."""

from __future__ import annotations

from pathlib import Path

import msgspec


class DataLayout(msgspec.Struct, frozen=True):
    """Paths below ``root``, the data directory. Nothing here touches the disk."""

    root: Path

    @property
    def dev_env(self) -> Path:
        """The development account: ``EMBERGATE_URL``, ``_ACCOUNT_ID`` and ``_API_TOKEN``; mode 600."""
        return self.root / "dev.env"

    @property
    def secrets_dir(self) -> Path:
        """The installation's own secrets, each a file of mode 600."""
        return self.root / "secrets"

    @property
    def spool_dir(self) -> Path:
        """The durable journal of usage records on their way to the database."""
        return self.root / "spool"

    @property
    def logs_dir(self) -> Path:
        return self.root / "logs"

    @property
    def run_dir(self) -> Path:
        """The lock and the state of the running processes."""
        return self.root / "run"

    @property
    def models_dir(self) -> Path:
        return self.root / "models"

    @property
    def embedded_dir(self) -> Path:
        """The embedded model: its source and one checkpoint directory per form."""
        return self.models_dir / "smollm2-135m-instruct"

    @property
    def embedding_model(self) -> Path:
        """The directory of the embedded embedding model."""
        return self.models_dir / "all-minilm-l6-v2"

    def embedded_checkpoint(self, form: str) -> Path:
        """The checkpoint directory of the embedded model in ``form`` (``kimi`` or ``llama``)."""
        return self.embedded_dir / form

    def tiny_checkpoint(self, form: str) -> Path:
        """The checkpoint directory of the tiny model in ``form`` (``bf16``, ``fp8`` or ``int4``)."""
        return self.models_dir / "kimi-k2.5-tiny" / form
