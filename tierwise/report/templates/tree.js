// The tree of modules as a treegrid: rows open and close, arrows walk.
function growTree(table) {
  const rows = [...table.querySelectorAll("tbody tr")], byKey = new Map(rows.map((row) => [row.dataset.key, row]));
  const parentOf = (row) => byKey.get(row.dataset.parent), isOpen = (row) => row.getAttribute("aria-expanded") === "true";
  const seen = (row) => { for (let p = parentOf(row); p; p = parentOf(p)) if (!isOpen(p)) return false; return true; };
  const refresh = () => { for (const row of rows) row.hidden = !seen(row); };
  const open = (row, yes) => { row.setAttribute("aria-expanded", yes); refresh(); };
  const focus = (row) => {
    if (!row) return;
    for (const other of rows) other.tabIndex = -1;
    row.tabIndex = 0;
    row.focus();
  };
  // At first: the step, and its modules down to the first level that tells something apart.
  const children = (row) => rows.filter((other) => other.dataset.parent === row.dataset.key);
  for (const row of rows) if (row.hasAttribute("aria-expanded")) row.setAttribute("aria-expanded", +row.getAttribute("aria-level") < 3 && children(row).length <= 40);
  rows.forEach((row, i) => { row.tabIndex = i ? -1 : 0; });
  refresh();
  table.addEventListener("click", (event) => {
    const row = event.target.closest("tbody tr");
    if (row && row.hasAttribute("aria-expanded")) open(row, !isOpen(row));
  });
  table.addEventListener("keydown", (event) => {
    const row = event.target.closest("tbody tr");
    if (!row) return;
    const shown = rows.filter((r) => !r.hidden), at = shown.indexOf(row), can = row.hasAttribute("aria-expanded");
    const does = {
      ArrowDown: () => focus(shown[at + 1]), ArrowUp: () => focus(shown[at - 1]), Home: () => focus(shown[0]), End: () => focus(shown[shown.length - 1]),
      ArrowRight: () => (can && !isOpen(row) ? open(row, true) : can && focus(shown[at + 1])),
      ArrowLeft: () => (can && isOpen(row) ? open(row, false) : focus(parentOf(row))),
      Enter: () => can && open(row, !isOpen(row)), " ": () => can && open(row, !isOpen(row)),
    }[event.key];
    if (!does) return;
    does();
    event.preventDefault();
  });
}
