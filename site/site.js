/* On a phone a wide table becomes a list: a row is a block, and each cell says what it is. */
const TABLES = ".bd-article table:not(.highlighttable)"

function fit(table) {
    const heads = [...table.querySelectorAll("thead th")].map((head) => head.innerText.trim())
    table.classList.remove("as-list")
    const wide = table.scrollWidth > table.parentElement.clientWidth
    table.classList.toggle("as-list", wide && heads.length > 0)
    for (const row of table.tBodies[0]?.rows ?? [])
        [...row.cells].forEach((cell, column) => { cell.dataset.head = heads[column] ?? "" })
}

function fitAll() {
    document.querySelectorAll(TABLES).forEach(fit)
}

addEventListener("load", fitAll)
addEventListener("resize", fitAll)
