"""Where followers find the leader."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING

import mlx.core as mx
import pytest

from mlx_provider.errors import BadRequest
from mlx_provider.registry import PluginRegistry
from mlx_provider_ranks.address import Meeting, bind_host, leader_hosts, new_key, spread
from mlx_provider_ranks.hello import own_hello
from mlx_provider_ranks.messages import differences

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("ranks", "expected", "bound"),
    [
        ([["127.0.0.1:5000"], ["127.0.0.1:5001"]], ("127.0.0.1",), "127.0.0.1"),
        ([["10.0.0.1:5000", "10.0.1.1:5001"], ["10.0.0.2:5002"]], ("10.0.0.1", "10.0.1.1", ""), ""),
        (["[::1]:5000", "[::1]:5001"], ("127.0.0.1",), "127.0.0.1"),
        (["[fd00::1]:5000", "[fd00::2]:5001"], ("fd00::1", ""), ""),
    ],
)
def test_a_ring(tmp_path: Path, ranks: object, expected: tuple[str, ...], bound: str) -> None:
    file = tmp_path / "hosts.json"
    file.write_text(json.dumps(ranks))
    found = leader_hosts({"MLX_HOSTFILE": str(file)})
    assert found == tuple(each or socket.gethostname() for each in expected)
    assert bind_host(found) == bound


def test_other_launchers(tmp_path: Path) -> None:
    name = socket.gethostname()
    assert leader_hosts({"MLX_JACCL_COORDINATOR": "10.0.0.1:32323"}) == ("10.0.0.1", name)
    assert leader_hosts({"MLX_JACCL_COORDINATOR": "127.0.0.1:32323"}) == ("127.0.0.1",)
    assert leader_hosts({}) == (name,)
    (tmp_path / "empty").write_text("\n")
    assert leader_hosts({"MLX_HOSTFILE": str(tmp_path / "empty")}) == (name,)
    with pytest.raises(BadRequest, match=r"MLX_HOSTFILE=.*gone"):
        leader_hosts({"MLX_HOSTFILE": str(tmp_path / "gone")})
    (tmp_path / "odd").write_text("[3]")
    with pytest.raises(BadRequest, match=r"MLX_HOSTFILE=.*odd"):
        leader_hosts({"MLX_HOSTFILE": str(tmp_path / "odd")})


def test_the_address_is_spread_by_a_collective() -> None:
    meeting = Meeting(("10.0.0.1", "mac-é.local"), 65535, new_key())
    assert spread(mx.distributed.init(), meeting) == meeting
    with pytest.raises(BadRequest, match="2048 at most"):
        spread(None, Meeting(("x" * 3000,), 1, ""))


def test_a_rank_says_what_it_computes_with() -> None:
    registry = PluginRegistry.discover({})
    mine = own_hello(1, registry, "cpu", 2**30)
    assert mine.versions["mlx"]
    assert "mlx-provider:text" in mine.plugins
    assert differences(mine, mine.model_copy(update={"rank": 2, "pid": 1, "host": "b"})) == []
    other = mine.model_copy(update={"python": "3.0", "versions": {**mine.versions, "mlx": ""}})
    assert [line.partition(" on ")[0] for line in differences(mine, other)] == [
        "python: 3.0",
        "mlx: not installed",
    ]
