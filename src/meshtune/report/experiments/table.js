// The table of a sweep's experiments, made from the data that table.py wrote: filters, sorting, and the chosen rows side
// by side. Rows are drawn a hundred at a time, as they are scrolled to. All text is set as text, never as HTML.
{
  const EXPERIMENTS = JSON.parse(document.getElementById("data-of-experiments").textContent);
  const CHUNK = 100;  // rows
  const {columns, parts, simulated} = EXPERIMENTS;
  const section = document.getElementById("experiments"), beside = document.getElementById("chosen");
  const box = section.querySelector(".wide"), filters = section.querySelector(".filters");
  const note = section.querySelector(".note"), head = section.querySelector("thead");
  const body = section.querySelector("tbody");
  for (const column of columns) column.values ??= column.at.map(place => column.words[place]);
  const status = columns.find(column => column.name === "status");
  const total = columns[0].values.length, order = new Intl.Collator("en", {numeric: true});
  const state = {words: [], only: new Map(), sorted: EXPERIMENTS.sorted, down: EXPERIMENTS.sorted > 0, chosen: new Set(), rows: [], drawn: 0};

  const made = (tag, text = "", properties = {}) => {
    const element = Object.assign(document.createElement(tag), properties);
    if (text !== "") element.textContent = text;
    return element;
  };
  const digits = value => Math.abs(value) >= 99.95 ? Math.round(value).toLocaleString("en")
    : Number.isInteger(value) ? String(value) : Number(value.toPrecision(3)).toString();
  const forms = {
    text: String,
    number: digits,
    share: value => (100 * value).toFixed(1) + "%",
    seconds: value => value < 1 ? digits(1000 * value) + " ms" : digits(value) + " s",
    GiB: value => value < 0.1 ? digits(1024 * value) + " MiB" : digits(value) + " GiB",
  };
  const written = (column, row) => {
    const value = column.values[row];
    return value === null || value === undefined || value === "" ? "" : forms[column.form](value);
  };
  const everything = Array.from({length: total}, (_, row) =>
    columns.map(column => written(column, row)).join("\n").toLowerCase());

  function choose() {
    const only = [...state.only];
    state.rows = [];
    for (let row = 0; row < total; row++) {
      if (only.every(([column, value]) => String(column.values[row] ?? "") === value)
          && state.words.every(word => everything[row].includes(word))) state.rows.push(row);
    }
    const {values, form} = columns[state.sorted], sign = state.down ? -1 : 1;
    const missing = value => value === null || value === undefined || value === "";
    const compare = form === "text" ? order.compare : (one, other) => one - other;
    const last = row => form !== "text" && state.sorted > 0 && status.values[row] !== "done";
    state.rows.sort((one, other) => {
      const a = values[one], b = values[other];
      if (last(one) !== last(other)) return last(one) - last(other);
      if (missing(a) || missing(b)) return missing(a) - missing(b) || one - other;
      return sign * compare(a, b) || one - other;
    });
    note.textContent = `${state.rows.length.toLocaleString("en")} of ${total.toLocaleString("en")} experiments`
      + (simulated ? `, simulated (${simulated})` : "") + ". Choose two or more to see them side by side.";
    for (const [place, cell] of [...head.querySelectorAll("th[data-column]")].entries())
      cell.ariaSort = place !== state.sorted ? "none" : state.down ? "descending" : "ascending";
    body.replaceChildren();
    state.drawn = 0;
    box.scrollTop = 0;
    more();
  }

  function more() {
    const rows = state.rows.slice(state.drawn, state.drawn + CHUNK), added = document.createDocumentFragment();
    for (const row of rows) {
      const line = made("tr"), cell = made("td");
      const mark = made("input", "", {type: "checkbox", checked: state.chosen.has(row)});
      mark.ariaLabel = `choose experiment ${columns[0].values[row]}`;
      mark.addEventListener("change", () => {
        state.chosen[mark.checked ? "add" : "delete"](row);
        compare();
      });
      cell.append(mark);
      line.append(cell, ...columns.map(column => {
        const text = written(column, row);
        return made("td", text, {className: column.form === "text" ? "left" : "", title: text.length > 40 ? text : ""});
      }));
      added.append(line);
    }
    body.append(added);
    state.drawn += rows.length;
  }

  function compare() {
    const rows = [...state.chosen].sort((one, other) => one - other);
    beside.hidden = rows.length < 2;
    beside.replaceChildren();
    if (beside.hidden) return;
    const clear = made("button", "clear the choice", {type: "button"});
    clear.addEventListener("click", () => {
      state.chosen.clear();
      for (const mark of body.querySelectorAll("input")) mark.checked = false;
      compare();
    });
    const table = made("table", "", {className: "facts numbers listing"}), wide = made("div", "", {className: "wide"});
    const title = made("tr");
    title.append(made("th"), ...rows.map(row => made("th", `experiment ${columns[0].values[row]}`)));
    const headOf = made("thead"), lines = made("tbody");
    headOf.append(title);
    const line = (name, texts, className = "") => {
      const added = made("tr", "", {className});
      added.append(made("th", name), ...texts.map(text => made("td", text)));
      lines.append(added);
    };
    for (const column of columns.slice(1)) {
      const texts = rows.map(row => written(column, row));
      if (new Set(texts).size > 1) line(column.name, texts);
    }
    for (const [kind, title, form] of [["time", "time of a step", "seconds"], ["memory", "peak memory", "GiB"]]) {
      for (const [place, source] of parts.sources.entries()) {
        const of = rows.map(row => parts[kind].rows[row]?.[place] ?? null);
        if (of.every(values => values === null)) continue;
        line(`${title}, ${source}`, rows.map(() => ""), "total");
        for (const [n, name] of parts[kind].names.entries())
          if (of.some(values => values?.[n] > 0))
            line(name, of.map(values => values === null ? "" : values[n] ? forms[form](values[n]) : "0"));
      }
    }
    table.append(headOf, lines);
    wide.append(table);
    const heading = made("h2", `${rows.length} experiments side by side${simulated ? ", simulated" : ""} `);
    beside.append(heading, made("p", "What differs, then the parts of a step and of memory.", {className: "note"}), clear, wide);
  }

  const labelled = (name, control) => {
    const label = made("label", name + " ");
    control.ariaLabel = name;
    label.append(control);
    filters.append(label);
    return control;
  };
  const search = labelled("words", made("input", "", {type: "search", placeholder: "in any column"}));
  search.addEventListener("input", () => {
    state.words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    choose();
  });
  for (const column of columns.filter(column => column.filter)) {
    const values = [...new Set(column.values.map(value => String(value ?? "")))].sort(order.compare);
    if (values.length < 2 || values.length > 60) continue;
    const select = labelled(column.name, made("select"));
    select.append(new Option("all", "\n"), ...values.map(value => new Option(value || "–", value)));
    select.addEventListener("change", () => {
      select.value === "\n" ? state.only.delete(column) : state.only.set(column, select.value);
      choose();
    });
  }
  const heads = made("tr");
  heads.append(made("th"), ...columns.map((column, place) => {
    const cell = made("th", "", {className: column.form === "text" ? "left" : ""});
    cell.dataset.column = place;
    const button = made("button", column.name, {type: "button"});
    button.addEventListener("click", () => {
      // the largest number first, texts from A on; again: the other way round
      state.down = state.sorted === place ? !state.down : column.form !== "text";
      state.sorted = place;
      choose();
    });
    cell.append(button);
    return cell;
  }));
  head.append(heads);
  box.addEventListener("scroll", () => {
    if (box.scrollTop + 2 * box.clientHeight > box.scrollHeight && state.drawn < state.rows.length) more();
  });
  choose();
}
