"use strict";
const at = (id) => document.getElementById(id);
const PERIOD_MS = 700;
const MAX_BYTES = 32 * 1024 * 1024; // MAX_BODY_BYTES of page.py
let shown = "";

function element(tag, text, className) {
  const made = document.createElement(tag);
  made.textContent = text; // never HTML: names come from people and files
  if (className) made.className = className;
  return made;
}

function answer(row, place, count) {
  const item = element("li", "", row.unknown ? "unknown" : "");
  if (count > 1) item.append(element("small", `Part ${place + 1}`));
  const best = row.top.length ? row.top[0].label : "no products yet";
  item.append(element("div", row.unknown ? "unknown" : best, "best"));
  const table = document.createElement("table");
  for (const { label, score } of row.top) {
    const line = table.insertRow();
    line.insertCell().textContent = label;
    const meter = element("meter", "");
    meter.value = score;
    line.insertCell().append(meter);
    line.insertCell().textContent = row.calibrated ? `${Math.round(100 * score)}%` : score.toFixed(2);
  }
  item.append(table);
  return item;
}

function show(state) {
  at("problem").textContent = state.problem;
  if (state.number) {
    at("name").textContent = state.name;
    at("picture").src = `picture?number=${state.number}`;
  }
  const count = state.rows * state.columns;
  at("answers").replaceChildren(...state.answers.map((row, place) => answer(row, place, count)));
  at("place").hidden = count < 2;
  if (at("part").length !== count) {
    const options = Array.from({ length: count }, (_, place) => element("option", `${place + 1}`));
    options.forEach((option, place) => { option.value = place; });
    at("part").replaceChildren(...options);
  }
  const rows = state.learnt.map((each) => element("li", `${each.name} (${each.photos} photos)`));
  at("products").replaceChildren(...(rows.length ? rows : [element("li", "none")]));
  const events = state.history.map((each) => element("li", `${each.time} ${each.action}: ${each.names.join(", ")}`));
  at("history").replaceChildren(...events);
  at("undo").disabled = !rows.length;
  at("frames").disabled = !state.can_learn || !state.kept;
  at("upload").disabled = !state.can_learn;
  at("frames").textContent = `Learn from the last ${state.kept || ""} pictures`;
  if (!state.can_learn && !at("result").textContent) {
    say("This bundle has no embedding: new products need the stage expose_embedding.", true);
  }
}

function say(text, wrong) {
  at("result").textContent = text;
  at("result").className = wrong ? "wrong" : "";
}

async function refresh() {
  try {
    const text = await (await fetch("state.json")).text();
    if (text !== shown) show(JSON.parse(text));
    shown = text;
  } catch (error) {
    shown = "";
    at("problem").textContent = "The program does not answer.";
  }
}

async function change(path, body, headers) {
  say("Please wait…");
  try {
    const options = { method: "POST", body: body || "", headers: { "X-Shop": "1", ...headers } };
    const result = await (await fetch(path, options)).json();
    if (result.error) say(result.error, true);
    else if (result.learnt) say(result.learnt.text);
    else say("Done.");
    return !result.error;
  } catch (error) {
    say("The program does not answer.", true);
    return false;
  } finally {
    await refresh();
  }
}

function product() {
  const name = at("product").value.trim();
  if (!name) say("Enter the name of the product first.", true);
  return name && `learn?name=${encodeURIComponent(name)}`;
}

at("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const path = product();
  if (path && await change(`${path}&part=${at("part").value || 0}`)) at("product").value = "";
});
at("upload").addEventListener("click", async () => {
  const files = [...at("files").files];
  if (!files.length) return say("Choose about five photos first.", true);
  const path = product();
  if (files.reduce((sum, file) => sum + file.size, 0) > MAX_BYTES) {
    return say("The photos have more than 32 MB: choose fewer or smaller ones.", true);
  }
  const sizes = files.map((file) => file.size).join(",");
  if (path && await change(path, new Blob(files), { "X-Sizes": sizes })) {
    at("product").value = "";
    at("files").value = "";
  }
});
at("undo").addEventListener("click", () => change("undo"));
at("import").addEventListener("change", async () => {
  const [file] = at("import").files;
  if (file) await change("import", file);
  at("import").value = "";
});

refresh();
setInterval(refresh, PERIOD_MS);
