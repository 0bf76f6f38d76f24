"use strict";
// Draws snapshots of moejax/serve/http/live.py, and chats over OpenAI's API. No library, no build.

const FREE = -4, KV_FREE = -3, KV_USED = -2, EMPTY_CELL = -1; // of moejax/engine/snapshot.py
const KEPT = 240; // snapshots of the last minute
const by = (id) => document.getElementById(id);
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

let model = null, now = null, before = null, key = "", keyRefused = false, answering = null;
let heat = [], rates = [], messages = [];
let speed = { rate: "–", token: "–", device: "–", wait: "–", host: "–" }; // of the last tokens that came

// ---- requests

function headers() {
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

async function request(url, body, signal) {
  for (;;) {
    const method = body === undefined ? "GET" : "POST";
    const response = await fetch(url, { method, headers: headers(), body: body && JSON.stringify(body), signal });
    if (response.status === 401 && !(keyRefused && url === "/live")) { // /live is tried again and again
      const given = prompt("The server wants an API key:");
      keyRefused = !given;
      if (given) { key = given; continue; }
    }
    if (!response.ok) {
      const said = await response.json().catch(() => null);
      throw new Error(said?.error?.message ?? `${response.status} ${response.statusText}`);
    }
    return response;
  }
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const lines = part.split("\n");
      const name = lines.find((line) => line.startsWith("event: "))?.slice(7);
      const data = lines.find((line) => line.startsWith("data: "))?.slice(6);
      if (data !== undefined) yield { name, data };
    }
  }
}

// ---- chat

function turn(who, text) {
  const element = document.createElement("p");
  element.className = "turn";
  const name = document.createElement("b");
  name.textContent = who;
  element.append(name, document.createTextNode(text));
  by("turns").append(element);
  return element.lastChild;
}

async function ask(text) {
  turn("You", text);
  const answer = turn("Model", ""), thoughts = document.createElement("i");
  answer.before(thoughts);
  messages.push({ role: "user", content: text });
  const options = { model: model.model, stream: true, temperature: Number(by("temperature").value),
    max_tokens: Number(by("most").value) };
  const body = model.chat ? { ...options, messages } : { ...options, prompt: text };
  answering = new AbortController();
  by("send").textContent = "Stop";
  try {
    const url = model.chat ? "/v1/chat/completions" : "/v1/completions";
    for await (const { data } of events(await request(url, body, answering.signal))) {
      if (data === "[DONE]") break;
      const piece = JSON.parse(data);
      if (piece.error) throw new Error(piece.error.message);
      const choice = piece.choices[0];
      const thought = choice?.delta?.reasoning_content ?? "";
      if (thought) thoughts.textContent += thought; // no part of the conversation
      answer.data += choice ? choice.delta?.content ?? choice.text ?? "" : "";
      by("turns").scrollTop = by("turns").scrollHeight;
    }
    messages.push({ role: "assistant", content: answer.data });
  } catch (error) {
    messages.pop(); // the next message does not follow one without an answer
    if (error.name !== "AbortError") answer.parentElement.classList.add("error");
    answer.data += error.name === "AbortError" ? " (stopped)" : error.message;
  }
  answering = null;
  by("send").textContent = "Send";
}

by("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (answering) { answering.abort(); return; }
  const text = by("text").value.trim();
  if (!text || !model) return;
  by("text").value = "";
  ask(text);
});
by("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    by("ask").requestSubmit();
  }
});
by("clear").addEventListener("click", () => {
  answering?.abort();
  messages = [];
  by("turns").replaceChildren();
  by("text").focus();
});

// ---- pictures

function colour(layer, version = 0) {
  const hue = (layer * 360) / model.layers;
  return `hsl(${hue} ${version ? 35 : 65}% ${version ? 65 : 50}%)`;
}

function canvas(id, rows, columns, cell, gap) {
  const element = by(id), width = element.clientWidth, ratio = devicePixelRatio || 1;
  const size = cell ?? Math.max(2, (width - gap) / columns - gap);
  const height = Math.ceil(rows * (size + gap) + gap);
  element.style.height = `${height}px`;
  element.width = width * ratio;
  element.height = height * ratio;
  const context = element.getContext("2d");
  context.scale(ratio, ratio);
  return { context, size, width, height };
}

