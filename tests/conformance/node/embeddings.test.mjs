// Embeddings.
import assert from "node:assert/strict";
import { test } from "node:test";
import { embedMany } from "ai";
import { client, embeddingModel, model } from "./server.mjs";

test("openai: base64, which the SDK asks for by itself, and floats say the same", async () => {
  const decoded = (await client.embeddings.create({ model, input: "a mesh" })).data[0].embedding;
  const floats = (await client.embeddings.create({ model, input: "a mesh", encoding_format: "float" })).data[0].embedding;
  assert.equal(decoded.length, floats.length);
  decoded.forEach((value, index) => assert.ok(Math.abs(value - floats[index]) < 1e-5));
});

test("ai: embedMany", async () => {
  const { embeddings, usage } = await embedMany({ model: embeddingModel, values: ["a mesh", "of nodes"], maxRetries: 0 });
  assert.equal(embeddings.length, 2);
  assert.ok(usage.tokens > 0);
});
