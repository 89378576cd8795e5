"""Addresses of the remote tier that would not work are refused when they are read, and passwords are never repeated."""

from __future__ import annotations

import pytest

from kveik.clock import StepClock
from kveik.errors import BadValue
from kveik.offload.stores.address import OPTIONS, client_address, shown
from kveik.offload.stores.redis_wire import Wire
from kveik.offload.stores.remote import RemoteLimits, RemoteStore, check_address
from tests.offload.stores.records import FORMATS, pairs, payloads, read
from tests.offload.stores.redis_server import running

GOOD = {
    "redis://localhost": "redis://localhost",
    "valkey://127.0.0.1:6379/0": "redis://127.0.0.1:6379/0",
    "valkeys://u:p%2Fw@host:1/15?ssl_cert_reqs=none&ssl_ca_certs=/x.pem": "rediss://u:p%2Fw@host:1/15?ssl_cert_reqs=none"
    "&ssl_ca_certs=/x.pem",
    "redis://[::1]:6379/?client_name=one": "redis://[::1]:6379/?client_name=one",
    "unix://:p@/run/redis.sock?db=2": "unix://:p@/run/redis.sock?db=2",
}

BAD = {
    "redis://u:s3cret@localhost:99999/0": "99999",
    "redis://localhost:0": "1 to 65535",
    "redis://localhost:abc": "1 to 65535",
    "redis://[::1": "IPv6",
    "redis://": "redis://host:6379/0",
    "localhost": "redis://host:6379/0",
    "http://u:s3cret@host": "redis://host:6379/0",
    "redis://:s3cret#x@host": "redis://host:6379/0",
    "redis://:1/s3cret@host": "redis://host:6379/0",
    "redis://u:1/s3cret@host": "@ behind the host",
    "redis://host/notadb": "notadb",
    "redis://host/-5": "'-5'",
    "redis://host/0?foo=bar": "'foo'",
    "redis://host/0?foo=": "'foo'",
    "redis://host/0?decode_responses=true": "'decode_responses'",
    "redis://host/0?ssl_cert_reqs=none": "'ssl_cert_reqs'",
    "rediss://host/0?ssl_cert_reqs=perhaps": "ssl_cert_reqs",
    "unix:///run/x.sock?db=x": "db",
}


@pytest.mark.parametrize("url", GOOD)
def test_a_good_address_is_passed_on_as_the_client_knows_it(url: str) -> None:
    assert client_address(url) == GOOD[url]
    check_address(url)


@pytest.mark.parametrize("url", BAD)
def test_an_address_that_would_not_work_is_refused_with_what_is_wrong_with_it(url: str) -> None:
    with pytest.raises(BadValue) as refused:
        RemoteStore(url, FORMATS, RemoteLimits(), StepClock())
    assert BAD[url] in refused.value.message
    assert "--kv-remote" in refused.value.message
    assert refused.value.param == "kv_remote"
    assert "s3cret" not in refused.value.message
    with pytest.raises(BadValue) as at_start:
        check_address(url)
    assert at_start.value.message == refused.value.message


def test_what_is_shown_of_an_address_has_no_user_no_password_and_no_options() -> None:
    assert shown("rediss://user:s3cret@host:6380/2?ssl_ca_certs=x") == "rediss://host:6380/2"
    assert shown("redis://[::1]:6379/0") == "redis://[::1]:6379/0"


def test_an_option_that_is_let_through_works() -> None:
    with running() as server:
        store = RemoteStore(f"{server.url}?client_name=brewer", FORMATS, RemoteLimits(timeout_seconds=30.0), StepClock())
        assert store.put_many(pairs([1])) == [None]
        assert read(store, [1]) == payloads([1])
        assert "brewer" in {one["name"] for one in server.tell("CLIENT LIST")}
        store.close()


VALUES = {"ssl_cert_reqs": "none", "ssl_check_hostname": "false", "db": "3"}


@pytest.mark.parametrize(("scheme", "option"), [(scheme, option) for scheme, options in OPTIONS.items() for option in options])
def test_every_option_that_an_address_may_have_is_one_of_the_clients(scheme: str, option: str) -> None:
    url = f"{scheme}://{'/socket' if scheme == 'unix' else 'host'}?{option}={VALUES.get(option, 'x')}"
    # Nobody is asked yet: an option that is none would be an error at every call.
    wire = Wire(url, 1.0, 1 << 20, StepClock())
    assert wire._kind(StepClock(), 1.0, wire._options) is not None
