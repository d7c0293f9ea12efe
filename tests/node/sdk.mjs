// The official OpenAI SDK for Node against a running Tollgate.
//
// TOLLGATE_URL is its address, KEYS the keys of the accounts it needs as JSON: rich, poor, mute, slow.
// Prints one line of JSON a check: {"name", "error"}, the error null when all is well.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { LengthFinishReasonError } from "openai/error";
import { makeParseableResponseFormat } from "openai/lib/parser";

const WEATHER = {
  type: "function",
  function: {
    name: "get_weather",
    description: "Tell the weather.",
    parameters: {
      type: "object",
      properties: { city: { type: "string" }, days: { type: "integer" } },
      required: ["city", "days"],
      additionalProperties: false,
    },
  },
};
const TIME = { type: "function", function: { name: "get_time", parameters: { type: "object", properties: {} } } };
const SCHEMA = {
  type: "json_schema",
  json_schema: { name: "weather", strict: true, schema: WEATHER.function.parameters },
};
const FORECAST = { city: "text", days: 1 };

const baseURL = `${process.env.TOLLGATE_URL}/v1`;
const keys = JSON.parse(process.env.KEYS ?? "{}");
const sdkOf = (apiKey) => new OpenAI({ baseURL, apiKey: apiKey ?? "none", maxRetries: 0, timeout: 30_000 });
const sdk = sdkOf(keys.rich);

const asked = (text = "say:hello_there usage:12,2", fields = {}) => ({
  model: "twin",
  max_tokens: 100,
  messages: [{ role: "user", content: text }],
  ...fields,
});

async function all(iterable) {
  const items = [];
  for await (const item of iterable) items.push(item);
  return items;
}

async function thrown(promise) {
  try {
    await promise;
  } catch (error) {
    return error;
  }
  assert.fail("nothing was thrown");
}

function isError(error, kind, status, code, type, param = null) {
  assert.equal(error.constructor, kind, `${error.constructor.name}: ${error.message}`);
  assert.deepEqual([error.status, error.code, error.type, error.param], [status, code, type, param]);
  assert.match(error.requestID, /^req_/);
  assert.equal(error.requestID, error.headers.get("x-request-id"));
  assert.equal(error.error.request_id, error.requestID);
  assert.ok(error.message.includes(error.error.message));
}

function hasGrammar(chunks) {
  assert.equal(new Set(chunks.map((chunk) => chunk.id)).size, 1);
  assert.ok(chunks.every((chunk) => chunk.object === "chat.completion.chunk" && chunk.model === "twin"));
  assert.equal(chunks.filter((chunk) => chunk.choices[0].delta.role).length, 1);
  assert.equal(chunks[0].choices[0].delta.role, "assistant");
  assert.equal(chunks.map((chunk) => chunk.choices[0].delta.content ?? "").join(""), "w0 w1 w2 w3 w4");
  assert.deepEqual(
    chunks.map((chunk) => chunk.choices[0].finish_reason),
    [...Array(chunks.length - 1).fill(null), "stop"],
  );
}

