"""The gateway put together: what a person wrote becomes limits, names and a page to read."""

import pytest

from phasesplit.errors import SpecError
from phasesplit.gateway.estimates import Backlog
from phasesplit.gateway.limits import Limits
from phasesplit.gateway.registry import BreakerRule
from phasesplit.io.text import fields_of
from phasesplit.launcher.announcing import model_name
from phasesplit.launcher.gateway_process import bounds_from
from phasesplit.launcher.ready import Ready


def test_limits_keep_their_types() -> None:
    """A limit of 5 requests would be 5.0, or a number of seconds cut to a whole one."""
    assert bounds_from(
        {"live_requests": 5.0, "header_s": 2, "structured_output": True}, fields_of("x")
    ).limits == Limits(live_requests=5, header_s=2.0, structured_output=True)


def test_backlog_and_breaker_have_fields_of_their_own() -> None:
    """A deployment could not say when it turns requests away, or when it leaves a machine alone."""
    found = bounds_from({"backlog": {"most_wait_s": 5}, "breaker": {"failures": 7, "open_s": 2}}, fields_of("x"))
    assert found == (Limits(), Backlog(most_wait_s=5.0), BreakerRule(failures=7, open_s=2.0))


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"live_requests": 1.5}, "x, field live_requests: got 1.5, allowed is a whole number"),
        ({"live_requests": True}, "x, field live_requests: got True"),
        ({"structured_output": 1}, "x, field structured_output: got 1, allowed is true or false"),
        ({"header_s": 0}, "x, field header_s: got 0.0, allowed is a positive number"),
        ({"headers": 1}, "x, field headers: unknown name 'headers', did you mean header_s"),
        ({"backlog": 3}, "x, field backlog: got 3, allowed is fields with values"),
        (
            {"backlog": {"most_wait": 3}},
            "x, field backlog.most_wait: unknown name 'most_wait', did you mean most_wait_s",
        ),
        ({"breaker": {"growth": 0.5}}, "x, field breaker.growth: got 0.5, allowed is a number >= 1"),
        ({"breaker": {"failures": 1.5}}, "x, field breaker.failures: got 1.5, allowed is a whole number"),
    ],
)
def test_wrong_limits_are_refused(settings: dict[str, object], line: str) -> None:
    """A mistyped limit would be no limit."""
    with pytest.raises(SpecError) as caught:
        bounds_from(settings, fields_of("x"))
    assert line in str(caught.value)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("default", "smollm2-135m-instruct"),
        ("tiny", "tiny"),
        ("models/My-Model.Q4_0.gguf", "my-model.q4_0"),
        ("hf:org/Name", "name"),
    ],
)
def test_models_have_names_that_clients_can_ask_for(model: str, name: str) -> None:
    """A client would have to know a path of the server."""
    assert model_name(model) == name


def test_what_is_printed_can_be_pasted() -> None:
    """The first thing that a newcomer copies would not work."""
    facts = {"home": "prefill", "memory_bytes": 1e8, "capacity_blocks": 10, "layout": {"block_tokens": 32},
             "address": {"unix": "x"}, "link": "1 GB/s"}  # fmt: skip
    worker = {"name": "prefill-0", "pid": 7, "announcement": facts}
    token = {"name": "decode-0", "pid": 8, "announcement": facts | {"home": "decode"}}
    ready = Ready(url="http://127.0.0.1:1", model="m", needs_key=True, took_s=1.0, workers=[worker, token])
    text = ready.text()
    assert "320 tokens    shared memory: 1 GB/s" in text
    assert "Authorization: Bearer $KEY" in text
    snippet = [line.strip() for line in text.splitlines() if line.startswith("  ") and "import" in line]
    assert snippet == ["import os", "from openai import OpenAI"]
    code = text[text.index("  import os") : text.index("Watch it")]
    compile("\n".join(line[2:] for line in code.splitlines()), "snippet", "exec")


def test_a_cluster_without_one_of_the_phases_says_so_at_once() -> None:
    """A file that forgot the decode pool would look like a split cluster."""
    ready = Ready(url="u", model="m", needs_key=False, took_s=1.0, workers=[], degraded=["no decode machine serves"])
    assert "! no decode machine serves" in ready.text().splitlines()
