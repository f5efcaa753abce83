// Plain chat completions.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { APICallError, generateText, streamText } from "ai";
import { baseURL, chatModel, client, COUNT, HELLO, model, user } from "./server.mjs";

test("openai: whole", async () => {
  const completion = await client.chat.completions.create({ model, messages: user("Hi") });
  assert.equal(completion.choices[0].message.content, HELLO);
  assert.equal(completion.choices[0].finish_reason, "stop");
  assert.ok(completion._request_id);
});

test("openai: stream helper", async () => {
  const stream = client.chat.completions.stream({
    model, messages: user("Count from 1 to 5."), stream_options: { include_usage: true },
  });
  let deltas = "";
  stream.on("content", (delta) => { deltas += delta; });
  const final = await stream.finalChatCompletion();
  assert.equal(deltas, COUNT);
  assert.equal(final.choices[0].message.content, COUNT);
  assert.equal(final.choices[0].message.role, "assistant");
  assert.ok((await stream.totalUsage()).completion_tokens > 0);
});

test("openai: models", async () => {
  const ids = [];
  for await (const one of client.models.list()) ids.push(one.id);
  assert.ok(ids.includes(model));
  assert.equal((await client.models.retrieve(model)).id, model);
});

test("openai: errors have their classes", async () => {
  await assert.rejects(client.chat.completions.create({ model: "no-such-model", messages: user("Hi") }),
    (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found");
  await assert.rejects(client.chat.completions.create({ model, messages: user("Hi"), temperature: 9 }),
    (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
});

test("openai: a broken stream is an error", async () => {
  const stream = client.chat.completions.stream({ model, messages: user("Break the stream.") });
  await assert.rejects(stream.finalChatCompletion(), OpenAI.APIError);
});

test("openai: leaving a stream ends the work", async () => {
  const stream = await client.chat.completions.create({ model, messages: user("Count from 1 to 5."), stream: true });
  for await (const _ of stream) break;
  const root = baseURL.replace(/\/v1$/, "");
  const until = Date.now() + 2000;
  let active = 1;
  while (active && Date.now() < until) active = (await (await fetch(`${root}/mesh`)).json()).gateway.active;
  assert.equal(active, 0);
});

test("ai: generateText", async () => {
  const { text, finishReason, usage } = await generateText({ model: chatModel, prompt: "Count from 1 to 5.", maxRetries: 0 });
  assert.deepEqual([text, finishReason], [COUNT, "stop"]);
  assert.ok(usage.inputTokens > 0 && usage.outputTokens > 0);
});

test("ai: streamText", async () => {
  const result = streamText({ model: chatModel, prompt: "Hi", maxRetries: 0 });
  let text = "";
  for await (const part of result.textStream) text += part;
  assert.equal(text, HELLO);
  assert.equal(await result.finishReason, "stop");
  assert.ok((await result.usage).outputTokens > 0);
});

test("ai: errors are read, before and within a stream", async () => {
  await assert.rejects(generateText({ model: chatModel, prompt: "Hi", temperature: 9, maxRetries: 0 }),
    (error) => APICallError.isInstance(error) && error.statusCode === 400 && /temperature/.test(error.message));
  const errors = [];
  const result = streamText({ model: chatModel, prompt: "Break the stream.", maxRetries: 0, onError: ({ error }) => errors.push(error) });
  for await (const _ of result.textStream);
  assert.equal(errors.length, 1);
});
