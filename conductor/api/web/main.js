// Which view is shown, and when it is asked for anew. A view is a module: `load` what the conductor says, `draw` it as
// elements, `settle` what depends on their places, `bind` its events once. What follows # says which view.

import { element, empty, morph } from "./draw.js";
import { PERIOD_MS, setKey } from "./data.js";
import * as overview from "./overview.js";
import * as cluster from "./cluster.js";
import * as requests from "./requests.js";
import * as playground from "./playground.js";
import { replay, whatif } from "./replay.js";

const VIEWS = { overview, cluster, node: cluster.node, requests, request: requests.one, playground, replay, whatif };
const TABS = { node: "cluster", request: "requests" };

const view = document.getElementById("view");
let place = null; // the element of the view that is shown; its listeners go with it
let turn = 0, timer = 0, shown = "", problem = "";

const wanted = () => {
  const [name, ...rest] = location.hash.replace(/^#\/?/, "").split("/").map((part) => { try { return decodeURIComponent(part); } catch { return part; } });
  return Object.hasOwn(VIEWS, name) ? [name, rest] : ["overview", []];
};

function report(words) {
  const box = document.getElementById("problem");
  if (words !== problem) box.textContent = problem = words;
  box.hidden = !words;
}

function badge(answer) {
  const state = document.getElementById("state"), words = answer ? (answer.ready ? "ready" : "not ready") : "no answer";
  if (state.textContent !== words) state.textContent = words;
  state.className = `badge ${answer?.ready ? "ok" : "bad"}`;
}

const go = (hash) => { location.hash = hash; };

function put(one, found) {
  morph(place, one.draw(found).filter(Boolean));
  one.settle?.(place, found);
}

// Show what was found: in a new place where the view is another than before, else in the one that is there.
function show(name, one, found, isNew) {
  if (isNew) {
    place = element("div", { "data-view": name });
    view.replaceChildren(place);
  }
  put(one, found);
  if (isNew) {
    one.bind?.(place, go, () => put(one, found), () => refresh(false), found);
    document.title = `${one.title} · Conductor`;
    for (const tab of document.querySelectorAll("#tabs a")) {
      if (tab.hash.split("/")[1] === (TABS[name] ?? name)) tab.setAttribute("aria-current", "page"); else tab.removeAttribute("aria-current");
    }
    if (shown) { // its user went there: what is read next is the view
      scrollTo(0, 0);
      place.querySelector("h2")?.focus({ preventScroll: true });
    }
    shown = location.hash || "#/overview";
  }
}

async function refresh(isNew) {
  clearTimeout(timer);
  const [name, rest] = wanted(), one = VIEWS[name], mine = (turn += 1);
  let found = null;
  try {
    found = await one.load(rest);
    if (mine !== turn) return; // another view was chosen meanwhile
    show(name, one, found, isNew || place?.dataset.view !== name);
    if (found.answer) badge(found.answer);
    report("");
    document.getElementById("key").hidden = true;
  } catch (error) {
    if (mine !== turn) return;
    failed(name, one, error);
  }
  if (!one.isStill && !found?.isStill) timer = setTimeout(() => refresh(false), PERIOD_MS);
}

function failed(name, one, error) {
  if (error.status === undefined) { // a fault of this page: it says so, and looks again
    console.error(error);
    report(`This page failed: ${error.message}. Please report it.`);
    return;
  }
  if (error.status === 404) {
    show(name, { title: one.title, draw: () => [element("h2", { tabindex: -1 }, one.title), empty("Nothing is known by that name or of that moment. Of requests the latest thousand are remembered, and for an hour the slowest, late and rejected ones.")] }, {}, true);
    report("");
    return;
  }
  document.getElementById("key").hidden = error.status !== 401 && error.status !== 403;
  if (!place) show(name, { title: one.title, draw: () => [element("h2", { tabindex: -1 }, one.title), empty(document.getElementById("key").hidden ? "There is nothing to show without an answer of the conductor." : "Give a key above: conductor keys add NAME --operator makes one.")] }, {}, true);
  place.dataset.view = ""; // what comes with the next answer is shown anew
  report(error.message);
  badge(null);
}

document.getElementById("key").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(event.target.querySelector("input").value);
  refresh(true);
});
addEventListener("hashchange", () => refresh(true));
addEventListener("resize", () => place && refresh(false));
document.addEventListener("visibilitychange", () => { if (document.hidden) clearTimeout(timer); else refresh(false); });
view.addEventListener("click", (event) => {
  const row = event.target.closest("tr[data-href]");
  if (row && !event.target.closest("a") && !String(getSelection())) go(row.dataset.href);
});
refresh(true);
