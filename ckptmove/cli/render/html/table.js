// A table that can be searched and sorted. Only the rows in view are in the document.

/** Rows above and below the view that are drawn too. */
const MARGIN = 8;
/** Browsers limit the height of an element; a longer table scrolls faster than it is high. */
const HIGHEST = 8_000_000;

class Table {
  constructor(place, data) {
    this.data = data;
    this.shown = Array.from({ length: data.rows }, (_, row) => row);
    this.sorted = null;
    this.marked = -1;
    this.search = make("input", { type: "search", "aria-label": "Search", spellcheck: "false", autocomplete: "off" });
    this.search.placeholder = data.column("role") ? "Search: optimizer cuda:0 findings:O201" : "Search: value weight";
    this.count = make("output", { class: "matches" });
    // The roles stay when the style of a narrow page makes boxes of rows.
    this.head = make("thead", { role: "rowgroup" });
    this.body = make("tbody", { role: "rowgroup" });
    this.table = make("table", { role: "table", "aria-rowcount": data.rows + 1 }, this.head, this.body);
    this.view = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Rows" }, this.table);
    place.append(make("div", { class: "tools" }, this.search, this.count), this.view);
    this.drawHead();
    this.search.addEventListener("input", () => this.later(() => this.filter(this.search.value)));
    this.view.addEventListener("scroll", () => this.later(() => this.draw()), { passive: true });
    new ResizeObserver(() => this.later(() => this.draw())).observe(this.view);
    this.filter("");
  }

  /** Run the last call of a frame. */
  later(work) {
    if (!this.next) requestAnimationFrame(() => { const next = this.next; this.next = null; next(); });
    this.next = work;
  }

  drawHead() {
    const cells = this.data.columns.map((column) => {
      const button = make("button", { type: "button" }, column.title);
      button.addEventListener("click", () => this.sort(column));
      return make("th", { scope: "col", role: "columnheader", class: `column column-${column.title.replace(" ", "-")}` }, button);
    });
    this.head.append(make("tr", { role: "row", "aria-rowindex": 1 }, ...cells));
  }

  /** Sort by a column: ascending, then descending, then in the order of the file. */
  sort(column) {
    const was = this.sorted?.column === column ? this.sorted.sign : 0;
    this.sorted = was < 0 ? null : { column, sign: was ? -1 : 1 };
    this.data.columns.forEach((one, index) => {
      const sign = this.sorted?.column === one ? this.sorted.sign : 0;
      const cell = this.head.rows[0].cells[index];
      if (sign) cell.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      else cell.removeAttribute("aria-sort");
    });
    this.order();
    this.draw();
  }

  order() {
    if (!this.sorted) {
      this.shown.sort((a, b) => a - b);
      return;
    }
    const { column, sign } = this.sorted;
    const keys = new Array(this.data.rows);
    for (const row of this.shown) keys[row] = column.key(row);
    this.shown.sort((a, b) => (keys[a] < keys[b] ? -sign : keys[a] > keys[b] ? sign : a - b));
  }

  /** Show the rows that have every word of a query; "device:cpu" asks for a whole cell. */
  filter(query) {
    if (this.search.value !== query) this.search.value = query;
    const tests = query.toLowerCase().split(/\s+/).filter(Boolean).map((word) => this.test(word));
    this.shown = [];
    for (let row = 0; row < this.data.rows; row++) if (tests.every((test) => test(row))) this.shown.push(row);
    this.order();
    const of = this.shown.length < this.data.rows ? ` of ${this.data.rows.toLocaleString("en-US")}` : "";
    this.count.textContent = `${this.shown.length.toLocaleString("en-US")}${of}`;
    this.view.scrollTop = 0;
    this.draw();
  }

  test(word) {
    const [, title, cell] = word.match(/^([a-z]+):(.+)$/) ?? [];
    const column = this.data.column(title);
    if (column?.kind === "words") {
      const fits = column.words.map((text) => [text, ...text.split(" ")].some((one) => one.toLowerCase() === cell));
      return (row) => fits[column.at[row]];
    }
    this.texts ??= this.lowered();
    return (row) => this.texts[row].includes(word);
  }

  /** The name of the parameter that the state in a row belongs to. */
  owner(row) {
    const owner = this.data.owners?.[row] ?? -1;
    return owner < 0 ? "" : this.data.column("name").text(owner);
  }

  lowered() {
    const columns = this.data.columns.filter((column) => column.kind === "words" || column.kind === "names");
    return Array.from(this.shown.length === this.data.rows ? this.shown : { length: this.data.rows }, (_, row) =>
      [this.owner(row), ...columns.map((column) => column.text(row))].join(" ").toLowerCase());
  }

  /** Show all rows, with one of them marked and in view. */
  reveal(row) {
    this.marked = row;
    if (!this.shown.includes(row)) this.filter("");
    const { rowHeight, full, high } = this.heights();
    const at = this.shown.indexOf(row) * rowHeight - this.view.clientHeight / 3;
    this.view.scrollTop = full > high ? (at / (full - this.view.clientHeight)) * (high - this.view.clientHeight) : at;
    this.view.scrollIntoView({ block: "center" });
    this.view.focus({ preventScroll: true });
    this.draw();
  }

  heights() {
    const rowHeight = parseFloat(getComputedStyle(this.table).getPropertyValue("--row"));
    const full = this.shown.length * rowHeight;
    return { rowHeight, full, high: Math.min(full, HIGHEST) };
  }

  draw() {
    const { rowHeight, full, high } = this.heights();
    const view = this.view.clientHeight;
    const top = this.view.scrollTop;
    // Where the view is in a table of full height.
    const at = full > high ? (top / (high - view)) * (full - view) : top;
    // The view grows to the height of its rows, but never beyond the window.
    const first = Math.max(0, Math.floor(at / rowHeight) - MARGIN);
    const last = Math.min(this.shown.length, Math.ceil((at + innerHeight) / rowHeight) + MARGIN);
    const above = Math.max(0, first * rowHeight - at + top);
    const rows = this.shown.slice(first, last).map((row, index) => this.row(row, first + index));
    if (!this.shown.length) rows.push(make("tr", {}, make("td", { class: "none" }, "Nothing matches.")));
    this.body.replaceChildren(
      spacer(above), ...rows, spacer(high - above - rows.length * rowHeight));
  }

  row(row, index) {
    const cells = this.data.columns.map((column) => {
      const text = column.text(row);
      const cell = make("td", { role: "cell", class: `column column-${column.title.replace(" ", "-")}` });
      if (column.slots) cell.append(make("span", { class: `swatch ${column.slots[column.at[row]]}` }));
      const severity = column.grave?.[column.at[row]];
      if (severity) cell.classList.add("grave", severity);
      cell.append(make("bdi", {}, text));
      if (text.length > 12) cell.title = text;
      if (column.kind === "names") cell.append(make("small", {}, this.owner(row)));
      return cell;
    });
    const made = make("tr", { role: "row", "aria-rowindex": index + 2 }, ...cells);
    if (row === this.marked) made.classList.add("marked");
    return made;
  }
}

function spacer(height) {
  const made = make("tr", { class: "spacer", "aria-hidden": "true" });
  made.style.height = `${Math.max(0, height)}px`;
  return made;
}
