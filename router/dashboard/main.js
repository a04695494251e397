// Asks for the state every second and shows it. An operator's key, where one is needed, stays in this tab.

import { showCalls, showLegend } from "./calls.js";
import { byId } from "./dom.js";
import { showFleet } from "./fleet.js";
import { Routers } from "./merge.js";
import { showTiles } from "./tiles.js";

const EVERY_MS = 1000;
const KEY = "baton-operator-key";
const THEME = "baton-theme";
const routers = new Routers();
let latest = null;

async function ask() {
  const key = sessionStorage.getItem(KEY);
  const answer = await fetch("/dashboard/state", { headers: key ? { authorization: `Bearer ${key}` } : {}, cache: "no-store" });
  if (answer.status === 401 || answer.status === 403) return refused(answer.status, key);
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  latest = routers.take(await answer.json());
  show();
  live("on", "live");
  return EVERY_MS;
}

function show() {
  byId("key-form").hidden = true;
  byId("content").hidden = false;
  byId("model").textContent = latest.router.model;
  const number = latest.num_routers;
  byId("routers").textContent = `${number} router${number > 1 ? "s" : ""} · ${latest.router.policy} policy, plan ${latest.router.plan}`;
  document.title = `Baton · ${latest.router.model}`;
  showTiles(latest);
  showFleet(latest);
  showCalls(latest);
}

function refused(status, key) {
  byId("content").hidden = true;
  byId("key-form").hidden = false;
  byId("key-error").textContent = !key ? "" : status === 403 ? "That key is not an operator's." : "That key is not known here.";
  sessionStorage.removeItem(KEY);
  live("", "key needed");
  byId("key").focus();
  return null;
}

function live(state, words) {
  byId("live").className = `live ${state}`;
  byId("live-text").textContent = words;
}

async function loop() {
  let next = EVERY_MS;
  try {
    next = await ask();
  } catch (error) {
    live("off", latest ? "no answer, last known state" : "no answer");
    next = 2 * EVERY_MS;
  }
  if (next !== null) setTimeout(loop, document.hidden ? 5 * next : next);
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value.trim());
  byId("key").value = "";
  loop();
});

byId("theme").addEventListener("click", () => {
  const isDark = (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  setTheme(isDark ? "light" : "dark");
});

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  localStorage.setItem(THEME, name);
}

const stored = localStorage.getItem(THEME);
if (stored === "light" || stored === "dark") setTheme(stored);
window.addEventListener("resize", () => latest && showFleet(latest));
showLegend();
loop();
