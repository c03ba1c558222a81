"""Several engines under one model name: keeps a session on the engine that has its prefix.

LiteLLM's `session_affinity` pins a session to an entry of the config (1.106.2 and 1.109.1,
`deployment_affinity_check.py`). But it needs a session id from the client, keeps the pin of a lost
engine until the pin expires, sends a request again to the engine that refused it, and without
Redis keeps at most 200 sessions. Its hook `async_filter_deployments`, which gets the candidates for
a request before any pin is applied, corrects all four.
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
    """The entries that can answer a request, best first.

    `model`: the name of their group. `request`: the arguments of the call; a session without a name
    gets one in its metadata. Entries of other providers do not change.
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
    """A name for a conversation, from its messages up to the first user message.

    The system prompt alone is not enough: all sessions of an agent share it, and one engine would
    get them all. Tools are not included, because agents load them in the middle of a session.
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
    """The session's name: from the client, or a new one."""
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
    """The entries on which this request has not failed yet, or all if it has failed on each.

    The router records failures before it tries again (1.106.2, `Router.log_retry`).
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
    """The router's store of sessions; `None`: it does not pin sessions of this group."""
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
    """Raise the limit of the router's cache, which is 200 pins and counts. At the limit, it evicts
    pins of active sessions (`InMemoryCache.evict_cache`)."""
    kept.max_size_in_memory = max(ITEMS, kept.max_size_in_memory)


def _ranked(session: str, entries: Entries) -> Entries:
    """Sorted by a hash of session and entry, so that each entry is first for its share of
    sessions."""
    key = hashlib.blake2b(_bytes(session), digest_size=32).digest()
    digest = partial(hashlib.blake2b, key=key, digest_size=16)
    return sorted(entries, key=lambda entry: digest(_bytes(_id(entry))).digest(), reverse=True)


async def _is_pinned(pins: Any, session: str, left: Entries, request: Mapping[str, Any]) -> bool:
    """Whether a session is pinned to one of these entries. A pin to an unavailable engine is
    removed, so that the session stays on its next engine.

    The pins in this process can be out of date; if proxies share a Redis, its pins decide.
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
