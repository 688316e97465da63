// Draws the page's charts in Vega, again when the window or the theme changes; follow.js adds points to them.
const dark = matchMedia("(prefers-color-scheme: dark)"), phone = matchMedia("(max-width: 720px)");
const CELL = /(?:"((?:[^"]|"")*)"|([^,\n]*))([,\n])/g;
const LEFT = 72;  // pixels of the number axis of small charts
const ROWS = "rows";  // name of a chart's table in its view
let page = given();
let drawn = {};  // key of a chart -> its view
let added = {};  // key of a chart -> points that came after the page

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
  return spec;
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
}

async function insert(key, points = added[key]?.points ?? []) {
  const view = drawn[key], end = added[key]?.end;
  if (!view || end === undefined) return;
  view.signal("end_" + key, end);
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
    view.signal("end_" + key, chart.params.find(one => one.name === "end_" + key).value);
    return view.runAsync();
  }));
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
