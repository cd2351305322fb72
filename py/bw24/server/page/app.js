/* The chat page: a conversation kept in this browser, replies streamed from /v1/chat/completions. Owns the page's state and its small Markdown;
 * asks nothing but this server. Text from the model becomes nodes, never HTML. */
"use strict";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens"];
const FIELDS = [...NUMBERS, "system", "tools", "reasoning_effort"];
let turns = [];
let running = null;

// ---- nodes

function node(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// ---- Markdown: code, headings, lists, quotes, tables, emphasis, links

const INLINE = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*|\[([^\]\n]*)\]\((https?:\/\/[^\s)]+)\)|(https?:\/\/[^\s<>()]+[^\s<>().,;:!?])/g;

function inline(parent, text) {
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    parent.append(text.slice(at, found.index));
    at = found.index + found[0].length;
    if (found[2] !== undefined) parent.append(node("code", "", found[2].trim()));
    else if (found[3] !== undefined) inline(parent.appendChild(node("strong")), found[3]);
    else if (found[4] !== undefined) inline(parent.appendChild(node("em")), found[4]);
    else {
      const link = node("a", "", found[5] || found[6] || found[7]);
      link.href = found[6] || found[7];
      link.rel = "noreferrer noopener";
      link.target = "_blank";
      parent.append(link);
    }
  }
  parent.append(text.slice(at));
}

function codeBlock(lines, language) {
  const block = node("pre"), copy = node("button", "", "Copy");
  const code = block.appendChild(node("code", "", lines.join("\n")));
  if (language) code.dataset.language = language;
  copy.type = "button";
  copy.onclick = () => navigator.clipboard.writeText(code.textContent).then(() => { copy.textContent = "Copied"; });
  block.append(copy);
  return block;
}

function table(rows) {
  const made = node("table");
  rows.filter((_, i) => i !== 1).forEach((row, i) => {
    const line = made.appendChild(node("tr"));
    for (const cell of row.trim().replace(/^\||\|$/g, "").split("|")) inline(line.appendChild(node(i ? "td" : "th")), cell.trim());
  });
  return made;
}

const STARTS = /^(```|~~~|#{1,6} |> ?|\s*[-*+] |\s*\d+[.)] )/;

function markdown(text) {
  const out = document.createDocumentFragment(), lines = text.split("\n");
  let i = 0;
  const take = (test) => { const got = []; while (i < lines.length && test(lines[i])) got.push(lines[i++]); return got; };
  while (i < lines.length) {
    const line = lines[i], fence = line.match(/^\s*(```+|~~~+)\s*([\w+#.-]*)/), heading = line.match(/^(#{1,6}) (.*)/);
    if (fence) {
      i++;
      out.append(codeBlock(take((l) => !l.trim().startsWith(fence[1])), fence[2]));
      i++;
    } else if (heading) {
      inline(out.appendChild(node("h" + Math.min(heading[1].length + 1, 6))), heading[2]);
      i++;
    } else if (/^> ?/.test(line)) {
      out.appendChild(node("blockquote")).append(markdown(take((l) => /^> ?/.test(l)).map((l) => l.replace(/^> ?/, "")).join("\n")));
    } else if (/^\s*([-*+]|\d+[.)]) /.test(line)) {
      const list = out.appendChild(node(/^\s*\d/.test(line) ? "ol" : "ul"));
      if (list.tagName === "OL") list.start = parseInt(line, 10);
      for (const item of take((l) => /^\s*([-*+]|\d+[.)]) /.test(l) || (/^\s{2,}\S/.test(l)))) {
        if (/^\s*([-*+]|\d+[.)]) /.test(item)) inline(list.appendChild(node("li")), item.replace(/^\s*([-*+]|\d+[.)]) /, ""));
        else inline(list.lastChild || list, " " + item.trim());
      }
    } else if (line.includes("|") && /^\s*\|?[\s:|-]+\|[\s:|-]*$/.test(lines[i + 1] || "")) {
      out.append(table(take((l) => l.includes("|"))));
    } else if (!line.trim()) {
      i++;
    } else {
      const first = lines[i++], rest = take((l) => l.trim() && !STARTS.test(l));
      inline(out.appendChild(node("p")), [first, ...rest].join("\n"));
    }
  }
  return out;
}

// ---- the conversation on the page

function draw(turn) {
  turn.box = turn.box || $("chat").appendChild(node("div", "turn " + turn.role));
  const box = turn.box, open = box.querySelector("details")?.open;
  box.replaceChildren();
  if (turn.reasoning) {
    const fold = box.appendChild(node("details"));
    fold.open = open || false;
    fold.append(node("summary", "", turn.content || turn.done ? "Thoughts" : "Thinking…"), turn.reasoning);
  }
  const body = box.appendChild(node("div", "body"));
  if (turn.role === "user") body.textContent = turn.content;
  else body.append(markdown(turn.content));
  for (const call of turn.calls || []) box.append(node("div", "call", `${call.function.name}(${call.function.arguments})`));
  if (turn.error) box.append(node("div", "error", turn.error));
  if (turn.notes) box.append(node("div", "notes", turn.notes));
}

function follow(action) {
  const chat = $("chat"), atEnd = chat.scrollHeight - chat.scrollTop - chat.clientHeight < 60;
  action();
  if (atEnd) chat.scrollTop = chat.scrollHeight;
}

