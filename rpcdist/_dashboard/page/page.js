"use strict";
// One page for a job: draws what the server-sent events bring. Texts of workers are only ever set as text.

const byId = (id) => document.getElementById(id);
const COLOURS = { local: "#2f9e6b", tcp: "#3f7fdf", grpc: "#b8578f", memory: "#8a8f98", "shared memory": "#7a5fc0" };
const LINES = { lost: "#d64045", silent: "#d64045", replaced: "#d98e04", restarted: "#d98e04", joined: "#2f9e6b", back: "#2f9e6b", left: "#8a8f98" };
let view = null;
let sorting = { key: "id", down: false };
let shownWorker = null;

function number(value) {
  if (value === null || value === undefined) return "";
  if (value >= 1e6) return (value / 1e6).toFixed(1) + " M";
  if (value >= 1e4) return (value / 1e3).toFixed(1) + " k";
  return Number.isInteger(value) ? String(value) : value.toFixed(value < 10 ? 1 : 0);
}

function bytes(value) {
  if (!value) return "0 B";
  const power = Math.min(4, Math.floor(Math.log2(Math.max(1, value)) / 10));
  const shown = value / 2 ** (10 * power);
  return shown.toFixed(power && shown < 100 ? 1 : 0) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][power];
}

function seconds(value) {
  if (value === null || value === undefined) return "";
  if (value < 0.001) return Math.round(value * 1e6) + " us";
  if (value < 1) return (value * 1000).toFixed(value < 0.1 ? 1 : 0) + " ms";
  if (value < 120) return value.toFixed(1) + " s";
  return value < 7200 ? Math.round(value / 60) + " min" : (value / 3600).toFixed(1) + " h";
}

// Plotly reads some tags, links among them, in the names of lines.
function plainText(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
}

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

const COLUMNS = [
  ["name", "worker", (w) => w.name],
  ["role", "role", (w) => w.role || ""],
  ["state", "state", (w) => (w.state !== "answers" ? w.state : w.phase === "leaving" ? "in shutdown" : w.phase)],
  ["served_rate", "served /s", (w) => number(w.served_rate)],
  ["made_rate", "made /s", (w) => number(w.made_rate)],
  ["latency_s", "latency", (w) => seconds(w.latency_s)],
  ["serving", "serving", (w) => number(w.serving)],
  ["calls", "waits for", (w) => number(w.calls)],
  ["oldest_s", "oldest", (w) => (w.oldest_s ? seconds(w.oldest_s) : "")],
  ["threads", "threads busy", (w) => (w.pool ? `${w.pool.running}/${w.pool.threads}` : "")],
  ["sent_rate", "sent /s", (w) => (w.state === "answers" ? bytes(w.sent_rate) : "")],
  ["received_rate", "received /s", (w) => (w.state === "answers" ? bytes(w.received_rate) : "")],
  ["memory_bytes", "memory", (w) => (w.memory_bytes ? bytes(w.memory_bytes) : "")],
  ["queued", "queue", (w) => number(w.queued)],
  ["references", "references", (w) => number(w.references)],
  ["passes", "passes", (w) => number(w.passes)],
  ["operations", "collectives", (w) => number(w.operations)],
  ["lent_bytes", "lent", (w) => (w.lent_bytes ? bytes(w.lent_bytes) : "")],
  ["refused", "refused", (w) => number(w.refused)],
  ["host", "host", (w) => w.host || w.address],
];
// Shown where some worker has a value.
const SPARSE = new Set(["role", "passes", "operations", "lent_bytes", "refused"]);

function shownColumns() {
  return COLUMNS.filter(([key]) => !SPARSE.has(key) || view?.workers.some((worker) => worker[key]));
}

