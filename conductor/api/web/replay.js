// Replays: a trace that is dropped here, or the traffic of the last hour, on nodes of one's choice, as `conductor replay`
// simulates them. The answers are that command's reports and pages; charts are taken over from its page.

import { bar, count, counted, element, empty, P99, percent, row, seconds, table, TBT, TTFT, words } from "./draw.js";
import { ask } from "./data.js";
import { now, slower } from "./cluster.js";

const TIMEOUT_MS = 130000;
const MAX_FILE_BYTES = 64 << 20, MARGIN_BYTES = 4096;
const DRAWN = "svg, path, polyline, text, figure, figcaption, line, rect, g"; // what is taken over of a report's page

const ENCODER = new TextEncoder();
let dropped = null; // {name, text}
const results = { replay: null, whatif: null };
const working = { replay: false, whatif: false };

// The first lines of a trace, as many as a call of so many bytes may have: {text, lines}.
export function fitting(text, most) {
  let bytes = 0, end = 0, lines = 0;
  while (end < text.length) {
    const next = text.indexOf("\n", end) + 1 || text.length;
    if (next - end > most) break;
    bytes += ENCODER.encode(JSON.stringify(text.slice(end, next))).length - 2;
    if (bytes > most) break;
    end = next; lines += 1;
  }
  return { text: end === text.length ? text : text.slice(0, end), lines };
}

// The clusters a step away from the one there is, as texts like 2P1D, and what each is called. Where roles follow the load
// a cluster is its number of nodes: whichever role one more begins with, it changes.
export function steps(nodes, isFollowing = false) {
  const many = (roles) => nodes.filter((node) => node.roles === roles && !node.draining).length;
  const [prefill, decode, both] = [many("prefill"), many("decode"), many("decode+prefill")];
  if (both && !prefill && !decode) return [[`${both}C`, "as it is"], [`${both + 1}C`, "one more node"], ...(both > 1 ? [[`${both - 1}C`, "one less"]] : [])];
  if (!prefill || !decode) return [];
  const rest = both ? `${both}C` : "", name = (p, d) => `${p}P${d}D${rest}`;
  if (isFollowing) {
    const less = prefill > decode ? [prefill - 1, decode] : [prefill, decode - 1];
    return [[name(prefill, decode), "as it is"], [name(prefill + 1, decode), "one more node"], ...(less[1] ? [[name(...less), "one less"]] : [])];
  }
  const found = [[name(prefill, decode), "as it is"], [name(prefill + 1, decode), "one more prefill node"], [name(prefill, decode + 1), "one more decode node"]];
  if (prefill > 1) found.push([name(prefill - 1, decode + 1), "one of prefill to decode"]);
  if (decode > 1) found.push([name(prefill + 1, decode - 1), "one of decode to prefill"]);
  return found;
}

// The share of requests within their bounds, as the service counts them: TBT is the mean of each.
const share = ({ report }) => report.served_within;
const points = (difference) => `${Number((100 * Math.abs(difference)).toPrecision(2))} points`;

