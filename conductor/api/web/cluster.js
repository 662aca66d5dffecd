// The cluster as a picture: nodes by role and host, what they hold and do, KV flowing between them; and one node's hour.
//
// Up to CARDS nodes are cards, more are small squares, grouped; either way each is a link. The flows are curves from
// card to card that run in the direction of the bytes, drawn above the picture and spoken of in the table below it.

import { age, bar, bytes, chart, count, element, empty, percent, row, seconds, table } from "./draw.js";
import { columns as unpacked, page } from "./data.js";

const CARDS = 24, FLOWS = 24, TABLED = 24;
const GROUPS = [["prefill", "Prefill"], ["decode+prefill", "Both roles"], ["decode", "Decode"], ["", "Storage"]];

export const title = "Cluster";

export async function load() {
  const told = await page("now");
  return { told, nodes: told.nodes.map((values) => Object.fromEntries(told.columns.map((name, at) => [name, values[at]]))) };
}

// The share of each bound that a node has used up: {name, share, value, bound}, the fullest first.
export function budgets(node, bounds) {
  const found = [];
  if (node.queue_s !== null && bounds.ttft_s) found.push({ name: "TTFT bound (queue)", share: node.queue_s / bounds.ttft_s, value: node.queue_s, bound: bounds.ttft_s });
  if (node.step_s !== null && bounds.tbt_s) found.push({ name: "TBT bound (step)", share: node.step_s / bounds.tbt_s, value: node.step_s, bound: bounds.tbt_s });
  if (node.held !== null && node.blocks) found.push({ name: "KV blocks held", share: node.held / node.blocks, value: node.held, bound: node.blocks });
  return found.sort((a, b) => b.share - a.share);
}

// One sentence on where the cluster is fullest.
export function bottleneck(nodes, bounds) {
  const known = nodes.map((node) => [node, budgets(node, bounds)[0]]).filter(([, budget]) => budget);
  if (!known.length) return "";
  const [node, most] = known.reduce((a, b) => (b[1].share > a[1].share ? b : a));
  const fact = most.name.startsWith("KV") ? `${count(most.value)} of ${count(most.bound)} blocks` : `${seconds(most.value)} of ${seconds(most.bound)}`;
  if (most.share < 0.6) return `Nothing is tight: the fullest is ${node.id}, ${percent(most.share)} of its ${most.name}, ${fact}.`;
  return `The bottleneck now is ${node.id}: ${percent(most.share)} of its ${most.name}, ${fact}.`;
}

// What the last step of a node was made of.
export function made(node) {
  if (!node.step_budget) return "";
  if (!node.step_rows && !node.step_prompt_tokens) return "no step now";
  return `${count(node.step_rows)} ${node.step_rows === 1 ? "row" : "rows"} + ${count(node.step_prompt_tokens)} of ${count(node.step_budget)} tokens`;
}

const fullest = (nodes, bounds, many) => [...nodes].sort((a, b) => (budgets(b, bounds)[0]?.share ?? 0) - (budgets(a, bounds)[0]?.share ?? 0)).slice(0, many);

export function groups(nodes) {
  return GROUPS.map(([role, name]) => {
    const members = nodes.filter((node) => node.roles === role), hosts = new Map();
    for (const node of members) hosts.set(node.host, [...(hosts.get(node.host) ?? []), node]);
    return { name, members, hosts: [...hosts] };
  }).filter(({ members }) => members.length);
}

const level = (node, bounds) => {
  const share = budgets(node, bounds)[0]?.share ?? 0;
  return node.draining ? "draining" : share >= 0.9 ? "full" : share >= 0.6 ? "busy" : share >= 0.3 ? "some" : "calm";
};
const LEVELS = [["calm", "under 30 %"], ["some", "30 to 60 %"], ["busy", "60 to 90 %"], ["full", "90 % and more of a bound"], ["draining", "draining"]];

function spoken(node, bounds) {
  const parts = [`${count(node.running)} running`, made(node) && `last step ${made(node)}`, `${count(node.queued_tokens)} prompt tokens queued`];
  if (node.queue_s !== null) parts.push(`queue ${seconds(node.queue_s)}`);
  if (node.step_s !== null) parts.push(`step ${seconds(node.step_s)}`);
  return `${node.id} on ${node.host}: ${parts.filter(Boolean).join(", ")}, KV held ${percent(node.held / node.blocks)}${node.draining ? ", draining" : ""}${level(node, bounds) === "full" ? ", full" : ""}`;
}

