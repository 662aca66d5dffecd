// The playground: a chat with the model that is served, with tools if one likes; each answer says how soon it came,
// how much of its prompt was found in the cache, and where its time went.

import { count, counted, element, empty, morph, percent, seconds } from "./draw.js";
import { ask, headers, Refused } from "./data.js";

const EXAMPLE = [{ type: "function", function: { name: "weather", description: "The weather of a town", parameters: { type: "object", properties: { town: { type: "string" } }, required: ["town"] } } }];

export const title = "Playground";
export const isStill = true; // nothing here changes by itself

let model = null, stop = null;
const talk = []; // {role, text, calls, stats, problem}

export async function load() {
  model ??= (await ask("v1/models")).data[0];
  return { answer: { ready: (await fetch("health")).ok } };
}

// What the parts of an event stream add to an answer.
export function take(answer, event, atMs) {
  const choice = event.choices?.[0];
  const delta = choice?.delta ?? {};
  if ((delta.content || delta.reasoning_content || delta.tool_calls) && answer.firstMs === undefined) answer.firstMs = atMs;
  answer.text += delta.content ?? "";
  answer.reasoning += delta.reasoning_content ?? "";
  for (const part of delta.tool_calls ?? []) {
    const call = (answer.calls[part.index] ??= { id: "", name: "", arguments: "" });
    call.id ||= part.id ?? "";
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  if (choice?.finish_reason) answer.finish = choice.finish_reason;
  if (event.id) answer.id = event.id;
  if (event.usage) answer.usage = event.usage;
  if (event.error) throw new Refused(event.error.message, 0);
}

// How an answer went, in words.
export function summary(answer) {
  const { usage, firstMs, lastMs } = answer, cached = usage?.prompt_tokens_details?.cached_tokens ?? 0;
  const parts = [];
  if (firstMs !== undefined) parts.push(`first token after ${seconds(firstMs / 1e3)}`);
  if (usage) parts.push(`${count(cached)} of ${counted(usage.prompt_tokens, "prompt token")} hit (${percent(usage.prompt_tokens ? cached / usage.prompt_tokens : 0)})`, counted(usage.completion_tokens, "new token"));
  if (usage?.completion_tokens > 1 && lastMs > firstMs) parts.push(`${count((usage.completion_tokens - 1) / ((lastMs - firstMs) / 1e3))} a second`);
  if (answer.finish && answer.finish !== "stop") parts.push(`ended: ${answer.finish}`);
  return parts.join(" · ");
}

function said(turn, number) {
  return element("article", { "data-key": String(number), class: turn.role },
    element("h3", {}, { user: "You", assistant: model?.id ?? "The model", tool: "The tool" }[turn.role]),
    turn.reasoning ? element("details", {}, element("summary", {}, "Its reasoning"), element("p", { class: "text" }, turn.reasoning)) : null,
    turn.text ? element("p", { class: "text" }, turn.text) : turn.role === "assistant" && !turn.calls?.length && !turn.problem ? element("p", { class: "note" }, turn.finish ? "(no text)" : "…") : null,
    (turn.calls ?? []).map((call) => element("p", { class: "call" }, "calls ", element("code", {}, `${call.name}(${call.arguments})`))),
    turn.problem ? element("p", { class: "late" }, turn.problem) : null,
    turn.role === "assistant" && turn.finish ? element("p", { class: "note" }, summary(turn), " · ", element("a", { href: `#/request/${encodeURIComponent(turn.id)}` }, "where its time went")) : null);
}

function show(view) {
  morph(view.querySelector("#talk"), talk.length ? talk.map(said) : [empty("Say something to ", element("b", {}, model?.id ?? "the model"), ". Say it twice to see its prompt found in the cache.")]);
}

export function draw() {
  const number = (id, words, value, step, max) => element("label", { for: id }, words, element("input", { id, type: "number", value, step, min: 0, max }));
  return [
    element("h2", { tabindex: -1 }, "Playground"),
    element("div", { id: "talk", role: "log", "aria-live": "polite", "aria-label": "The conversation", "data-kept": true, "data-key": "talk" }),
    element("form", { id: "say", "data-kept": true, "data-key": "say" },
      element("label", { for: "words" }, "Your words"), element("textarea", { id: "words", rows: 3, placeholder: "Enter sends, Shift+Enter makes a line" }),
      element("div", { class: "row" }, element("button", { id: "send" }, "Send"), element("button", { type: "button", id: "stop", disabled: true }, "Stop"), element("button", { type: "button", id: "again" }, "New conversation"),
        number("temperature", "Temperature", "0", "0.1", 2), number("most", "Most tokens", "200", "1", 100000)),
      element("details", {}, element("summary", {}, "Tools"), element("label", { for: "tools" }, "A JSON list, as OpenAI's API has it; empty: none"),
        element("textarea", { id: "tools", rows: 5, spellcheck: "false" }), element("button", { type: "button", id: "example" }, "Insert an example"))),
  ];
}

export function bind(view) {
  const at = (id) => view.querySelector(`#${id}`);
  show(view);
  at("say").addEventListener("submit", (event) => { event.preventDefault(); send(view); });
  at("words").addEventListener("keydown", (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(view); } });
  at("stop").addEventListener("click", () => stop?.abort());
  at("again").addEventListener("click", () => { stop?.abort(); talk.length = 0; show(view); at("words").focus(); });
  at("example").addEventListener("click", () => { at("tools").value = JSON.stringify(EXAMPLE, null, 1); });
}

