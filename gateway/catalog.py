"""The models that this gateway serves, by id and by alias."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.config import ServedModel
from gateway.errors import no_such_model


class Catalog:
    """Immutable. Bills and answers name the model that ran, whichever alias was asked for."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        """Raises ValueError when two models claim one name."""
        self.models = tuple(models)
        self._by_name: dict[str, ServedModel] = {}
        for model in models:
            for name in (model.id, *model.aliases):
                if name in self._by_name:
                    raise ValueError(
                        f"models: {name!r} names both {self._by_name[name].id!r} and {model.id!r}"
                    )
                self._by_name[name] = model

    def find(self, name: str) -> ServedModel:
        """Raises Refusal: 400, no such model."""
        model = self._by_name.get(name)
        if model is None:
            raise no_such_model(name)
        return model

    def names(self) -> list[str]:
        """All ids and aliases, in the order of the configuration."""
        return list(self._by_name)
