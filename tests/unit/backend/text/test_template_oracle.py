"""Templates of several families render as the reference implementation renders them."""

from __future__ import annotations

from typing import Any

import pytest

from backend.text.chat_template import ChatTemplate

pytestmark = pytest.mark.slow  # the reference takes seconds to import

TOOLS = [
    {
        "type": "function",
        "function": {"name": "find", "description": "Finds <é>.", "parameters": {"type": "object"}},
    }
]
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What's 2 + 2?\n"},
    {"role": "assistant", "content": "  4 'quoted' \"twice\" "},
    {"role": "user", "content": "삼겹살 & <b>bold</b> 👋🏽"},
]
TEMPLATES = {
    "chatml": """\
{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "headers": """{{ bos_token }}
{% for message in messages %}
    {%- set content = '<|h|>' + message['role'] + '<|/h|>\n\n' + message['content'] | trim + '<|eot|>' %}
    {{- content }}
{% endfor %}""",
    "tools": """{% if tools is not none %}
{{ tools | tojson }}
{{ tools[0] | tojson(indent=4) }}{% endif %}
{% for m in messages %}{% if loop.last %}{% continue %}{% endif %}{{ m.content | tojson }}{% endfor %}""",
    "namespace": """{%- set ns = namespace(seen=false, text='') -%}
{%- for m in messages -%}
  {%- if m.role == 'system' and not ns.seen -%}{%- set ns.seen = true -%}{%- set ns.text = m.content -%}
  {%- endif -%}
{%- endfor -%}
{{ ns.text }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
    {# a comment #}
    {%- for m in messages | reverse %}
  {{ m.content.split(' ')[-1] }}{% endfor %}""",
    "generation": """{% for m in messages %}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}
{% else %}
{{ m.content }}{% endif %}{% endfor %}""",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [[], TOOLS])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_rendering_equals_the_reference(name: str, tools: list[Any], add_generation_prompt: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    special = {"bos_token": "<|bos|>", "eos_token": "<|eot|>"}
    expected, _ = render_jinja_template(
        conversations=[CONVERSATION],
        tools=tools or None,
        chat_template=TEMPLATES[name],
        add_generation_prompt=add_generation_prompt,
        **special,
    )
    template = ChatTemplate(TEMPLATES[name], ["<|im_start|>", "<|im_end|>", "<|bos|>"], special)
    prompt = template.render(CONVERSATION, tools=tools, add_generation_prompt=add_generation_prompt)
    assert prompt.text == expected[0]