const checks = {
  async chat() {
    const { data, response, request_id } = await sdk.chat.completions.create(asked()).withResponse();
    assert.equal(data.object, "chat.completion");
    assert.match(data.id, /^chatcmpl-/);
    assert.equal(data.model, "twin");
    assert.equal(data.choices.length, 1);
    assert.deepEqual(
      [data.choices[0].index, data.choices[0].finish_reason, data.choices[0].logprobs], [0, "stop", null],
    );
    const { role, content, refusal } = data.choices[0].message;
    assert.deepEqual([role, content, refusal], ["assistant", "hello there", null]);
    assert.deepEqual(
      [data.usage.prompt_tokens, data.usage.completion_tokens, data.usage.total_tokens], [12, 2, 14],
    );
    assert.equal(data.usage.cost_usd, "0.000032");
    assert.equal(response.headers.get("x-tollgate-cost"), "0.000032");
    assert.match(data._request_id, /^req_/);
    assert.equal(data._request_id, response.headers.get("x-request-id"));
    assert.equal(request_id, data._request_id);
  },

  async stream_without_usage() {
    for (const fields of [{}, { stream_options: { include_usage: false } }]) {
      const chunks = await all(await sdk.chat.completions.create(asked("tokens:5", { stream: true, ...fields })));
      assert.ok(chunks.every((chunk) => !("usage" in chunk)));
      hasGrammar(chunks);
    }
  },

  async stream_with_usage() {
    const chunks = await all(
      await sdk.chat.completions.create(
        asked("tokens:5 usage:7,5", { stream: true, stream_options: { include_usage: true } }),
      ),
    );
    const last = chunks.pop();
    assert.deepEqual(last.choices, []);
    assert.deepEqual(
      [last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cost_usd], [7, 5, "0.000057"],
    );
    assert.equal(last.id, chunks[0].id);
    assert.ok(chunks.every((chunk) => chunk.usage === null));
    hasGrammar(chunks);
  },

  async stream_helper() {
    const stream = sdk.chat.completions.stream(
      asked("tokens:5 usage:7,5", { stream_options: { include_usage: true } }),
    );
    let heard = "";
    stream.on("content", (piece) => (heard += piece));
    const final = await stream.finalChatCompletion();
    assert.equal(heard, "w0 w1 w2 w3 w4");
    assert.equal(final.choices[0].message.content, heard);
    assert.deepEqual([final.choices[0].message.role, final.choices[0].finish_reason], ["assistant", "stop"]);
    assert.equal((await stream.totalUsage()).completion_tokens, 5);
    assert.equal(final.usage.cost_usd, "0.000057");
  },

  async stream_left_early() {
    const stream = await sdk.chat.completions.create(asked("tokens:50 pace:0.02", { stream: true }));
    for await (const chunk of stream) {
      if (chunk.choices[0].delta.content) break;
    }
    assert.equal(stream.controller.signal.aborted, true);
  },

  async tool() {
    const answer = await sdk.chat.completions.create(asked("tool", { tools: [WEATHER] }));
    const { message, finish_reason } = answer.choices[0];
    assert.equal(finish_reason, "tool_calls");
    assert.equal(message.content, null);
    const [call] = message.tool_calls;
    assert.deepEqual([call.id, call.type, call.function.name], ["call_twin0", "function", "get_weather"]);
    assert.deepEqual(JSON.parse(call.function.arguments), FORECAST);
    const next = await sdk.chat.completions.create({
      model: "twin",
      tools: [WEATHER],
      messages: [
        { role: "user", content: "And the weather?" },
        message,
        { role: "tool", tool_call_id: call.id, content: "rain" },
      ],
    });
    assert.equal(next.choices[0].message.content, "The tool said: rain");
  },

  async parallel_tools() {
    const answer = await sdk.chat.completions.create(asked("tools:3", { tools: [WEATHER, TIME] }));
    assert.deepEqual(
      answer.choices[0].message.tool_calls.map((call) => [call.id, call.function.name]),
      [["call_twin0", "get_weather"], ["call_twin1", "get_time"], ["call_twin2", "get_weather"]],
    );
  },

  async streamed_tools() {
    const chunks = await all(
      await sdk.chat.completions.create(asked("tools:2", { tools: [WEATHER, TIME], stream: true })),
    );
    const calls = [];
    for (const piece of chunks.flatMap((chunk) => chunk.choices[0].delta.tool_calls ?? [])) {
      const call = (calls[piece.index] ??= { ids: [], names: [], text: "" });
      if (piece.id) call.ids.push(piece.id);
      if (piece.function.name) call.names.push(piece.function.name);
      assert.equal(typeof piece.function.arguments, "string");
      call.text += piece.function.arguments;
    }
    assert.deepEqual(calls.map((call) => [call.ids, call.names, JSON.parse(call.text)]), [
      [["call_twin0"], ["get_weather"], FORECAST],
      [["call_twin1"], ["get_time"], {}],
    ]);
    assert.equal(chunks.at(-1).choices[0].finish_reason, "tool_calls");
  },

  async streamed_tools_helper() {
    const final = await sdk.chat.completions
      .stream(asked("tools:2", { tools: [WEATHER, TIME] }))
      .finalChatCompletion();
    assert.deepEqual(
      final.choices[0].message.tool_calls.map((call) => [
        call.id, call.type, call.function.name, JSON.parse(call.function.arguments),
      ]),
      [
        ["call_twin0", "function", "get_weather", FORECAST],
        ["call_twin1", "function", "get_time", {}],
      ],
    );
  },

  async tool_runner() {
    const seen = [];
    const tool = {
      type: "function",
      function: {
        ...WEATHER.function,
        parse: JSON.parse,
        function: (forecast) => {
          seen.push(forecast);
          return "rain";
        },
      },
    };
    for (const stream of [false, true]) {
      const runner = sdk.chat.completions.runTools({ ...asked("tool", { tools: [tool] }), stream });
      assert.equal(await runner.finalContent(), "The tool said: rain");
    }
    assert.deepEqual(seen, [FORECAST, FORECAST]);
  },

  async json_schema() {
    const answer = await sdk.chat.completions.create(asked("json", { response_format: SCHEMA }));
    assert.deepEqual(JSON.parse(answer.choices[0].message.content), FORECAST);
  },

  async parse() {
    const format = makeParseableResponseFormat(SCHEMA, JSON.parse);
    const answer = await sdk.chat.completions.parse(asked("json", { response_format: format }));
    assert.deepEqual(answer.choices[0].message.parsed, FORECAST);
    const cut = await thrown(sdk.chat.completions.parse(asked("json", { response_format: format, max_tokens: 1 })));
    assert.equal(cut.constructor, LengthFinishReasonError);
  },

  async image_parts() {
    const answer = await sdk.chat.completions.create({
      model: "twin",
      messages: [
        {
          role: "user",
          content: [
            { type: "text", text: "What is this?" },
            { type: "image_url", image_url: { url: "data:image/gif;base64,R0lGODlhAQABAAAAACw=", detail: "low" } },
            { type: "image_url", image_url: { url: "https://example.com/cat.png" } },
          ],
        },
      ],
    });
    assert.equal(answer.choices[0].message.content, "I see 2 image(s).");
  },

  async several_choices() {
    const answer = await sdk.chat.completions.create(asked(undefined, { n: 2 }));
    assert.deepEqual(
      answer.choices.map((choice) => [choice.index, choice.message.content]),
      [[0, "hello there"], [1, "hello there"]],
    );
    const final = await sdk.chat.completions.stream(asked(undefined, { n: 2 })).finalChatCompletion();
    assert.deepEqual(
      final.choices.map((choice) => [choice.message.content, choice.finish_reason]),
      [["hello there", "stop"], ["hello there", "stop"]],
    );
  },

  async stop() {
    for (const stop of ["four", ["never", "four"]]) {
      const answer = await sdk.chat.completions.create(asked("say:two_three_four_five", { stop }));
      assert.deepEqual(
        [answer.choices[0].message.content, answer.choices[0].finish_reason], ["two three", "stop"],
      );
    }
  },

  async length() {
    for (const limit of [{ max_tokens: 3 }, { max_tokens: undefined, max_completion_tokens: 3 }]) {
      const answer = await sdk.chat.completions.create(asked("tokens:9", limit));
      assert.deepEqual(
        [answer.choices[0].message.content, answer.choices[0].finish_reason], ["w0 w1 w2", "length"],
      );
      const chunks = await all(await sdk.chat.completions.create(asked("tokens:9", { ...limit, stream: true })));
      assert.equal(chunks.at(-1).choices[0].finish_reason, "length");
    }
  },

  async unknown_fields() {
    const answer = await sdk.chat.completions.create(asked(undefined, { made_up: { deep: [1] }, user_id: 5 }));
    assert.equal(answer.choices[0].message.content, "hello there");
  },

  async idempotency_key() {
    const options = { headers: { "Idempotency-Key": `node-${Date.now()}` } };
    const first = await sdk.chat.completions.create(asked(), options);
    const again = await sdk.chat.completions.create(asked(), options).withResponse();
    assert.deepEqual(again.data, first);
    assert.equal(again.response.headers.get("idempotent-replayed"), "true");
    assert.notEqual(again.request_id, first._request_id);
  },

  async models() {
    const page = await sdk.models.list();
    const names = page.data.map((model) => model.id);
    assert.ok(names.includes("twin") && names.includes("vendor/twin by call"));
    assert.deepEqual((await all(sdk.models.list())).map((model) => model.id), names);
    for (const name of names) {
      const model = await sdk.models.retrieve(name);
      assert.deepEqual([model.id, model.object, Number.isInteger(model.created)], [name, "model", true]);
      assert.match(model._request_id, /^req_/);
    }
  },

  async usage_pages() {
    const made = [];
    for (let n = 0; n < 5; n += 1) made.unshift((await sdk.chat.completions.create(asked()))._request_id);
    const page = await sdk.get("/usage", { query: { limit: 3 } });
    assert.deepEqual(page.data.map((row) => row.id), made.slice(0, 3));
    assert.equal(page.has_more, true);
    const next = await sdk.get("/usage", { query: { limit: 2, after: page.last_id } });
    assert.deepEqual(next.data.map((row) => row.id), made.slice(3));
  },

  async missing_key() {
    const error = await thrown(sdk.chat.completions.create(asked(), { headers: { Authorization: null } }));
    isError(error, OpenAI.AuthenticationError, 401, "missing_api_key", "authentication_error");
  },

  async invalid_key() {
    const stranger = sdkOf("sk-wrong");
    for (const call of [() => stranger.models.list(), () => stranger.chat.completions.create(asked())]) {
      isError(await thrown(call()), OpenAI.AuthenticationError, 401, "invalid_api_key", "authentication_error");
    }
  },

  async bad_field() {
    const error = await thrown(sdk.chat.completions.create(asked(undefined, { temperature: "warm" })));
    isError(error, OpenAI.BadRequestError, 400, "invalid_request", "invalid_request_error", "temperature");
    const deep = await thrown(sdk.chat.completions.create({ model: "twin", messages: [{ role: "boss" }] }));
    isError(deep, OpenAI.BadRequestError, 400, "invalid_request", "invalid_request_error", "messages[0].role");
  },

  async insufficient_credits() {
    for (const stream of [false, true]) {
      const error = await thrown(sdkOf(keys.poor).chat.completions.create(asked(undefined, { stream })));
      isError(error, OpenAI.APIError, 402, "insufficient_credits", "billing_error");
    }
  },

  async scope_denied() {
    const error = await thrown(sdkOf(keys.mute).chat.completions.create(asked()));
    isError(error, OpenAI.PermissionDeniedError, 403, "scope_denied", "permission_error");
  },

  async unknown_model() {
    for (const call of [
      () => sdk.chat.completions.create(asked(undefined, { model: "gone" })),
      () => sdk.models.retrieve("gone/with space"),
    ]) {
      isError(await thrown(call()), OpenAI.NotFoundError, 404, "model_not_found", "not_found_error", "model");
    }
  },

  async unknown_path() {
    isError(await thrown(sdk.get("/nothing")), OpenAI.NotFoundError, 404, "not_found", "not_found_error");
  },

  async rate_limit() {
    const slow = sdkOf(keys.slow);
    for (let n = 0; n < 3; n += 1) await slow.chat.completions.create(asked());
    for (const stream of [false, true]) {
      const error = await thrown(slow.chat.completions.create(asked(undefined, { stream })));
      isError(error, OpenAI.RateLimitError, 429, "rate_limit_exceeded", "rate_limit_error");
      assert.equal(error.headers.get("retry-after"), "60");
    }
  },

  async failing_provider() {
    for (const call of [
      () => sdk.chat.completions.create(asked("status:403")),
      () => sdk.chat.completions.create(asked("status:403", { stream: true })),
    ]) {
      isError(await thrown(call()), OpenAI.InternalServerError, 502, "upstream_error", "upstream_error");
    }
  },

  async failure_within_a_stream() {
    const stream = await sdk.chat.completions.create(asked("tokens:9 error:3", { stream: true }));
    let text = "";
    const error = await thrown(
      (async () => {
        for await (const chunk of stream) text += chunk.choices[0].delta.content ?? "";
      })(),
    );
    assert.equal(text, "w0 w1 w2");
    assert.ok(error instanceof OpenAI.APIError);
    assert.deepEqual([error.code, error.type], ["upstream_error", "upstream_error"]);
    assert.match(error.error.request_id, /^req_/);
    assert.equal(error.requestID, error.error.request_id);
    const helped = await thrown(sdk.chat.completions.stream(asked("tokens:9 cut:3")).finalChatCompletion());
    assert.equal(helped.code, "upstream_error");
  },
};

for (const [name, check] of Object.entries(checks)) {
  let failure = null;
  try {
    await check();
  } catch (error) {
    failure = String(error?.stack ?? error);
  }
  console.log(JSON.stringify({ name, error: failure }));
}
