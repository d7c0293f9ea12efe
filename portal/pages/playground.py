"""The playground: talk to any chat model from the dashboard, and see what each answer cost.

A conversation lives in its page and nowhere else: it comes with the form and goes back with the answer. Calls
run under a hidden key through the gateway like any others, so they stand in usage. A script streams the answer;
without one the same form answers with the whole page.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from markupsafe import Markup
from quart import Response, current_app, g, request
from werkzeug.datastructures import MultiDict

from models import call as calls
from models import hidden_key
from models.catalog import Offer
from models.database import Row
from models.errors import DatabaseUnavailable, NotFound
from portal.answer import page
from portal.forms import Form, sent_form
from portal.markdown import rendered
from portal.pages import Pages

PATH = "/dashboard/playground"
STREAM_TYPE = "application/x-ndjson"
MESSAGE_CHARACTERS_MAX = 100_000
SYSTEM_CHARACTERS_MAX = 20_000
TURNS_MAX = 100
FORMATTED_AT_ONCE = 100_000
MAX_TOKENS_MAX = 1_000_000
TEMPERATURE = re.compile(r"[01](\.\d{1,2})?|2(\.0{1,2})?")
_REQUEST_ID = re.compile(r"req_[0-9a-z]{26}")
USER, ASSISTANT = "user", "assistant"


class Turn(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Be one message of a conversation, as the page keeps it. `id` is the call that made an answer."""

    role: str
    content: str
    id: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class Shown:
    """Show one message. `html` is safe, None for plain text; `call` is the row of the call that made it."""

    role: str
    text: str
    html: Markup | None
    model: str
    call: Row | None


@dataclass(frozen=True, slots=True)
class Sample:
    """Show a call as code."""

    id: str
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Asked:
    """Hold a good form: what is to be asked, of whom."""

    turns: list[Turn]
    message: str
    body: dict[str, Any]


@dataclass(slots=True)
class Heard:
    """Gather what a call brings."""

    text: str = ""
    reason: str | None = None
    error: str | None = None

    def take(self, chunk: Mapping[str, Any]) -> str:
        """Take a chunk, a whole answer or an error, and return the text in it."""
        if isinstance(error := chunk.get("error"), Mapping):
            self.error = str(error.get("message", ""))
            return ""
        for choice in chunk.get("choices") or ():
            self.reason = choice.get("finish_reason") or self.reason
            said = choice.get("delta") or choice.get("message") or {}
            text = said.get("content") or said.get("refusal") or ""
            if isinstance(text, str):
                self.text += text
                return text
        return ""