// What the runs say of "would it have helped?": a sentence. Whoever is first is the cluster as it is. `was`: what was
// measured of the same requests; a difference that is smaller than the replay's own error is no answer.
export function verdict(runs, called, was = null) {
  if (runs.length < 2) return "";
  const now = runs[0], others = runs.slice(1), nameOf = ({ nodes }) => called[nodes] ?? nodes;
  const best = others.reduce((a, b) => (share(b) > share(a) ? b : a));
  const more = share(best) - share(now), name = nameOf(best);
  const error = was ? Math.abs(share({ report: was }) - share(now)) : 0;
  const one = others.filter((run) => nameOf(run).startsWith("one more"));
  if (more > 0.005 && one.length > 1) { // each role is answered by itself
    const said = (run) => { const gain = share(run) - share(now); return `${nameOf(run)}, ${gain > Math.max(0.005, error) ? "yes" : gain > 0.005 ? "perhaps" : "no"} (${run.nodes}: ${percent(share(run))} would have been served within their bounds, instead of ${percent(share(now))})`; };
    const sentence = one.map(said).join("; "), moved = others.filter((run) => !one.includes(run) && share(run) - share(now) > Math.max(0.005, error)).map((run) => `${nameOf(run)} (${run.nodes}: ${percent(share(run))})`);
    return `${sentence[0].toUpperCase()}${sentence.slice(1)}.${moved.length ? ` Without another node: ${moved.join(", ")}.` : ""}${more <= error ? ` The replay is ${points(error)} from what was measured: that is more than the difference.` : ""}`;
  }
  if (more > 0.005 && more <= error) return `Perhaps: with ${name} (${best.nodes}) the replay has ${percent(share(best))} within their bounds instead of ${percent(share(now))}, but ${points(error)} is how far it is from what was measured.`;
  if (more > 0.005) return `Yes: with ${name} (${best.nodes}) ${percent(share(best))} would have been served within their bounds, instead of ${percent(share(now))}.`;
  const sooner = now.report.ttft_s.p99 - best.report.ttft_s.p99;
  if (share(now) >= 0.995) return `No: in the replay ${percent(share(now))} are within their bounds with ${now.nodes} already${sooner > 0.1 * now.report.ttft_s.p99 && now.report.ttft_s.p99 > 0 ? `; the slowest hundredth would have had its first token ${seconds(sooner)} sooner with ${name}` : ""}.`;
  return `No: none of these clusters would have served noticeably more than the ${percent(share(now))} of ${now.nodes}.`;
}

// Seconds of those who were served; a dash where nobody was.
const ofServed = ({ completed }, value) => seconds(completed === 0 ? null : value);

// How far the replay of the cluster as it is, is from what was measured: its error.
export function errorOf(was, { report }) {
  const difference = report.served_within - was.served_within, kind = difference > 0 ? "kinder" : "harsher";
  const within = Math.abs(difference) < 0.0005 ? "the same share within bounds" : `${points(difference)} ${kind}`;
  return `How far to trust it: measured were ${percent(was.served_within)} within bounds and a TTFT p99 of ${ofServed(was, was.ttft_s.p99)}; the replay as it is says ${percent(report.served_within)} (${within}) and ${ofServed(report, report.ttft_s.p99)}.`;
}

const COLUMNS = [
  ["nodes", "2P1D: two prefill nodes and one decode node; 4C: four of both roles."], "change",
  ["within bounds", "The share of all requests that were served with TTFT and TBT within the bounds above."], ["rejected", "Refused because no node could have kept the bounds."],
  ["TTFT median", TTFT[1]], ["TTFT p99", `${TTFT[1]} ${P99[1]}`], ["TBT p99", `${TBT[1]} ${P99[1]}`],
  ["hit rate", "The share of prompt tokens whose KV was cached."], ["goodput", "Requests within bounds, a second of the traffic."], ["prefill each", "Seconds of computing that a prompt took, in the mean."],
];
const EXPLAINED = COLUMNS.filter((column) => column !== "change" && !column[0].startsWith("T"));

const reported = (nodes, change, report, about, attributes) => row([element("b", {}, nodes), change, element("td", {}, bar([[report.served_within, "held"]]), ` ${percent(report.served_within)}`), count(report.rejected), ...[report.ttft_s.p50, report.ttft_s.p99, report.mean_tbt_s.p99].map((value) => ofServed(report, value)),
  percent(report.completed === 0 ? null : report.hit_rate_tokens), `${count((report.served_within * about.requests) / Math.max(1, about.span_s))}/s`, ofServed(report, report.prefill_gpu_s_per_request)], attributes);

