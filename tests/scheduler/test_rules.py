"""The settings of the scheduler: what is refused, and that columns hold what was set."""

from dataclasses import fields

import pytest

from ledgers import ledger_of
from phasesplit.errors import SpecError
from phasesplit.scheduler.rules import NAMES, Batching, Placement, Rules


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_prompt_tokens", 0),
        ("batch_requests", 0),
        ("batch_requests", 4_097),
        ("spill_tokens", -1),
        ("preemption_limit", -1),
        ("repurpose_after_s", 0.0),
        ("block_tokens", 12),
        ("block_tokens", 0),
        ("kv_headroom", 0.51),
        ("kv_headroom", -0.01),
        ("hbm_share", 0.0),
        ("hbm_share", 1.01),
        ("layerwise_from_tokens", -1),
        ("streaming_slowdown", -0.1),
    ],
)
def test_values_that_no_scheduler_could_follow_are_refused(field: str, value: float) -> None:
    """A setting outside its range would run and give figures that mean nothing."""
    with pytest.raises(SpecError, match=f"rules, field {field}: got"):
        Rules(**{field: value})


def test_settings_reach_the_ledger() -> None:
    """A rule would be set and not followed."""
    rules = Rules(batch_prompt_tokens=777, batch_requests=9, spill_tokens=5, block_tokens=32, kv_headroom=0.25, seed=11)
    settings = ledger_of("unsplit", rules=rules, capacity_blocks=123).settings
    for field in fields(Rules):
        if field.name in (settings.dtype.names or ()):
            assert settings[field.name][0] == getattr(rules, field.name)
    assert settings["block_shift"][0] == 5
    assert settings["most_blocks"][0] == 123


def test_names_that_people_write() -> None:
    """The command line would not know a rule by its name."""
    assert NAMES[Placement]["jsq-tokens"] is Placement.JSQ_TOKENS
    assert NAMES[Batching]["chunked"] is Batching.CHUNKED
    assert all(len(names) == len(kind) for kind, names in NAMES.items())
