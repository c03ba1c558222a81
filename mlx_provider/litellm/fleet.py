"""Several engines under one model name: what LiteLLM's router must know to keep prefixes warm.

Its `session_affinity` pins a session to an entry of the config (1.106.2 and 1.109.1,
`deployment_affinity_check.py`), but knows a session only by an id that the client sends, keeps
the pin of an engine that is gone until it expires, asks the same engine again for a request
that it refused, and without Redis keeps 200 sessions at most. Its hook
`async_filter_deployments`, which sees the candidates for a request before any pin does, is where
all four are mended.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import litellm

from .errors import PROVIDER

Entries = list[dict[str, Any]]
"""Config entries, as the router has them."""

PLACES = ("litellm_metadata", "metadata")
"""Where LiteLLM keeps what it knows of a request, the first that is there."""
PREFIX = "head-"
"""Begins the names of sessions that are told by their first messages."""
ITEMS = 100_000
"""Pins and counts that a proxy keeps in memory, of some 700 bytes each."""
USERS = ("user", None)
"""The roles of what a conversation is about; `None`: a Responses API item may have none."""


async def kept_together(
    model: str, entries: Entries, messages: Sequence[Any] | None, request: dict[str, Any]
) -> Entries:
    """The entries that may answer a request, in the order that settles a tie between them.

    `model`: the name of their group. `request`: the arguments of the call, in whose metadata a
    session is named that the client left unnamed. Entries of others pass as they are.
    """
    if not any(_is_ours(entry) for entry in entries):
        return entries
    left = _untried(entries, request)
    pins = _pins(model)
    if pins is None:
        return left
    _widen(pins.cache.in_memory_cache)
    session = _session(messages, request)
    if await _is_pinned(pins, session, left, request):
        return left
    return _ranked(session, left)


def head(messages: Sequence[Any], request: Mapping[str, Any]) -> str:
    """A name for the conversation that begins so: what comes up to its first user message.

    The system prompt alone will not do: all sessions of an agent share it, and one engine would
    get them all. Tools are left out, which agents load in the middle of a session.
    """
    return PREFIX + _digest(*_beginning(messages, request))[:32]


def _beginning(messages: Sequence[Any], request: Mapping[str, Any]) -> Iterator[Any]:
    yield request.get("system")  # of /v1/messages
    yield request.get("instructions")  # of /v1/responses
    for message in messages:
        yield message
        if not isinstance(message, Mapping) or message.get("role") in USERS:
            return


def _session(messages: Sequence[Any] | None, request: dict[str, Any]) -> str:
    """The session's name: the client's, or one that is given to it here."""
    found = (place.get("session_id") for place in _metadata(request))
    named = next((str(name) for name in found if name is not None), None)
    if named is not None:
        return named
    given = messages if messages is not None else request.get("input")
    texts = given if isinstance(given, list) else [given]
    key = request.get("prompt_cache_key")
    session = key if isinstance(key, str) and key else head(texts, request)
    place = next(_metadata(request), None)
    if place is None:
        place = request["metadata"] = {}
    place["session_id"] = session
    return session


def _metadata(request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    return (found for name in PLACES if isinstance(found := request.get(name), dict))


def _untried(entries: Entries, request: Mapping[str, Any]) -> Entries:
    """Without those that this request has already failed on, as long as any is left.

    The router notes them before it tries again (1.106.2, `Router.log_retry`).
    """
    failed = {
        attempt.get("deployment_id")
        for place in _metadata(request)
        for attempt in _listed(place.get("previous_models"))
        if isinstance(attempt, Mapping)
    }
    return [entry for entry in entries if _id(entry) not in failed] or entries


def _listed(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list | tuple) else ()


AFFINITY = "session_affinity"


def _pins(model: str) -> Any | None:
    """The router's keeper of sessions, where it pins those of this group."""
    from litellm.router_utils.pre_call_checks.deployment_affinity_check import (
        DeploymentAffinityCheck,
    )

    for callback in litellm.callbacks:
        if isinstance(callback, DeploymentAffinityCheck):
            flags = callback.model_group_affinity_config.get(model)
            pinned = callback.enable_session_id_affinity if flags is None else AFFINITY in flags
            return callback if pinned else None
    return None


def _widen(kept: Any) -> None:
    """Room for more than the 200 pins and counts for which the router makes its cache, of which
    it would evict those of sessions that go on (`InMemoryCache.evict_cache`)."""
    kept.max_size_in_memory = max(ITEMS, kept.max_size_in_memory)


def _ranked(session: str, entries: Entries) -> Entries:
    """By a hash of both, so that each entry comes first for its part of all sessions."""
    key = hashlib.blake2b(_bytes(session), digest_size=32).digest()
    digest = partial(hashlib.blake2b, key=key, digest_size=16)
    return sorted(entries, key=lambda entry: digest(_bytes(_id(entry))).digest(), reverse=True)


async def _is_pinned(pins: Any, session: str, left: Entries, request: Mapping[str, Any]) -> bool:
    """Whether a session has a pin to one of these. One to an engine that is out is let go of, so
    that the session stays where it goes next.

    What is kept in this process may be out of date; where proxies share a Redis, it decides.
    """
    caller = pins.get_user_key_from_request_kwargs(request_kwargs=request)
    key = pins.get_session_affinity_cache_key(left[0]["model_name"], session, caller)
    cache, known = pins.cache, {_id(entry) for entry in left}
    place = _pinned(await cache.async_get_cache(key=key))
    if place is None or place in known:
        return place is not None
    cache.in_memory_cache.delete_cache(key)
    place = _pinned(await cache.async_get_cache(key=key))
    if place is not None and place not in known:
        await cache.async_delete_cache(key)
    return place in known


def _pinned(stored: Any) -> str | None:
    found = stored.get("model_id") if isinstance(stored, Mapping) else None
    return found if isinstance(found, str) else None


def _is_ours(entry: Mapping[str, Any]) -> bool:
    return str(entry["litellm_params"].get("model")).startswith(PROVIDER + "/")


def _id(entry: Mapping[str, Any]) -> str:
    return str(entry["model_info"]["id"])


def _digest(*parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(_bytes(text), digest_size=32).hexdigest()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
