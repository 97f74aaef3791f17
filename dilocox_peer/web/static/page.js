"use strict";
// Draws the run from its document (/api/state, then /api/events). What strangers have written gets into the page as text alone:
// nothing here makes markup of a string.

const FIRST_SHOWN = 20, PEERS_SHOWN = 24, NEWEST_ROUNDS = 12, STALE_MS = 15000, RETRY_MS = 10000;
const state = {};
const at = id => document.getElementById(id);
const wanted = new URLSearchParams(location.search).get("run");
const query = wanted === null ? "" : "?run=" + encodeURIComponent(wanted);
let heardAt = 0, plot = null, plotted = "", showAll = false, axis = "tokens", drawn = {};

// ---- words and numbers ----

const whole = new Intl.NumberFormat("en");
function count(number, word) { return whole.format(number) + " " + word + (number === 1 ? "" : "s"); }
function three(value) { return String(value >= 100 ? Math.round(value) : Number(value.toPrecision(3))); }
function si(value) {
  for (const [size, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]])
    if (value >= size) return three(value / size) + " " + unit;
  return three(value);
}
function bytes(value) {
  for (const [size, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]])
    if (value >= size) return three(value / size) + " " + unit;
  return Math.round(value) + " B";
}
function duration(seconds) {
  if (seconds < 10) return Math.max(0, seconds).toFixed(1) + " s";
  const s = Math.round(seconds);
  if (s < 90) return s + " s";
  if (s < 5400) return Math.round(s / 60) + " min";
  const m = Math.round(s / 60);
  if (s < 172800) return Math.floor(m / 60) + " h " + m % 60 + " min";
  return (s / 86400).toFixed(1) + " days";
}
function loss(value) { return value === null || value === undefined ? "–" : value.toFixed(3); }
function clock(seconds) { return new Date(seconds * 1000).toLocaleTimeString(); }
function who(peer, name) {  // two may have one name: a piece of the key stays beside it, however long it is
  const node = made("span", "who", made("span", "name", name || "…" + peer.slice(-8)), made("span", "tail", name ? " …" + peer.slice(-4) : ""));
  node.title = peer;
  return node;
}

// ---- the page ----

function put(id, text) { const node = at(id); if (node.textContent !== text) node.textContent = text; }
function made(tag, className, ...inside) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...inside);
  return node;
}
function changed(name) { if (drawn[name] === state[name]) return false; drawn[name] = state[name]; return true; }

function draw() {
  if (!state.run || !state.now) return;
  if (changed("run")) drawRun(state.run);
  if (changed("runs")) drawRuns(state.runs || []);
  drawNow(state.now);
  if (changed("sample")) drawSample(state.sample);
  if (changed("stages")) drawStages(state.stages);
  if (changed("contributors")) drawContributors();
  if (changed("history")) { drawCurve(); drawRounds(); }
}

function drawRun(run) {
  document.title = run.name + " – a training run";
  put("name", run.name);
  put("about", si(run.parameters) + " parameters" + (run.stages > 1 ? " in " + run.stages + " stages" : "") + ", trained by volunteers over the internet");
  const invited = "ask the run’s owner for a link";
  put("how", run.join === null ? "By invitation: " + invited + "." : run.admission === "list"
    ? "With dilocox-peer installed, those on the run’s list paste this into a terminal; others " + invited + ":"
    : "With dilocox-peer installed, paste this into a terminal:");
  at("join").parentNode.hidden = run.join === null;
  put("join", run.join || "");
  put("export", run.export);
  put("id", run.id.slice(0, 12));
  at("api").href = "/api/state" + query;
}

function drawRuns(runs) {
  const nav = at("runs");
  nav.hidden = runs.length < 2;
  nav.replaceChildren(...runs.map(run => {
    const link = made("a", "", run.name);
    link.href = "/?run=" + encodeURIComponent(run.id.slice(0, 12));
    if (state.run && run.id === state.run.id) link.setAttribute("aria-current", "page");
    return link;
  }));
}

