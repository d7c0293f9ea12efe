// Passkeys: a form with data-passkey asks us for a challenge, the browser for an answer, and is then sent as it is.

const refused = (form, sentence) => { form.querySelector("[data-passkey-said]").textContent = sentence }
const ceremonies = {
  create: async (options) => navigator.credentials.create({ publicKey: PublicKeyCredential.parseCreationOptionsFromJSON(options) }),
  get: async (options) => navigator.credentials.get({ publicKey: PublicKeyCredential.parseRequestOptionsFromJSON(options) }),
}

const known = window.PublicKeyCredential?.parseCreationOptionsFromJSON !== undefined
for (const form of document.querySelectorAll("form[data-passkey]")) {
  form.hidden = !known
  form.addEventListener("submit", async (event) => {
    event.preventDefault()
    try {
      const answer = await fetch(form.dataset.options, { method: "POST", body: new URLSearchParams({ csrf_token: form.elements.csrf_token.value }) })
      if (answer.status === 429) return refused(form, (await answer.json()).said)
      if (!answer.ok) throw new Error(answer.statusText)
      const credential = await ceremonies[form.dataset.passkey](await answer.json())
      form.elements.credential.value = JSON.stringify(credential.toJSON())
      form.submit()
    } catch (error) {
      refused(form, error.name === "NotAllowedError" ? "Nothing was chosen." : "That did not work. Try again.")
    }
  })
}