function save() {
  const kept = turns.map(({ role, content, reasoning, calls, notes, error }) => ({ role, content, reasoning, calls, notes, error, done: true }));
  try { localStorage.setItem("bw24.turns", JSON.stringify(kept)); } catch { /* the browser's store is full or closed: the page works without */ }
}

function load() {
  try { turns = JSON.parse(localStorage.getItem("bw24.turns")) || []; } catch { turns = []; }
  for (const name of FIELDS) $(name).value = localStorage.getItem("bw24." + name) || "";
  $("key").value = sessionStorage.getItem("bw24.key") || "";
  turns.forEach(draw);
  $("chat").scrollTop = $("chat").scrollHeight;
}

// ---- requests

function request() {
  const body = { messages: [], stream: true, stream_options: { include_usage: true } };
  if ($("system").value.trim()) body.messages.push({ role: "system", content: $("system").value });
  for (const turn of turns) {
    if (turn.error && !turn.content && !turn.calls?.length) continue;
    const message = { role: turn.role, content: turn.content };
    if (turn.calls?.length) message.tool_calls = turn.calls;
    if (turn.reasoning && turn.role === "assistant") message.reasoning_content = turn.reasoning;
    body.messages.push(message);
  }
  for (const name of NUMBERS) if ($(name).value !== "") body[name] = Number($(name).value);
  if ($("reasoning_effort").value) body.reasoning_effort = $("reasoning_effort").value;
  if ($("tools").value.trim()) {
    try { body.tools = JSON.parse($("tools").value); } catch (error) { throw new Error("Tools: " + error.message); }
  }
  return body;
}

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: "Bearer " + key } : {}) };
}

async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    let end;
    while ((end = held.indexOf("\n\n")) >= 0) {
      const block = held.slice(0, end);
      held = held.slice(end + 2);
      if (block.startsWith("data: ") && block !== "data: [DONE]") yield JSON.parse(block.slice(6));
    }
  }
}

function take(turn, chunk) {
  if (chunk.error) throw new Error(chunk.error.message);
  const choice = chunk.choices?.[0];
  if (choice) {
    turn.content += choice.delta.content || "";
    turn.reasoning += choice.delta.reasoning_content || "";
    for (const { index, ...call } of choice.delta.tool_calls || []) turn.calls.push(call);
    turn.reason = choice.finish_reason || turn.reason;
  }
  if (chunk.timings) turn.timings = chunk.timings;
  if (chunk.usage) turn.usage = chunk.usage;
}

function notes({ usage, timings, reason }) {
  const parts = [];
  if (usage) parts.push(`${usage.completion_tokens} tokens`);
  if (timings) parts.push(`${timings.predicted_per_second.toFixed(1)} tok/s`, `first token ${Math.round(timings.prompt_ms + timings.queue_ms)} ms`);
  if (usage) parts.push(`prompt ${usage.prompt_tokens}, ${usage.prompt_tokens_details.cached_tokens} cached`);
  if (timings?.draft_n) parts.push(`${Math.round(100 * timings.draft_n_accepted / timings.draft_n)} % of drafts accepted`);
  if (reason === "length") parts.push("cut at the limit");
  return parts.join(" · ");
}

async function send() {
  const turn = { role: "assistant", content: "", reasoning: "", calls: [], notes: "" };
  running = new AbortController();
  $("send").textContent = "Stop";
  let drawn = false;
  const show = () => {
    if (drawn) return;
    drawn = true;
    requestAnimationFrame(() => { drawn = false; follow(() => draw(turn)); });
  };
  try {
    const body = request();
    turns.push(turn);
    const reply = await fetch("/v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal });
    if (!reply.ok) throw new Error((await reply.json()).error.message);
    for await (const chunk of events(reply)) { take(turn, chunk); show(); }
  } catch (error) {
    if (error.name === "AbortError") turn.stopped = true;
    else turn.error = error.message;
  }
  if (!turns.includes(turn)) turns.push(turn);
  turn.done = true;
  turn.notes = turn.stopped ? "stopped" : turn.error ? "" : notes(turn);
  running = null;
  $("send").textContent = "Send";
  follow(() => draw(turn));
  save();
}

async function look() {
  try {
    const reply = await fetch("/health", { headers: headers() });
    const state = await reply.json();
    $("model").textContent = state.model || $("model").textContent;
    $("state").textContent = reply.ok ? "ready" : state.error.message;
  } catch { $("state").textContent = "no answer"; }
}

// ---- events

$("ask").onsubmit = (event) => {
  event.preventDefault();
  if (running) return running.abort();
  const text = $("text").value.trim();
  if (!text) return;
  $("text").value = "";
  $("text").style.height = "";
  const turn = { role: "user", content: text };
  turns.push(turn);
  draw(turn);
  $("chat").scrollTop = $("chat").scrollHeight;
  send();
};
$("text").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); if (!running) $("ask").requestSubmit(); }
};
$("text").oninput = () => { $("text").style.height = "auto"; $("text").style.height = $("text").scrollHeight + "px"; };
$("settings-button").onclick = () => {
  $("settings").hidden = !$("settings").hidden;
  $("settings-button").setAttribute("aria-expanded", String(!$("settings").hidden));
};
$("settings").onsubmit = (event) => event.preventDefault();
$("settings").onchange = () => {
  for (const name of FIELDS) localStorage.setItem("bw24." + name, $(name).value);
  sessionStorage.setItem("bw24.key", $("key").value);
};
$("clear").onclick = () => {
  if (running) running.abort();
  turns = [];
  $("chat").replaceChildren();
  save();
  $("text").focus();
};
load();
look();
setInterval(look, 10000);
