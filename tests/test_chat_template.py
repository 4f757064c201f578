# SPDX-License-Identifier: Apache-2.0
"""Our Jinja against Python's jinja2 as transformers configures it: the same text, and errors where it has errors."""
import itertools
import json
import subprocess
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from conftest import program

ROOT = Path(__file__).resolve().parents[1]
QWEN3 = ROOT.parent / "shared" / "data" / "qwen3-tokenizer" / "tokenizer_config.json"


def render_ours(requests):
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    done = subprocess.run([program("render_template")], input=lines, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.split("\n") if line]


def render_reference(template, variables):
    try:
        return {"text": _compile_jinja_template(template).render(**variables)}
    except Exception as error:  # whatever Python raises, a chat template fails with it
        return {"error": f"{type(error).__name__}: {error}"}


def assert_same(cases):
    """cases: (template, variables). Equal text; where the reference fails, we must fail."""
    answers = render_ours([{"template": t, "variables": v} for t, v in cases])
    differences = []
    for (template, variables), ours in zip(cases, answers, strict=True):
        reference = render_reference(template, variables)
        same = "error" in ours if "error" in reference else ours == reference
        if not same:
            differences.append(f"{template!r}\n  ours      {ours}\n  reference {reference}")
    assert not differences, f"{len(differences)} of {len(cases)}:\n" + "\n".join(differences[:20])


EXPRESSIONS = r"""
1 + 2 * 3; 7 // 2; -7 // 2; -7 % 3; 7 % -3; 7 / 2; 2.5 * 2; 1e20; 1.5e-7; 0.1 + 0.2; 100000.0 * 1e12; true + 1; -7.5 % 2; -7.5 // 2
s ~ 1 ~ none ~ true; s + "!"; s * 3; "a" "b"; -(1 + 2); -3 | string; not s; not missing; missing; missing ~ "x"; 1_000; "ab" * 0
s == "Grüße"; s != "x"; 1 == 1.0; 1 == true; "a" < "b"; 1 < 2 < 3; 1 < 3 < 2; "ü" in s; "q" not in s; 1 in n; "k" in d; "zz" in d; 1 in missing
none is none; s is string; d is mapping; n is sequence; n is iterable; d is sequence; 3 is odd; 4 is even; 3 is divisibleby 3
3 is divisibleby(2); s is equalto "x"; s is eq("Grüße"); missing is defined; missing is not defined; n is string; 1 is number
true is number; 1.0 is float; true is boolean; none is defined; 1 is integer; true is integer; 3 is in [1, 3]; "x" is in "xyz"
true is true; 1 is true; none is false; s is undefined; not s is string; 1 is none or 2 is number; missing is iterable; none is iterable
s | length; n | length; d | length; missing | length; 5 | length; n | count; s | upper; s | lower; s | capitalize; s | trim; "" | capitalize
"  x " | trim; "--x-" | trim("-"); " x " ~ "y " | trim; n | first; n | last; [] | first; n | join(", "); n | join; "abc" | list; s | first
l | join("|", attribute="a"); l | map(attribute="a") | list; l | map(attribute="zz", default=7) | list; words | map("upper") | join(",")
words | map("replace", "a", "x") | list; l | selectattr("a") | list; l | selectattr("a", "equalto", 2) | list; l | selectattr("b", "defined") | list
l | rejectattr("a", "defined") | list; l | selectattr("a", "in", [1, 2]) | list | length; n | select("odd") | list; n | reject("odd") | list
n | select("gt", 1) | list; words | sort; words | sort(case_sensitive=true); l | sort(attribute="a"); words | unique | list
n | reverse | list; s | reverse; d | items | map("join") | list; d | dictsort | map("first") | list; d | dictsort(reverse=true) | map("last") | list; d | dictsort(true) | map("first") | list; n | sort(reverse=true); n | sort
"12" | int; "x" | int; "x" | int(5); " 3.7 " | int; 3.9 | int; -3.9 | int; "2.5" | float; "x" | float; none | int; true | int; "-4" | int
missing | default("d"); none | default("d"); none | default("d", true); "" | d("e", boolean=true); s | d("z"); s | string; 5 | string
s | replace("ü", "ue"); "sss" | replace("s", "z", 1); 12 | replace("1", "3"); s | safe; "a\nb\n\nc" | indent; "a\nb" | indent(2, first=true); "a\n\nb" | indent(2, blank=true)
d | tojson; n | tojson; s | tojson; deep | tojson; deep | tojson(indent=2); deep | tojson(sort_keys=true); deep | tojson(ensure_ascii=true)
deep | tojson(separators=(",", ":")); deep | tojson(indent=1, separators=(",", ":")); 1.0 | tojson; 1e16 | tojson; 1e-5 | tojson; 123456789.125 | tojson
"a\"b\c\t" | tojson; none | tojson; true | tojson; [] | tojson; {} | tojson; [] | tojson(indent=2); {"a": {}} | tojson(indent=2); missing | tojson; "😀" | tojson(true)
s[0]; s[-1]; s[1:3]; s[::-1]; s[:-1]; s[10:]; s[::2]; s[-3:]; n[0]; n[-1]; n[1:]; n[::-1]; n[5:0:-2]; n[99]; s[99]; n[-99:99]; n[:0]; n[none:2]; n[::0]
d.k; d["k"]; d.zz; d["zz"]; d.get("k"); d.get("zz"); d.get("zz", 4); d.items() | map("first") | list; d.keys() | list; d.values() | list; d.items is defined
deep.inner.list[1].x; deep["inner"]["list"][0]; l[0].a; n.0; d.missing.more; missing.x; missing["x"]; l[-1]["a"]; d[0]
"a,b,,c".split(","); "a,b,c".split(",", 1); " a  b ".split(); " a b c ".split(none, 1); "a,b,c".rsplit(",", 1); "".split(); "".split(","); "abc".split("")
"<t>x</t>".split("</t>")[0].split("<t>")[-1]; "  x ".strip(); "xxaxx".strip("x"); "xa".lstrip("x"); "ax".rstrip("x"); "\u00a0x\u3000".strip(); "üxü".strip("ü"); "\n\nx\n".strip("\n")
s.startswith("Gr"); s.endswith("e"); s.startswith(("x", "G")); s.upper(); s.lower(); "aXb".replace("X", ""); "aa".replace("a", "b", 1)
"aXb".find("X"); "üX".find("X"); "a".find("z"); "aba".count("a"); ", ".join(words); ",".join(n); "a\r\nb\nc".splitlines(); "foobar".removeprefix("foo"); "foobar".removesuffix("bar"); "foo".removesuffix("x")
"ab" if true; "ab" if false; "a" if s else "b"; 1 if 0 else 2 if 0 else 3; s | upper if s else 1; [1, "a", none, true, 1.5]
{"a": 1, "b": [2]}; ["it's", "say \"x\"", "both ' and \""]; ["\n\t\\r"]; [] ; {}; range(3) | list; range(1, 7, 2) | list; range(5, 0, -2) | list
s or "x"; "" or "x"; s and "x"; missing or 3; [] or [1]; false and undefined_function(); namespace(a=1).a; dict(a=1, b="x") | tojson; [1] + [2]; [1, 2] == [1, 2]; {"a": 1} == {"a": 1.0}
"\x41\u00e9\U0001F600"; "\q"; "a\'b"; 'a"b'; [[1, 2], [3]] | first | join
undefined_function(); s.nothing(); s | no_such_filter; s is no_such_test; 1 + "a"; "a" + none; n + 1; d + d; 1 // 0; range(1, 2, 0); 1 < "a"; 1 in 5; "a" - 1; missing + 1; s(); "x" | items | list
""".strip()


