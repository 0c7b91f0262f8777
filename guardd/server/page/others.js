// Effects in doubt over all runs, and the emergency rules.

import { get } from "/page/api.js";
import { allow, deny } from "/page/dialog.js";
import { ago, fill, h, runLink, table, whenNew } from "/page/dom.js";
import { settle, stateWord } from "/page/run.js";

export function doubtView(main) {
  const list = h("div");
  fill(main, h("h1", {}, "In doubt"),
    h("p", {}, "Effects that somebody began and nobody knows the outcome of. Look each up in the outside system, then settle it; until then nobody runs it again."), list);
  const show = whenNew((found) => fill(list, table("Effects in doubt", ["Key", "Tool", "Run", "State", "Since", "Action"], found.map((each) => [
    each.key, each.tool, runLink(each.run), stateWord(each.state), ago(each.until_ms), settle(each),
  ]), "Nothing is in doubt.")));
  return { refresh: async () => show(await get("/v1/ledger?in_doubt=true&limit=500")) };
}

export function denyView(main) {
  const list = h("div");
  fill(main, h("h1", {}, "Deny rules"), h("p", {}, "Emergency rules: a tool that matches is refused in every run, on every daemon."),
    h("p", { class: "buttons" }, h("button", { type: "button", id: "deny", class: "danger", click: deny }, "Forbid a tool")), list);
  const show = whenNew((rules) => fill(list, table("Deny rules", ["Rule", "Tool", "Runs", "Until", "Why", "Action"], rules.map((rule) => [
    rule.id, h("code", {}, rule.tool), rule.run_prefix || "all", rule.until_ms ? new Date(rule.until_ms).toLocaleString() : "removed by hand", rule.note,
    h("button", { type: "button", "aria-label": `Remove ${rule.id}`, click: () => allow(rule) }, "Remove"),
  ]), "No tool is forbidden.")));
  return { refresh: async () => show(await get("/v1/deny_rules")) };
}
