"""Chat templates: published templates word for word, encoding, and templates that are broken or hostile."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bw24 import chat, tokenizer
from bw24.chat import ChatTemplate
from bw24.errors import Bw24Error
from test_tokenizer import byte_metadata

MODELS = ["smollm2", "qwen3.5-4b", "gemma-4-31b-it", "hy3", "minimax-m2", "deepseek-v3.1"]
COUNTS = {"smollm2": 26, "qwen3.5-4b": 84, "gemma-4-31b-it": 78, "hy3": 84, "minimax-m2": 28, "deepseek-v3.1": 104}


def check_file(path: Path) -> tuple[int, int]:
    """(renderings, template errors) compared; all must be equal."""
    golden = json.loads(path.read_text())
    template = ChatTemplate(golden["template"], bos_token="", eos_token="")
    wrong, failures = [], 0
    for case in golden["cases"]:
        try:
            found = template.render(**case["vars"])
        except Bw24Error as error:
            found = error
        if "error" in case:
            failures += 1
            found = str(found) if isinstance(found, Bw24Error) else found
        if found != case.get("expected", case.get("error")):
            wrong.append((case["name"], found))
    assert wrong == []
    return len(golden["cases"]) - failures, failures


def render(source: str, seconds: float = 5.0, **values: object) -> str:
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>", seconds=seconds)
    return template.render(values.pop("messages", [{"role": "user", "content": "hi"}]), **values)


@pytest.mark.parametrize("model", MODELS)
def test_selected_conversations(model, fixtures):
    good, failures = check_file(fixtures / "text" / f"chat_{model}.json")
    assert good >= 7 and failures == (2 if model in ("qwen3.5-4b", "minimax-m2") else 0)


@pytest.mark.parametrize("model", MODELS)
def test_all_conversations(model, goldens):
    assert sum(check_file(goldens / "real" / f"chat_{model}.json")) == COUNTS[model]


# ---- the environment ----


def test_environment_is_hugging_faces():
    assert render("{% if true %}\n  a\n  {% endif %}\nb\n") == "  a\nb"  # blocks eat their line's blanks and newline; the last newline goes
    assert render("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "02"
    assert render("{{ {'b': '<é>', 'a': [1, 1.0, none, true]}|tojson }}") == '{"b": "<é>", "a": [1, 1.0, null, true]}'
    assert render("{{ {'b': 1, 'a': 'é'}|tojson(indent=1, sort_keys=true, ensure_ascii=true) }}") == '{\n "a": "\\u00e9",\n "b": 1\n}'
    assert render("{{ [1]|tojson(separators=(',', ':')) }}{{ bos_token }}{{ eos_token }}") == "[1]<s></s>"
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")
    assert render("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c") == "abhic"
    assert render("{{ tools is defined }} {{ add_generation_prompt }}", add_generation_prompt=False) == "False False"
    assert render("{{ tools|length }}{{ enable_thinking }}", tools=[{"a": 1}], enable_thinking=False) == "1False"


def test_own_checks_change_nothing_else():
    """Loops, `~`, literals and namespaces go through the sandbox's hands; their meaning stays jinja2's."""
    loop = "{% for x in items %}{{ loop.index }}/{{ loop.length }}{{ '.' if loop.last }}{{ loop.nextitem }} {% else %}none{% endfor %}"
    assert render(loop, items=["a", "b"]) == "1/2b 2/2. " and render(loop, items=[]) == "none" and render(loop) == "none"
    pairs = "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}{% for k in d %}{{ k }}{% endfor %}"
    assert render(pairs, d={"x": 1, "y": 2}) == "x=1;y=2;xy"
    assert render("{% for x in t recursive %}{{ x.n }}{{ loop(x.c) if x.c }}{% endfor %}", t=[{"n": 1, "c": [{"n": 2}]}, {"n": 3}]) == "123"
    assert render("{% set a, b = 1, [x, 2] %}{{ a ~ b ~ none ~ nothing }}", x=3) == "1[3, 2]None"
    assert render("{% set ns = namespace(x=1) %}{% set ns.x = ns.x + 1 %}{% macro m(n) %}{{ n.x }}{% endmacro %}{{ m(ns) }}") == "2"
    assert render("{{ 'a %s b' % 1 }}{{ '{} {x}'.format(2, x=3) }}{{ '%s'|format('é') }}") == "a 1 b2 3é"
    assert render("{{ 'ab' * 2 }}{{ 2 ** 10 }}{{ [1] + [2] }}{{ 'a-b'.replace('-', '+') }}") == "abab1024[1, 2]a+b"
    assert render("{{ ['a', 'b']|join(', ') }}{{ 'x'.join(['a', 'b']) }}{{ ('a', 'b')|map('upper')|list }}") == "a, baxb['A', 'B']"
    assert render("{% set t %}x{{ 1 }}{% endset %}{{ t }}{{ 'a\nb'|indent(2) }}") == "x1a\n  b"
    assert render("{{ [3, 1]|sort }}{{ [1, 2]|sum }}{{ 'ab'|center(4) }}|") == "[1, 3]3 ab |"


def test_variables_a_template_reads():
    template = ChatTemplate("{% set x = 1 %}{{ x }}{{ tools }}{% for m in messages %}{{ m }}{% endfor %}", bos_token="", eos_token="")
    assert template.variables == {"tools", "messages"}


def test_threads_have_their_own_clock():
    source = "{% for i in range(300) %}{{ messages[0].content }}{{ i }}{% endfor %}"
    template, results = ChatTemplate(source, bos_token="", eos_token=""), {}

    def work(name: str) -> None:
        results[name] = template.render([{"role": "user", "content": name}])

    threads = [threading.Thread(target=work, args=(str(i),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {str(n): "".join(f"{n}{i}" for i in range(300)) for n in range(8)}


# ---- encoding ----


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("prefix", ["", "{{ bos_token }}", "{{ bos_token }}{{ bos_token }}"])
def test_apply_gives_one_bos(adds, prefix):
    meta = byte_metadata(control=("<s>", "</s>"))
    meta |= {"tokenizer.ggml.bos_token_id": 256, "tokenizer.ggml.eos_token_id": 257, "tokenizer.ggml.add_bos_token": adds}
    tok = tokenizer.from_metadata(meta | {"tokenizer.ggml.add_eos_token": True})
    template = ChatTemplate(prefix + "{% for m in messages %}{{ m.content }}</s>{% endfor %}", bos_token="<s>", eos_token="</s>")
    ids = chat.apply(tok, template, [{"role": "user", "content": "!"}], add_generation_prompt=False)
    written = prefix.count("bos_token")
    assert ids == [256] * (1 if adds else written) + [0, 257]


# ---- errors ----


@pytest.mark.parametrize(("source", "message"), [
    ("\n\n{% if x %}\n{{ y }", "chat template, line 4: unexpected '}'"),
    ("a\n{% endif %}", "chat template, line 2: Encountered unknown tag 'endif'."),
    ("\n{{ 1|nosuch }}", "chat template, line 2: No filter named 'nosuch'."),
    ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "chat template: cannot be compiled: RecursionError"),
    ("x" * (1 << 20) + "y", "chat template: expected at most 1048576 characters, found 1048577"),
])
def test_templates_that_do_not_compile(source, message):
    with pytest.raises(Bw24Error) as caught:
        ChatTemplate(source, bos_token="", eos_token="")
    assert str(caught.value) == message


@pytest.mark.parametrize(("source", "message"), [
    ("\n{{ raise_exception('No\n user  message') }}", "No user message"),
    ("\n\n{{ nothing.x.y }}", "chat template, line 3: 'nothing' is undefined"),
    ("\n{{ messages[0]['role'] + 1 }}", 'chat template, line 2: TypeError: can only concatenate str (not "int") to str'),
    ("{{ 1 / 0 }}", "chat template, line 1: ZeroDivisionError: division by zero"),
    ("{{ ''.__class__.__mro__ }}", "chat template, line 1: access to attribute '__class__' of 'str' object is unsafe."),
    ("{{ messages.append(1) }}", "chat template, line 1: access to attribute 'append' of 'list' object is unsafe."),
    ("{{ messages[0].update({}) }}", "chat template, line 1: access to attribute 'update' of 'dict' object is unsafe."),
    ("{% import 'os' as os %}", "chat template, line 1: TypeError: no loader for this environment specified"),
    ("{{ lipsum() }}", "chat template, line 1: 'lipsum' is undefined"),
])
def test_templates_that_fail(source, message):
    with pytest.raises(Bw24Error) as caught:
        render(source)
    assert str(caught.value) == message


GROW = "{% set ns = namespace(x='aaaaaaaaaa', y=1) %}{% for i in range(60) %}"
BIG = "{% set a = 'a' * 1000000 %}"
NESTED = "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set m = namespace(a=ns.x, b=ns.x) %}{% set ns.x = m %}{% endfor %}"
HOSTILE = {
    "nested loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "loops over text": BIG + "{% for i in range(100000) %}{% for c in a %}{% endfor %}{% endfor %}",
    "filtered loop": "{% for i in range(100000) %}{% for x in range(100000)|map('string') if x == 'a' %}{% endfor %}{% endfor %}",
    "bushy macro": "{% macro f(n) %}{{ f(n-1) if n > 0 }}{{ f(n-1) if n > 0 }}{% endmacro %}{{ f(60) }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "endless loop()": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "long range": "{% for i in range(10 ** 9) %}x{% endfor %}",
    "text * number": "{{ 'a' * 10 ** 10 }}", "number * text": "{{ 10 ** 9 * 'a' }}", "list * number": "{{ [1] * 10 ** 9 }}",
    "power": "{% set x = 9 ** 999 %}{{ x ** 999999 }}",
    "product": "{% set ns = namespace(x=9) %}{% for i in range(90) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubling ~": GROW + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "doubling +": GROW + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling block": GROW + "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "doubling list": GROW + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "doubling tuple": GROW + "{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ {ns.x: 1} }}",
    "doubling dict": GROW + "{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    "doubling fromkeys": "{% set x = 1 %}" + "{% set x = dict.fromkeys([1, 2], x) %}" * 60 + "{{ x == 1 }}",
    "doubling cycler": GROW + "{% set ns.x = cycler(ns.x, ns.x).items %}{% endfor %}{{ ns.x }}",
    "doubling varargs": "{% macro f(n) %}{{ f(n - 1, varargs, varargs) if n > 0 else varargs }}{% endmacro %}{{ f(60, 1) }}",
    "comparison": GROW + "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    "namespaces printed": NESTED + "{{ ns.x }}", "namespaces formatted": NESTED + "{{ '{}'.format(ns.x) }}",
    "namespaces joined": NESTED + "{{ [1, 2]|join(ns.x) }}", "namespaces as text": NESTED + "{{ ns.x|upper }}",
    "namespaces raised": NESTED + "{{ raise_exception(ns.x) }}",
    "center": "{{ 'a'|center(10 ** 9) }}", "ljust": "{{ 'a'.ljust(10 ** 9) }}", "expandtabs": "{{ ('\t' * 100000).expandtabs(100000) }}",
    "replace filter": BIG + "{{ a|replace('a', a) }}", "replace method": BIG + "{{ a.replace('', a) }}", "join": BIG + "{{ a|join(a) }}",
    "join method": BIG + "{{ a.join(range(100000)|map('string')) }}", "join map": BIG + "{{ range(100000)|map('replace', '1', a)|join }}",
    "indent": "{{ ('\n' * 1000000)|indent(1000) }}", "wordwrap": BIG + "{{ ('a ' * 100000)|wordwrap(1, wrapstring=a) }}",
    "translate": BIG + "{{ a.translate({97: a}) }}",
    "% width": "{{ '%1000000000d' % 1 }}", "% precision": "{{ '%.1000000000f' % 1 }}", "% star": "{{ '%*d' % (10 ** 9, 1) }}",
    "format width": "{{ '{:1000000000}'.format(1) }}", "format nested": "{{ '{:{}}'.format(1, 10 ** 9) }}",
    "format filter": "{{ '%1000000000d'|format(1) }}", "format repeated": BIG + "{{ ('{0}' * 100000).format(a) }}",
    "format_map": BIG + "{{ ('{a}' * 100000).format_map({'a': a}) }}", "% mapping": BIG + "{{ ('%(a)s' * 100000) % {'a': a} }}",
    "batch": "{{ range(10)|batch(10 ** 9, 1)|list }}", "slice": "{{ range(10)|slice(10 ** 9)|list }}",
    "sum of lists": "{{ ([['a' * 100] * 1000] * 1000)|sum(start=[]) }}", "tojson indent": "{{ [1, 2]|tojson(indent=10 ** 9) }}",
    "tojson again": GROW + "{% endfor %}{% set l = ['a'] * 100000 %}{% for i in range(100000) %}{% set y = l|tojson %}{% endfor %}",
    "output": BIG + "{% for i in range(100000) %}{{ a }}{% endfor %}", "strftime": "{{ strftime_now('%1000000000d') }}",
    "intermediate text": BIG + "{% for i in range(100000) %}{% set x = a ~ i %}{% endfor %}", "round": "{{ 1.5|round(1000000, 'ceil') }}",
    "sorting": "{% for i in range(100000) %}{% set x = range(100000)|sort %}{% endfor %}",
    "to_bytes": "{{ (1).to_bytes(10 ** 10, 'big') }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_soon(name):
    started = time.thread_time()
    with pytest.raises(Bw24Error) as caught:
        render(HOSTILE[name], seconds=0.2)
    assert time.thread_time() - started < 2  # the limit, and what a single step may take beyond it
    assert str(caught.value).startswith("chat template") and "\n" not in str(caught.value)


def test_hostile_templates_stay_small():
    """All of them in one process with 1 GiB of address space on top of what importing takes."""
    code = f"""if True:
        import resource, sys
        sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}
        import test_chat
        with open("/proc/self/statm") as f:
            used = int(f.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
        for name, source in test_chat.HOSTILE.items():
            try:
                test_chat.render(source, seconds=0.05)
            except test_chat.Bw24Error as error:
                assert "MemoryError" not in str(error), (name, str(error))
        print("ok", len(test_chat.HOSTILE))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == f"ok {len(HOSTILE)}\n", done.stderr[-2000:]


def test_long_conversations_are_not_hostile(fixtures):
    """1000 turns with 4 MB of text; and 400 by the template that looks back from each message."""
    for model, turns, words in (("qwen3.5-4b", 1000, 800), ("gemma-4-31b-it", 400, 10)):
        golden = json.loads((fixtures / "text" / f"chat_{model}.json").read_text())
        template = ChatTemplate(golden["template"], bos_token="<bos>", eos_token="<eos>")
        messages = [{"role": ("user", "assistant")[i % 2], "content": f"turn {i} " + "word " * words} for i in range(turns + 1)]
        text = template.render(messages)
        assert all(f"turn {i} word" in text for i in range(turns + 1)) and len(text) > turns * words * 5