function drawNow(now) {
  const standing = at("standing");
  standing.className = "standing " + now.standing;
  put("word", now.standing);
  put("why", now.why);
  at("why").className = "note " + now.standing;
  const wants = [now.owner_wants, now.owner_says ? "“" + now.owner_says + "”" : ""].filter(Boolean).join(" · ");
  at("owner").hidden = !wants;
  put("owner", wants ? "The run’s owner: " + wants : "");
  drawTroubles(now.troubles.filter(each => each.cause + ": " + each.next !== now.why));
  put("kept", "The newest round" + (now.kept_round ? " (" + whole.format(now.kept_round) + " is kept here)" : "") + ", as a folder for transformers"
    + (state.run.admission === "open" ? ":" : "; the LINK is an invitation to read, which the run’s owner makes (invite --rights read):"));
  const share = now.total_steps ? Math.min(1, now.steps / now.total_steps) : 0;
  at("progress").value = share;
  at("progress").hidden = !now.total_steps;
  put("rounds", "Round " + whole.format(now.round) + (now.total_rounds ? " of " + whole.format(now.total_rounds) + " · " + Math.floor(share * 100) + " %" : ""));
  put("eta", now.eta_s === null ? "" : now.eta_s < 10 ? "a few seconds left" : "about " + duration(now.eta_s) + " left");
  put("loss", loss(now.loss));
  put("val", loss(now.val_loss));
  put("val-sub", now.val_round === null ? "not evaluated yet" : "after round " + whole.format(now.val_round));
  put("tokens", si(now.tokens));
  put("speed", now.tokens_per_s === null ? "" : si(now.tokens_per_s) + " a second");
  put("peers", whole.format(now.peers));
  const people = state.contributors ? count(state.contributors.count, "contributor") + " in all" : "";
  put("peers-sub", now.peers_paused ? now.peers_paused + " paused; " + people : people);
  put("less", now.times_less === null ? "–" : Math.round(now.times_less) + "× less");
  put("less-sub", now.times_less === null ? "nothing to send with one peer a stage" : bytes(now.sent_bytes) + " sent; AllReduce: " + bytes(now.allreduce_bytes));
  const rank = now.rank === null ? "" : " of rank " + now.rank;
  put("plan", "Now: " + count(now.inner_steps, "local step") + " a round, then pseudo-gradients as " + now.codec + rank
    + (now.round_s === null ? "." : "; a round takes " + duration(now.round_s) + ".")
    + (now.counted_share === null || now.counted_share === 1 ? ""
      : " " + Math.floor(now.counted_share * 100) + " % of the contributions that the last rounds could have are in them."));
}

function drawSample(sample) {
  at("sample-card").hidden = sample.round === null;
  if (sample.round === null) return;
  put("sample-note", "After round " + whole.format(sample.round) + ", going on from a piece of text that it was not trained on (in grey):");
  put("sample-prompt", sample.prompt);
  put("sample-text", sample.text);
}

function drawTroubles(troubles) {
  const said = JSON.stringify(troubles.map(each => [each.cause, each.next]));
  if (drawn.troubles === said) return;
  drawn.troubles = said;
  at("troubles").hidden = !troubles.length;
  at("troubles").replaceChildren(...troubles.map(each =>
    made("li", each.stops ? "stops" : ["thin", "slow"].includes(each.kind) ? "" : "warns", made("strong", "", each.cause), ": " + each.next)));
}

function drawPeer(peer) {
  const how = !peer.answers ? "silent" : peer.paused ? "paused" : peer.reachability;
  const said = [!peer.answers ? "no answer" : peer.paused ? "paused" : peer.reachability];
  if (peer.answers && !peer.seated && state.now.round) said.push("joining");
  if (peer.answers && !peer.paused && peer.tokens_per_s) said.push(si(peer.tokens_per_s) + " tok/s");
  if (said[1] !== "joining") said.push("round " + whole.format(peer.round));
  const dot = made("span", "dot " + how);
  dot.setAttribute("aria-hidden", "true");
  return made("li", "", dot, who(peer.peer, peer.name), made("span", "how", said.join(" · ")));
}

