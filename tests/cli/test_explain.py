from __future__ import annotations

import pytest
from click.testing import CliRunner, Result

from ckpt_sentry.cli import main
from ckpt_sentry.core import codes


def explain(*words: str) -> Result:
    return CliRunner().invoke(main, ["explain", *words], env={"COLUMNS": "100"})


def test_a_finding() -> None:
    done = explain("tied_weights_lost")
    assert done.exit_code == 0
    assert done.output == (
        "tied_weights_lost (about values)\n\n"
        "  Two names share one tensor; the load broke the tie and made it anew from the name that held the\n"
        "  old values.\n"
    )


def test_a_finding_that_explains_others() -> None:
    assert explain("no_overlap").output.endswith("\n  It explains: missing_keys, unexpected_keys.\n")


def test_a_finding_with_one_next_step_wherever_it_is_said() -> None:
    assert explain("paths_differ").output.endswith("saves.\n\n  Next: Give every rank the same path.\n")


@pytest.mark.parametrize("name", ["no_op", "NO-OP", " no_op "])
def test_a_verdict(name: str) -> None:
    assert explain(name).output == "no_op (verdict)\n\n  Nothing entered: not one key.\n"


def test_all_of_them() -> None:
    text = explain().output
    assert [name for name in (*codes.BY_NAME, *codes.VERDICTS) if f"  {name} " not in text] == []
    assert max(map(len, text.splitlines())) <= 100


def test_an_unknown_one() -> None:
    done = explain("renamed_key")
    assert (done.exit_code, done.stderr) == (
        2,
        "ckpt-sentry explain: there is no finding renamed_key; did you mean renamed_keys?\n",
    )
    assert explain("rank_kill").stderr.endswith("did you mean rank_killed, rank_stalled, rank_raised?\n")
    assert explain("\x1b[31m").stderr.startswith("ckpt-sentry explain: there is no finding \\x1b[31m: `ckpt-sentry")
