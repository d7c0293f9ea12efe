// Five small things. Every page works without them.

const one = (selector, within = document) => within.querySelector(selector)
const say = (sentence) => { const region = one("#announce"); if (region) region.textContent = sentence }

// Copy: a button with data-copy names the element whose text or value is wanted.
document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]")
  if (!button) return
  const source = document.getElementById(button.dataset.copy)
  const word = (button.dataset.word ??= button.textContent)
  try {
    await navigator.clipboard.writeText(source.value ?? source.textContent)
    button.textContent = "Copied"
    say("Copied")
    setTimeout(() => { button.textContent = word }, 2000)
  } catch {
    if (source.select) source.select()
    else getSelection().selectAllChildren(source)
    say("Copying was refused. The text is selected: press the keys for copying.")
  }
})
document.addEventListener("focusin", (event) => { if (event.target.matches("input[readonly][data-select]")) event.target.select() })

// Theme: system, light, dark, in turn.
document.addEventListener("click", (event) => {
  if (!event.target.closest("[data-theme-switch]")) return
  const root = document.documentElement
  const now = root.dataset.theme
  const next = now === "light" ? "dark" : now === "dark" ? "" : "light"
  if (next) root.dataset.theme = next
  else delete root.dataset.theme
  try { next ? localStorage.setItem("theme", next) : localStorage.removeItem("theme") } catch { /* not remembered */ }
  say(`Theme: ${next || "as the system"}`)
})

// Shortcuts: g and a letter travels, / searches, j and k walk rows, ? lists them, Esc closes.
let going = false
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return
  if (event.target.matches("input, textarea, select, [contenteditable]")) return
  const dialog = one("dialog#shortcuts")
  if (going) {
    going = false
    const link = one(`[data-go="${CSS.escape(event.key)}"]`)
    if (link) { event.preventDefault(); link.click() }
    return
  }
  if (event.key === "g") { going = true; setTimeout(() => { going = false }, 1500) }
  else if (event.key === "?" && dialog) { event.preventDefault(); dialog.open ? dialog.close() : dialog.showModal() }
  else if (event.key === "/") { const field = one("[data-search]"); if (field) { event.preventDefault(); field.focus() } }
  else if (event.key === "j" || event.key === "k") {
    const rows = [...document.querySelectorAll("[data-rows] tr[tabindex]")]
    const at = rows.indexOf(document.activeElement.closest?.("tr"))
    rows[Math.max(0, Math.min(rows.length - 1, at + (event.key === "j" ? 1 : -1)))]?.focus()
  }
})

// Live parts: paused while hidden, hovered or focused; a word beside them says which, and how many rows wait.
const live = { failures: 0, tags: new WeakMap(), unsaid: new Set(), said: new Set(), saidAt: -Infinity }
const state = (word, kind) => document.querySelectorAll("[data-live-state]").forEach((mark) => {
  mark.textContent = word
  mark.className = `state ${kind}`
})
const wait = (words) => document.querySelectorAll("[data-live-new]").forEach((mark) => { mark.textContent = words; mark.hidden = !words })
// One polite sentence a minute, whatever comes: a sentence for each row would never end.
const meet = (ids) => {
  for (const id of ids) if (!live.said.has(id)) live.unsaid.add(id)
  if (!live.unsaid.size || performance.now() - live.saidAt < 60_000) return
  say(live.unsaid.size === 1 ? "1 new call" : `${live.unsaid.size} new calls`)
  live.said = live.unsaid
  live.unsaid = new Set()
  live.saidAt = performance.now()
}
// While a part is held nothing in it moves, but what it is told counts what is new.
const countNew = async (part) => {
  const tag = live.tags.get(part) ?? part.getAttribute("hx-ptag") ?? ""
  const headers = { "HX-Request": "true", "HX-Request-Type": "partial", "HX-PTag": tag }
  const answer = await fetch(part.getAttribute("hx-get"), { headers, redirect: "error" })
  if (answer.status !== 200) return
  const rows = new DOMParser().parseFromString(await answer.text(), "text/html").querySelectorAll("[data-rows] tr[id]")
  live.tags.set(part, answer.headers.get("HX-PTag"))
  const fresh = [...rows].map((row) => row.id).filter((id) => !document.getElementById(id))
  if (!isHeld(part) || !fresh.length) return
  wait(`${fresh.length}${fresh.length === rows.length ? "+" : ""} new`)
  meet(fresh)
}
// A steady part never moves what is under the pointer, so only hiding it pauses it.
const isHeld = (part) => part.dataset.live !== "steady" && (part.matches(":hover") || part.contains(document.activeElement))
document.addEventListener("htmx:before:request", (event) => {
  const part = event.target.closest?.("[data-live]")
  if (!part || event.detail.ctx?.sourceEvent?.type !== "every") return
  if (!document.hidden && !isHeld(part)) return
  event.preventDefault()
  if (document.hidden) return
  state("paused", "")
  countNew(part).catch(() => { /* the next poll tells whether the server is there */ })
})
// htmx may have met the page before its extension came, which then has not read the part's tag.
document.addEventListener("htmx:config:request", (event) => {
  const tag = event.target.closest?.("[data-live]")?.getAttribute("hx-ptag")
  if (tag) event.detail.ctx.request.headers["HX-PTag"] ??= tag
})
document.addEventListener("htmx:after:request", (event) => {
  const part = event.target.closest?.("[data-live]")
  if (!part) return
  live.failures = 0
  live.tags.delete(part)
  const tag = event.detail.ctx?.response?.headers?.get?.("HX-PTag")
  if (tag) live.tags.set(part, tag)
  state("live", "good")
  wait("")
})
document.addEventListener("htmx:after:swap", () => meet([...document.querySelectorAll("[data-live] tr.new")].map((row) => row.id)))
document.addEventListener("htmx:error", (event) => {
  if (event.target.closest?.("[data-live]") && ++live.failures > 1) state("reconnecting", "warn")
})
document.addEventListener("visibilitychange", () => state(document.hidden ? "paused" : "live", document.hidden ? "" : "good"))

// Times: exact ones in the reader's own zone, on hover.
const localTimes = () => document.querySelectorAll("time[datetime]:not([data-local])").forEach((time) => {
  time.dataset.local = ""
  time.title = `${new Date(time.dateTime).toLocaleString()} (your time)`
})
document.addEventListener("DOMContentLoaded", localTimes)
document.addEventListener("htmx:after:swap", localTimes)

// Forms that ask before something dangerous; a button keeps its width while it is busy.
document.addEventListener("submit", (event) => {
  const button = event.submitter
  if (button && !event.defaultPrevented) { button.ariaBusy = "true"; setTimeout(() => { button.ariaBusy = null }, 8000) }
})

// A new key: the box closes its panel for good, and leaving the page takes it out of what "back" may show.
const forget = () => document.querySelectorAll("[data-reveal]").forEach((panel) => panel.remove())
document.addEventListener("change", (event) => {
  if (!event.target.matches("[data-reveal] [data-stored]")) return
  forget()
  say("The key is no longer shown.")
  one("#content h1")?.scrollIntoView({ block: "nearest" })
})
addEventListener("pagehide", forget)
