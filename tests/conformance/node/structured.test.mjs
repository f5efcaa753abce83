// Answers bound to a schema.
import assert from "node:assert/strict";
import { test } from "node:test";
import { generateObject, streamObject } from "ai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { chatModel, client, model, user } from "./server.mjs";

const schema = z.object({ name: z.string(), age: z.number() });
const ADA = { name: "Ada", age: 36 };
const prompt = "Describe a person as JSON.";

test("openai: parse", async () => {
  const completion = await client.chat.completions.parse({
    model, messages: user(prompt), response_format: zodResponseFormat(schema, "person"),
  });
  assert.deepEqual(completion.choices[0].message.parsed, ADA);
});

test("openai: stream helper with a format", async () => {
  const final = await client.chat.completions.stream({
    model, messages: user(prompt), response_format: zodResponseFormat(schema, "person"),
  }).finalChatCompletion();
  assert.deepEqual(final.choices[0].message.parsed, ADA);
});

test("ai: generateObject", async () => {
  assert.deepEqual((await generateObject({ model: chatModel, prompt, schema, maxRetries: 0 })).object, ADA);
});

test("ai: streamObject", async () => {
  const result = streamObject({ model: chatModel, prompt, schema, maxRetries: 0 });
  for await (const _ of result.partialObjectStream);
  assert.deepEqual(await result.object, ADA);
});
