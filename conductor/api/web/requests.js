// Requests: lists of them, and the waterfall of one, every part predicted beside actual, attempt by attempt.

import { age, clock, count, counted, element, empty, percent, row, seconds, table, TBT, TTFT, words } from "./draw.js";
import { page } from "./data.js";
import { link as node } from "./cluster.js";

const LISTS = [["latest", "Latest"], ["slowest", "Slowest first token"], ["missed", "Missed a bound"], ["rejected", "Rejected"]];
const NONE = {
  latest: "No request has come yet. The playground asks one.",
  slowest: "No request has had its first token in the last hour.",
  missed: "No request has missed a bound in the last hour. Bounds are slo in cluster.yaml, or a request's own.",
  rejected: "No request was rejected in the last hour.",
};

// The parts of a waterfall: what each is called, and what it is.
export const PARTS = {
  received: ["read and tokenised", "The request was read and checked, and its text turned into tokens."],
  waited: ["waited to be placed", "It waited at the conductor until a node could take it in time."],
  ahead: ["others before it", "Of a rejected request: those who waited at the conductor before it, and would have been placed first."],
  dispatched: ["sent to its nodes", "Messages from the conductor to its nodes and back, and what of the time to the first token no other part covers."],
  reserved: ["blocks set aside for it", "Within it: the decode node set aside memory (KV blocks) for the request."],
  queued: ["queued to be computed", "Its prompt waited behind others on the node that computes it."],
  loaded: ["prefix copied", "Within it: KV of the prompt's beginning, which another node had, was copied from there."],
  prefilled: ["prompt computed", "The model read the prompt: its KV was computed, in so many steps."],
  written: ["KV sent meanwhile", "KV went to the decode node layer by layer while later layers were computed. Only what shows below costs time."],
  "handed over": ["rest of the hand-off", "What of sending the KV to the decode node was left when the prompt was computed."],
  decoded: ["tokens after the first", "Steps of the decode node, one token each."],
};
const name = (part) => PARTS[part]?.[0] ?? part;
const PLACED = [["prefill", "The node that computes its prompt; ←: the one that its known beginning is copied from."], ["decode", "The node that makes its tokens after the first."]];
const COULD_PREFILL = [
  ["ready_s", "ready in", "Seconds until the prompt would be computed there: the queue, or the copying where that is longer, and the computing."],
  ["queue_s", "queue", "Seconds of prompts before it."],
  ["fetch_s", "copying", "Seconds to copy the prompt's known beginning from another node."],
  ["prefill_s", "computing", "Seconds to compute the rest of the prompt."],
  ["others_s", "delay to others", "Seconds that other requests would lose by it. The node with the least of this and 'ready in' together is chosen."],
  ["local_blocks", "blocks it has", "KV blocks of the prompt's beginning in the node's own cache."],
  ["matched_blocks", "with copies", "The same, and those that it would copy."],
  ["fetch_from", "copies from", "The node that it would copy from."],
];
const COULD_DECODE = [
  ["tbt_s", "TBT", "Predicted seconds between two tokens, with this request there."],
  ["sequences", "decoding", "Requests that decode there already."],
  ["free_tokens", "room, tokens", "Tokens whose KV it has room for."],
  ["matched_blocks", "blocks it has", "KV blocks of the prompt that are there and need not be sent."],
  ["beside_s", "its prompt there too", "Seconds until its prompt would be computed there, beside what decodes: a node may do both where roles follow the load. –: it has no time or room for it, or roles are fixed."],
  ["fits", "has room", "Whether the request's KV has room there, with its answer."],
];
let lastList = "latest"; // the way back from a request

export const title = "Requests";

export async function load([list = "latest"]) {
  const known = LISTS.some(([name]) => name === list) ? list : "latest";
  lastList = known;
  return { list: known, answer: await page(`requests.${known}`) };
}

const nodes = (prefill, source) => (prefill ? [node(prefill), source ? [" ← ", node(source)] : []].flat() : ["–"]);
const cell = (...content) => element("td", {}, content.flat());
const link = (id) => element("a", { href: `#/request/${encodeURIComponent(id)}` }, id);
const late = (value, bound) => value !== null && value !== undefined && bound !== null && bound !== undefined && value > bound;
const measured = (value, bound) => element("td", { class: late(value, bound) ? "late" : null }, seconds(value), late(value, bound) ? " late" : "");

