// The cluster as a picture: nodes by role and host, what they hold and do, KV flowing between them, now or at a moment of
// the last hour or day; which node was fullest when; and one node's hour.
//
// Up to CARDS nodes are cards, up to COLUMN of a role one below the other, so that KV flows beside them; more are small
// squares, grouped. Either way each is a link. The flows are curves from node to node, drawn above the picture and spoken
// of in the table below it (`flows.js`).

import { age, bar, bytes, chart, clock, count, counted, element, empty, known, KV, momentAt, morph, percent, row, seconds, table, TBT, TTFT, words } from "./draw.js";
import { columns as unpacked, page, seldom } from "./data.js";
import { flow, flowing } from "./flows.js";

const CARDS = 24, COLUMN = 6, TABLED = 24, TIGHT = 0.6, NOTABLE = 0.01, SLOWER = 1.5, MINUTE_S = 60, AT_ONCE = 60;
const GROUPS = [["prefill", "Prefill"], ["decode+prefill", "Both roles"], ["decode", "Decode"], ["", "Storage"]];
const BUDGETS = { queue: "queue", step: "step", kv: "KV blocks" };
const OF_ROLE = { prefill: ["queue"], decode: ["step", "kv"] };
const TERMS = [
  ["budget", "What a node may use up until requests are rejected. Queue: seconds of prompts, of what the bound on TTFT leaves beside the computing. Step: how far its decode step has grown from that of one request to the longest that the bound on TBT admits. KV: its blocks. The bottleneck is the fullest from 60 % on, and where requests are rejected the fullest of the role that they lacked."],
  ["prefill, decode", "Prefill nodes compute prompts, decode nodes the tokens of answers after the first, step by step for all requests at once. Where roles follow the load (scheduler.roles, the default) they are what a node prefers: it does the other's work too where that is better, and changes."],
  ["queue", "Predicted seconds of prompts before one that came now: those that a prefill node has, and its part of those that wait at the conductor to be placed."],
  ["step", "Predicted seconds of a decode node's next step: one more token for each request there."],
  ["pace", "How many times what its profile says a node's work takes, as measured lately: 1 is as expected, 3 three times slower."],
  ["last step", "Rows: requests that got one more token in it. Tokens: of prompts that were computed in it, of as many as one step may have."],
  ["held, cached", "KV blocks of requests in progress; and blocks kept in case that a prompt begins alike."],
  TTFT, TBT, KV,
];

export const title = "Cluster";

const named = ({ columns, nodes }) => nodes.map((values) => Object.fromEntries(columns.map((name, at) => [name, values[at]])));

export async function now() {
  const answer = await page("now");
  return { answer, nodes: named(answer) };
}

// A node as its history has it: its roles are those that it had a queue or a step in.
const asThen = (node) => ({ ...node, host: node.host ?? "left since", roles: [node.step_s !== null && "decode", node.queue_s !== null && "prefill"].filter(Boolean).join("+") });

export async function load([when = "", at = "", ofAt = ""] = []) {
  const isPast = when === "at", span = (isPast ? ofAt : when) === "day" ? "day" : "hour";
  const [{ answer, nodes }, fullest] = await Promise.all([
    isPast ? page(`at.${at}`).then((answer) => ({ answer, nodes: named(answer).map(asThen) })) : now(),
    seldom(span === "day" ? "fullest-day" : "fullest"),
  ]);
  return { answer, nodes, span, fullest: { ...fullest, ...unpacked(fullest) }, atS: isPast ? answer.moment_s : null, isStill: isPast };
}

// The share of a node's KV blocks that requests hold; null: it is not known.
const held = (node) => node.kv_held ?? (node.blocks && node.held !== null ? node.held / node.blocks : null);

// The share of each budget that a node has used up, as `serving/budgets.py` has it: {name, share, fact}, the fullest first.
export function budgets(node, limits) {
  const found = [], { queue_s: queueS, step_least_s: leastS, step_s: stepS } = limits;
  if (known(node.queue_s) && known(queueS)) found.push({ name: "queue", share: node.queue_s / queueS, fact: `, ${seconds(node.queue_s)} of ${seconds(queueS)}` });
  if (known(node.step_s) && known(stepS)) found.push({ name: "step", share: Math.max(0, node.step_s - leastS) / (stepS - leastS), fact: `, ${seconds(node.step_s)} where ${seconds(leastS)} is the least and ${seconds(stepS)} the most` });
  if (held(node) !== null) found.push({ name: "kv", share: held(node), fact: node.blocks ? `, ${count(node.held)} of ${count(node.blocks)}` : "" });
  return found.sort((a, b) => b.share - a.share);
}

