// Requests: lists of them, and the waterfall of one, every part predicted beside actual, attempt by attempt.

import { age, count, element, empty, row, seconds, table } from "./draw.js";
import { page } from "./data.js";

const LISTS = [["latest", "Latest"], ["slowest", "Slowest first token"], ["missed", "Missed a bound"], ["rejected", "Rejected"]];
const NONE = {
  latest: "No request has come yet. The playground asks one.",
  slowest: "No request has had its first token in the last hour.",
  missed: "No request has missed a bound in the last hour. Bounds are slo in cluster.yaml, or a request's own.",
  rejected: "No request was rejected in the last hour.",
};

export const title = "Requests";

export async function load([list = "latest"]) {
  const known = LISTS.some(([name]) => name === list) ? list : "latest";
  return { list: known, told: await page(`requests.${known}`) };
}

const link = (id) => element("a", { href: `#/request/${encodeURIComponent(id)}` }, id);
const late = (value, bound) => value !== null && value !== undefined && bound !== null && bound !== undefined && value > bound;
const measured = (value, bound) => element("td", { class: late(value, bound) ? "late" : null }, seconds(value), late(value, bound) ? " late" : "");

export function draw({ list, told }) {
  const found = told.requests;
  return [
    element("h2", { tabindex: -1 }, "Requests"),
    element("form", { id: "find", role: "search", "data-kept": true, "data-key": "find" },
      element("label", { for: "find-id" }, "Find by id"),
      element("input", { id: "find-id", placeholder: "chatcmpl-…, or its x-request-id", autocomplete: "off", size: 34 }),
      element("button", {}, "Show")),
    element("div", { class: "choice", role: "group", "aria-label": "Which" },
      LISTS.map(([name, words]) => element("a", { href: `#/requests/${name}`, "aria-current": name === list ? "true" : null }, words))),
    found.length ? table(`${LISTS.find(([name]) => name === list)[1]}: choose one to see where its time went`,
      ["request", "ago", "state", "TTFT", "predicted", "TBT", "prompt", "hit", "new", "prefill", "decode"],
      found.map((each) => row([link(each.request_id), age(each.age_s), each.state, measured(each.ttft_s, each.ttft_slo_s),
        seconds(each.predicted_ttft_s), measured(each.mean_tbt_s, each.tbt_slo_s), count(each.num_tokens), count(each.num_cached_tokens), count(each.num_output_tokens),
        (each.prefill_node ?? "–") + (each.source_node ? ` ← ${each.source_node}` : ""), each.decode_node ?? "–"], { "data-key": each.request_id, "data-href": `#/request/${encodeURIComponent(each.request_id)}` })))
      : empty(NONE[list]),
  ];
}

export function bind(view, go) {
  view.querySelector("#find")?.addEventListener("submit", (event) => {
    event.preventDefault();
    const id = view.querySelector("#find-id").value.trim();
    if (id) go(`#/request/${encodeURIComponent(id)}`);
  });
}

// Where each part begins and how long it is, in seconds of the attempt; those beneath another are put within it.
export function placed(parts) {
  const bars = { predicted: [], actual: [] };
  for (const which of ["predicted", "actual"]) {
    let at = 0;
    const begun = {};
    for (const part of parts) {
      const long = part[`${which}_s`];
      if (part.beneath === "handed over") bars[which].push({ part, long, ends: true });
      else if (part.beneath) bars[which].push({ part, from: begun[part.beneath], long });
      else {
        begun[part.name] = at;
        bars[which].push({ part, from: at, long });
        at += long ?? 0;
      }
      if (part.name === "handed over") {
        // what was written ended with the hand-off
        for (const each of bars[which]) if (each.ends) each.from = Math.max(0, at - (each.long ?? 0));
      }
    }
    bars[`${which}_s`] = at;
  }
  return bars;
}

const WORDS = {
  received: "read and tokenised", waited: "waited to be placed", dispatched: "messages", reserved: "blocks set aside for it", queued: "queued on the prefill node",
  loaded: "prefix loaded", prefilled: "prompt computed", written: "KV leaving beneath", "handed over": "rest of the hand-off", decoded: "tokens after the first",
};

function waterfall(attempt) {
  const bars = placed(attempt.parts), whole = Math.max(bars.predicted_s, bars.actual_s, 1e-6);
  const lane = (bar, kind) => element("svg:svg", { viewBox: "0 0 1000 10", preserveAspectRatio: "none", class: `lane ${kind}`, "aria-hidden": "true" },
    bar.long > 0 && bar.from !== undefined ? element("svg:rect", { x: ((1000 * bar.from) / whole).toFixed(2), y: 1, height: 8, width: Math.max(2, (1000 * bar.long) / whole).toFixed(2), class: bar.part.beneath ? "beneath" : kind }) : null);
  const actual = attempt.actual ?? {};
  const more = { prefilled: actual.num_chunks ? ` in ${actual.num_chunks} ${actual.num_chunks === 1 ? "step" : "steps"}` : "", decoded: actual.num_output_tokens > 1 ? ` (${actual.num_output_tokens - 1})` : "" };
  const most = longest(attempt);
  const rows = attempt.parts.map((part, at) => row([
    element("th", { scope: "row", class: part.beneath ? "beneath" : null }, WORDS[part.name] ?? part.name, more[part.name] ?? ""),
    seconds(part.predicted_s), seconds(part.actual_s),
    element("td", { class: "lanes" }, lane(bars.predicted[at], "predicted"), lane(bars.actual[at], "actual")),
  ], { class: part.name === most ? "longest" : null }));
  const sum = (which) => seconds(bars[`${which}_s`]);
  rows.push(row([element("th", { scope: "row" }, "all"), sum("predicted"), sum("actual"), element("td", { class: "lanes note" }, `0 to ${seconds(whole)}`)], { class: "sum" }));
  return element("div", { class: "waterfall" }, table("Where its time went: pale is predicted, full is actual", ["part", "predicted", "actual", "when"], rows));
}

