// Draws the page's charts in Vega, again when the window or the theme changes; follow.js adds points to them.
const dark = matchMedia("(prefers-color-scheme: dark)"), phone = matchMedia("(max-width: 720px)");
const CELL = /(?:"((?:[^"]|"")*)"|([^,\n]*))([,\n])/g;
const LEFT = 72;  // pixels of the number axis of small charts
const ROWS = "rows";  // name of a chart's table in its view
let page = given();
let drawn = {};  // key of a chart -> its view
let added = {};  // key of a chart -> points that came after the page
const logged = new Set(), zoomed = {};  // keys of charts with a log axis; key -> the stretch of x that is shown
let dragged = null;  // where the button of the mouse went down in a chart of curves

function given() {
  return JSON.parse(document.getElementById("charts").textContent);
}

// Rows of a table as encode.py writes it. Vega's own reader of CSV makes code from text.
function rowsOf(table, numbers) {
  const lines = [[]];
  for (const [, quoted, plain, end] of table.matchAll(CELL)) {
    lines.at(-1).push(quoted === undefined ? plain : quoted.replaceAll('""', '"'));
    if (end === "\n") lines.push([]);
  }
  const value = (name, cell) => !(name in numbers) ? cell : cell === "" ? null : Number(cell);
  const [names, ...rows] = lines.slice(0, -1);
  return rows.map(cells => Object.fromEntries(names.map((name, n) => [name, value(name, cells[n])])));
}

function withRows(spec) {
  if (Array.isArray(spec)) return spec.map(withRows);
  if (spec === null || typeof spec !== "object") return spec;
  if (spec.format?.type === "csv") return {values: rowsOf(spec.values, spec.format.parse ?? {})};
  return Object.fromEntries(Object.entries(spec).map(([name, part]) => [name, withRows(part)]));
}

function charts() {
  return phone.matches ? {...page.charts, ...page.narrow} : page.charts;
}

function specification(key, chart) {
  const theme = dark.matches ? "dark" : "light", spec = {...withRows(chart), config: page.themes[theme]};
  if (spec.data) spec.data = {name: ROWS, values: spec.data.values};
  if (spec.facet) {  // small charts share the width of the element, which Vega-Lite can't do
    if (phone.matches) spec.columns = Math.min(spec.columns, 2);
    const {clientWidth} = document.getElementById("chart-" + key);
    spec.spec.width = Math.max(40, Math.floor((clientWidth - LEFT + spec.spacing) / spec.columns - spec.spacing));
  }
  return logged.has(key) ? logarithmic(spec) : spec;
}

function logarithmic(spec) {
  const layer = spec.layer.map(one => {
    const y = one.encoding.y;
    if (!y) return one;
    const transform = [...one.transform, {filter: `datum.${y.field} > 0`}];
    return {...one, transform, encoding: {...one.encoding, y: {...y, scale: {type: "log", nice: false}}}};
  });
  return {...spec, layer};
}

async function embed(key, chart) {
  const theme = dark.matches ? "dark" : "light";
  const options = {ast: true, actions: false, renderer: "canvas", mode: "vega-lite", tooltip: {theme}};
  const element = document.getElementById("chart-" + key);
  drawn[key]?.finalize();
  delete drawn[key];
  drawn[key] = (await vegaEmbed(element, specification(key, chart), options)).view;
  await insert(key);
}

async function draw() {
  await Promise.all(Object.entries(charts()).map(([key, chart]) => embed(key, chart)));
  switches();
}

// Gives each chart of curves a button for a log axis and, while a stretch of it is shown, one for all of it.
function switches() {
  for (const [key, chart] of Object.entries(charts())) {
    const caption = document.getElementById("chart-" + key)?.parentElement.querySelector("figcaption");
    if (!caption || !hasEnd(chart, key)) continue;
    for (const name of caption.querySelector("button") ? [] : ["log", "all"]) {
      const button = document.createElement("button");
      Object.assign(button, {type: "button", textContent: name, title: "log axis; drag across the chart to zoom"});
      button.dataset.key = key;
      caption.append(button);
    }
    const [log, all] = caption.querySelectorAll("button");
    log.setAttribute("aria-pressed", logged.has(key));
    all.hidden = !zoomed[key];
  }
}