// What the requests lacked that were rejected in the rows from one moment to another, {came, prefill, decode, speed}; and
// of the role that they lacked the node that was fullest in these rows, {node, budget, share}, in their mean.
export function lacked(fullest, fromS, untilS) {
  const rows = [...fullest.nodes.keys()].filter((at) => { const atS = (fullest.first + at) * fullest.step_s; return fullest.came[at] >= 0 && atS >= fromS && atS < untilS; });
  const found = Object.fromEntries(["came", "prefill", "decode", "speed"].map((name) => [name, rows.reduce((sum, at) => sum + fullest[name][at], 0)]));
  const meant = OF_ROLE[short(found)] ?? [], sums = new Map();
  for (const at of rows) {
    const budget = fullest.budgets[fullest.budget[at]], key = `${fullest.nodes[at]} ${budget}`, [sum, many] = sums.get(key) ?? [0, 0];
    if (meant.includes(budget)) sums.set(key, [sum + fullest.share[at], many + 1, { node: fullest.nodes[at], budget }]);
  }
  const [sum, many, most] = [...sums.values()].sort((a, b) => b[0] - a[0])[0] ?? [];
  return { ...found, fullest: most ? { ...most, share: sum / many } : null };
}

// The role that rejected requests lacked; empty: hardly any did.
const short = ({ came, prefill, decode }) => (Math.max(prefill, decode) < Math.max(1, NOTABLE * came) ? "" : prefill >= decode ? "prefill" : "decode");
const WHY = {
  prefill: "because no node could have had their first token ready in time",
  decode: "because no decode node could have taken them within the bound on TBT, or had room",
  speed: "that not even an idle node would have served in time: more nodes would not help them, a faster one or a longer bound would",
};

// One sentence on where the cluster is fullest, or was at a moment; and on who was rejected in the minute, and why.
export function bottleneck(nodes, limits, atS = null, lack = null, period = "minute") {
  const role = lack ? short(lack) : "", meant = OF_ROLE[role];
  const known = nodes.map((node) => [node, budgets(node, limits).find(({ name }) => !meant || meant.includes(name))]).filter(([, budget]) => budget);
  const said = (name) => `${percent(lack[name] / lack.came)} of the requests of ${atS === null ? `the last ${period}` : `that ${period}`} were rejected`;
  const refused = [role && ` ${said(role)}, ${WHY[role]}.`, lack && lack.speed >= Math.max(1, NOTABLE * lack.came) && ` ${said("speed")} ${WHY.speed}.`].filter(Boolean).join("");
  if (!known.length) return refused.trim();
  const [node, most] = known.reduce((a, b) => (b[1].share > a[1].share ? b : a));
  const much = `${percent(most.share)} of its ${BUDGETS[most.name]}${most.fact}.`, [is, then] = atS === null ? ["is", ""] : ["was", ` at ${clock(atS, false, true)}`];
  if (role && lack.fullest) return `The bottleneck${then || " now"} ${is} ${role}.${refused} The fullest of that time: ${lack.fullest.node}, ${percent(lack.fullest.share)} of its ${BUDGETS[lack.fullest.budget]} in the mean.`;
  if (role) return `The bottleneck${then || " now"} ${is} ${role}.${refused} The fullest ${is} ${node.id}: ${much}`;
  if (most.share < TIGHT) return `Nothing ${is} tight${then}: the fullest ${is} ${node.id}, ${much}${refused}`;
  return `The bottleneck${then || " now"} ${is} ${node.id}: ${much}${refused}`;
}