function outcome(which, called = {}, slow = "") {
  const answer = results[which];
  if (working[which]) return [element("p", { class: "sentence", role: "status" }, "It runs beside the conductor, at the lowest priority: a moment…")];
  if (!answer) return [];
  if (answer.problem) return [element("p", { class: "late", role: "alert" }, answer.problem)];
  const { runs, measured: was } = answer, about = runs[0].trace;
  return [
    element("p", { class: "sentence", role: "status" }, verdict(runs, called, was) || `${percent(share(runs[0]))} would have been served within their bounds.`),
    was ? element("p", { class: "note" }, errorOf(was, runs[0])) : null,
    was && slow ? element("p", { class: "note" }, `${slow} The replay has ${Object.keys(runs[0].slow_nodes).length ? "it as slow" : "all nodes as fast as their profile says"}.`) : null,
    element("p", { class: "note" }, `${counted(about.requests, "request")} over ${seconds(about.span_s)}, blocks of ${about.block_size} tokens.`, was?.failed ? ` ${count(was.failed)} of them failed, or their clients left.` : ""),
    table(was ? "What was, and what would have been" : "In virtual time", COLUMNS, [
      ...(was ? [reported("measured", "what really was", was, about, { "data-key": "measured", class: "chosen" })] : []),
      ...runs.map(({ nodes, report }) => reported(nodes, `${called[nodes] ?? ""}${was ? `${called[nodes] ? ", " : ""}replayed` : ""}`, report, about, { "data-key": nodes }))]),
    words("What the columns mean", [...EXPLAINED, TTFT, TBT, P99]),
    ...runs.filter(({ html }) => html).map(({ nodes, html }) => element("details", { "data-key": `report ${nodes}`, open: runs.length === 1 }, element("summary", {}, `Charts of ${nodes}`),
      element("p", {}, element("a", { href: URL.createObjectURL(new Blob([html], { type: "text/html" })), download: `replay-${nodes}.html` }, "Save the report as a page")),
      element("div", { class: "report" }, figures(html)))),
  ];
}

// The figures of a report's page: elements and attributes that draw, and nothing else of it.
function figures(html) {
  const copy = (from) => {
    if (from.nodeType === 3) return document.createTextNode(from.data);
    if (from.nodeType !== 1 || !from.matches(DRAWN)) return null;
    const made = document.createElementNS(from.namespaceURI, from.localName);
    for (const { name, value } of from.attributes) if (!/^on|^style$|href/i.test(name)) made.setAttribute(name, value);
    made.append(...[...from.childNodes].map(copy).filter(Boolean));
    return made;
  };
  return [...new DOMParser().parseFromString(html, "text/html").querySelectorAll("figure")].map(copy);
}

const field = (id, words, value, attributes = {}) => element("label", { for: id }, words, element("input", { id, value: value ?? "", ...attributes }));
const bounds = (answer) => [field("ttft", "TTFT bound, s", answer.bounds.ttft_s, { type: "number", min: 0, step: "any", placeholder: "none" }), field("tbt", "TBT bound, s", answer.bounds.tbt_s, { type: "number", min: 0, step: "any", placeholder: "none" })];

async function run(which, trace, view, again) {
  const at = (id) => Number(view.querySelector(`#${id}`).value) || null;
  const nodes = view.querySelector("#nodes").value.split(/[\s,]+/).filter(Boolean).slice(0, 5);
  working[which] = true;
  again();
  try {
    results[which] = await ask("v1/replay", { trace, nodes, ttft_s: at("ttft"), tbt_s: at("tbt") }, TIMEOUT_MS);
  } catch (error) {
    results[which] = { problem: error.message };
  } finally {
    working[which] = false;
    again();
  }
}

function sized({ answer, nodes }) {
  const found = steps(nodes, answer.roles_follow);
  return found.length ? found : [["1P1D", "as it is"], ["2P1D", "one more prefill node"], ["1P2D", "one more decode node"]];
}

