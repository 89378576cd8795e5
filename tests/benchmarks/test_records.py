"""What is loaded is what was stored, and what int8 records cost stays small."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.records import COMPUTED, measure


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(600)
def test_raw_records_change_no_logit_and_int8_records_little(catalogue_file: Callable[[str], Path]) -> None:
    costs = measure(str(catalogue_file("smollm2-135m")), 20)
    assert len(costs["int8"].divergence) == 20 * COMPUTED
    assert costs["raw"].divergence.max() == 0.0
    assert 0.0 < costs["int8"].divergence.mean() < 0.007
    assert np.percentile(costs["int8"].divergence, 99) < 0.03
    assert costs["int8"].same_top.mean() > 0.93


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(600)
def test_raw_records_change_no_logit_over_k_quants_either(catalogue_file: Callable[[str], Path]) -> None:
    assert measure(str(catalogue_file("qwen2.5-coder-0.5b")), 2)["raw"].divergence.max() == 0.0