// One sentence on the nodes whose work takes much longer than that of others of their role; empty: there are none.
export function slower(nodes) {
  const found = groups(nodes).flatMap(({ members }) => {
    const paces = members.map(({ pace }) => pace).filter(known).sort((a, b) => a - b), usual = paces[Math.floor((paces.length - 1) / 2)];
    return members.filter(({ pace }) => paces.length > 1 && pace > SLOWER * usual).map(({ id, pace }) => `${id} takes ${paced(pace)} what its profile says, where ${paced(usual)} is usual`);
  });
  return found.length ? `Slower than the others of its role: ${found.slice(0, 4).join("; ")}${found.length > 4 ? `; and ${found.length - 4} more` : ""}. It gets less work for it.` : "";
}
const paced = (pace) => (known(pace) ? `${pace.toFixed(pace < 9.95 ? 1 : 0)} times` : "–");

// Which nodes were the fullest at `TIGHT` or more, or when requests were rejected for want of their role: {node, budget,
// seconds, beyond, worst, rejected, atS}; first those that were far beyond it for long, not those that touched it often.
export function bottlenecks(fullest) {
  const { nodes, budgets: names, budget, share, first, step_s: stepS } = fullest, found = new Map();
  nodes.forEach((node, at) => {
    const lack = { came: fullest.came[at], prefill: fullest.prefill[at], decode: fullest.decode[at] }, role = short(lack);
    if (!(share[at] >= TIGHT) && !(role && share[at] >= 0)) return;
    const name = names[budget[at]], key = `${node} ${name}`;
    const one = found.get(key) ?? { node, budget: name, seconds: 0, beyond: 0, worst: 0, rejected: 0, atS: 0 };
    const rejected = role && OF_ROLE[role].includes(name) ? lack[role] : 0;
    one.seconds += stepS;
    one.beyond += stepS * (Math.max(0, share[at] - TIGHT) + (rejected ? rejected / lack.came : 0));
    one.rejected += rejected;
    if (share[at] > one.worst) Object.assign(one, { worst: share[at], atS: (first + at) * stepS });
    found.set(key, one);
  });
  return [...found.values()].sort((a, b) => b.beyond - a.beyond);
}

// What the last step of a node was made of.
export function made(node) {
  if (!node.step_budget) return "";
  if (!node.step_rows && !node.step_prompt_tokens) return "no step now";
  return `${counted(node.step_rows, "row")} + ${count(node.step_prompt_tokens)} of ${counted(node.step_budget, "token")}`;
}

function fullestOf(nodes, limits, many) {
  const shares = new Map(nodes.map((node) => [node, budgets(node, limits)[0]?.share ?? 0]));
  return [...nodes].sort((a, b) => shares.get(b) - shares.get(a)).slice(0, many);
}

export function groups(nodes) {
  return GROUPS.map(([role, name]) => {
    const members = nodes.filter((node) => node.roles === role), hosts = new Map();
    for (const node of members) hosts.set(node.host, [...(hosts.get(node.host) ?? []), node]);
    return { name, members, hosts: [...hosts] };
  }).filter(({ members }) => members.length);
}

const level = (node, limits) => {
  const share = budgets(node, limits)[0]?.share ?? 0;
  return node.draining ? "draining" : share >= 0.9 ? "full" : share >= 0.6 ? "busy" : share >= 0.3 ? "some" : "calm";
};
const LEVELS = [["calm", "under 30 %"], ["some", "30 to 60 %"], ["busy", "60 to 90 %"], ["full", "90 % and more of a budget"], ["draining", "draining"]];

function spoken(node, limits) {
  const parts = [`${count(node.running)} running`, made(node) && `last step ${made(node)}`, node.queued_tokens !== undefined && `${counted(node.queued_tokens, "prompt token")} queued`];
  if (node.queue_s !== null) parts.push(`queue ${seconds(node.queue_s)}`);
  if (node.step_s !== null) parts.push(`step ${seconds(node.step_s)}`);
  return `${node.id} on ${node.host}: ${parts.filter(Boolean).join(", ")}, KV held ${percent(held(node))}${node.draining ? ", draining" : ""}${level(node, limits) === "full" ? ", full" : ""}`;
}