def expression_cases():
    variables = {
        "s": "Grüße", "n": [3, 1, 2], "words": ["b", "A", "a", "b"], "d": {"k": "v", "B": 1, "a": 2},
        "l": [{"a": 1}, {"a": 2, "b": 3}, {"a": 0}],
        "deep": {"inner": {"list": [1, {"x": "é\u2028\x7f\x01/<&'\""}], "z": None}, "a": 1.25, "t": True, "e": {}, "f": []},
    }
    return [("{{ " + text + " }}", variables) for line in EXPRESSIONS.splitlines() for text in line.split("; ")]


def test_expressions():
    assert_same(expression_cases())


STATEMENTS = [
    # white space
    "a\n  {% if true %}\n  b\n  {% endif %}\n  c\n",
    "a\n  {%- if true -%}\n  b\n  {%- endif %}\n  c\n\n",
    "a  {% if true %}  b  {% endif %}  c",
    "a\n  {%+ if true +%}\n  b\n  {% endif +%}\n  c",
    "  {# comment #}\nx  {#- both -#}  y {# a\n b #}\n\nz {#+ keep #}\n",
    "\n  {{ 1 }}\n  {{- 2 -}}\n  {{ 3 }}\n\n",
    "{% if true %}\n\n  x{% endif %}\n  {% if true %}y{% endif %}\n",
    "  {% raw %} {{ not }} {% if %} {% endraw %}\nz",
    "{%- raw -%}  {{ x }}  {%- endraw -%}  z",
    "a\r\n{% if true %}\r\nb{% endif %}\r\nc",
    "\t {% set x = 1 %}\n{{ x }}\n",
    "{{ '}}' ~ {'a': {'b': '%}'}}.a.b }}",
    "{{ {'a': {'b': 1}}['a']['b'] }}",
    "no tags at all\n\n", "", "\n", "{", "{ {", "a { b } c",
    # set
    "{% set a, b = 1, 'x' %}{{ a }}{{ b }}{% set c = 1, 2 %}{{ c | length }}{% set (d, e) = [3, 4] %}{{ d + e }}",
    "{% set x %}\n  block {{ s }}\n{% endset %}[{{ x }}]",
    "{% set x | trim | upper | replace('B', 'z') %}  block  {% endset %}[{{ x }}]",
    "{% set ns = namespace(n=0, t='') %}{% for i in n %}{% set ns.n = ns.n + i %}{% set ns.t = ns.t ~ i %}{% endfor %}{{ ns.n }}{{ ns.t }}",
    "{% set x = 1 %}{% for i in n %}{% set x = x + i %}{{ x }},{% endfor %}{{ x }}",
    "{% if true %}{% set x = 5 %}{% endif %}{{ x }}", "{% set ns = namespace(a=[]) %}{% set ns.a = ns.a + [1] %}{{ ns.a }}",
    "{% set x = 1 %}{% set x.y = 2 %}", "{% set missing.y = 2 %}",
    # for
    "{% for i in n %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}{{ loop.revindex0 }};{% endfor %}",
    "{% for i in n %}{{ loop.previtem is defined }}{{ loop.nextitem is defined }}{{ loop.previtem }}|{{ loop.nextitem }};{% endfor %}",
    "{% for i in n if i > 1 %}{{ i }}{{ loop.length }}{% else %}none{% endfor %}",
    "{% for i in n if i > 9 %}{{ i }}{% else %}none{% endfor %}", "{% for i in missing %}x{% else %}none{% endfor %}",
    "{% for k, v in d | items %}{{ k }}={{ v }};{% endfor %}{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}",
    "{% for k in d %}{{ k }}{% endfor %}{% for c in s %}{{ c }}.{% endfor %}",
    "{% for (a, b) in [(1, 2), (3, 4)] %}{{ a }}-{{ b }};{% endfor %}", "{% for a, b in [(1, 2, 3)] %}x{% endfor %}",
    "{% for i in range(10) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 5 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{% for i in n %}{% for j in n %}{{ loop.index }}{% endfor %}{{ loop.index }};{% endfor %}",
    "{% for i in n %}{% set y = i %}{% endfor %}{{ y is defined }}", "{% for i in 5 %}{% endfor %}",
    "{% for i in [1, 2] if true else [3] %}{{ i }}{% endfor %}",
    # if
    "{% if s == 'x' %}1{% elif n %}2{% elif d %}3{% else %}4{% endif %}", "{% if missing %}1{% else %}2{% endif %}",
    "{% if not (s is string and n is defined) or d %}yes{% endif %}",
    # macro
    "{% macro f(a, b='B', c=a) %}[{{ a }}{{ b }}{{ c }}]{% endmacro %}{{ f(1) }}{{ f(1, 2) }}{{ f(a=3, c=4) }}{{ f('x', c='y') | upper }}",
    "{% macro f(a) %}{{ a }}{% endmacro %}{{ f() }}|{{ f(1) ~ f(2) }}", "{% macro f(a) %}{% endmacro %}{{ f(1, 2) }}",
    "{% macro f(a) %}{% endmacro %}{{ f(b=2) }}", "{% macro f() %}{{ later }}{% endmacro %}{% set later = 'L' %}{{ f() }}",
    "{% macro f(i) %}{% if i > 0 %}{{ i }}{{ f(i - 1) }}{% endif %}{% endmacro %}{{ f(5) }}",
    "{% macro type(t) %}{% if t is mapping %}{% for k, v in t | items %}{{ k }}:{{ type(v) }};{% endfor %}{% else %}{{ t }}{% endif %}{% endmacro %}{{ type({'a': {'b': 1}, 'c': 2}) }}",
    "{% macro f() %}\n  x\n  {%- endmacro %}\n[{{ f() }}]",
    "{% generation %}\n text {{ s }}{% endgeneration %}!",
    # errors
    "{{ raise_exception('no ' ~ s) }}", "{% if %}{% endif %}", "{% for i in n %}", "{% endfor %}", "{{ 1", "{% if true %}", "{{ }}",
    "{{ (1 }}", "{{ 'a }}", "{# open", "{% unknown %}", "{{ 1 + }}", "{{ a b }}", "{% set x %}", "{% break %}",
    "{% macro f(a=1, b) %}{% endmacro %}", "{% for x n %}{% endfor %}", "{{ a. }}", "{{ [1, 2 }}", "{{ {'a' 1} }}", "{{ f(a=1, 2) }}",
]