export function draw({ list, answer }) {
  const found = answer.requests;
  return [
    element("h2", { tabindex: -1 }, "Requests"),
    element("form", { id: "find", role: "search", "data-kept": true, "data-key": "find" },
      element("label", { for: "find-id" }, "Find by id"),
      element("input", { id: "find-id", placeholder: "chatcmpl-…, or its x-request-id", autocomplete: "off", size: 34 }),
      element("button", {}, "Show")),
    element("div", { class: "choice", role: "group", "aria-label": "Which" },
      LISTS.map(([name, words]) => element("a", { href: `#/requests/${name}`, "aria-current": name === list ? "true" : null }, words))),
    found.length ? table(`${LISTS.find(([name]) => name === list)[1]}: choose one to see where its time went`,
      ["request", "ago", "state", TTFT, ["predicted", "The TTFT that was predicted when it was placed."], TBT, ["prompt", "Tokens of its prompt."], ["hit", "Tokens of its prompt whose KV was cached."], ["new", "Tokens of its answer."], ...PLACED],
      found.map((each) => row([link(each.request_id), age(each.age_s), each.state, measured(each.ttft_s, each.ttft_slo_s),
        seconds(each.predicted_ttft_s), measured(each.mean_tbt_s, each.tbt_slo_s), count(each.num_tokens), count(each.num_cached_tokens), count(each.num_output_tokens),
        cell(nodes(each.prefill_node, each.source_node)), cell(nodes(each.decode_node))], { "data-key": each.request_id, "data-href": `#/request/${encodeURIComponent(each.request_id)}` })))
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

function waterfall(attempt) {
  const bars = placed(attempt.parts), whole = Math.max(bars.predicted_s, bars.actual_s, 1e-6);
  const lane = (bar, kind) => element("svg:svg", { viewBox: "0 0 1000 10", preserveAspectRatio: "none", class: `lane ${kind}`, "aria-hidden": "true" },
    bar.long > 0 && bar.from !== undefined ? element("svg:rect", { x: ((1000 * bar.from) / whole).toFixed(2), y: 1, height: 8, width: Math.max(2, (1000 * bar.long) / whole).toFixed(2), class: bar.part.beneath ? "beneath" : kind }) : null);
  const actual = attempt.actual ?? {};
  const more = { prefilled: actual.num_chunks ? ` in ${counted(actual.num_chunks, "step")}` : "", decoded: actual.num_output_tokens > 1 ? `: ${count(actual.num_output_tokens - 1)}` : "" };
  const most = longest(attempt);
  const rows = attempt.parts.map((part, at) => row([
    element("th", { scope: "row", class: part.beneath ? "beneath" : null, title: PARTS[part.name]?.[1] ?? null }, name(part.name), more[part.name] ?? ""),
    seconds(part.predicted_s), seconds(part.actual_s),
    element("td", { class: "lanes" }, lane(bars.predicted[at], "predicted"), lane(bars.actual[at], "actual")),
  ], { class: part.name === most ? "longest" : null }));
  const sum = (which) => seconds(bars[`${which}_s`]);
  rows.push(row([element("th", { scope: "row" }, "all"), sum("predicted"), sum("actual"), element("td", { class: "lanes note" }, `0 to ${seconds(whole)}`)], { class: "sum" }));
  return element("div", { class: "waterfall" }, table(attempt.rejected ? "Where its time would have gone, as predicted" : "Where its time went: pale is predicted, full is actual", ["part", "predicted", "actual", "when"], rows));
}

// Whether the first token came past its bound, or long after it was predicted.
function isSlowStart({ parts, asked, actual }) {
  const before = (which) => parts.reduce((sum, part) => (part.beneath || part.name === "decoded" ? sum : sum + (part[which] ?? 0)), 0);
  const predicted = before("predicted_s");
  return late(actual?.ttft_s, asked?.slo?.[0]) || (predicted > 0 && before("actual_s") > 1.5 * predicted);
}

const longestOf = (parts) => parts.reduce((most, part) => (!part.beneath && part.actual_s > (most?.actual_s ?? 0) ? part : most), null);

// The name of the part that took longest, before the first token if that was slow or alone is known; empty: nothing is.
export function longest(attempt) {
  if (attempt.rejected) return attempt.parts.reduce((most, part) => (part.predicted_s > (most?.predicted_s ?? 0) ? part : most), null)?.name ?? "";
  const isSlow = isSlowStart(attempt);
  return longestOf(attempt.parts.filter((part) => !(isSlow && part.name === "decoded")))?.name ?? "";
}

const LACKED = { prefill: "It lacked a prefill node.", decode: "It lacked a decode node.", speed: "It lacked speed: not even an idle node would have been in time, however many there are." };
const REASONS = {
  no_prefill_node: "no prefill node was there", no_decode_node: "no decode node was there", no_free_blocks: "no decode node had KV blocks for it",
  waited: "it waited to be placed as long as it may, or would have", too_many_wait: "too many waited to be placed", ttft: "its first token would have come too late", tbt: "its tokens would have come too slowly",
};

// Why an attempt was rejected, with the numbers that were compared.
function refused({ rejected: { reason }, judged, asked, parts }) {
  const why = REASONS[reason] ?? reason, long = (part) => parts.find(({ name }) => name === part)?.predicted_s ?? 0;
  if (!judged) return `Rejected: ${why}.`;
  const share = (limit, bound) => (limit < bound ? ` (${percent(limit / bound)} of its bound: predictions are not exact)` : "");
  if (reason === "ttft") {
    const spent = [["behind others who waited", "ahead"], ["queued to be computed", "queued"], ["computing its prompt", "prefilled"]].filter(([, part]) => long(part) > 0.01 * judged.ttft_s).map(([words, part]) => `${seconds(long(part))} ${words}`);
    return `Rejected: its first token was predicted after ${seconds(judged.ttft_s)}, and admitted are ${seconds(judged.ttft_limit_s)}${share(judged.ttft_limit_s, asked.slo[0])}. Of that ${spent.join(", ")}. ${LACKED[judged.lacks]}`;
  }
  if (reason === "tbt") {
    const added = judged.displaced_s > 0 ? `, ${seconds(judged.displaced_s)} of it because it takes the room of several while many are rejected` : "";
    return `Rejected: the steps of decode nodes would have come to ${seconds(judged.tbt_s)}${added}, and admitted are ${seconds(judged.tbt_limit_s)}${share(judged.tbt_limit_s, asked.slo[1])}. ${LACKED[judged.lacks]}`;
  }
  return `Rejected: ${why}. ${LACKED[judged.lacks]}`;
}

// What became of an attempt, and what took most of the time to its first token.
export function sentence(attempt) {
  if (attempt.rejected) {
    return `${refused(attempt)} Its client was sent a time to ask again: ${seconds(attempt.rejected.retry_after_s)}.`;
  }
  if (!attempt.actual) return `It runs: prefill on ${attempt.placed.prefill_node}, decode on ${attempt.placed.decode_node}.`;
  const { actual, asked } = attempt, part = longestOf(attempt.parts.filter(({ name }) => name !== "decoded"));
  const beyond = part && part.predicted_s > 0 && part.actual_s > 1.5 * part.predicted_s ? `, ${Number((part.actual_s / part.predicted_s).toPrecision(2))} times what was predicted` : "";
  const past = (value, bound) => (late(value, bound) ? `, late by ${seconds(value - bound)}` : "");
  const first = asked.max_tokens === 0 ? "vector" : "first token"; // of an embedding
  const spent = part ? ` Most of the time to its ${first}: ${name(part.name)}, ${seconds(part.actual_s)}${beyond}.` : "";
  const pace = actual.mean_tbt_s ? `, then one every ${seconds(actual.mean_tbt_s)}${past(actual.mean_tbt_s, asked.slo[1])}` : "";
  return `${actual.end[0].toUpperCase()}${actual.end.slice(1)}, ${asked.max_tokens === 0 ? "its vector" : `${counted(actual.num_output_tokens, "token")}. First token`} after ${seconds(actual.ttft_s)}${past(actual.ttft_s, asked.slo[0])}${pace}.${spent}`;
}

function candidates(caption, rows, columns, chosen) {
  if (!rows) return empty(`${caption}: more nodes than are kept with a decision.`);
  if (!rows.length) return empty(`${caption}: no node.`);
  const said = (key, value) => (key.endsWith("_s") ? seconds(value) : typeof value === "number" ? count(value) : typeof value === "boolean" ? (value ? "yes" : "no") : String(value ?? "–"));
  return table(caption, ["node", ...columns.map(([, name, meaning]) => [name, meaning])],
    rows.map((each) => row([cell(node(each.node), each.node === chosen ? " ✓ chosen" : ""), ...columns.map(([key]) => said(key, each[key]))], { class: each.node === chosen ? "chosen" : null })));
}

// On which nodes an attempt is, and why they are not two: words and names in turn.
export function where({ placed: { prefill_node: computes, decode_node: decodes, is_inline: isInline }, asked }) {
  if (!asked.max_tokens) return ["Computed on ", computes, ", and nothing decodes: a vector was asked for"];
  if (computes !== decodes) return ["Prefill on ", computes, ", decode on ", decodes];
  const why = isInline ? ", which computes its prompt beside what decodes there: that costs less than a prefill node and a hand-off" : ", so that its KV goes nowhere";
  return ["Prefill and decode on ", decodes, why];
}

export const one = {
  title: "Request",
  async load([id = ""]) { return { answer: await page(`request.${id}`) }; },
  draw({ answer }) {
    const found = answer.attempts, last = found[found.length - 1];
    const trace = last.actual?.trace_id ?? "", isTrace = /^[0-9a-f]{32}$/.test(trace); // it may be its client's
    const address = isTrace && answer.trace_page ? answer.trace_page.replace("{trace_id}", trace) : "";
    const cameS = answer.at_s - (answer.now_s - last.arrived_at_s);
    return [
      element("p", { class: "note" }, element("a", { href: "#/requests/latest" }, "Requests"), " › ", element("a", { href: `#/requests/${lastList}` }, LISTS.find(([list]) => list === lastList)[1]), " ›"),
      element("h2", { tabindex: -1 }, "Request ", element("code", {}, answer.request_id)),
      element("p", {}, `${counted(last.asked.num_tokens, "prompt token")}, at most ${count(last.asked.max_tokens)} new. `,
        `Bounds: TTFT ${seconds(last.asked.slo[0])}, TBT ${seconds(last.asked.slo[1])}. Came ${age(answer.now_s - last.arrived_at_s)} ago, at ${clock(cameS, false, true)}: `, element("a", { href: `#/cluster/at/${Math.floor(cameS)}` }, "the cluster then"), ". ",
        trace ? element("span", {}, "Trace ", address ? element("a", { href: address, rel: "noreferrer" }, element("code", {}, trace)) : element("code", {}, trace)) : ""),
      ...found.map((attempt, number) => element("section", { "data-key": String(number), "aria-label": `Attempt ${number + 1}` },
        found.length > 1 ? element("h3", {}, `Attempt ${number + 1} of ${found.length}`, attempt.begun_s ? `, ${seconds(attempt.begun_s)} after it came` : "") : null,
        element("p", { class: "sentence" }, sentence(attempt)),
        attempt.placed ? element("p", { class: "note" }, ...where(attempt).map((part, at) => (at % 2 ? node(part) : part)),
          attempt.placed.source_node ? [`, prefix of ${counted(attempt.placed.matched_blocks, "block")} from `, node(attempt.placed.source_node)] : attempt.placed.matched_tokens ? `, ${counted(attempt.placed.matched_tokens, "token")} matched there` : ", nothing matched") : null,
        waterfall(attempt),
        candidates(`Could prefill, the best first: as predicted when it was ${attempt.rejected ? "rejected" : "placed"}`, attempt.prefill_candidates, COULD_PREFILL, attempt.placed?.prefill_node),
        attempt.asked.max_tokens ? candidates("Could decode, the shortest step first", attempt.decode_candidates, COULD_DECODE, attempt.placed?.decode_node) : null)),
      words("What the parts and columns mean", [...Object.values(PARTS), ...[...COULD_PREFILL, ...COULD_DECODE.filter(([key]) => key !== "matched_blocks" && key !== "tbt_s")].map(([, name, meaning]) => [name, meaning]), TTFT, TBT]),
    ];
  },
};