function card(node, limits, first) {
  const href = `#/node/${encodeURIComponent(node.id)}`, tab = first ? 0 : -1;
  const tight = budgets(node, limits)[0], cached = node.blocks && known(node.cached) ? `, cached ${percent(Math.max(0, node.cached - node.held) / node.blocks)}` : "";
  return element("a", { href, class: `node card ${level(node, limits)}`, "data-key": node.id, "data-node": node.id, tabindex: tab },
    element("b", {}, node.id),
    element("span", { class: "what" }, node.queue_s === null ? "" : `queue ${seconds(node.queue_s)}${node.queued_tokens === undefined ? "" : `, ${counted(node.queued_tokens, "token")}`}`),
    element("span", { class: "what" }, node.step_s !== null ? `${count(node.running)} running, step ${seconds(node.step_s)}` : node.roles ? `${count(node.running)} running` : "keeps blocks"),
    element("span", { class: "what" }, made(node)),
    element("span", { class: "what" }, held(node) === null ? "" : `KV held ${percent(held(node))}${cached}`),
    tight ? bar([[tight.share, level(node, limits)]]) : null,
    element("span", { class: "what small" }, node.draining ? "draining" : tight ? `tightest: ${BUDGETS[tight.name]}, ${percent(tight.share)}` : `${count(node.held)} of ${counted(node.blocks, "block")}`));
}

function square(node, limits, first) {
  const words = spoken(node, limits);
  return element("a", { href: `#/node/${encodeURIComponent(node.id)}`, class: `node square ${level(node, limits)}`, "data-key": node.id, "data-node": node.id,
    tabindex: first ? 0 : -1, "aria-label": words, title: words });
}

// The fullest budget over time, a moment of it to choose, and who it was.
function moments({ fullest, span, atS }) {
  const [fromS, untilS] = [fullest.first, fullest.next].map((row) => row * fullest.step_s), of = span === "day" ? "/day" : "";
  const spans = element("div", { class: "choice", role: "group", "aria-label": "Moments of" },
    [["hour", "Hour"], ["day", "Day"]].map(([name, words]) => element("a", { href: `#/cluster${atS === null ? "" : `/at/${atS}`}${name === "day" ? "/day" : ""}`, "aria-current": name === span ? "true" : null }, words)),
    atS === null ? null : element("a", { href: `#/cluster${of}` }, "Back to now"));
  if (fullest.nodes.length < 2) return [spans, empty("A moment to look back at comes within ten seconds, and of the day within ten minutes.")];
  const at = atS === null ? fullest.nodes.length - 1 : Math.floor(atS / fullest.step_s) - fullest.first;
  const who = fullest.nodes[at] && fullest.share[at] >= 0 ? `${percent(fullest.share[at])} of ${BUDGETS[fullest.budgets[fullest.budget[at]]]}, ${fullest.nodes[at]}` : "nothing recorded";
  const when = atS === null ? "now" : clock(atS, span === "day", true);
  return [
    spans,
    element("div", { class: "strip" },
      chart({ title: "The fullest budget of all nodes", means: TERMS[0][1], unit: "share", lines: [{ label: "fullest", column: fullest.share, how: "max" }], fromS, stepS: fullest.step_s, withDate: span === "day", atS }),
      element("label", { for: "moment", class: "moment" }, `Moment: ${when}`,
        element("input", { type: "range", id: "moment", min: fromS, max: untilS, step: fullest.step_s, "aria-valuetext": `${when}: ${who}` }))),
  ];
}

function ofTheSpan({ fullest, span }) {
  const found = bottlenecks(fullest), last = span === "day" ? "day" : "hour";
  if (!found.length) return empty(`No node was the fullest at ${percent(TIGHT)} or more of a budget in the last ${last}.`);
  return table(`Bottlenecks of the last ${last}, the worst first`, ["node", ["budget", TERMS[0][1]], ["how long", "The time in which it was the fullest of all, at 60 % or more, or requests were rejected for want of its role."], "worst", ["rejected", "Requests that were rejected in that time for want of its role."], "worst at"],
    found.slice(0, TABLED).map((each) => row([link(each.node), BUDGETS[each.budget], age(each.seconds), percent(each.worst), each.rejected ? count(each.rejected) : "–",
      element("a", { href: `#/cluster/at/${each.atS}${span === "day" ? "/day" : ""}` }, clock(each.atS, span === "day", true))], { "data-key": `${each.node} ${each.budget}` })));
}

