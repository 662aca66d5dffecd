from datetime import datetime

import pytest
from jinja2 import TemplateError

from base.errors import ConfigError, InvalidRequestError
from conductor.api import chat_template
from conductor.api.chat_template import ChatMessage, ChatTemplate

HELLO = [ChatMessage("user", "hello")]


def rendered(source: str, messages: list[ChatMessage] = HELLO, **variables: object) -> str:
    template = ChatTemplate(source, {"eos_token": "</s>"}, now=lambda: datetime(2026, 11, 21))
    return template.render(messages, variables=variables)


TEMPLATES = [
    "{% for m in messages %}\n  {% if 1 %}\n{{ m.role }}{{ eos_token }}\n{% endif %}{% endfor %}",
    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "a{% generation %}{% set x = 1 %}{{ messages[0].content }}{% endgeneration %}b{{ x is defined }}",
    "{{ {'b': '<é>', 'a': [1]} | tojson }}{{ {'b': 1, 'a': 2} | tojson(indent=1) }}",
    "{{ messages[-1]['content'].strip().upper() }}{{ tools is none }}{{ documents is none }}",
    "{%- if add_generation_prompt -%} go {%- endif -%}",
]


@pytest.mark.parametrize("source", TEMPLATES)
def test_templates_render_as_transformers_renders_them(source):
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [ChatMessage("user", " one "), ChatMessage("assistant", "<two>")]
    plain = [{"role": message.role, "content": message.content} for message in messages]
    expected, _ = transformers.render_jinja_template(
        [plain], chat_template=source, add_generation_prompt=True, eos_token="</s>"
    )
    assert rendered(source, messages) == expected[0]


def test_template_can_state_the_date():
    assert rendered("{{ strftime_now('%d %b %Y') }}") == "21 Nov 2026"


def test_developers_message_is_a_system_message_to_templates():
    assert rendered("{{ messages[0].role }}", [ChatMessage("developer", "x")]) == "system"


def test_clients_variables_reach_the_template():
    assert rendered("{{ enable_thinking }}", enable_thinking=False) == "False"


def test_client_cannot_replace_the_messages():
    with pytest.raises(InvalidRequestError, match="messages cannot be set"):
        ChatTemplate("{{ messages }}", {}).render(HELLO, variables={"messages": []})


def test_templates_own_refusal_is_the_clients_error():
    with pytest.raises(InvalidRequestError, match="only users here") as caught:
        rendered("{{ raise_exception('only users here') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].content + 1 }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{% set ns = namespace(_x=1) %}",
        "{{ range(10**9) | list }}",
        "{{ missing.attribute.more }}",
        "{{ cycler() }}",
    ],
)
def test_template_that_leaves_the_sandbox_or_fails_is_refused(source):
    with pytest.raises(InvalidRequestError):
        rendered(source)


def test_template_that_multiplies_its_input_is_stopped(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_OUTPUT_CHARS", 1000)
    with pytest.raises(InvalidRequestError, match="more than 1000 characters"):
        rendered("{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}")


def test_template_that_does_not_parse_is_refused_at_start():
    with pytest.raises(ConfigError, match="does not parse") as caught:
        ChatTemplate("{% for %}", {})
    assert isinstance(caught.value.__cause__, TemplateError)