function slotGrid() {
  const width = by("slots").clientWidth, gap = 1;
  const size = Math.max(3, Math.min(18, Math.sqrt((width * 150) / now.slots.length) - gap));
  const columns = Math.max(1, Math.floor((width - gap) / (size + gap)));
  return { size, gap, columns };
}

function drawSlots() {
  const { size, gap, columns } = slotGrid(), slots = now.slots;
  const { context } = canvas("slots", Math.ceil(slots.length / columns), columns, size, gap);
  const plain = { [FREE]: style("--free"), [KV_FREE]: style("--kv-free"), [KV_USED]: style("--kv"),
    [EMPTY_CELL]: style("--cell") };
  const each = model.layers * model.experts;
  slots.forEach((held, i) => {
    const x = gap + (i % columns) * (size + gap), y = gap + Math.floor(i / columns) * (size + gap);
    const layer = Math.floor((held % each) / model.experts);
    context.fillStyle = held < 0 ? plain[held] : colour(layer, Math.floor(held / each));
    context.fillRect(x, y, size, size);
  });
}

function drawExperts() {
  const { layers, experts } = model;
  const size = Math.max(2, Math.min(22, by("experts").clientWidth / experts - 1));
  const height = Math.max(4, Math.min(16, 260 / layers - 1));
  const { context } = canvas("experts", layers, experts, height, 1);
  const most = Math.max(...heat, 1e-9), ink = style("--ink");
  for (let layer = 0; layer < layers; layer++) {
    for (let expert = 0; expert < experts; expert++) {
      const i = layer * experts + expert, x = expert * (size + 1), y = 1 + layer * (height + 1);
      context.fillStyle = style("--cell");
      context.fillRect(x, y, size, height);
      context.globalAlpha = Math.sqrt(heat[i] / most);
      context.fillStyle = colour(layer);
      context.fillRect(x, y, size, height);
      context.globalAlpha = 1;
      if (now.resident[i]) {
        const dot = Math.max(1.5, Math.min(size, height) / 3.5);
        context.fillStyle = ink;
        context.fillRect(x + (size - dot) / 2, y + (height - dot) / 2, dot, dot);
      }
    }
  }
}

function drawHistory() {
  const { context, width } = canvas("history", 1, 1, 70, 1), height = 70;
  context.strokeStyle = style("--line");
  context.fillStyle = style("--dim");
  context.font = "11px system-ui";
  for (const share of [0, 0.5, 1]) {
    const y = 8 + (1 - share) * (height - 16);
    context.beginPath();
    context.moveTo(36, y);
    context.lineTo(width, y);
    context.stroke();
    context.fillText(`${100 * share}%`, 0, y + 4);
  }
  context.strokeStyle = style("--accent");
  context.lineWidth = 2;
  context.beginPath();
  let drawing = false;
  rates.forEach((rate, i) => {
    const x = 36 + ((width - 36) * (i + KEPT - rates.length)) / (KEPT - 1);
    const y = 8 + (1 - rate) * (height - 16);
    if (rate === null) drawing = false;
    else if (drawing) context.lineTo(x, y);
    else { context.moveTo(x, y); drawing = true; }
  });
  context.stroke();
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  for (; count >= 1024 && i < units.length - 1; i++) count /= 1024;
  return `${count.toFixed(count < 10 && i ? 1 : 0)} ${units[i]}`;
}

function tiles() {
  const passed = before ? now.time - before.time : 0;
  const change = (name) => (before ? now[name] - before[name] : 0);
  const tokens = change("generated_tokens"), wait = change("wait_seconds");
  const experts = now.cells_per_layer.reduce((sum, cells) => sum + cells, 0);
  const milliseconds = (seconds) => `${((1000 * seconds) / tokens).toFixed(1)} ms`;
  if (passed && tokens > 0) {
    speed = { rate: (tokens / passed).toFixed(0), token: milliseconds(change("seconds")), wait: milliseconds(wait),
      device: milliseconds(Math.max(0, change("device_seconds") - wait)),
      host: milliseconds(Math.max(0, change("seconds") - change("device_seconds"))) };
  }
  const shown = [
    ["Tokens a second", speed.rate],
    ["Time a token", speed.token],
    ["of it computing", speed.device],
    ...(now.wait_seconds === null ? [] : [["waiting for experts", speed.wait]]),
    ["on the host", speed.host],
    ["Hit rate, in all", now.activations ? `${((100 * now.hits) / now.activations).toFixed(1)}%` : "–"],
    ["Misses", (now.activations - now.hits).toLocaleString("en")],
    ["Over the link", bytes(now.bytes)],
    ["Experts / KV", `${bytes(experts * model.slot_bytes)} / ${bytes(now.kv_slots * model.slot_bytes)}`],
    ["Running, waiting", `${now.running}, ${now.waiting}`],
    ["Tokens so far", now.generated_tokens.toLocaleString("en")],
  ];
  by("tiles").replaceChildren(...shown.map(([name, value]) => {
    const tile = document.createElement("div"), label = document.createElement("span");
    tile.className = "tile";
    label.textContent = name;
    const bold = document.createElement("b");
    bold.textContent = value;
    tile.append(label, bold);
    return tile;
  }));
}