export const link = (id) => element("a", { href: `#/node/${encodeURIComponent(id)}` }, id);

function inTheMove({ answer }) {
  const flows = flowing(answer.links);
  return element("div", { class: "pair" },
    flows.length ? table("KV on its way", ["from", "to", ["rate", "Bytes of KV a second, of the last ten seconds or so."]], flows.map(([from, to, rate]) => row([from, to, `${bytes(rate)}/s`], { "data-key": `${from} ${to}` }))) : empty("No KV moves between nodes just now."),
    answer.prefixes.length ? table("Hot prefixes", [["last block", "Beginnings of prompts that many requests share, by the name of their last block."], "blocks", "requests", ["copies", "Nodes that have it in their cache."]], answer.prefixes.map(([name, depth, rate, copies, holders]) => row([element("code", {}, name), depth, `${count(60 * rate)}/min`, element("td", {}, `${copies}${copies ? ": " : ""}`, holders.flatMap((id, at) => [at ? ", " : "", link(id)]), copies > holders.length ? " …" : "")], { "data-key": name }))) : empty("No prefix was matched lately: a second turn of a chat has one."));
}

const COLUMNS = ["node", "host", "roles", ["queue", TERMS[2][1]], ["step", TERMS[3][1]], "running"];
const NOW = [["pace", TERMS[4][1]], ["last step", TERMS[5][1]], ["queued tokens", "Prompt tokens that wait on it to be computed."], ["context tokens", "Tokens of all requests there, whose KV each step reads."]];

function tabled({ answer, nodes, atS }) {
  const isNow = atS === null;
  return table(nodes.length > CARDS ? `The ${TABLED} nodes with the fullest budgets` : "Nodes, the fullest first",
    [...COLUMNS, ...(isNow ? NOW : []), "KV held", ["tightest", TERMS[0][1]], ...(isNow ? ["heard"] : [])],
    fullestOf(nodes, answer.limits, TABLED).map((node) => { const tight = budgets(node, answer.limits)[0];
      return row([link(node.id), node.host, node.roles || "storage", seconds(node.queue_s), seconds(node.step_s), count(node.running), ...(isNow ? [known(node.pace) ? node.pace.toFixed(1) : "–", made(node) || "–", count(node.queued_tokens), count(node.context_tokens)] : []),
        isNow ? `${percent(held(node))} of ${count(node.blocks)}` : percent(held(node)), element("td", {}, tight ? bar([[tight.share, level(node, answer.limits)]]) : "", tight ? ` ${percent(tight.share)}` : "–"),
        ...(isNow ? [node.silent_s === null ? "not yet" : `${age(node.silent_s)} ago`] : [])], { "data-key": node.id }); }));
}

// What a refresh puts into its place frame by frame, so that none is late: the first of each is where, its attributes, and
// what is there.
const PARTS = [["groups", { class: "groups" }, pictured], ["span", {}, (found) => [ofTheSpan(found)]], ["moving", {}, (found) => (found.atS === null ? [inTheMove(found)] : [])], ["nodes", {}, (found) => (found.nodes.length ? [tabled(found)] : [])]];
const holder = (name) => element("div", { ...PARTS.find(([each]) => each === name)[1], "data-part": name, "data-key": name, "data-kept": true });

function pictured({ answer: { limits }, nodes }) {
  const isSmall = nodes.length > CARDS, shape = isSmall ? square : card;
  let first = true;
  const one = (node) => { const made = shape(node, limits, first); first = false; return made; };
  return groups(nodes).map(({ name, members, hosts }) => element("section", { class: "group", "data-key": name, "aria-label": `${name}, ${members.length} nodes` },
    element("h3", {}, `${name} `, element("small", {}, members.length)),
    hosts.map(([host, there]) => element("div", { class: "host", "data-key": host }, element("p", { class: "note" }, host, there.length > 1 ? ` · ${there.length}` : ""), element("div", { class: isSmall ? "squares" : members.length > COLUMN ? "cards" : "cards column" }, there.map(one))))));
}