function card(node, bounds, first) {
  const href = `#/node/${encodeURIComponent(node.id)}`, tab = first ? 0 : -1;
  const tight = budgets(node, bounds)[0];
  return element("a", { href, class: `node card ${level(node, bounds)}`, "data-key": node.id, "data-node": node.id, tabindex: tab },
    element("b", {}, node.id),
    element("span", { class: "what" }, node.queue_s !== null ? `queue ${seconds(node.queue_s)}, ${count(node.queued_tokens)} tokens` : ""),
    element("span", { class: "what" }, node.step_s !== null ? `${count(node.running)} running, step ${seconds(node.step_s)}` : node.roles ? `${count(node.running)} running` : "keeps blocks"),
    element("span", { class: "what" }, made(node)),
    bar([[node.held / node.blocks, "held"], [Math.max(0, node.cached - node.held) / node.blocks, "cached"]]),
    element("span", { class: "what small" }, node.draining ? "draining" : tight ? `tightest: ${percent(tight.share)} ${tight.name}` : `${count(node.held)} of ${count(node.blocks)} blocks`));
}

const square = (node, bounds, first) => element("a", { href: `#/node/${encodeURIComponent(node.id)}`, class: `node square ${level(node, bounds)}`, "data-key": node.id, "data-node": node.id,
  tabindex: first ? 0 : -1, "aria-label": spoken(node, bounds), title: spoken(node, bounds) });

export function draw({ told, nodes }) {
  if (!nodes.length) return [element("h2", { tabindex: -1 }, "Cluster"), empty("No node is attached. ", element("code", {}, "conductor up"), " starts some; ", element("code", {}, "conductor doctor"), " says why one does not come.")];
  const bounds = told.bounds, isSmall = nodes.length > CARDS, shape = isSmall ? square : card;
  let first = true;
  const one = (node) => { const made = shape(node, bounds, first); first = false; return made; };
  const picture = groups(nodes).map(({ name, members, hosts }) => element("section", { class: "group", "data-key": name, "aria-label": `${name}, ${members.length} nodes` },
    element("h3", {}, `${name} `, element("small", {}, members.length)),
    hosts.map(([host, there]) => element("div", { class: "host", "data-key": host }, element("p", { class: "note" }, host, there.length > 1 ? ` · ${there.length}` : ""), element("div", { class: isSmall ? "squares" : "cards" }, there.map(one))))));
  const flows = told.links.slice(0, FLOWS);
  return [
    element("h2", { tabindex: -1 }, "Cluster"),
    element("p", { class: "sentence" }, bottleneck(nodes, bounds)),
    bounds.ttft_s || bounds.tbt_s ? null : element("p", { class: "note" }, "Without slo.ttft_s and slo.tbt_s in cluster.yaml only KV has a budget."),
    element("div", { class: "picture", id: "picture" }, picture, element("svg:svg", { id: "flows", "aria-hidden": "true", "data-kept": true, "data-key": "flows" })),
    element("ul", { class: "legend levels" }, LEVELS.map(([name, words]) => element("li", { class: name }, words))),
    element("p", { class: "note" }, "Arrow keys go from node to node, Enter opens one. A card has its queue, what runs, its last step (rows that decode, and tokens of prompts of those that it may have), and its blocks: held, then cached."),
    element("div", { class: "pair" },
      flows.length ? table("KV on its way", ["from", "to", "rate"], flows.map(([from, to, rate]) => row([from, to, `${bytes(rate)}/s`], { "data-key": `${from} ${to}` }))) : empty("No KV moves between nodes just now."),
      told.prefixes.length ? table("Hot prefixes", ["last block", "blocks", "requests", "copies"], told.prefixes.map(([name, depth, rate, copies]) => row([element("code", {}, name), depth, `${count(60 * rate)}/min`, copies], { "data-key": name }))) : empty("No prefix was matched lately: a second turn of a chat has one.")),
    table(isSmall ? `The ${TABLED} nodes with the fullest budgets` : "Nodes, the fullest first", ["node", "host", "roles", "queue", "step", "running", "last step", "queued tokens", "context tokens", "KV held", "tightest", "heard"],
      fullest(nodes, bounds, TABLED).map((node) => { const tight = budgets(node, bounds)[0];
        return row([element("a", { href: `#/node/${encodeURIComponent(node.id)}` }, node.id), node.host, node.roles || "storage", seconds(node.queue_s), seconds(node.step_s), count(node.running), made(node) || "–", count(node.queued_tokens), count(node.context_tokens),
          `${percent(node.held / node.blocks)} of ${count(node.blocks)}`, element("td", {}, tight ? bar([[tight.share, level(node, bounds)]]) : "", tight ? ` ${percent(tight.share)}` : "–"), node.silent_s === null ? "not yet" : `${age(node.silent_s)} ago`], { "data-key": node.id }); })),
  ].filter(Boolean);
}