async function zoom(key, ends) {
  if (ends) zoomed[key] = ends;
  else delete zoomed[key];
  await insert(key, []);
  switches();
}

document.addEventListener("click", async ({target}) => {
  const key = target.dataset?.key;
  if (key === undefined) return;
  if (target.textContent === "all") return zoom(key);
  if (!logged.delete(key)) logged.add(key);
  await embed(key, charts()[key]);
  switches();
});

document.addEventListener("mousedown", event => {
  const key = event.target.closest?.(".chart")?.id.slice("chart-".length), view = drawn[key];
  const curves = view && event.target.matches("canvas") && hasEnd(charts()[key], key);
  dragged = curves ? {key, view, from: event.clientX, x: event.offsetX - view.origin()[0]} : null;
});

document.addEventListener("mouseup", event => {
  if (!dragged || Math.abs(event.clientX - dragged.from) < 8) return;
  const {key, view, from, x} = dragged, places = [x, x + event.clientX - from].sort((one, other) => one - other);
  const [begin, end] = places.map(place => Math.round(view.scale("x").invert(place)));
  const stretch = [Math.max(0, begin), Math.min(allOf(key)[1], end)];
  if (stretch[1] > stretch[0]) zoom(key, stretch);
});

document.addEventListener("dblclick", event => {
  const key = event.target.closest?.(".chart")?.id.slice("chart-".length);
  if (zoomed[key]) zoom(key);
});

// First and last x of a chart of curves.
function allOf(key) {
  return [0, added[key]?.end ?? charts()[key].params.find(one => one.name === "end_" + key).value];
}

async function insert(key, points = added[key]?.points ?? []) {
  const view = drawn[key];
  if (!view || !hasEnd(charts()[key], key)) return;
  const [begin, end] = zoomed[key] ?? allOf(key);
  view.signal("begin_" + key, begin).signal("end_" + key, end);
  if (points.length) view.insert(ROWS, points.map(point => ({...point})));
  await view.runAsync();
}

// Adds points to charts of curves: key -> [{x, y0, y1 …}]. end: last x of all of them.
async function add(points, end) {
  for (const key of Object.keys(charts())) {
    if (!hasEnd(charts()[key], key)) continue;
    added[key] ??= {points: []};
    added[key].points.push(...points[key] ?? []);
    added[key].end = end;
    await insert(key, points[key] ?? []);
  }
}

function hasEnd(chart, key) {
  return chart.params?.some(one => one.name === "end_" + key) ?? false;
}

// Draws what is new in the element `charts`: a table alone is exchanged in its view, another chart is drawn anew.
// others: whether the charts are others than before, in elements of their own.
async function renew(others) {
  const before = charts();
  page = given();
  added = {};
  if (others) {
    for (const view of Object.values(drawn)) view.finalize();
    drawn = {};
    return draw();
  }
  await Promise.all(Object.entries(charts()).map(async ([key, chart]) => {
    const view = drawn[key];
    if (!view || !before[key] || form(before[key], key) !== form(chart, key)) return embed(key, chart);
    view.data(ROWS, specification(key, chart).data.values);
    return insert(key);
  }));
  switches();
}

// Text that is equal for charts which differ in their table and the end of their axis alone.
function form(chart, key) {
  if (!chart.data || !hasEnd(chart, key)) return JSON.stringify(chart);
  const params = chart.params.filter(one => one.name !== "end_" + key);
  return JSON.stringify({...chart, params, data: chart.data.format});
}

draw();
for (const query of [dark, phone]) query.addEventListener("change", draw);
let resized;
addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(() => {
    for (const [key, chart] of Object.entries(charts())) if (chart.facet) embed(key, chart);
  }, 200);
});
export {add, renew};