def register(pages: Pages) -> None:
    """Add the page."""
    blueprint, database = pages.blueprint, pages.database
    base_url = f"{pages.settings.public_url}/v1"

    def offers() -> list[Offer]:
        plan = pages.catalog().plans.get(g.session.plan)
        if plan is None or not plan.includes("chat"):
            return []
        sold = (one for one in pages.catalog().offers.values() if one.surface == "chat")
        return sorted(sold, key=lambda one: one.id)

    async def answer(
        form: Form, turns: list[Turn], *, status: int = 200, body: Mapping[str, Any] | None = None,
        error: str | None = None, failed: Row | None = None, unverified: bool = False,
    ) -> Response:
        sold = offers()
        if body is None and sold:
            body = {"model": sold[0].id, "messages": [{"role": USER, "content": "Hello"}]}
        return await page(
            "playground/index.html", status=status, form=form, offers=sold,
            models=[(one.id, one.id) for one in sold], turns=await _shown(pages, turns),
            conversation=_kept(turns), samples=_samples(base_url, body) if body else [], error=error, failed=failed,
            unverified=unverified,
        )

    @blueprint.get(PATH)
    async def playground() -> Response:
        sold = offers()
        wanted = request.args.get("model", "")
        return await answer(Form(_typed(model=wanted if any(one.id == wanted for one in sold) else "")), [])

    @blueprint.post(PATH)
    async def ask_playground() -> Response:
        form = await sent_form()
        turns = _turns(form)
        asked = _asked(form, turns, offers())
        if asked is None:
            return await answer(form, turns, status=422)
        try:
            key_hash = await hidden_key.hash_of(database, g.session.account_id, hidden_key.PLAYGROUND)
        except hidden_key.Unverified:
            return await answer(form, turns, status=403, unverified=True)
        if request.headers.get("accept") == STREAM_TYPE:
            status, chunks = await pages.ask(key_hash, {**asked.body, "stream": True})
            return _streamed(pages, base_url, asked, status, chunks)
        status, chunks = await pages.ask(key_hash, asked.body)
        heard = Heard()
        async with aclosing(chunks):
            async for chunk in chunks:
                heard.take(chunk)
        if heard.error is not None:
            row = await _row(pages, g.session.account_id, g.exchange.id)
            return await answer(form, turns, status=status, body=asked.body, error=heard.error, failed=row)
        again = Form(_typed(**{
            name: form.typed(name) for name in ("model", "system", "temperature", "max_tokens")
        }))
        return await answer(again, _continued(asked, heard, g.exchange.id), body=asked.body)

    @blueprint.get(f"{PATH}/calls/<call_id>")
    async def playground_call(call_id: str) -> Response:
        """Show what a call cost that was stopped: its last word comes a moment after the stop."""
        row = await calls.find(database, g.session.account_id, call_id)
        return await page("playground/_figures.html", call=row)


def _streamed(
    pages: Pages, base_url: str, asked: Asked, status: int, chunks: AsyncIterator[dict[str, Any]]
) -> Response:
    """Return an answer as lines of JSON: its text piece by piece, then all that belongs below it."""
    call_id, account_id, templates = g.exchange.id, g.session.account_id, current_app.jinja_env

    # Runs when the request's own context is gone: what it needs of that stands above.
    async def lines() -> AsyncIterator[bytes]:
        heard = Heard()
        async with aclosing(chunks):
            async for chunk in chunks:
                text = heard.take(chunk)
                yield _line({"text": text}) if text else b"\n"
        turns = _continued(asked, heard, call_id)
        broken = heard.error is not None and not heard.text
        row = await _row(pages, account_id, call_id)
        shown = Shown(ASSISTANT, heard.text, await _formatted(heard.text), asked.body["model"], row)
        turn, code = (templates.get_template(f"playground/_{name}.html") for name in ("turn", "code"))
        yield _line({
            "html": turn.render(turn=shown, error=heard.error, reason=heard.reason),
            "code": code.render(samples=_samples(base_url, asked.body)),
            "conversation": _kept(asked.turns if broken else turns),
            "failed": broken,
        })

    response = Response(lines(), status, content_type=STREAM_TYPE)
    response.timeout = None
    response.headers["x-accel-buffering"] = "no"
    return response


def _asked(form: Form, turns: list[Turn], sold: Sequence[Offer]) -> Asked | None:
    """Return what a form asks; None when a field will not do."""
    model = form.choice("model", [offer.id for offer in sold])
    message = _prose(form, "message", MESSAGE_CHARACTERS_MAX, required=True)
    system = _prose(form, "system", SYSTEM_CHARACTERS_MAX)
    temperature = form.typed("temperature").strip()
    if temperature and not TEMPERATURE.fullmatch(temperature):
        form.refuse("temperature", "Use a number from 0 to 2, such as 0.7.")
    max_tokens = form.whole("max_tokens", 1, MAX_TOKENS_MAX)
    if len(turns) >= TURNS_MAX:
        form.refuse("message", "This conversation is too long. Begin a new one.")
    if not form.is_good:
        return None
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": turn.role, "content": turn.content} for turn in turns]
    body: dict[str, Any] = {"model": model, "messages": [*messages, {"role": USER, "content": message}]}
    if temperature:
        # A number of JSON as it was typed: 0.7 goes out as 0.7.
        body["temperature"] = float(temperature)
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    return Asked(turns, message, body)


