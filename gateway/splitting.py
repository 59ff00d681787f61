"""Which of a pool's replicas answers a request, and whether another computes its prompt first.

Replicas say what they do: all of a request, prompts for others, or answers to prompts that others computed.
An answer goes to the first in the ranking of its key that has room for it in its KV cache, so that turns of a
conversation meet again. Its prompt is computed elsewhere when enough of it is probably not cached where the
answer is; there too the ranking of the key decides, so that prompts that begin alike meet.

A conversation whose owner has changed, because a replica came or is draining, is handed over in the same way:
its previous owner sends what it has.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.call import Call
from gateway.config import RoutingConfig
from gateway.predictions import CachePredictions
from gateway.replicas import Replica
from gateway.routing import Ranking
from gateway.wire.embeddings import EmbeddingsRequest

_BYTES_PER_TOKEN = 4
"""About so many bytes of text are a token: a guess, which decides where to compute and nothing else."""


class Splitter:
    """See the module. The two rankings are of two pools; a ring remembers the one that it was built for."""

    def __init__(
        self,
        ranking: Ranking[Replica],
        prefill_ranking: Ranking[Replica],
        predictions: CachePredictions,
        config: RoutingConfig,
    ) -> None:
        self._ranking = ranking
        self._prefill_ranking = prefill_ranking
        self._predictions = predictions
        self._config = config

    def rank(self, call: Call, serving: Sequence[Replica]) -> list[Replica]:
        """Those that may answer, best first."""
        if any(replica.role != "both" for replica in serving):
            serving = tuple(replica for replica in serving if replica.role != "prefill")
        ranking = self._ranking(call.account_id, call.affinity_key, serving) if serving else []
        if any(replica.role == "decode" for replica in ranking):
            needed = estimate_tokens(call) + _longest_answer(call)
            ranking.sort(key=lambda replica: _lack_of_room(replica, needed))
        return ranking

    def choose_prefill(self, call: Call, replica: Replica, serving: Sequence[Replica]) -> Replica | None:
        """Who computes the prompt of a request that ``replica`` answers; None for ``replica`` itself."""
        if not replica.can_fetch or isinstance(call.request, EmbeddingsRequest):
            return None
        if (previous := self._previous_owner(call, replica, serving)) is not None:
            return previous
        others = tuple(other for other in serving if other.transfer and other is not replica)
        if not any(other.role == "prefill" for other in others):
            return None
        cached = self._predictions.predict(call.account_id, call.affinity_key, replica.id)
        if estimate_tokens(call) - cached < self._config.min_split_tokens:
            return None
        for other in self._prefill_ranking(call.account_id, call.affinity_key, others):
            if other.health == "ready" and other.num_prefills < self._config.max_prefills_per_replica:
                return other
        return None

    def _previous_owner(self, call: Call, replica: Replica, serving: Sequence[Replica]) -> Replica | None:
        """Who has the earlier turns of a conversation that has moved, while it still lives: it hands them
        over, with the little that is new, for less than computing all of it again.
        """
        last = self._predictions.last(call.account_id, call.affinity_key)
        if last is None or last[0] == replica.id or last[1] < self._config.min_handover_tokens:
            return None
        for other in serving:
            if other.id == last[0] and other.transfer and other.health in ("ready", "draining"):
                has_room = other.num_prefills < self._config.max_prefills_per_replica
                return other if has_room else None
        return None


def estimate_tokens(call: Call) -> int:
    """About how long the prompt is."""
    num_bytes = max(len(call.exchange.body) - call.images.num_url_chars, 0)
    return min(num_bytes // _BYTES_PER_TOKEN, call.model.max_model_len)


def _longest_answer(call: Call) -> int:
    request = call.request
    if isinstance(request, EmbeddingsRequest):
        return 0
    return (request.max_tokens or call.model.default_max_tokens) * request.num_choices


def _lack_of_room(replica: Replica, needed: int) -> int:
    """0 for who has room, or does not say."""
    room = replica.kv_room_tokens
    return 0 if room < 0 else max(needed - room, 0)