export function draw(found) {
  const { answer, nodes, atS } = found, { bounds, limits } = answer, heading = element("h2", { tabindex: -1 }, "Cluster");
  if (!nodes.length && atS === null) return [heading, empty("No node is attached. ", element("code", {}, "conductor up"), " starts some; ", element("code", {}, "conductor doctor"), " says why one does not come."), ...(found.fullest.nodes.length ? moments(found) : [])];
  const stepS = found.fullest.step_s, period = Math.max(MINUTE_S, stepS), untilS = atS === null ? found.fullest.next * stepS : Math.floor(atS / stepS + 1) * stepS;
  const lack = lacked(found.fullest, untilS - period, untilS), slow = atS === null ? slower(nodes) : "";
  return [
    heading,
    element("p", { class: "sentence", role: atS === null ? null : "status" }, nodes.length ? bottleneck(nodes, limits, atS, lack, period === MINUTE_S ? "minute" : "five minutes") : `Nothing is recorded of ${clock(atS, true, true)}: the conductor keeps a day, since its start.`),
    slow ? element("p", { class: "sentence" }, slow) : null,
    bounds.ttft_s || bounds.tbt_s ? null : element("p", { class: "note" }, "Without slo.ttft_s and slo.tbt_s in cluster.yaml only KV has a budget."),
    ...moments(found),
    element("div", { class: "picture", id: "picture" }, holder("groups"), element("svg:svg", { id: "flows", "aria-hidden": "true", "data-kept": true, "data-key": "flows" }), element("div", { id: "dots", "aria-hidden": "true", "data-kept": true, "data-key": "dots" })),
    element("ul", { class: "legend levels" }, LEVELS.map(([name, words]) => element("li", { class: name }, words))),
    element("p", { class: "note" }, atS === null ? "Arrow keys go from node to node, Enter opens one. Dots run as KV does." : "As it was recorded then. How KV flowed, and what steps were made of, is not kept."),
    ...["span", "moving", "nodes"].map(holder),
    words("What the words mean", TERMS),
  ].filter(Boolean);
}

// The squares that are shown already, drawn anew a few at each frame: {done}, or null where other nodes are there now.
function redrawn(host, { answer: { limits }, nodes }) {
  const shown = [...host.querySelectorAll(".square")], wanted = groups(nodes).flatMap(({ hosts }) => hosts.flatMap(([, there]) => there));
  if (nodes.length <= CARDS || shown.length !== wanted.length || shown.some(({ dataset }, at) => dataset.node !== wanted[at].id)) return null;
  if (host.querySelectorAll(".host").length !== new Set(wanted.map(({ roles, host: name }) => `${roles} ${name}`)).size) return null;
  const turns = [];
  for (let from = 0; from < shown.length; from += AT_ONCE) turns.push(() => {
    for (let at = from; at < Math.min(shown.length, from + AT_ONCE); at += 1) {
      const words = spoken(wanted[at], limits), kind = `node square ${level(wanted[at], limits)}`;
      if (shown[at].className !== kind) shown[at].className = kind;
      if (shown[at].title !== words) { shown[at].title = words; shown[at].setAttribute("aria-label", words); }
    }
  });
  return turns;
}

let turns = []; // what is left of the latest refresh

// Put the parts into their places: at once where they are empty or the view stands still, else one after the other.
function fill(view, found) {
  const places = PARTS.map(([name, , make]) => [view.querySelector(`[data-part=${name}]`), make]);
  const isNew = places.some(([host]) => host && !host.hasChildNodes() && host.dataset.part === "groups");
  const due = places.flatMap(([host, make]) => (!host ? [] : (host.dataset.part === "groups" && redrawn(host, found)) || [() => morph(host, make(found).filter(Boolean))]));
  const isRunning = turns.length > 0;
  turns = due;
  if (isNew || found.isStill) { for (const each of turns.splice(0)) each(); return; }
  const next = () => { turns.shift()?.(); if (turns.length) requestAnimationFrame(next); };
  if (!isRunning) requestAnimationFrame(next);
}

// After the elements are there: the flows, from where the nodes are, and the slider's place.
export function settle(view, found) {
  const { answer, atS, fullest } = found;
  fill(view, found);
  flow(view, answer.links ?? []);
  const slider = view.querySelector("#moment");
  if (slider && view.ownerDocument.activeElement !== slider) slider.value = atS ?? fullest.next * fullest.step_s;
}

