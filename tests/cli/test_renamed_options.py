"""Options of other servers are refused with the name they have here."""

from __future__ import annotations

import re

import pytest

from kveik.cli.main import run
from kveik.cli.options import every_setting
from kveik.cli.renamed_options import FOREIGN, Foreign, advice_for

OURS = {flag for name, setting in every_setting().items() if name != "model" for flag in setting.flags}
OURS.add("--prompts-file")


@pytest.mark.parametrize(("flag", "foreign"), FOREIGN.items(), ids=FOREIGN)
def test_advice_names_only_options_that_exist(flag: str, foreign: Foreign) -> None:
    assert flag not in OURS
    assert set(re.findall(r"--[a-z][a-z-]+", foreign.advice)) <= OURS
    assert foreign.advice.endswith(".")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("pull -ngl 99", "-ngl is llama.cpp's. kveik computes on the CPU"),
        ("pull -c 4096", "The name here is --max-model-len."),
        ("pull --ctx-size=4096", "The name here is --max-model-len."),
        ("pull --swap-space 4", "Preempted sequences are recomputed"),
        ("pull --gpu-memory 0.5", "The name here is --gpu-memory-utilization."),
        ("pull --n-gpu-layers 1", "no layers to move elsewhere"),
        ("pull --threads-batch 2", "The name here is --threads"),
        ("pull --mem-fraction-static 0.8", "The name here is --gpu-memory-utilization."),
        ("pull --chunked-prefill-size 512", "The name here is --prefill-chunk-size."),
        ("pull --max-running-requests 8", "The name here is --max-num-seqs."),
        ("pull --context-length 8", "The name here is --max-model-len."),
        ("pull --enable-chunked-prefill", "Long prompts are always computed in chunks"),
    ],
)
def test_a_foreign_option_is_a_usage_error_with_the_right_name(
    line: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line.split()) == 2
    assert words in capsys.readouterr().err


def test_an_option_of_nobody_gets_no_advice() -> None:
    assert advice_for(["--brew", "now"], ()) is None
    # Behind -- there are no options, and an option of ours is ours whatever else is called so.
    assert advice_for(["--brew", "--", "-ngl"], ()) is None
    assert advice_for(["--file", "x"], {"--file"}) is None
