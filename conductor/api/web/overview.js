// The first view: what the cluster does, and did in the last minutes, hour or day, against its bounds.

import { bytes, chart, count, element, empty, percent, seconds } from "./draw.js";
import { day, hour, week } from "./data.js";

const SPANS = [["minutes", "10 minutes"], ["hour", "Hour"], ["day", "Day"]];
const SERIES = { minutes: hour, hour, day, week };

export const title = "Overview";

export async function load([span = "hour"]) {
  const series = SERIES[span] ?? hour;
  return { told: await series.refresh(), span, series };
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
    ["TTFT, median", seconds(mean("ttft_p50"))],
    ["TTFT, 99 %", slowest("ttft_p99")],
    ["TBT, 99 %", slowest("tbt_p99")],
    ["of prompts hit", percent(prompt ? mean("cached_tokens") / prompt : null)],
    ["tokens generated", rate(mean("output_tokens"))],
    ["running", count(mean("running"))],
    ["waiting", count(mean("waiting"))],
    ["KV held", percent(mean("kv_held"))],
    ["KV moved", `${bytes(mean("kv_moved_bytes"))}/s`],
  ];
}

export function charts(columns, bounds) {
  const line = (label, name, how = "mean") => ({ label, column: columns[name] ?? new Float32Array(0), how });
  const share = columns.prompt_tokens.map((prompt, at) => (prompt > 0 ? columns.cached_tokens[at] / prompt : NaN));
  const percentiles = (name) => [line("99 %", `${name}_p99`, "max"), line("90 %", `${name}_p90`, "max"), line("median", `${name}_p50`)];
  return [
    { title: "Requests that ended", unit: "1/s", lines: [line("in bounds", "good"), line("late", "late"), line("rejected", "rejected"), line("failed", "failed")] },
    { title: "Time to first token", unit: "s", lines: percentiles("ttft"), bound: bounds.ttft_s },
    { title: "Time between tokens, mean of each request", unit: "s", lines: percentiles("tbt"), bound: bounds.tbt_s },
    { title: "Requests now", unit: "count", lines: [line("running", "running"), line("waiting to be placed", "waiting", "max"), line("waiting on nodes", "waiting_on_nodes", "max")] },
    { title: "Prompt tokens that hit", unit: "share", lines: [{ label: "matched", column: share, how: "mean" }] },
    { title: "Tokens", unit: "1/s", lines: [line("of prompts", "prompt_tokens"), line("matched", "cached_tokens"), line("generated", "output_tokens")] },
    { title: "KV blocks held", unit: "share", lines: [line("held", "kv_held")] },
    { title: "KV moved between nodes", unit: "B/s", lines: [line("moved", "kv_moved_bytes")] },
  ];
}

export function draw({ told, span, series }) {
  const rows = span === "minutes" ? Math.ceil(600 / series.stepS) : series.kept;
  const shown = Object.fromEntries(Object.entries(series.columns).map(([name, column]) => [name, column.slice(-rows)]));
  const long = Math.min(rows, series.length);
  const spans = element("div", { class: "choice", role: "group", "aria-label": "How long" },
    [...SPANS, ...(told.source === "prometheus" ? [["week", "Week"]] : [])].map(([name, words]) => element("a", { href: `#/overview/${name}`, "aria-current": name === span ? "true" : null }, words)));
  const quiet = !hour.mean("running", 3600) && !series.mean("good", rows);
  return [
    element("h2", { tabindex: -1 }, "Overview"),
    element("p", { class: "note" }, "The last minute. Each 99 % is that of the worst moment in it."),
    element("dl", { class: "numbers overview-numbers", "aria-label": "The last minute" }, numbers(series).map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)))),
    quiet ? empty("No request has come in this time. ", element("a", { href: "#/playground" }, "Ask one in the playground"), ", or send some: ", element("code", {}, "conductor bench")) : null,
    spans,
    long < 2 ? empty("The first rows come in a moment.") : element("div", { class: "charts" },
      charts(shown, told.bounds).map((each) => chart({ ...each, fromS: (series.next - long) * series.stepS, stepS: series.stepS, withDate: span === "day" || span === "week" }))),
    told.problem ? element("p", { class: "late" }, `${told.problem}. Shown is the conductor's own memory.`) : null,
    element("p", { class: "note" }, told.source === "prometheus"
      ? "Drawn from the Prometheus of server.prometheus."
      : "The conductor's own memory: an hour by the second, a day by 30 seconds. For longer, and over restarts: server.prometheus."),
  ].filter(Boolean);
}