function drawHeads() {
  const row = element("tr");
  for (const [key, label] of shownColumns()) {
    const head = element("th");
    const button = element("button", label + (sorting.key === key ? (sorting.down ? " \u25be" : " \u25b4") : ""));
    button.addEventListener("click", () => {
      sorting = { key, down: sorting.key === key ? !sorting.down : true };
      drawHeads();
      drawWorkers();
    });
    head.append(button);
    row.append(head);
  }
  document.querySelector("#workers thead").replaceChildren(row);
}

function drawWorkers() {
  if (document.querySelectorAll("#workers th").length !== shownColumns().length) drawHeads();
  const value = (w) => (sorting.key === "threads" ? (w.pool ? w.pool.running : -1) : w[sorting.key] ?? -1);
  const order = (a, b) => (typeof a === "string" ? String(a).localeCompare(String(b)) : a - b);
  const rows = [...view.workers].sort((a, b) => order(value(a), value(b)) * (sorting.down ? -1 : 1) || (a.id ?? 0) - (b.id ?? 0));
  document.querySelector("#workers tbody").replaceChildren(...rows.map((worker) => {
    const row = element("tr");
    row.tabIndex = 0;
    for (const [key, , text] of shownColumns()) {
      const cell = element("td", text(worker));
      cell.dataset.of = key;
      if (key === "state") cell.className = worker.state === "answers" ? (worker.phase === "leaving" ? "" : "good") : "bad";
      row.append(cell);
    }
    row.title = worker.detail || (worker.pid ? `process ${worker.pid}` : "");
    const open = () => showWorker(worker.name);
    row.addEventListener("click", open);
    row.addEventListener("keydown", (event) => { if (event.key === "Enter") open(); });
    return row;
  }));
}

function drawTiles() {
  const answering = view.workers.filter((w) => w.state === "answers");
  const sum = (key) => answering.reduce((total, w) => total + (w[key] || 0), 0);
  const tiles = [
    [`${answering.length} of ${view.workers.length}`, "workers answer"],
    [number(sum("served_rate")), "calls a second"],
    [number(sum("calls")), "calls in flight"],
    [bytes(sum("sent_rate")), "sent a second"],
    [number(sum("references")), "references"],
    [number(sum("passes")), "backward passes"],
  ];
  byId("tiles").replaceChildren(...tiles.map(([value, label]) => {
    const tile = element("div", undefined, "tile");
    tile.append(element("b", value), element("span", label));
    return tile;
  }));
}

function drawWaits() {
  const items = [];
  for (const text of view.waits?.deadlocks ?? []) items.push(element("li", "Deadlock: " + text, "deadlock"));
  for (const { text, chains } of view.waits?.culprits ?? []) items.push(element("li", chains > 1 ? `${text} (${chains} wait for it)` : text));
  byId("waits").replaceChildren(...items);
  byId("problems").hidden = items.length === 0;
}

function drawMap() {
  const svg = byId("map");
  const make = (tag, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  };
  const places = new Map();
  const workers = view.workers;
  workers.forEach((worker, index) => {
    const angle = (2 * Math.PI * index) / Math.max(1, workers.length) - Math.PI / 2;
    places.set(worker.name, workers.length === 1 ? [200, 150] : [200 + 150 * Math.cos(angle), 145 + 110 * Math.sin(angle)]);
  });
  const parts = [];
  const kinds = new Set();
  for (const link of view.links ?? []) {
    const from = places.get(link.from), to = places.get(link.to);
    if (!from || !to) continue;
    kinds.add(link.kind);
    const line = make("line", { x1: from[0], y1: from[1], x2: to[0], y2: to[1], stroke: COLOURS[link.kind] ?? "#888", "stroke-width": link.queued ? 3 : 1.2, opacity: 0.7 });
    const title = make("title", {});
    title.textContent = `${link.from} to ${link.to}: ${link.kind}${link.tls ? ", TLS" : ""}${link.round_trip_s ? ", " + seconds(link.round_trip_s) + " round trip" : ""}`;
    line.append(title);
    parts.push(line);
  }
  const radius = Math.max(3, Math.min(9, 180 / Math.max(1, workers.length)));
  for (const worker of workers) {
    const [x, y] = places.get(worker.name);
    const colour = worker.state !== "answers" ? "var(--bad)" : worker.oldest_s > 1 ? "var(--warn)" : "var(--good)";
    parts.push(make("circle", { cx: x, cy: y, r: radius, fill: colour }));
    if (workers.length <= 24) {
      const label = make("text", { x, y: y - radius - 3 });
      label.textContent = worker.name;
      parts.push(label);
    }
  }
  svg.replaceChildren(...parts);
  const legend = byId("legend");
  legend.replaceChildren();
  for (const kind of kinds) {
    const entry = element("span", "\u2501 " + kind + "  ");
    entry.style.color = COLOURS[kind] ?? "#888";
    legend.append(entry);
  }
}

