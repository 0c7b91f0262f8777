// The list of runs, newest first.

import { get } from "/page/api.js";
import { ago, badge, fill, h, runLink, table, whenNew } from "/page/dom.js";

const filters = { text: "", state: "", reason: "", label: "" };
const STATES = [["", "any state"], ["running", "running"], ["waiting", "waiting for a person"], ["frozen", "frozen"], ["ended", "ended"]];

export function runsView(main) {
  const list = h("div");
  let runs = [], doubts = [];
  const reasons = h("select", { id: "filter-reason", change: (event) => set("reason", event.target.value) });
  fill(main,
    h("h1", {}, "Runs"),
    h("form", { class: "filters", role: "search", submit: (event) => event.preventDefault() },
      field("filter-text", "Text in the name", h("input", { id: "filter-text", type: "search", value: filters.text, input: (event) => set("text", event.target.value) })),
      field("filter-state", "State", h("select", { id: "filter-state", change: (event) => set("state", event.target.value) },
        STATES.map(([value, text]) => h("option", { value, selected: value === filters.state }, text)))),
      field("filter-reason", "Reason", reasons),
      field("filter-label", "Label, as team=pay", h("input", { id: "filter-label", type: "search", value: filters.label, input: (event) => set("label", event.target.value) }))),
    list);

  function set(name, value) {
    filters[name] = value;
    draw();
  }

  function draw() {
    const known = [...new Set([...runs.map((run) => run.reason).filter(Boolean), filters.reason].filter(Boolean))].sort();
    fill(reasons, h("option", { value: "" }, "any reason"),
      known.map((reason) => h("option", { value: reason, selected: reason === filters.reason }, reason)));
    const shown = runs.filter(fits);
    const observed = runs.filter((run) => run.limits.mode === "observe").length;
    fill(list,
      observed > 0 && h("p", { class: "banner" }, `Observe mode in ${observed} of ${runs.length} runs: refusals there are only recorded, every call runs.`),
      h("p", { class: "quiet" }, shown.length === runs.length ? `${runs.length} runs` : `${shown.length} of ${runs.length} runs`),
      table("Runs", ["Run", "State", "Reason", "In doubt", "Steps", "Refused", "Tokens", "Labels", "Policy", "Started", "Last seen"], shown.map((run) => row(run, doubts)),
        runs.length ? "No run fits these filters." : "No run yet. A run appears here with its first call; try: make demo"));
  }

  const show = whenNew((...found) => {
    [runs, doubts] = found;
    draw();
  });

  return {
    async refresh() {
      show(...await Promise.all([get("/v1/runs?limit=200"), get("/v1/ledger?in_doubt=true&limit=1000")]));
    },
  };
}

const field = (id, label, element) => h("div", { class: "field" }, h("label", { for: id }, label), element);

function fits(run) {
  const state = run.freeze && run.status === "running" ? "frozen" : run.status;
  const [name, value] = filters.label.split("=");
  return (!filters.state || state === filters.state)
    && (!filters.reason || run.reason === filters.reason)
    && (!name || (name in run.labels && (value === undefined || run.labels[name].startsWith(value))))
    && JSON.stringify([run.run, run.policy, run.labels]).toLowerCase().includes(filters.text.toLowerCase());
}

function row(run, doubts) {
  const { counters, limits } = run;
  const count = doubts.filter((each) => each.run.split("/")[0] === run.run).length;
  return [runLink(run.run), [badge(run), limits.mode === "observe" && " observe"], run.reason,
    count > 0 && h("span", { class: "badge waiting" }, `? ${count}`),
    limits.max_steps === undefined ? String(counters.steps) : `${counters.steps} of ${limits.max_steps}`, String(counters.denied), String(counters.tokens),
    Object.entries(run.labels).map(([name, value]) => `${name}=${value}`).join(" "), run.policy, ago(run.started_ms), ago(run.last_ms)];
}