// After the elements are there: the flows, from where the nodes are.
export function settle(view, { told }) {
  const svg = view.querySelector("#flows"), picture = view.querySelector("#picture");
  if (!svg) return;
  const frame = picture.getBoundingClientRect();
  svg.setAttribute("viewBox", `0 0 ${frame.width} ${frame.height}`);
  const place = new Map([...picture.querySelectorAll("[data-node]")].map((node) => [node.dataset.node, node.getBoundingClientRect()]));
  const known = told.links.slice(0, FLOWS).filter(([from, to]) => place.has(from) && place.has(to));
  const most = Math.max(1, ...known.map(([, , rate]) => rate));
  const wanted = new Set(known.map(([from, to]) => `${from} ${to}`));
  for (const path of [...svg.children]) if (!wanted.has(path.dataset.key)) path.remove();
  for (const [from, to, rate] of known) {
    const key = `${from} ${to}`, [a, b] = [place.get(from), place.get(to)];
    const side = a.left < b.left - 4 ? [a.right, b.left] : a.left > b.left + 4 ? [a.left, b.right] : [a.right, b.right];
    const [x1, x2] = side.map((x) => x - frame.left), [y1, y2] = [a, b].map((box) => box.top + box.height / 2 - frame.top);
    const bend = side[0] === a.right && side[1] === b.right ? 40 : (x2 - x1) / 2;
    const d = `M${x1.toFixed(0)} ${y1.toFixed(0)}C${(x1 + bend).toFixed(0)} ${y1.toFixed(0)} ${(side[1] === b.right && bend === 40 ? x2 + bend : x2 - bend).toFixed(0)} ${y2.toFixed(0)} ${x2.toFixed(0)} ${y2.toFixed(0)}`;
    const path = [...svg.children].find((each) => each.dataset.key === key) ?? svg.appendChild(element("svg:path", { "data-key": key }));
    const strength = rate > 0.5 * most ? "strong" : rate > 0.1 * most ? "middling" : "weak";
    if (path.getAttribute("d") !== d) path.setAttribute("d", d);
    if (path.getAttribute("class") !== `flow ${strength}`) path.setAttribute("class", `flow ${strength}`);
  }
}

// Arrow keys among the nodes: one of them is in the order of Tab.
export function bind(view) {
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
    const now = await load();
    const told = await page(`${span === "day" ? "node-day" : "node"}.${id}`).catch((error) => { if (error.status === 404) return null; throw error; });
    return { id, span, told, now, node: now.nodes.find((each) => each.id === id) };
  },
  draw({ id, span, told, now, node: found }) {
    const heading = [element("p", { class: "note" }, element("a", { href: "#/cluster" }, "Cluster"), " ›"), element("h2", { tabindex: -1 }, "Node ", element("code", {}, id))];
    if (!found && !told) return [...heading, empty("No such node is or was attached.")];
    const facts = found ? [["host", found.host], ["roles", found.roles || "storage"], ["running", count(found.running)], ["prompt tokens queued", count(found.queued_tokens)],
      ["queue", seconds(found.queue_s)], ["step", seconds(found.step_s)], ["KV held", `${count(found.held)} of ${count(found.blocks)}`], ["cached", count(found.cached)]] : [];
    const shown = told ? unpacked(told) : null, from = told ? told.first * told.step_s : 0;
    const line = (label, name, how = "mean") => ({ label, column: shown[name], how });
    const flows = now.told.links.filter(([a, b]) => a === id || b === id);
    return [...heading,
      found ? element("p", { class: "sentence" }, budgets(found, now.told.bounds).map(({ name, share }) => `${percent(share)} of its ${name}`).join(", ") || "It has no budget", ".", made(found) ? ` Its last step: ${made(found)} of prompts.` : "") : empty("It has left; this is what it did."),
      element("dl", { class: "numbers" }, facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)))),
      element("div", { class: "choice", role: "group", "aria-label": "How long" }, [["hour", "Hour"], ["day", "Day"]].map(([name, words]) => element("a", { href: `#/node/${encodeURIComponent(id)}/${name}`, "aria-current": name === span ? "true" : null }, words))),
      shown ? element("div", { class: "charts" }, [
        { title: "Queue of prompts", unit: "s", lines: [line("predicted", "queue_s", "max")], bound: now.told.bounds.ttft_s },
        { title: "Decode step", unit: "s", lines: [line("predicted", "step_s", "max")], bound: now.told.bounds.tbt_s },
        { title: "KV blocks held", unit: "share", lines: [line("held", "kv_held")] },
        { title: "Sequences running", unit: "count", lines: [line("running", "running", "max")] },
      ].filter(({ lines }) => lines.some(({ column }) => !column.every(Number.isNaN))).map((each) => chart({ ...each, fromS: from, stepS: told.step_s, withDate: span === "day" }))) : empty("Its first row comes within ten seconds."),
      flows.length ? table("KV to and from it", ["from", "to", "rate"], flows.map(([a, b, rate]) => row([a, b, `${bytes(rate)}/s`]))) : empty("No KV moves to or from it just now."),
    ];
  },
};
