// Read the data of a table: columns, in which rows refer to texts by number.

const UNITS = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

/** A size with a binary unit, as the terminal shows it. */
function size(bytes) {
  if (bytes < 1024) return `${bytes} B`;
  const power = Math.min(Math.floor(Math.log2(bytes) / 10), UNITS.length);
  return `${(bytes / 1024 ** power).toFixed(1)} ${UNITS[power - 1]}`;
}

/** A number with its noun: "1 tensor", "2,048 tensors". */
function amount(number, noun) {
  return `${number.toLocaleString("en-US")} ${noun}${number === 1 ? "" : "s"}`;
}

/** A difference of values; JSON has infinities as text. */
function figure(value) {
  if (typeof value !== "number") return value ?? "";
  return Number.isInteger(value) ? String(value) : value.toPrecision(3);
}

/** A column, with the text and the sort key of each row. */
function readColumn(data) {
  if (data.kind === "names") {
    const { heads, tails } = data;
    const text = (row) => heads.words[heads.at[row]] + tails.words[tails.at[row]];
    return { ...data, text, key: text };
  }
  if (data.kind === "words") {
    const text = (row) => data.words[data.at[row]];
    return { ...data, text, key: text };
  }
  const key = (row) => (typeof data.values[row] === "string" ? Infinity : data.values[row] ?? -Infinity);
  return { ...data, key, text: (row) => (data.kind === "bytes" ? size : figure)(data.values[row]) };
}

/** The columns and the number of rows of a data element. */
function readTable(id) {
  const data = JSON.parse(document.getElementById(id).textContent);
  const columns = data.columns.map(readColumn);
  const column = (title) => columns.find((one) => one.title === title);
  return { ...data, columns, column };
}

/** An element with text and children; text never becomes markup. */
function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
