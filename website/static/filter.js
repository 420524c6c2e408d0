// A field above every long table, which hides the rows that do not have its words.
for (const table of document.querySelectorAll("article table")) {
  const rows = [...table.querySelectorAll("tbody tr")];
  if (rows.length < 60) continue;
  const chinese = document.documentElement.lang.startsWith("zh");
  const field = document.createElement("input");
  field.type = "search";
  field.placeholder = chinese ? `筛选 ${rows.length} 行` : `Filter ${rows.length} rows`;
  field.setAttribute("aria-label", field.placeholder);
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
  (table.closest(".table-wrapper") ?? table).before(field);
}
