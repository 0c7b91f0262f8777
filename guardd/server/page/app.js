// Which view is shown, and when it is looked at again: at every event, and every two seconds while it can be seen.

import { follow, get, Refused, token, trouble } from "/page/api.js";
import { askToken } from "/page/dialog.js";
import { fill, h, tick } from "/page/dom.js";
import { denyView, doubtView } from "/page/others.js";
import { runView } from "/page/run.js";
import { runsView } from "/page/runs.js";

const EVERY_MS = 2000;
const GAP_MS = 300; // at least, between two looks: a busy guard sends many events
const main = document.getElementById("main");
let view = null, isBusy = false, isAgain = false, isShut = false, following = new AbortController();

function route() {
  const [, name, ...rest] = location.hash.slice(1).split("/");
  const run = rest.map(decoded).join("/");
  if (name === "runs" && run) view = runView(main, run);
  else if (name === "doubt") view = doubtView(main);
  else if (name === "deny") view = denyView(main);
  else view = runsView(main);
  document.title = run ? `${run} · guardd` : `${main.querySelector("h1")?.textContent ?? "Runs"} · guardd`;
  for (const link of document.querySelectorAll("nav a")) {
    const isHere = link.getAttribute("href") === `#/${name || "runs"}`;
    if (isHere) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  refresh();
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // an address written by hand: the daemon says what is wrong with the name
  }
}

async function refresh() {
  if (isBusy) {
    isAgain = true;
    return;
  }
  isBusy = true;
  const shown = view, used = token();
  try {
    await shown.refresh();
    await look();
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    isShut = error.needsToken && used === token(); // asking on would only be refused again
    banner(error.toString(), error.needsToken && h("button", { type: "button", click: askToken }, "Give a token"));
  } finally {
    if (isShut) isAgain = false;
    if (isAgain && shown === view) await new Promise((resolve) => setTimeout(resolve, GAP_MS));
    isBusy = false;
    if (isAgain || shown !== view) {
      isAgain = false;
      refresh();
    }
  }
}

async function look() {
  const [why, doubts] = await Promise.all([trouble(), get("/v1/ledger?in_doubt=true&limit=100")]);
  banner(why && `Nothing is granted: ${why}`);
  const count = document.getElementById("doubt-count");
  count.hidden = doubts.length === 0;
  count.textContent = doubts.length === 100 ? "100+" : String(doubts.length);
}

let said = "";
function banner(text, ...more) {
  if ((text || "") === said) return;
  said = text || "";
  fill(document.getElementById("banners"), text && h("p", { class: "banner" }, text, " ", more));
}

function live(isLive) {
  const mark = document.getElementById("live");
  mark.textContent = isLive ? "live" : "not connected";
  mark.classList.toggle("is-live", isLive);
  if (isLive) refresh();
}

function start() {
  isShut = false;
  following.abort();
  following = new AbortController();
  follow(following.signal, refresh, live);
  refresh();
}

addEventListener("hashchange", () => {
  route();
  main.focus();
});
document.addEventListener("guardd-refresh", start);
document.addEventListener("visibilitychange", () => document.hidden || refresh());
document.getElementById("token-button").addEventListener("click", askToken);
setInterval(tick, 1000);
setInterval(() => document.hidden || isShut || refresh(), EVERY_MS);
route();
start();