def _prose(form: Form, name: str, length_max: int, *, required: bool = False) -> str:
    """Return a text of several lines."""
    text = form.typed(name).replace("\r\n", "\n").strip()
    if required and not text:
        form.refuse(name, "Write something first.")
    if len(text) > length_max:
        form.refuse(name, f"Use at most {length_max:,} characters.")
    if "\0" in text:
        form.refuse(name, "Use ordinary characters.")
    return text


def _turns(form: Form) -> list[Turn]:
    """Return the conversation so far. One that is not as we wrote it is none."""
    text = form.typed("conversation")
    if not text:
        return []
    try:
        turns = msgspec.json.decode(text, type=list[Turn])
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return []
    expected = [(USER, ASSISTANT)[place % 2] for place in range(len(turns))]
    is_ours = [turn.role for turn in turns] == expected and len(turns) % 2 == 0
    return turns if is_ours and not any("\0" in turn.content for turn in turns) else []


def _continued(asked: Asked, heard: Heard, call_id: str) -> list[Turn]:
    return [
        *asked.turns, Turn(USER, asked.message),
        Turn(ASSISTANT, heard.text.replace("\0", ""), call_id, asked.body["model"]),
    ]


def _kept(turns: Sequence[Turn]) -> str:
    return msgspec.json.encode(turns).decode()


async def _shown(pages: Pages, turns: list[Turn]) -> list[Shown]:
    ids = [turn.id for turn in turns if _REQUEST_ID.fullmatch(turn.id)]
    rows = await calls.several(pages.database, g.session.account_id, ids)
    shown, left = [], FORMATTED_AT_ONCE
    # The last answers first: of a very long conversation the oldest stay plain text.
    for turn in reversed(turns):
        left -= len(turn.content)
        html = await _formatted(turn.content) if turn.role == ASSISTANT and left >= 0 else None
        shown.append(Shown(turn.role, turn.content, html, turn.model, rows.get(turn.id)))
    return shown[::-1]


async def _formatted(text: str) -> Markup:
    return await asyncio.to_thread(rendered, text)


async def _row(pages: Pages, account_id: str, call_id: str) -> Row | None:
    """Return a call's row; None for one that was refused before it had any."""
    try:
        return await calls.find(pages.database, account_id, call_id)
    except (NotFound, DatabaseUnavailable):
        return None


def _line(value: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def _typed(**values: str) -> MultiDict[str, str]:
    return MultiDict(values)


def _samples(base_url: str, body: Mapping[str, Any]) -> list[Sample]:
    """Return a call as code for curl, Python and Node, ready to run."""
    compact = json.dumps(body, ensure_ascii=False, indent=2)
    curl = (
        f"curl {base_url}/chat/completions \\\n"
        '  -H "Authorization: Bearer $TOLLGATE_API_KEY" \\\n'
        '  -H "Content-Type: application/json" \\\n'
        f"  -d {shlex.quote(compact)}"
    )
    # Strings and numbers, lists and objects: JSON reads the same in all three languages.
    fields = "".join(f"    {name}={json.dumps(value, ensure_ascii=False)},\n" for name, value in body.items())
    python = (
        "import os\nfrom openai import OpenAI\n\n"
        f'client = OpenAI(base_url="{base_url}", api_key=os.environ["TOLLGATE_API_KEY"])\n'
        f"answer = client.chat.completions.create(\n{fields})\nprint(answer.choices[0].message.content)"
    )
    node = (
        'import OpenAI from "openai"\n\n'
        f'const client = new OpenAI({{ baseURL: "{base_url}", apiKey: process.env.TOLLGATE_API_KEY }})\n'
        f"const answer = await client.chat.completions.create({compact})\n"
        "console.log(answer.choices[0].message.content)"
    )
    return [Sample("as-curl", "curl", curl), Sample("as-python", "Python", python), Sample("as-node", "Node", node)]
