"use strict";
// Sorts a table by the column whose heading is pressed, and shows the rows whose name holds what was typed.
for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  const said = document.getElementById(table.dataset.said);

  const keyOf = (row, column) => {
    const cell = row.cells[column];
    if (cell.dataset.key === undefined) return cell.textContent.trim();
    return cell.dataset.key === "" ? null : Number(cell.dataset.key);
  };

  const sort = (column) => {
    const heading = headings[column];
    const numbers = "key" in (body.rows[0]?.cells[column].dataset ?? {});
    // The largest number is what one looks for first; names begin at A.
    const first = numbers ? "descending" : "ascending";
    const second = numbers ? "ascending" : "descending";
    const way = heading.getAttribute("aria-sort") === first ? second : first;
    headings.forEach((other) => other.setAttribute("aria-sort", "none"));
    heading.setAttribute("aria-sort", way);
    const sign = way === "ascending" ? 1 : -1;
    const rows = [...body.rows].map((row) => [keyOf(row, column), row]);
    rows.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null);
      const order = numbers ? a - b : a.localeCompare(b, undefined, { numeric: true });
      return sign * order;
    });
    body.append(...rows.map(([, row]) => row));
    said.textContent = `sorted by ${heading.textContent.trim()}, ${way}`;
  };

  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => sort(column));
  });

  const filter = document.getElementById(table.dataset.filter);
  filter?.addEventListener("input", () => {
    const typed = filter.value.trim().toLowerCase();
    let shown = 0;
    for (const row of body.rows) {
      row.hidden = !row.cells[0].textContent.toLowerCase().includes(typed);
      shown += row.hidden ? 0 : 1;
    }
    said.textContent = `${shown} of ${body.rows.length} shown`;
  });
}
