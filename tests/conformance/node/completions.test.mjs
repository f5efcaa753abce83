// Raw completions.
import assert from "node:assert/strict";
import { test } from "node:test";
import { generateText } from "ai";
import { client, completionModel, COUNT, model } from "./server.mjs";

test("openai: whole and streamed", async () => {
  const call = { model, prompt: "Count from 1 to 5", max_tokens: 40 };
  assert.equal((await client.completions.create(call)).choices[0].text, COUNT);
  let text = "";
  for await (const chunk of await client.completions.create({ ...call, stream: true })) text += chunk.choices[0].text;
  assert.equal(text, COUNT);
});

test("ai: a completion model", async () => {
  const { text } = await generateText({ model: completionModel, prompt: "Count from 1 to 5", maxOutputTokens: 40, maxRetries: 0 });
  assert.equal(text, COUNT);
});