// Whether the first token came past its bound, or long after it was predicted.
function isSlowStart({ parts, asked, actual }) {
  const before = (which) => parts.reduce((sum, part) => (part.beneath || part.name === "decoded" ? sum : sum + (part[which] ?? 0)), 0);
  const predicted = before("predicted_s");
  return late(actual?.ttft_s, asked?.slo?.[0]) || (predicted > 0 && before("actual_s") > 1.5 * predicted);
}

// The name of the part that took longest, before the first token if that was slow or alone is known; empty: nothing is.
export function longest(attempt) {
  const isSlow = isSlowStart(attempt);
  const own = attempt.parts.filter((part) => !part.beneath && part.actual_s > 0 && !(isSlow && part.name === "decoded"));
  return own.reduce((most, part) => (part.actual_s > (most?.actual_s ?? 0) ? part : most), null)?.name ?? "";
}

// One sentence: what became of an attempt, and what it spent most of its time on.
export function sentence(attempt) {
  if (attempt.rejected) {
    const { reason, predicted_ttft_s: ttft, predicted_tbt_s: tbt, retry_after_s: again } = attempt.rejected;
    return `Rejected (${reason}): its first token was predicted after ${seconds(ttft)}, then one every ${seconds(tbt)}. It was told to ask again in ${seconds(again)}.`;
  }
  if (!attempt.actual) return `It runs: prefill on ${attempt.placed.prefill_node}, decode on ${attempt.placed.decode_node}.`;
  const { actual, asked } = attempt, most = longest(attempt), part = attempt.parts.find(({ name }) => name === most);
  const beyond = part && part.predicted_s > 0 && part.actual_s > 1.5 * part.predicted_s ? `, ${Number((part.actual_s / part.predicted_s).toPrecision(2))} times what was predicted` : "";
  const past = (value, bound) => (late(value, bound) ? `, late by ${seconds(value - bound)}` : "");
  const first = isSlowStart(attempt) ? "Most of the time to its first token" : "Most of its time";
  const spent = part ? ` ${first}: ${WORDS[most]}, ${seconds(part.actual_s)}${beyond}.` : "";
  const pace = actual.mean_tbt_s ? `, then one every ${seconds(actual.mean_tbt_s)}${past(actual.mean_tbt_s, asked.slo[1])}` : "";
  return `${actual.end[0].toUpperCase()}${actual.end.slice(1)}, ${count(actual.num_output_tokens)} tokens. First token after ${seconds(actual.ttft_s)}${past(actual.ttft_s, asked.slo[0])}${pace}.${spent}`;
}

function candidates(caption, rows, columns, chosen) {
  if (!rows) return empty(`${caption}: more nodes than are kept with a decision.`);
  const cell = (name, value) => (name.endsWith("_s") ? seconds(value) : typeof value === "number" ? count(value) : typeof value === "boolean" ? (value ? "yes" : "no") : String(value ?? "–"));
  return table(caption, ["node", ...columns.map((name) => name.replace(/_s$/, "").replaceAll("_", " "))],
    rows.map((each) => row([each.node + (each.node === chosen ? " ✓ chosen" : ""), ...columns.map((name) => cell(name, each[name]))], { class: each.node === chosen ? "chosen" : null })));
}

export const one = {
  title: "Request",
  async load([id = ""]) { return { told: await page(`request.${id}`) }; },
  draw({ told }) {
    const found = told.attempts, last = found[found.length - 1];
    const trace = last.actual?.trace_id;
    return [
      element("p", { class: "note" }, element("a", { href: "#/requests/latest" }, "Requests"), " ›"),
      element("h2", { tabindex: -1 }, "Request ", element("code", {}, told.request_id)),
      element("p", {}, `${count(last.asked.num_tokens)} prompt tokens, at most ${count(last.asked.max_tokens)} new. `,
        `Bounds: TTFT ${seconds(last.asked.slo[0])}, TBT ${seconds(last.asked.slo[1])}. Came ${age(told.now_s - last.arrived_at_s)} ago. `,
        trace ? element("span", {}, "Trace ", element("code", {}, trace)) : ""),
      ...found.map((attempt, number) => element("section", { "data-key": String(number), "aria-label": `Attempt ${number + 1}` },
        found.length > 1 ? element("h3", {}, `Attempt ${number + 1} of ${found.length}`, attempt.begun_s ? `, ${seconds(attempt.begun_s)} after it came` : "") : null,
        element("p", { class: "sentence" }, sentence(attempt)),
        attempt.placed ? element("p", { class: "note" }, `prefill on ${attempt.placed.prefill_node}, decode on ${attempt.placed.decode_node}`,
          attempt.placed.source_node ? `, prefix of ${attempt.placed.matched_blocks} blocks from ${attempt.placed.source_node}` : attempt.placed.matched_tokens ? `, ${count(attempt.placed.matched_tokens)} tokens matched there` : ", nothing matched") : null,
        waterfall(attempt),
        candidates("Could prefill, soonest first", attempt.prefill_candidates, ["ready_s", "queue_s", "fetch_s", "prefill_s", "others_s", "local_blocks", "matched_blocks", "fetch_from"], attempt.placed?.prefill_node),
        candidates("Could decode, shortest step first", attempt.decode_candidates, ["tbt_s", "sequences", "free_tokens", "matched_blocks", "fits"], attempt.placed?.decode_node))),
    ];
  },
};
