"""What a model is asked while its ranks are counted: a built-in pack of mixed prompts, others that `validate` holds out, or a file of one's own.
Knows no model; a prompt is messages and perhaps tools, as chat templates take them.

The pack is made of forms and subjects, so that a short file gives several hundred different prompts. Held-out prompts share neither.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from ..errors import Bw24Error

MAX_PROMPTS, MAX_LINE = 100_000, 1 << 20


@dataclass(frozen=True)
class Prompt:
    """One conversation that ends where the model is to reply. `kind` groups prompts in reports."""

    kind: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "messages": list(self.messages), **({"tools": list(self.tools)} if self.tools else {})}


def _ask(kind: str, text: str, system: str | None = None, tools: Sequence[dict[str, Any]] = ()) -> Prompt:
    first = ({"role": "system", "content": system},) if system else ()
    return Prompt(kind, (*first, {"role": "user", "content": text}), tuple(tools))


# ---- the pack

LANGUAGES = ("Python", "C", "Rust", "JavaScript", "Go", "SQL", "Java", "shell script")
CODE_FORMS = (
    "Write {language} code that {task}. Keep it short and add comments.",
    "I need a {language} function that {task}. Show the code, then explain it step by step.",
    "Here is what I want in {language}: it {task}. Write it with tests.",
)
CODE_TASKS = (
    "counts how often each word occurs in a text file", "merges two sorted lists", "parses a date such as 2024-03-09 without a library",
    "reads a CSV file and sums one column", "finds the shortest path in a grid of cells", "caches the results of a slow call",
    "checks whether brackets are balanced", "turns a nested structure into flat key-value pairs", "retries a request with growing pauses",
    "computes the edit distance of two strings", "splits a list into chunks of equal size", "validates an e-mail address",
)
CODE_FIXES = (
    "def mean(xs):\n    total = 0\n    for x in xs:\n        total =+ x\n    return total / len(xs)",
    "for (int i = 0; i <= n; i++) {\n    sum += a[i];\n}",
    "SELECT name, COUNT(*) FROM orders WHERE total > 10;",
    "let cache = {};\nfunction get(key) { if (!cache[key]) { cache[key] = load(key); } return cache.key; }",
)
PROSE_FORMS = (
    "Write a short story about {subject}.", "Explain {subject} to a curious child.", "Write an encyclopedia paragraph about {subject}.",
    "Give five surprising facts about {subject} as a list with a heading.", "Argue for and against {subject} in two paragraphs.",
)
PROSE_SUBJECTS = (
    "lighthouses", "the invention of the bicycle", "a market at dawn", "how vaccines work", "a village that lost its name", "the tides",
    "honest maps", "learning to cook late in life", "the colour blue", "night trains", "a dispute between neighbours", "volcanoes",
)
CHAT = (
    "My flight was cancelled and the airline wants to rebook me in three days. What should I do?",
    "Suggest a week of dinners for two people who do not eat meat.", "I keep forgetting names. Any tricks that really work?",
    "What is the difference between a virus and a bacterium?", "Plan a weekend in a rainy city with two children.",
    "Rewrite this politely: send me the report now, you are late again.", "Which is heavier, a litre of oil or a litre of water, and why?",
    "Summarise the plot of a detective novel that you make up.", "How do I remove a wine stain from a wool carpet?",
    "I have an interview tomorrow for a job as a nurse. Ask me five likely questions.", "Compare renting and buying a home for a young couple.",
    "Explain compound interest with an example in numbers.", "Write a thank-you note to a teacher who is retiring.",
    "Give me a table of three cheap laptops' features that matter to a student.", "What can I do when my neighbour's dog barks all night?",
    "Translate 'the early bird catches the worm' into three languages and explain the images.",
)
MATHS = (
    "A train travels 240 km in 3 hours and then 150 km in 2 hours. What is its average speed? Show each step.",
    "Solve 3x^2 - 12x + 9 = 0 and check the answers.", "How many ways are there to seat 5 people at a round table? Explain.",
    "A shop lowers a price by 20 % and then raises it by 20 %. Is it the old price again?", "Prove that the sum of two odd numbers is even.",
    "Convert 0.375 to a fraction and 5/16 to a decimal number.",
)
FORMATS = (
    "Return JSON with the keys title, year and tags for three films that you invent.",
    "Write a YAML file that describes a small web service.",
    "Make a Markdown table of the planets with size and distance from the sun.",
    "Give a regular expression for a phone number and explain each part.",
    "Write an HTML page with a form of three fields and a little style sheet.", "Write a LaTeX fragment with a matrix and its determinant.",
)
WORLD = (
    "Schreibe eine kurze Geschichte über einen vergessenen Brief.", "Erkläre mir, wie ein Kühlschrank funktioniert.",
    "Welche Vor- und Nachteile hat Homeoffice?", "Écris un court texte sur la mer en hiver.", "Explique la photosynthèse à un enfant.",
    "Donne-moi une recette simple de soupe.", "Escribe un cuento breve sobre un reloj que se detiene.", "¿Cómo puedo aprender inglés más rápido?",
    "Explica qué es la inflación con un ejemplo.", "Scrivi una lettera a un vecino gentile.", "Come si prepara un buon caffè?",
    "Escreva um texto curto sobre uma viagem de trem.", "Explique o que é um algoritmo.", "Napisz krótkie opowiadanie o starym moście.",
    "Jak działa silnik elektryczny?", "Напиши короткий рассказ о зимнем лесе.", "Объясни, что такое гравитация, простыми словами.",
    "Kısa bir masal yaz: konuşan bir kedi.", "Leg uit hoe een fiets in balans blijft.", "Skriv en kort text om hösten.",
    "写一个关于老桥的短故事。", "请解释一下什么是人工智能。", "短い俳句を三つ作って、意味を説明してください。", "電車はどうやって動きますか。",
    "겨울 바다에 대한 짧은 글을 써 주세요.", "커피를 맛있게 내리는 방법을 알려 주세요.",
    "اكتب قصة قصيرة عن مدينة قديمة.", "اشرح لي كيف تعمل البطارية.",
    "एक पुराने पेड़ के बारे में छोटी कहानी लिखो।", "Viết một đoạn văn ngắn về mùa mưa.", "Tulis cerita pendek tentang nelayan tua.",
)
AGENT_TASKS = (
    "Find out why the nightly build fails and fix it.", "What is the weather in Oslo and should I take an umbrella?",
    "Book a table for four on Friday at seven.", "Read the file src/main.c and tell me what it does.",
    "Search for the three newest articles on battery recycling and summarise them.", "Rename the function load to read_all in the whole project.",
)


def _tool(name: str, text: str, **fields: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": what} for key, what in fields.items()}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": {
        "type": "object", "properties": properties, "required": list(fields)}}}


TOOLS = (
    _tool("read_file", "Read a file of the project.", path="path of the file"),
    _tool("run_command", "Run a command and return its output.", command="the command line"),
    _tool("get_weather", "Weather of a place.", city="name of the city", day="day of the forecast"),
    _tool("search", "Search the web.", query="words to look for"),
)
SYSTEMS = (None, None, "You are a careful assistant. Answer briefly.", "You are a senior engineer who explains the reasons.")


def _code() -> Iterator[Prompt]:
    for i, task in enumerate(CODE_TASKS):
        for j, form in enumerate(CODE_FORMS):
            language = LANGUAGES[(i * len(CODE_FORMS) + j) % len(LANGUAGES)]
            yield _ask("code", form.format(language=language, task=task), SYSTEMS[(i + j) % len(SYSTEMS)])
    for text in CODE_FIXES:
        yield _ask("code", f"What is wrong with this, and how would you write it?\n```\n{text}\n```")


def _prose() -> Iterator[Prompt]:
    for i, subject in enumerate(PROSE_SUBJECTS):
        for form in (PROSE_FORMS[i % len(PROSE_FORMS)], PROSE_FORMS[(i + 2) % len(PROSE_FORMS)]):
            yield _ask("prose", form.format(subject=subject))


def _agents() -> Iterator[Prompt]:
    for task in AGENT_TASKS:
        yield _ask("agent", task, "You can call tools. Think about what you need first.", TOOLS)
    for i, task in enumerate(AGENT_TASKS):  # a conversation after the tool has answered
        call = {"function": {"name": "search", "arguments": {"query": task}}, "type": "function", "id": f"call{i}"}
        turns = ({"role": "user", "content": task}, {"role": "assistant", "content": "", "tool_calls": [call]},
                 {"role": "tool", "content": json.dumps({"status": "ok", "lines": [f"result {n}: see section {n}" for n in range(3)]}),
                  "tool_call_id": f"call{i}", "name": "search"})
        yield Prompt("agent", turns, TOOLS)


def _mixed(groups: Sequence[list[Prompt]]) -> list[Prompt]:
    """One of each group after the other, so that every stretch of the pack is a mixture."""
    return [p for row in zip_longest(*groups) for p in row if p is not None]


def built_in() -> list[Prompt]:
    """The pack that ranks are counted from, in a fixed order."""
    chat = [_ask("chat", text, SYSTEMS[i % len(SYSTEMS)]) for i, text in enumerate(CHAT)]
    chat += [_ask("chat", text) for text in (*MATHS, *FORMATS)]
    return _mixed([list(_code()), chat, list(_prose()), [_ask("world", text) for text in WORLD], list(_agents())])


# ---- held out: neither forms nor subjects of the pack

HELD = {
    "code": (
        "Implement a stack with push, pop and minimum in constant time, in Python.", "Show me how to draw a bar chart from a dictionary.",
        "Refactor: a class Account has deposit, withdraw and balance; make it safe against negative amounts.",
        "Write a C program that prints its own arguments in reverse order.", "Given a list of intervals, join those that overlap. Use TypeScript.",
        "How do I stream a large file over HTTP without loading it? Give code.",
    ),
    "chat": (
        "Should I repair my ten-year-old washing machine or replace it?", "Tell me a joke about librarians and explain why it is funny.",
        "What do I need to know before adopting a cat?", "Give me three exercises for a stiff back.", "How long should I boil an egg?",
        "Draft an e-mail to my landlord about a broken heater.",
    ),
    "prose": (
        "Describe an old harbour through the eyes of someone who comes back after forty years.", "What made the printing press spread so fast?",
        "Write the opening of a novel set in a weather station.", "Outline an essay on why forests matter to cities.",
    ),
    "world": ("Warum ist der Himmel blau?", "Raconte une anecdote drôle sur un voyage.",
              "¿Qué ventajas tiene leer todos los días?", "为什么海水是咸的？"),
    "agent": ("Check whether port 8080 is free and start the server.", "List the files changed today and explain the largest change."),
}


def held_out() -> list[Prompt]:
    """The prompts of `validate`, in a fixed order."""
    return _mixed([[_ask(kind, text, tools=TOOLS if kind == "agent" else ()) for text in texts] for kind, texts in HELD.items()])


# ---- a file


def _from_line(number: int, line: str) -> Prompt:
    if not line.startswith("{"):
        return _ask("file", line)
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise Bw24Error(f"line {number}: expected a text, or a JSON object, found {line[:60]!r}") from None
    messages = value.get("messages", [{"role": "user", "content": value.get("prompt")}])
    tools = value.get("tools") or []
    good = isinstance(messages, list) and messages and isinstance(tools, list) and all(isinstance(t, dict) for t in tools)
    if not good or not all(isinstance(m, dict) and isinstance(m.get("role"), str) and m.get("content") is not None for m in messages):
        raise Bw24Error(f"line {number}: expected 'messages' (objects of role and content) or 'prompt', found {line[:60]!r}")
    return Prompt(str(value.get("kind", "file"))[:40], tuple(messages), tuple(tools))


def read(text: str, name: str) -> list[Prompt]:
    """Prompts of a file, one a line: a text, or {"messages": [...], "tools": [...]} or {"prompt": "..."}. Raises Bw24Error with the line."""
    lines = text.splitlines()
    if len(lines) > MAX_PROMPTS or any(len(line) > MAX_LINE for line in lines):
        raise Bw24Error(f"{name}: expected at most {MAX_PROMPTS} lines of at most {MAX_LINE} characters")
    try:
        found = [_from_line(i, line.strip()) for i, line in enumerate(lines, 1) if line.strip()]
    except Bw24Error as error:
        raise Bw24Error(f"{name}: {error}") from None
    if not found:
        raise Bw24Error(f"{name}: holds no prompt")
    return found
