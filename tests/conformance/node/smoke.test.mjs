// One call of each kind, whatever the model answers: for scripted and real models alike.
import assert from "node:assert/strict";
import { test } from "node:test";
import { generateText, streamText } from "ai";
import { chatModel, client, model, user } from "./server.mjs";

const call = { model, messages: user("Say hello in three words."), max_tokens: 32, temperature: 0 };

test("openai: whole and streamed say the same", async () => {
  const whole = await client.chat.completions.create(call);
  const final = await client.chat.completions.stream(call).finalChatCompletion();
  assert.equal(final.choices[0].message.content, whole.choices[0].message.content);
  assert.equal(final.choices[0].finish_reason, whole.choices[0].finish_reason);
});

test("ai: generateText and streamText say the same", async () => {
  const options = { model: chatModel, prompt: "Say hello in three words.", maxOutputTokens: 32, temperature: 0, maxRetries: 0 };
  const whole = await generateText(options);
  assert.ok(whole.usage.outputTokens > 0);
  assert.equal(await streamText(options).text, whole.text);
});
