"""Keys, tenants and the secret behind them."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import httpx
import pytest

from kveik.config import ServerConfig
from kveik.errors import BadValue, NotAuthorized, Unreachable
from kveik.server.auth import OPEN_PATHS, Tenants, tenant_secret
from tests.server.fakes import running

ASK = {"prompt": "Hello", "max_tokens": 2}


def test_the_secret_is_made_once_for_its_owner_alone_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "secret"
    first = tenant_secret(path)
    assert len(first) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert tenant_secret(path) == first
    assert [entry.name for entry in path.parent.iterdir()] == ["secret"]


def test_servers_that_start_together_agree_on_one_secret(tmp_path: Path) -> None:
    path, found = tmp_path / "secret", []
    barrier = threading.Barrier(8)

    def start() -> None:
        barrier.wait()
        found.append(tenant_secret(path))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert set(found) == {path.read_bytes()}


def test_a_short_secret_is_refused_with_its_length(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"123456789\n")
    with pytest.raises(BadValue, match="9 bytes"):
        tenant_secret(path)


def test_a_secret_that_cannot_be_made_is_refused_with_its_path(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(Unreachable, match="--tenant-secret-file") as refused:
        tenant_secret(blocker / "secret")
    assert str(blocker / "secret") in refused.value.message


def test_tenants_are_stable_over_restarts_and_differ_by_key_and_secret() -> None:
    once, again, other = (Tenants(("a", "b"), secret) for secret in (b"s" * 32, b"s" * 32, b"t" * 32))
    assert once.tenant(b"Bearer a") == again.tenant(b"Bearer a")
    assert len({once.tenant(b"Bearer a"), once.tenant(b"bearer b"), other.tenant(b"Bearer a"), b""}) == 4
    assert len(once.tenant(b"Bearer a")) == 32


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic YTpi", "Bearer c", "a", "Bearer a b", "Bearer A"])
def test_everything_but_a_known_bearer_key_is_refused(header: str | None) -> None:
    with pytest.raises(NotAuthorized) as refused:
        Tenants(("a", "b"), b"s" * 32).tenant(header and header.encode())
    assert refused.value.status == 401


def test_without_keys_everybody_is_one_tenant() -> None:
    assert Tenants((), b"").tenant(None) == Tenants((), b"").tenant(b"Bearer whatever") == b""


def test_keys_guard_what_generates_and_leave_probes_open() -> None:
    with running(api_key=("first key", "zweiter")) as server, httpx.Client(base_url=server.url) as client:
        refused = client.post("/v1/completions", json=ASK)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"] == "Bearer"
        for path in ("/v1/models", "/tokenize", "/nothing/here"):
            assert client.get(path).status_code == 401
        for path in OPEN_PATHS:
            assert client.get(path).status_code == 200, path
        for key in ("first key", "zweiter"):
            answer = client.post("/v1/completions", json=ASK, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200
        tenants = [request.tenant for request in server.door.submitted]
        assert len(set(tenants)) == 2
        assert all(len(tenant) == 32 for tenant in tenants)


def test_keys_outside_ascii_are_compared_as_bytes() -> None:
    # The last byte of the second is a blank in Latin-1, in which headers are often read.
    for key in ("clé-β", "voilà"):
        with running(api_key=(key,)) as server:
            headers = [(b"authorization", f"Bearer {key}".encode())]
            assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("key", ["s3cret\n", " s3cret", " ", "", "s3\x00cret", "s3\udcffcret", "the same s3cret"])
def test_keys_that_nobody_can_use_are_refused_by_their_number(key: str) -> None:
    with pytest.raises(BadValue, match="--api-key number 2") as refused:
        ServerConfig(api_key=("the same s3cret", key))
    assert "cret" not in refused.value.message


def test_neither_keys_nor_bodies_reach_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    with running(api_key=("sk-very-secret",)) as server:
        for key in ("sk-very-secret", "sk-wrong-guess"):
            httpx.post(
                f"{server.url}/v1/completions?key={key}",
                json={"prompt": "private words", "max_tokens": 2},
                headers={"authorization": f"Bearer {key}"},
            )
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("kveik")]
    assert sum("POST /v1/completions" in line for line in lines) == 2
    for secret in ("sk-very-secret", "sk-wrong-guess", "private words"):
        assert not any(secret in line for line in lines)
