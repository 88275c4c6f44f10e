"""Chat templates: what they write, and what keeps them from the process that runs them."""

import pytest

from phasesplit.engine.chat_template import ChatTemplate
from phasesplit.errors import SpecError

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hé <b>"}]
CHATML = (
    "{%- for message in messages %}\n"
    "  {%- if message.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}\n"
    "    {{- '<|' + message['role'] + '|>' ~ message.content | trim ~ eos_token }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def rendered(source: str, **given: object) -> str:
    return ChatTemplate("m.gguf", source, {"eos_token": "</s>"}).render(MESSAGES, **given)


def refused(source: str) -> str:
    with pytest.raises(SpecError) as caught:
        rendered(source)
    assert str(caught.value).startswith("the chat template")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_prompt_of_messages() -> None:
    """A chat model would get a prompt that it was not trained on."""
    template = ChatTemplate("m.gguf", CHATML, {"eos_token": "</s>"})
    assert template.render(MESSAGES) == "<|system|>Be brief.</s><|user|>Hé <b></s><|assistant|>"
    assert template.render(MESSAGES, has_generation_prompt=False) == "<|system|>Be brief.</s><|user|>Hé <b></s>"


def test_further_names() -> None:
    """Tools would not reach the template, or be written as HTML."""
    assert rendered("{{ tools | tojson }}{{ bos_token is defined }}", tools=[{"n": "<é>"}]) == '[{"n": "<é>"}]False'


def test_loops_and_state_that_published_templates_use() -> None:
    """A template that works elsewhere would fail here."""
    source = (
        "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + loop.index0 % 2 %}"
        "{% if loop.index > 5 %}{% break %}{% endif %}{% endfor %}{{ ns.n }}{{ range(3) | list }}{{ 'a' * 3 }}"
        "{{ dict(a=1).items() | list }}{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f('y') }}{{ 'a,b'.split(',')[-1] }}"
        "{{ 'aab'.replace('a', 'c', 1) }}{{ 'aab' | replace('a', 'c') }}"
        "{{ '-'.join(['x', 'y']) }}{{ [1, 2] | join('+') }}"
    )
    assert rendered(source) == "1[0, 1, 2]aaa[('a', 1)][y]bcabccbx-y1+2"


def test_a_template_may_refuse() -> None:
    """A client whose messages the model cannot take would not learn why."""
    template = ChatTemplate("m.gguf", CHATML, {"eos_token": ""})
    with pytest.raises(SpecError, match="fails on these messages: system comes first"):
        template.render(MESSAGES[::-1])


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("{% for m in messages %}", id="open loop"),
        pytest.param("{{ messages | nothing }}", id="unknown filter"),
        pytest.param("{{ 1 + }}", id="syntax"),
        pytest.param("{{ " + "(" * 5000, id="nested"),
        pytest.param("x" * (1 << 19), id="long"),
    ],
)
def test_what_is_no_template_is_refused_at_once(source: str) -> None:
    """A model with a broken template would start, and fail at its first request."""
    with pytest.raises(SpecError) as caught:
        ChatTemplate("m.gguf", source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['x'] }}",
        "{% include '/etc/passwd' %}",
        "{{ messages[0].nothing.more }}",
    ],
)
def test_a_template_cannot_reach_the_process(source: str) -> None:
    """A model file from anybody would run what it likes."""
    assert "fails on these messages" in refused(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10**9 }}",
        "{{ 10**9 * 'x' }}",
        "{{ 9**9**9 }}",
        "{{ [0] * 10**9 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ 'x'.ljust(10**9) }}",
        "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(n=9) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        "{% set ns = namespace(x='xxxx') %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
        "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(60) %}{% set ns.x = ns.x.join('abc') %}{% endfor %}",
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x | replace('x', 'xx') %}{% endfor %}",
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x.replace('', 'xx') %}{% endfor %}",
        "{% set ns = namespace(x='x' * 99) %}{% for i in range(60) %}"
        "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
        "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
@pytest.mark.timeout(10)
def test_a_template_cannot_fill_time_or_memory(source: str) -> None:
    """A model file from anybody would hang the gateway or exhaust its memory."""
    assert "fails on these messages" in refused(source)
