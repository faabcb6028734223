/* On a phone a wide table becomes a list: a row is a block, and each cell says what it is; short cells
   share a line. */
const TABLES = ".bd-article table:not(.highlighttable)"

function fit(table) {
    const heads = [...table.querySelectorAll("thead th")].map((head) => head.innerText.trim())
    table.classList.remove("as-list")
    const wide = table.scrollWidth > table.parentElement.clientWidth
    table.classList.toggle("as-list", wide && heads.length > 0)
    for (const row of table.tBodies[0]?.rows ?? [])
        [...row.cells].forEach((cell, column) => {
            const head = heads[column] ?? ""
            cell.dataset.head = head
            const text = cell.innerText.trim()
            cell.classList.toggle("short", text !== "" && (head + text).length < 30)
        })
}

function fitAll() {
    document.querySelectorAll(TABLES).forEach(fit)
}

addEventListener("load", fitAll)
addEventListener("resize", fitAll)

/* On paper nobody opens a question: all are printed once more, with their answers, at the end. */
addEventListener("beforeprint", () => {
    const article = document.querySelector(".bd-article")
    const questions = [...article.querySelectorAll("details")]
    if (!questions.length) return
    const answers = document.createElement("section")
    answers.className = "answers"
    answers.innerHTML = "<h2>Answers</h2>"
    for (const question of questions) {
        const copy = question.cloneNode(true)
        copy.open = true
        answers.append(copy)
    }
    article.append(answers)
})

addEventListener("afterprint", () => document.querySelector(".answers")?.remove())