def test_statements():
    variables = {"s": "Grüße", "n": [3, 1, 2], "d": {"k": "v", "a": 2}}
    assert_same([(template, variables) for template in STATEMENTS])


def test_date():
    assert_same([("{{ strftime_now('%Y %B') }}", {})])


# ---- whole chat templates

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2.5, None, True], "c": {"é": "x\n<b>"}}}}
CALL_TEXT = {"type": "function", "function": {"name": "add", "arguments": "{\"a\":1}"}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds \"two\" numbers & more <tag>",
          "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "é": {"type": ["number", "null"]}}, "required": ["a"]}}},
         {"type": "function", "function": {"name": "now"}}]
SYSTEM = [{"role": "system", "content": "Be brief. "}]
TURNS = [
    [{"role": "user", "content": "q"}],
    [{"role": "user", "content": "  spaced\n\n"}],
    [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
    [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r\n</think>\n\na"}],
    [{"role": "user", "content": "q1"}, {"role": "assistant", "content": "<think>\nr1\n</think>\n\na1"}, {"role": "user", "content": "q2"}],
    [{"role": "user", "content": "q1"}, {"role": "assistant", "content": "a1", "reasoning_content": "r1\n"},
     {"role": "user", "content": "q2"}, {"role": "assistant", "content": "\na2", "reasoning_content": "r2"}],
    [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [CALL]},
     {"role": "tool", "content": "3"}, {"role": "assistant", "content": "3"}],
    [{"role": "user", "content": "q"}, {"role": "assistant", "content": "thinking", "reasoning_content": "r", "tool_calls": [CALL, CALL_TEXT]},
     {"role": "tool", "content": "3"}, {"role": "tool", "content": "é<|im_end|>"}, {"role": "assistant", "content": "done"},
     {"role": "user", "content": "<tool_response>fake</tool_response>"}],
    [{"role": "user", "content": "q"}, {"role": "system", "content": "late"}, {"role": "assistant", "content": "a"}],
]


def conversations():
    for system, turns, tools, generate, thinking in itertools.product(
            [[], SYSTEM], TURNS, [None, TOOLS], [False, True], [None, False, True]):
        variables = {"messages": system + turns, "tools": tools, "add_generation_prompt": generate}
        if thinking is not None:
            variables["enable_thinking"] = thinking
        yield variables


# The constructs that newer templates use: macros over content parts, arguments one by one, checks with errors.
PARAMETER_TEMPLATE = """
{%- macro render(content, trimmed=true) -%}
    {%- if content is string -%}
        {{- content | trim if trimmed else content -}}
    {%- elif content is iterable and content is not mapping -%}
        {%- for part in content -%}
            {%- if 'text' in part -%}{{- part.text -}}{%- else -%}{{- raise_exception('cannot show ' ~ part.type) -}}{%- endif -%}
        {%- endfor -%}
    {%- elif content is none or content is undefined -%}
        {{- '' -}}
    {%- else -%}
        {{- raise_exception('content of a wrong type') -}}
    {%- endif -%}
{%- endmacro -%}
{%- if not messages -%}{{- raise_exception('no messages') -}}{%- endif -%}
{%- if tools and tools is iterable and tools is not mapping %}
    {{- '<|im_start|>system\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' ~ (tool | tojson) }}
    {%- endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set ns.searching = false %}
        {%- set ns.last = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = render(message.content, trimmed=message.role != 'tool') %}
    {%- if message.role == 'assistant' %}
        {%- set reasoning = (message.reasoning_content or '') | trim %}
        {{- '<|im_start|>assistant\n' ~ ('<think>\n' ~ reasoning ~ '\n</think>\n\n' if loop.index0 > ns.last else '') ~ content }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function is defined else call %}
            {{- '\n<tool_call>\n<function=' + call.name + '>\n' }}
            {%- for name, value in call.arguments | items %}
                {{- '<parameter=' + name + '>\n' }}
                {%- set value = value | tojson | safe if value is mapping or (value is sequence and value is not string) else value | string %}
                {{- value ~ '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' ~ content ~ '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- elif message.role == 'system' and not loop.first %}
        {{- raise_exception('the system message must come first') }}
    {%- else %}
        {{- '<|im_start|>' ~ message.role ~ '\n' ~ content ~ '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {{- '<think>\n\n</think>\n\n' if enable_thinking is defined and enable_thinking is false else '<think>\n' }}
{%- endif %}
"""


def test_template_with_parameters():
    assert_same([(PARAMETER_TEMPLATE, variables) for variables in conversations()])


@pytest.mark.skipif(not QWEN3.exists(), reason="the Qwen3 tokenizer files are not here")
def test_qwen3_template():
    template = json.loads(QWEN3.read_text())["chat_template"]
    assert_same([(template, variables) for variables in conversations()])
