// Several choices of one call.
import assert from "node:assert/strict";
import { test } from "node:test";
import { client, model, user } from "./server.mjs";

test("openai: the stream helper tells them apart", async () => {
  const final = await client.chat.completions.stream({ model, messages: user("Name a number."), n: 3 }).finalChatCompletion();
  assert.deepEqual(final.choices.map((choice) => choice.message.content).sort(), ["one", "three", "two"]);
  assert.deepEqual(final.choices.map((choice) => choice.index), [0, 1, 2]);
});