function layout(title) {
  const style = getComputedStyle(document.documentElement);
  const pick = (name) => style.getPropertyValue(name).trim();
  const marks = view.events.filter((event) => LINES[event.kind] && event.kind !== "joined");
  return {
    margin: { l: 46, r: 8, t: 6, b: 30 }, height: 240, showlegend: true, legend: { orientation: "h", y: 1.15 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: pick("--text"), size: 11 },
    xaxis: { type: "date", gridcolor: pick("--line") }, yaxis: { title: { text: title }, rangemode: "tozero", gridcolor: pick("--line") },
    shapes: marks.map((event) => ({ type: "line", x0: new Date(event.time_s * 1000), x1: new Date(event.time_s * 1000), yref: "paper", y0: 0, y1: 1, line: { color: LINES[event.kind], width: 1, dash: "dot" } })),
  };
}

function drawCharts() {
  const options = { displayModeBar: false, responsive: true };
  const times = view.totals.time_s.map((time) => new Date(time * 1000));
  const line = (name, y, colour) => ({ x: times, y, name, mode: "lines", line: { color: colour, width: 1.6 } });
  Plotly.react("calls", [line("served a second", view.totals.calls, "#3f7fdf"), line("in flight", view.totals.in_flight, "#d98e04")], layout(""), options);
  Plotly.react("bytes", Object.entries(view.totals.bytes).map(([kind, values]) => line(kind, values.map((v) => v / 2 ** 20), COLOURS[kind])), layout("MiB a second"), options);
  const curves = Object.entries(view.curves ?? {});
  byId("curves-section").hidden = curves.length === 0;
  if (curves.length) {
    Plotly.react("curves", curves.map(([name, points]) => ({ x: points.map((p) => new Date(p[0] * 1000)), y: points.map((p) => p[1]), name: plainText(name), mode: "lines" })), layout(""), options);
  }
}

function drawFunctions() {
  document.querySelector("#functions tbody").replaceChildren(...(view.functions ?? []).map((one) => {
    const row = element("tr");
    for (const text of [one.function, number(one.running), number(one.waiting), one.oldest_s ? seconds(one.oldest_s) : "", number(one.ended), number(one.failed), one.ended ? seconds(one.median_s) : "", one.ended ? seconds(one.longest_s) : ""]) row.append(element("td", text));
    return row;
  }));
}

function drawActors() {
  const actors = view.actors ?? [];
  byId("actors-section").hidden = actors.length === 0;
  document.querySelector("#actors tbody").replaceChildren(...actors.map((one) => {
    const row = element("tr");
    const running = one.running ? `${one.running}, ${seconds(one.running_s)}` : "";
    for (const text of [one.kind || one.reference, one.worker, running, number(one.num_waiting), number(one.num_restarts)]) row.append(element("td", text));
    row.title = one.reference;
    return row;
  }));
}

function drawEvents() {
  byId("events").replaceChildren(...[...view.events].reverse().map((event) => {
    const item = element("li");
    const time = element("time", new Date(event.time_s * 1000).toLocaleTimeString());
    item.append(time, element("span", event.text, ["lost", "silent"].includes(event.kind) ? "bad" : ""));
    return item;
  }));
}