// Arrow keys among the nodes: one of them is in the order of Tab. And the moment that is chosen: by the slider, which
// keeps the focus, or by a click on the line above it.
export function bind(view, go, again, reload) {
  let due = 0;
  const choose = (atS) => {
    const slider = view.querySelector("#moment"), of = location.hash.endsWith("/day") ? "/day" : "";
    history.replaceState(null, "", atS >= Number(slider.max) ? `#/cluster${of}` : `#/cluster/at/${atS}${of}`);
    clearTimeout(due);
    due = setTimeout(reload, 60);
  };
  view.addEventListener("input", (event) => { if (event.target.id === "moment") choose(Number(event.target.value)); });
  view.addEventListener("click", (event) => { const atS = momentAt(event); if (atS !== null) choose(atS); });
  view.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const node = event.target.closest?.("[data-node]");
    if (!node || !step) return;
    event.preventDefault();
    const all = [...view.querySelectorAll("[data-node]")], next = all[(all.indexOf(node) + step + all.length) % all.length];
    for (const each of all) each.tabIndex = each === next ? 0 : -1;
    next.focus();
  });
}

export const node = {
  title: "Node",
  async load([id = "", span = "hour"]) {
    const current = await now();
    const answer = await page(`${span === "day" ? "node-day" : "node"}.${id}`).catch((error) => { if (error.status === 404) return null; throw error; });
    return { id, span, answer, now: current, node: current.nodes.find((each) => each.id === id) };
  },
  draw({ id, span, answer, now, node: found }) {
    const heading = [element("p", { class: "note" }, element("a", { href: "#/cluster" }, "Cluster"), ` › ${found?.roles || "node"}`), element("h2", { tabindex: -1 }, "Node ", element("code", {}, id))];
    if (!found && !answer) return [...heading, empty("No such node is or was attached.")];
    const facts = found ? [["host", found.host], ["roles", found.roles || "storage"], ["running", count(found.running)], ["prompt tokens queued", count(found.queued_tokens)],
      ["queue", seconds(found.queue_s)], ["step", seconds(found.step_s)], ["KV held", `${count(found.held)} of ${count(found.blocks)}`], ["cached", count(found.cached)], ["pace", paced(found.pace)]] : [];
    const shown = answer ? unpacked(answer) : null, from = answer ? answer.first * answer.step_s : 0;
    const line = (label, name, how = "mean") => ({ label, column: shown[name], how });
    const flows = now.answer.links.filter(([a, b]) => a === id || b === id);
    return [...heading,
      found ? element("p", { class: "sentence" }, budgets(found, now.answer.limits).map(({ name, share }) => `${percent(share)} of its ${BUDGETS[name]}`).join(", ") || "It has no budget", ".", made(found) ? ` Its last step: ${made(found)} of prompts.` : "") : empty("It has left; this is what it did."),
      element("dl", { class: "numbers" }, facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)))),
      element("div", { class: "choice", role: "group", "aria-label": "How long" }, [["hour", "Hour"], ["day", "Day"]].map(([name, words]) => element("a", { href: `#/node/${encodeURIComponent(id)}/${name}`, "aria-current": name === span ? "true" : null }, words))),
      shown ? element("div", { class: "charts" }, [
        { title: "Queue of prompts", means: TERMS[2][1], unit: "s", lines: [line("predicted", "queue_s", "max")], bound: now.answer.bounds.ttft_s },
        { title: "Decode step", unit: "s", lines: [line("predicted", "step_s", "max")], bound: now.answer.bounds.tbt_s },
        { title: "KV blocks held", unit: "share", lines: [line("held", "kv_held")] },
        { title: "Sequences running", unit: "count", lines: [line("running", "running", "max")] },
      ].filter(({ lines }) => lines.some(({ column }) => !column.every(Number.isNaN))).map((each) => chart({ ...each, fromS: from, stepS: answer.step_s, withDate: span === "day" }))) : empty("Its first row comes within ten seconds."),
      flows.length ? table("KV to and from it", ["from", "to", "rate"], flows.map(([a, b, rate]) => row([link(a), link(b), `${bytes(rate)}/s`]))) : empty("No KV moves to or from it just now."),
      words("What the words mean", TERMS),
    ];
  },
};