const sent = (turn) => (turn.role === "assistant" && turn.calls?.length
  ? { role: "assistant", content: turn.text || null, tool_calls: turn.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } })) }
  : { role: turn.role, content: turn.text, ...(turn.toolId ? { tool_call_id: turn.toolId } : {}) });

async function send(view) {
  const at = (id) => view.querySelector(`#${id}`), words = at("words").value;
  if (!words.trim() || stop) return;
  const before = talk[talk.length - 1];
  const pending = before?.role === "assistant" && before.calls?.length ? before.calls[0].id : "";
  talk.push(pending ? { role: "tool", text: words, toolId: pending } : { role: "user", text: words });
  const answer = { role: "assistant", text: "", reasoning: "", calls: [] };
  const kept = talk.filter((turn) => !turn.problem).map(sent);
  talk.push(answer);
  at("words").value = "";
  at("stop").disabled = false;
  stop = new AbortController();
  show(view);
  try {
    const tools = at("tools").value.trim() ? JSON.parse(at("tools").value) : null;
    const body = { model: model.id, messages: kept, stream: true, stream_options: { include_usage: true }, temperature: Number(at("temperature").value), max_tokens: Number(at("most").value) || 200, ...(tools ? { tools } : {}) };
    await stream(body, answer, view);
  } catch (error) {
    answer.problem = error.name === "AbortError" ? "stopped" : error instanceof SyntaxError ? `Tools: ${error.message}` : error.message;
    answer.finish ??= "stopped";
  } finally {
    stop = null;
    if (at("stop")) { at("stop").disabled = true; at("stop").ownerDocument.activeElement === at("stop") && at("words").focus(); }
    show(view);
  }
  if (answer.calls.length && at("words")) at("words").placeholder = `What ${answer.calls[0].name} answers`;
}

async function stream(body, answer, view) {
  const begun = performance.now();
  const response = await fetch("v1/chat/completions", { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json", ...headers() }, signal: stop.signal });
  if (!response.ok) throw new Refused((await response.json().catch(() => ({}))).error?.message ?? `status ${response.status}`, response.status);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    const events = (left + value).split("\n\n");
    left = events.pop();
    for (const event of events) if (event.startsWith("data: ") && event !== "data: [DONE]") take(answer, JSON.parse(event.slice(6)), performance.now() - begun);
    answer.lastMs = performance.now() - begun;
    if (view.querySelector("#talk")) show(view);
  }
}