const ROWS = { ddp: (worker, name) => `${worker} ${name.startsWith("bucket") ? "buckets" : name === "gradients" ? "backward" : "collectives"}` };
const KINDS = {
  pipeline: (name) => (/F/.test(name) ? "forward" : "backward"),
  backward: (name) => name,
  ddp: (name) => (name.startsWith("bucket") ? "bucket" : name === "gradients" ? "gradients computed" : name),
};
const drawn = {};

function drawTimeline(id) {
  const made = view.timelines?.[id];
  byId(id + "-section").hidden = !made;
  if (!made) return;
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const key = [made.title, made.time_s, made.bars.length, dark].join();
  if (drawn[id] === key) return;
  drawn[id] = key;
  const length = Math.max(...made.bars.map((bar) => bar[2] + bar[3]));
  let about = `${made.title}, ${seconds(length)}, began ${new Date(made.time_s * 1000).toLocaleTimeString()}`;
  if (made.buckets) about += `, ${made.buckets} buckets on each rank`;
  if (typeof made.overlap === "number") about += `, ${Math.round(made.overlap * 100)} % of the time of collectives beside the backward pass`;
  document.querySelector(`#${id}-section h2 span`).textContent = about;
  const ground = getComputedStyle(document.documentElement).getPropertyValue("--card").trim();
  const traces = new Map();
  const rows = [...new Set(made.bars.map(([worker, name]) => ROWS[id]?.(worker, name) ?? worker))].sort((a, b) => a.localeCompare(b, undefined, { numeric: true }));
  for (const [worker, name, begin, took] of made.bars) {
    const kind = KINDS[id](name);
    if (!traces.has(kind)) traces.set(kind, { type: "bar", orientation: "h", name: plainText(kind), x: [], base: [], y: [], text: [], hovertext: [], hoverinfo: "text", textposition: "inside", insidetextanchor: "middle", constraintext: "both", opacity: 0.85, marker: { line: { color: ground, width: 1 } } });
    const trace = traces.get(kind);
    trace.x.push(took * 1000);
    trace.base.push(begin * 1000);
    trace.y.push(plainText(ROWS[id]?.(worker, name) ?? worker));
    trace.text.push(id === "pipeline" ? plainText(name) : "");
    trace.hovertext.push(plainText(`${worker}: ${name}, ${seconds(took)} from ${seconds(begin)}`));
  }
  const style = layout("");
  const height = Math.min(900, 90 + 26 * rows.length);
  byId(id).style.height = height + "px";
  Plotly.react(id, [...traces.values()], {
    ...style, height, shapes: [], barmode: "overlay", bargap: 0.15, margin: { l: 10, r: 8, t: 6, b: 36 },
    legend: { orientation: "h", y: 1, yanchor: "bottom" },
    xaxis: { title: { text: "ms" }, gridcolor: style.yaxis.gridcolor, rangemode: "tozero" },
    yaxis: { type: "category", categoryorder: "array", categoryarray: rows.map(plainText).reverse(), automargin: true, gridcolor: style.yaxis.gridcolor },
  }, { displayModeBar: false, responsive: true });
}

function drawLog() {
  const lines = view.lines ?? [];
  const words = byId("log-filter").value.toLowerCase();
  const key = [lines.length ? lines[lines.length - 1].id : 0, words].join();
  if (drawn.log === key) return;
  drawn.log = key;
  const shown = lines.filter((line) => !words || `${line.worker} ${line.level} ${line.logger} ${line.text}`.toLowerCase().includes(words));
  byId("log-empty").hidden = lines.length > 0;
  document.querySelector("#log tbody").replaceChildren(...shown.reverse().map((line) => {
    const row = element("tr");
    const isBad = ["ERROR", "CRITICAL"].includes(line.level);
    row.append(element("td", new Date(line.time_s * 1000).toLocaleTimeString()), element("td", line.worker));
    row.append(element("td", line.level, isBad ? "bad" : line.level === "WARNING" ? "waiting" : ""), element("td", `${line.logger}: ${line.text}`));
    return row;
  }));
}

