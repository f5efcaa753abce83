// Reasoning, apart from the answer.
import assert from "node:assert/strict";
import { test } from "node:test";
import { generateText, streamText } from "ai";
import { chatModel } from "./server.mjs";

const options = { model: chatModel, prompt: "What is 15 * 37?", maxRetries: 0 };

test("ai: generateText and streamText", async () => {
  for (const result of [await generateText(options), streamText(options)]) {
    assert.equal((await result.text).trim(), "555");
    assert.equal((await result.reasoningText).trim(), "15 times 37 is 555.");
  }
});
