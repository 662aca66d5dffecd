// The first view: what the cluster does, and did in the last minutes, hour or day, against its bounds.

import { bytes, chart, clock, count, element, empty, KV, momentAt, P99, percent, seconds, TBT, TTFT, words } from "./draw.js";
import { day, hour, week } from "./data.js";

const SPANS = [["minutes", "10 minutes"], ["hour", "Hour"], ["day", "Day"]];
const SERIES = { minutes: hour, hour, day, week };

const TERMS = [
  ["in bounds, late", "Served to the end with TTFT and TBT within the request's bounds, or past one of them. Bounds are slo in cluster.yaml, or the request's own."],
  ["rejected", "Refused before any work, because no node could have kept the bounds; the client was sent a time to ask again."],
  TTFT, TBT, P99,
  ["hit, matched", "Prompt tokens whose KV was in the cache already, and need not be computed."],
  ["waiting to be placed, on nodes", "At the conductor, until a node can take it in time; or on a node, behind others."],
  KV,
];

let markedS = null; // the moment that a pointer is at

export const title = "Overview";

export async function load([span = "hour"]) {
  const series = Object.hasOwn(SERIES, span) ? SERIES[span] : hour;
  return { answer: await series.refresh(), span, series };
}

// The numbers at the top, of the last minute.
export function numbers(series) {
  const rows = Math.max(1, Math.round(60 / series.stepS)), mean = (name) => series.mean(name, rows);
  const worst = (name) => Math.max(...[...(series.columns[name] ?? []).slice(-rows)].filter((value) => !Number.isNaN(value)));
  const slowest = (name) => { const found = worst(name); return seconds(Number.isFinite(found) ? found : null); };
  const prompt = mean("prompt_tokens"), rate = (value) => `${count(value)}/s`;
  return [
    ["served in bounds", rate(mean("good"))],
    ["rejected", rate(mean("rejected"))],
    ["served late", rate(mean("late"))],
    ["TTFT median", seconds(mean("ttft_p50"))],
    ["TTFT p99, worst", slowest("ttft_p99")],
    ["TBT p99, worst", slowest("tbt_p99")],
    ["of prompts hit", percent(prompt ? mean("cached_tokens") / prompt : null)],
    ["tokens generated", rate(mean("output_tokens"))],
    ["running", count(mean("running"))],
    ["waiting to be placed", count(mean("waiting"))],
    ["KV held", percent(mean("kv_held"))],
    ["KV moved", `${bytes(mean("kv_moved_bytes"))}/s`],
  ];
}

export function charts(columns, bounds) {
  const line = (label, name, how = "mean") => ({ label, column: columns[name] ?? new Float32Array(0), how });
  const share = columns.prompt_tokens.map((prompt, at) => (prompt > 0 ? columns.cached_tokens[at] / prompt : NaN));
  const percentiles = (name) => [line("p99", `${name}_p99`, "max"), line("p90", `${name}_p90`, "max"), line("median", `${name}_p50`)];
  return [
    { title: "Requests that ended", unit: "1/s", lines: [line("in bounds", "good"), line("late", "late"), line("rejected", "rejected"), line("failed", "failed")] },
    { title: "TTFT of each request", means: TTFT[1], unit: "s", lines: percentiles("ttft"), bound: bounds.ttft_s },
    { title: "TBT, mean of each request", means: TBT[1], unit: "s", lines: percentiles("tbt"), bound: bounds.tbt_s },
    { title: "Requests now", unit: "count", lines: [line("running", "running"), line("waiting to be placed", "waiting", "max"), line("waiting on nodes", "waiting_on_nodes", "max")] },
    { title: "Prompt tokens that hit", unit: "share", lines: [{ label: "matched", column: share, how: "mean" }] },
    { title: "Tokens", unit: "1/s", lines: [line("of prompts", "prompt_tokens"), line("matched", "cached_tokens"), line("generated", "output_tokens")] },
    { title: "KV blocks held", unit: "share", lines: [line("held", "kv_held")] },
    { title: "KV moved between nodes", unit: "B/s", lines: [line("moved", "kv_moved_bytes")] },
  ];
}

export function draw({ answer, span, series }) {
  const rows = span === "minutes" ? Math.ceil(600 / series.stepS) : series.kept;
  const shown = Object.fromEntries(Object.entries(series.columns).map(([name, column]) => [name, column.slice(-rows)]));
  const long = Math.min(rows, series.length);
  const spans = element("div", { class: "choice", role: "group", "aria-label": "How long" },
    [...SPANS, ...(answer.source === "prometheus" ? [["week", "Week"]] : [])].map(([name, words]) => element("a", { href: `#/overview/${name}`, "aria-current": name === span ? "true" : null }, words)));
  const rowOf = series.stepS === 1 ? "second" : `${series.stepS ?? 1} s`;
  const quiet = !hour.mean("running", 3600) && !series.mean("good", rows);
  return [
    element("h2", { tabindex: -1 }, "Overview"),
    element("p", { class: "note" }, `The last minute. TTFT and TBT are of requests (TBT: the mean of each); p99, worst: that of the minute's worst ${rowOf}.`),
    element("dl", { class: "numbers overview-numbers", "aria-label": "The last minute" }, numbers(series).map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)))),
    quiet ? empty("No request has come in this time. ", element("a", { href: "#/playground" }, "Ask one in the playground"), ", or send some: ", element("code", {}, "conductor bench")) : null,
    spans,
    element("p", { class: "note", id: "marked" }, markedS === null ? "Point at a moment for its numbers; choose it to see which node was the bottleneck then. " : `Numbers of ${clock(markedS, span !== "hour" && span !== "minutes", true)}; choose it to see which node was the bottleneck. `, element("a", { href: "#/cluster" }, "The cluster, now or at a moment")),
    long < 2 ? empty("The first rows come in a moment.") : element("div", { class: "charts" },
      charts(shown, answer.bounds).map((each) => chart({ ...each, fromS: (series.next - long) * series.stepS, stepS: series.stepS, withDate: span === "day" || span === "week", atS: markedS }))),
    answer.problem ? element("p", { class: "late" }, `${answer.problem}. Shown is the conductor's own memory.`) : null,
    element("p", { class: "note" }, answer.source === "prometheus"
      ? "Drawn from the Prometheus of server.prometheus."
      : "The conductor's own memory: an hour by the second, a day by 30 seconds. For longer, and over restarts: server.prometheus."),
    words("What the words mean", TERMS),
  ].filter(Boolean);
}

// A pointer over a chart marks its moment in all of them; a click asks what the cluster was then.
export function bind(view, go, again) {
  let due = 0;
  const mark = (moment) => {
    if (moment === markedS) return;
    markedS = moment;
    due ||= requestAnimationFrame(() => { due = 0; again(); });
  };
  view.addEventListener("pointermove", (event) => mark(momentAt(event)));
  view.addEventListener("pointerleave", () => mark(null));
  view.addEventListener("click", (event) => {
    const moment = momentAt(event);
    if (moment === null) return;
    markedS = null;
    go(`#/cluster/at/${Math.round(moment)}`);
  });
}