export const replay = {
  title: "Replay", isStill: true,
  load: now,
  draw({ answer, nodes }) {
    return [
      element("h2", { tabindex: -1 }, "Replay a trace"),
      element("p", {}, "Drop a trace and see, in virtual time, how this conductor's scheduler would serve it with nodes of your choice. The same as ", element("code", {}, "conductor replay TRACE --html"), "."),
      element("form", { id: "ask", "data-kept": true, "data-key": "ask" },
        element("label", { class: "drop", for: "file", id: "drop" }, element("span", { id: "named" }, dropped ? dropped.name : "Drop a trace here, or choose a file: JSON Lines or CSV, plain or .gz"), element("input", { id: "file", type: "file", accept: ".jsonl,.json,.csv,.gz" })),
        element("div", { class: "row" }, field("nodes", "Clusters, up to five: 2P1D is 2 prefill, 1 decode", sized({ answer, nodes })[0][0], { placeholder: "2P2D 3P1D", size: 16 }), bounds(answer), element("button", {}, "Replay"))),
      ...outcome("replay"),
      results.replay || working.replay ? null : element("p", { class: "empty" }, "A trace has a row for each request: ", element("code", {}, '{"timestamp": 0, "input_length": 2236, "output_length": 225, "hash_ids": [0, 1, 2, 3, 4]}'), ": the milliseconds when it came, the tokens of its prompt and of its answer, and a number for each block of the prompt, which two prompts share where their beginnings are alike. A decision log of a conductor is one too."),
    ].filter(Boolean);
  },
  bind(view, go, again, reload, { answer: { max_body_bytes: most } }) {
    const take = async (file) => {
      if (!file) return;
      const named = view.querySelector("#named");
      if (file.size > MAX_FILE_BYTES) { named.textContent = `${file.name} is larger than 64 MB: conductor replay takes it`; return; }
      const stream = file.name.endsWith(".gz") ? file.stream().pipeThrough(new DecompressionStream("gzip")) : file.stream();
      const whole = await new Response(stream).text(), { text, lines } = fitting(whole, most - MARGIN_BYTES);
      dropped = lines ? { name: file.name, text } : null;
      named.textContent = text === whole ? `${file.name}: ${counted(lines, "line")}` : lines ? `${file.name}: its first ${counted(lines, "line")}, as many as one call may have (server.max_body_mib). conductor replay takes all` : `${file.name}: its first line is longer than a call may be. conductor replay takes it`;
    };
    const drop = view.querySelector("#drop");
    view.querySelector("#file").addEventListener("change", (event) => take(event.target.files[0]));
    drop.addEventListener("dragover", (event) => { event.preventDefault(); drop.classList.add("over"); });
    drop.addEventListener("dragleave", () => drop.classList.remove("over"));
    drop.addEventListener("drop", (event) => { event.preventDefault(); drop.classList.remove("over"); take(event.dataTransfer.files[0]); });
    view.querySelector("#ask").addEventListener("submit", (event) => {
      event.preventDefault();
      if (dropped) run("replay", dropped.text, view, again);
      else { results.replay = { problem: "Choose a trace first." }; again(); }
    });
  },
};

export const whatif = {
  title: "What if", isStill: true,
  load: now,
  draw({ answer, nodes }) {
    const found = sized({ answer, nodes }), called = Object.fromEntries(found);
    return [
      element("h2", { tabindex: -1 }, "What if"),
      element("p", {}, "The traffic of the last hour, replayed in virtual time on the nodes that you have and on others: would one more have helped? The first row is what really was.", answer.roles_follow ? " Roles follow the load, in replay too: 2P1D says how three nodes begin." : ""),
      element("form", { id: "ask", "data-kept": true, "data-key": "ask" },
        element("div", { class: "row" }, field("nodes", "Clusters, the present one first", found.map(([name]) => name).join(" "), { size: 34 }), bounds(answer), element("button", {}, "Replay the last hour"))),
      ...outcome("whatif", called, slower(nodes)),
      results.whatif || working.whatif ? null : empty("Press the button: it takes some seconds, beside the conductor. 2P1D is two prefill nodes and one decode node, 4C four of both roles."),
    ].filter(Boolean);
  },
  bind(view, go, again) {
    view.querySelector("#ask").addEventListener("submit", (event) => { event.preventDefault(); run("whatif", "", view, again); });
  },
};