function drawStages(stages) {
  const open = new Set([...document.querySelectorAll("#stages details[open]")].map(each => each.dataset.stage));
  at("stages").replaceChildren(...stages.map(stage => {
    const title = stages.length === 1 ? "The whole model" : "Stage " + stage.stage;
    const card = made("div", "stage" + (stage.empty ? " none" : stage.thin ? " thin" : ""),
      made("h3", "", title, made("small", "", "round " + whole.format(stage.round))));
    const here = stage.peers.filter(peer => peer.answers).length + stage.not_shown;
    let said = count(here, "peer") + ", " + si(stage.tokens_per_s) + " tokens/s";
    if (stage.thin) said += " · thin: the run depends on it";
    if (stage.empty) said = "EMPTY: nobody holds it, the run waits";
    card.append(made("p", "said", said));
    const costs = stage.costs;
    let takes = "A peer takes up to " + bytes(costs.memory_bytes) + " of memory and " + bytes(costs.disk_bytes) + " of disk";
    if (costs.sent_bytes_a_day !== null) takes += ", sends " + bytes(costs.sent_bytes_a_day) + " and receives " + bytes(costs.received_bytes_a_day) + " a day";
    card.append(made("p", "note", takes + "."));
    if (stage.peers.length) card.append(made("ul", "", ...stage.peers.slice(0, PEERS_SHOWN).map(drawPeer)));
    const more = stage.peers.slice(PEERS_SHOWN);
    if (more.length) {
      const details = made("details", "", made("summary", "", count(more.length + stage.not_shown, "more peer")), made("ul", "", ...more.map(drawPeer)));
      details.dataset.stage = stage.stage;
      details.open = open.has(String(stage.stage));
      card.append(details);
    }
    return card;
  }));
}

function row(...cells) { return made("tr", "", ...cells.map(cell => made("td", "", cell))); }

function drawContributors() {
  const { shown } = state.contributors, several = state.run.stages > 1;
  const rows = shown.slice(0, showAll ? shown.length : FIRST_SHOWN).map(each =>
    row(who(each.peer, each.name), several ? String(each.stage) : "–", whole.format(each.rounds), si(each.tokens), whole.format(each.last_round)));
  if (!rows.length) rows.push(row("nobody yet", "", "", "", ""));
  at("contributors").replaceChildren(...rows);
  at("contributors").parentNode.classList.toggle("single", !several);
  at("all").hidden = shown.length <= FIRST_SHOWN;
  put("all", showAll ? "Show the first " + FIRST_SHOWN : "Show all " + shown.length);
}

function drawRounds() {
  const history = state.history, last = history.round.length - 1;
  const validated = new Map(history.validation.round.map((number, index) => [number, history.validation.loss[index]]));
  const rows = [];
  for (let i = last; i >= 0 && i > last - NEWEST_ROUNDS; i--) {
    const took = i > 0 && history.at_s[i] !== null && history.at_s[i - 1] !== null ? duration(history.at_s[i] - history.at_s[i - 1]) : "–";
    rows.push(row(whole.format(history.round[i]), loss(history.loss[i]), loss(validated.get(history.round[i])), whole.format(history.contributors[i]), took,
      history.codec[i], whole.format(history.inner_steps[i]), bytes(history.sent_bytes[i]), bytes(history.allreduce_bytes[i])));
  }
  if (!rows.length) rows.push(row("none yet", "", "", "", "", "", "", "", ""));
  at("newest").replaceChildren(...rows);
}

// ---- the curve ----

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function columns() {
  const history = state.history, pick = (xs, ys) => {
    const kept = xs.map((x, i) => [x, ys[i]]).filter(([x, y]) => x !== null && y !== null);
    return [kept.map(each => each[0]), kept.map(each => each[1])];
  };
  return uPlot.join([pick(history[axis], history.loss), pick(history.validation[axis], history.validation.loss)]);
}