async function showWorker(name) {
  shownWorker = name;
  byId("worker-name").textContent = name;
  const dialog = byId("worker");
  if (!dialog.open) dialog.showModal();
  const row = view.workers.find((worker) => worker.name === name);
  const parts = [];
  const block = (title, text) => { if (text) parts.push(element("h3", title), element("pre", text)); };
  const isOurs = (frame) => /\/(rpcdist|asyncio|concurrent)\/|\/threading\.py$/.test(frame.file);
  const stack = (frames) => (frames ?? []).slice(Math.max(0, (frames ?? []).findIndex((frame) => !isOurs(frame)))).map((frame) => `    ${frame.file}:${frame.line} ${frame.function}`).join("\n");
  if (row && row.state !== "answers") {
    parts.push(element("p", row.detail));
    block("Stacks", row.stacks);
  } else {
    const answer = await fetch("worker?name=" + encodeURIComponent(name));
    if (shownWorker !== name) return;
    if (!answer.ok) {
      parts.push(element("p", await answer.text()));
    } else {
      const facts = await answer.json();
      const threads = new Map((facts.threads ?? []).map((thread) => [thread.id, thread]));
      block("Serves", (facts.calls_served ?? []).map((call) => `${call.function} for ${call.caller}: ${call.phase}, ${seconds(call.age_s)}\n${stack(call.stack?.length ? call.stack : threads.get(call.thread)?.stack)}`).join("\n"));
      block("Waits for", (facts.calls_made ?? []).map((call) => `${call.function} at ${call.to}: ${call.phase}, ${seconds(call.age_s)}`).join("\n"));
      block("Threads", (facts.threads ?? []).map((thread) => `${thread.name}\n${stack(thread.stack)}`).join("\n"));
      block("Connections", (facts.channels ?? []).map((one) => `${one.peer}: ${one.kind}${one.tls ? ", TLS" : ""}, sent ${bytes(one.bytes_sent)}, received ${bytes(one.bytes_received)}${one.shared_sent || one.shared_received ? `, in shared memory ${bytes(one.shared_sent)} and ${bytes(one.shared_received)}` : ""}, queue ${one.num_queued}`).join("\n"));
      block("References", (facts.references ?? []).map((one) => `${one.id} ${one.value} of ${one.owner}: ${one.state}${one.holders?.length ? ", held by " + one.holders.map((holder) => holder.worker).join(", ") : ""}`).join("\n"));
      block("Limits", (facts.limits ?? []).map((one) => `${one.name}: ${one.used} of ${one.limit}${one.num_waiting ? `, ${one.num_waiting} wait` : ""}`).join("\n"));
    }
  }
  byId("worker-facts").replaceChildren(...parts);
}

function setStatus(text, className) {
  const status = byId("status");
  status.textContent = text;
  status.className = "status " + className;
}

function draw() {
  byId("job").textContent = view.job;
  if (view.error) setStatus("no answer", "bad");
  else if ((view.waits?.deadlocks ?? []).length) setStatus("deadlock", "bad");
  else if (view.workers.some((worker) => worker.state !== "answers")) setStatus("a worker is silent", "bad");
  else setStatus("live", "good");
  byId("status").title = view.error || "";
  drawTiles();
  drawWaits();
  drawWorkers();
  drawMap();
  drawFunctions();
  drawActors();
  drawEvents();
  drawCharts();
  for (const id of Object.keys(KINDS)) drawTimeline(id);
  drawLog();
}

drawHeads();
byId("log-filter").addEventListener("input", () => { if (view) drawLog(); });
const source = new EventSource("events");
source.onmessage = (event) => { view = JSON.parse(event.data); if (!document.hidden) draw(); };
source.onerror = () => setStatus("the server of this page has ended", "bad");
document.addEventListener("visibilitychange", () => { if (!document.hidden && view) draw(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (view) draw(); });
