"""Claims have one owner, and always end."""

from __future__ import annotations

import pytest

from kveik.cache.claims import Claims


def test_the_first_claim_stands_until_its_owner_has_computed_it() -> None:
    claims = Claims()
    claims.stake(1, [b"a", b"b"])
    claims.stake(2, [b"b", b"c"])
    claims.fulfil(2, b"b")
    assert b"b" in claims
    claims.fulfil(1, b"b")
    assert b"b" not in claims
    assert b"c" in claims
    assert len(claims) == 2


def test_whoever_goes_takes_his_claims_along_and_no_others() -> None:
    claims = Claims()
    claims.stake(1, [b"a", b"b"])
    claims.stake(2, [b"b", b"c"])
    claims.drop(1)
    assert b"a" not in claims
    assert b"c" in claims
    claims.stake(2, [b"a"])
    claims.check([2])


def test_a_claim_without_a_running_owner_is_caught() -> None:
    claims = Claims()
    claims.stake(1, [b"a"])
    with pytest.raises(AssertionError, match="owner is gone"):
        claims.check([2])
