// The playground: streams an answer into the page. What a model says is only ever set as text here; the
// finished answer comes from the server, cleaned. Without this file the form answers with the whole page.

const form = document.querySelector("form[data-playground]")
const talk = document.getElementById("talk")
const [message, send, stop, working] = ["message", "send", "stop", "working"].map((id) => document.getElementById(id))
const conversation = form.elements.namedItem("conversation")
let running = null

const make = (tag, kind, text = "") => Object.assign(document.createElement(tag), { className: kind, textContent: text })
const turn = (role, by, text) => {
  const article = make("article", `turn ${role}`)
  article.append(make("h3", "", by), make("div", "said", text))
  talk.append(article)
  article.scrollIntoView({ block: "nearest" })
  return article
}
const busy = (is) => {
  stop.hidden = working.hidden = !is
  send.disabled = is
  talk.ariaBusy = String(is)
}

// Lines of JSON, however the network cut them.
async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader()
  let rest = ""
  for (;;) {
    const { value, done } = await reader.read()
    if (done) return
    const parts = (rest + value).split("\n")
    rest = parts.pop()
    for (const line of parts) if (line) yield JSON.parse(line)
  }
}

const finish = (answer, ended) => {
  const template = document.createElement("template")
  template.innerHTML = ended.html
  const whole = template.content.firstElementChild
  answer.replaceWith(whole)
  htmx.process(whole)
  conversation.value = ended.conversation
  document.getElementById("code").innerHTML = ended.code
}

// Stopped by its reader: what came stays, and what it cost is asked for by the call's number.
const keepStopped = async (answer, typed, model, callId) => {
  const text = answer.querySelector(".said").textContent
  answer.append(make("p", "note", "Stopped. You pay for what was delivered."))
  if (text) {
    const turns = JSON.parse(conversation.value || "[]")
    turns.push({ role: "user", content: typed }, { role: "assistant", content: text, id: callId, model })
    conversation.value = JSON.stringify(turns)
  }
  if (!callId) return
  const spent = make("p", "spent")
  spent.setAttribute("hx-get", `/dashboard/playground/calls/${encodeURIComponent(callId)}`)
  spent.setAttribute("hx-trigger", "load delay:1s")
  spent.setAttribute("hx-swap", "outerHTML")
  answer.append(spent)
  htmx.process(spent)
}

const ask = async () => {
  const typed = message.value.trim()
  const sent = new URLSearchParams(new FormData(form))
  const model = form.elements.namedItem("model").value
  running = new AbortController()
  busy(true)
  document.getElementById("talk-empty")?.remove()
  let asked, answer, callId = ""
  try {
    const response = await fetch(form.action, {
      method: "POST", body: sent, headers: { accept: "application/x-ndjson" }, signal: running.signal,
    })
    if (!response.headers.get("content-type")?.startsWith("application/x-ndjson")) {
      // A field that will not do, a session that has ended: the whole page says so better.
      form.submit()
      return
    }
    callId = response.headers.get("x-request-id") ?? ""
    asked = turn("user", "You", typed)
    answer = turn("assistant", model, "")
    message.value = ""
    const said = answer.querySelector(".said")
    for await (const line of lines(response.body)) {
      if (line.text) said.append(line.text)
      if (line.html === undefined) continue
      finish(answer, line)
      answer = null
      if (line.failed) message.value = typed
    }
    if (answer) answer.append(make("p", "note bad", "The connection was lost. Usage shows what this call cost."))
  } catch (error) {
    if (error.name === "AbortError" && answer) await keepStopped(answer, typed, model, callId)
    else if (error.name !== "AbortError") {
      const place = answer ?? turn("assistant", model, "")
      place.append(make("p", "note bad", "The connection was lost. Usage shows whether this call ran and what it cost."))
      message.value ||= typed
    }
  } finally {
    running = null
    busy(false)
    message.focus()
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault()
  if (running) return
  if (message.value.trim()) ask()
  else message.focus()
})
stop.addEventListener("click", () => running?.abort())
message.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); form.requestSubmit() }
  if (event.key === "Escape") running?.abort()
})