function legend() {
  const entries = [[style("--kv"), "KV in use"], [style("--kv-free"), "KV, empty"], [style("--cell"), "empty cell"],
    [style("--free"), "free"]];
  const step = Math.max(1, Math.ceil(model.layers / 8));
  for (let layer = 0; layer < model.layers; layer += step) entries.push([colour(layer), `layer ${layer}`]);
  if (model.versions.length > 1) entries.push([colour(0, 1), `paler: ${model.versions.slice(1).join(", ")}`]);
  by("legend").replaceChildren(...entries.map(([fill, name]) => {
    const entry = document.createElement("span"), square = document.createElement("i");
    square.style.background = fill;
    entry.append(square, name);
    return entry;
  }));
}

function draw() {
  if (!now) return;
  drawSlots();
  drawExperts();
  drawHistory();
  tiles();
}

// ---- what is under the pointer

by("experts").addEventListener("pointermove", (event) => {
  if (!now) return;
  const { layers, experts } = model;
  const size = Math.max(2, Math.min(22, by("experts").clientWidth / experts - 1));
  const height = Math.max(4, Math.min(16, 260 / layers - 1));
  const layer = Math.floor(event.offsetY / (height + 1)), expert = Math.floor(event.offsetX / (size + 1));
  if (layer < 0 || layer >= layers || expert < 0 || expert >= experts) return;
  const i = layer * experts + expert, kind = now.resident[i];
  const where = kind ? `resident (${model.versions[kind - 1]})` : "not resident";
  by("about").textContent = `layer ${layer}, expert ${expert}: ${where}, chosen by ${now.chosen[i]} tokens`;
});

// ---- the budget

by("split").addEventListener("input", () => { by("split-now").textContent = by("split").value; });
by("split").addEventListener("change", async () => {
  try {
    await request("/live/budget", { expert_slots: Number(by("split").value) });
    by("state").textContent = "budget moves …";
  } catch (error) {
    by("state").textContent = error.message;
  }
});

// ---- snapshots

function take(snapshot) {
  before = now;
  now = snapshot;
  // A short memory, so that the heat follows what is going on.
  heat = snapshot.chosen.map((count, i) => 0.9 * (heat[i] ?? 0) + count - (before?.chosen[i] ?? count));
  const needed = now.activations - (before?.activations ?? now.activations);
  rates.push(needed ? (now.hits - before.hits) / needed : null);
  rates = rates.slice(-KEPT);
  by("policy").textContent = now.policy ?? "";
  by("state").textContent = now.running ? "running" : "idle";
  if (document.activeElement !== by("split")) {
    const cells = now.cells_per_layer.reduce((sum, each) => sum + each, 0);
    by("split").value = cells;
    by("split-now").textContent = cells;
  }
  draw();
}

async function look() {
  for (;;) {
    try {
      for await (const { name, data } of events(await request("/live"))) {
        if (name === "model") {
          model = JSON.parse(data);
          now = before = null;
          heat = [];
          by("model").textContent = model.model;
          by("split").max = Math.min(model.layers * model.most_cells, model.slots - model.least_kv_slots);
          by("budget").hidden = !model.movable;
          legend();
        } else take(JSON.parse(data));
      }
      by("state").textContent = "the server has ended";
    } catch (error) {
      by("state").textContent = `no connection: ${error.message}`;
    }
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (model) legend(); draw(); });
look();