function drawCurve() {
  if (!state.history || !window.uPlot) return;
  const data = columns(), node = at("curve");
  document.querySelector(".legend .validation").hidden = !state.history.validation.loss.length;
  if (!data[0].length) return;
  const style = axis + matchMedia("(prefers-color-scheme: dark)").matches;
  if (plot && plotted === style) { plot.setData(data); return; }
  if (plot) plot.destroy();
  plotted = style;
  const text = colour("--soft"), grid = { stroke: colour("--grid"), width: 1 }, font = "12px system-ui, sans-serif";
  const axes = { stroke: text, grid, ticks: grid, font };
  plot = new uPlot({
    width: node.clientWidth, height: node.clientHeight, legend: { show: false },
    cursor: { drag: { x: true, y: false }, points: { size: 7 } },
    scales: { x: { time: axis === "at_s" } },
    axes: [
      axis === "at_s" ? { ...axes } : { ...axes, values: (_, ticks) => ticks.map(tick => Number.isInteger(tick) || axis === "tokens" ? si(tick) : "") },
      { ...axes, size: 52, values: (_, ticks) => ticks.map(tick => tick.toFixed(2)) },
    ],
    series: [
      {},
      { label: "training", stroke: colour("--accent"), width: 2, points: { show: data[0].length < 60, size: 5 }, spanGaps: true },
      { label: "validation", stroke: colour("--validation"), width: 2, dash: [6, 4], points: { show: true, size: 6 }, spanGaps: true },
    ],
    hooks: { setCursor: [u => tell(u.cursor.idx)] },
  }, data, node);
  tell(null);
}

function tell(index) {
  const history = state.history;
  if (!plot || !history.round.length) return;
  const data = plot.data, i = index === null || index === undefined ? data[0].length - 1 : index;
  const x = data[0][i], where = axis === "at_s" ? new Date(x * 1000).toLocaleString() : axis === "tokens" ? si(x) + " tokens" : "round " + whole.format(Math.round(x));
  const said = [where];
  if (data[1][i] !== null && data[1][i] !== undefined) said.push("training " + loss(data[1][i]));
  if (data[2][i] !== null && data[2][i] !== undefined) said.push("validation " + loss(data[2][i]));
  put("curve-at", (index === null || index === undefined ? "newest: " : "") + said.join(" · "));
}

at("curve").addEventListener("keydown", event => {
  if (!plot) return;
  const last = plot.data[0].length - 1, now = plot.cursor.idx ?? last;
  const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -last, End: last }[event.key];
  if (step === undefined) return;
  event.preventDefault();
  const next = Math.min(last, Math.max(0, now + step));
  plot.setCursor({ left: plot.valToPos(plot.data[0][next], "x"), top: plot.bbox.height / devicePixelRatio / 2 });
});
at("curve").addEventListener("focus", () => at("curve-at").setAttribute("aria-live", "polite"));
at("curve").addEventListener("blur", () => {
  at("curve-at").setAttribute("aria-live", "off"); if (plot) { plot.setCursor({ left: -10, top: -10 }); tell(null); } });
at("axis").addEventListener("change", event => { axis = event.target.value; drawCurve(); });
new ResizeObserver(() => { if (plot) plot.setSize({ width: at("curve").clientWidth, height: at("curve").clientHeight }); }).observe(at("curve"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCurve);

// ---- buttons ----

at("all").addEventListener("click", () => { showAll = !showAll; drawContributors(); });
for (const button of document.querySelectorAll("[data-copies]")) {
  button.addEventListener("click", async () => {
    const line = at(button.dataset.copies), label = button.firstChild;
    let done = true;
    try {
      await navigator.clipboard.writeText(line.textContent);
    } catch {  // a browser gives the clipboard to safe origins alone
      getSelection().selectAllChildren(line);
      done = document.execCommand("copy");
    }
    label.data = done ? "Copied" : "Press Ctrl-C";
    put("copied", done ? "copied" : "the line is selected: press Ctrl-C");
    setTimeout(() => { label.data = "Copy"; put("copied", ""); }, 2500);
  });
}

// ---- what comes ----

function take(text) {
  Object.assign(state, JSON.parse(text));
  heardAt = Date.now();
  draw();
  live();
}

function live() {
  const isLive = Date.now() - heardAt < STALE_MS;
  at("live").className = isLive ? "live" : "live lost";
  put("live", isLive ? "live" : heardAt ? "no news, trying again" : "connecting");
  if (state.now) put("at", "as of " + clock(state.now.at_s));
}

function follow() {
  const events = new EventSource("/api/events" + query);
  events.addEventListener("state", event => take(event.data));
  events.addEventListener("error", () => {
    if (events.readyState !== EventSource.CLOSED) return;  // it tries again by itself
    ask().catch(() => {}).finally(() => setTimeout(follow, RETRY_MS));
  });
}

async function ask() {
  const answer = await fetch("/api/state" + query);
  if (answer.ok) take(await answer.text());
}

setInterval(live, 1000);
follow();
