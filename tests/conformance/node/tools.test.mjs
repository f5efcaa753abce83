// Tool calls, and the turn after them.
import assert from "node:assert/strict";
import { test } from "node:test";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { chatModel, client, model, parameters, SUNNY, user } from "./server.mjs";

const PARIS = { location: "Paris \u{1f600}" };
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];

test("openai: stream helper", async () => {
  const final = await client.chat.completions
    .stream({ model, messages: user("And in Paris and London?"), tools }).finalChatCompletion();
  const calls = final.choices[0].message.tool_calls;
  assert.deepEqual(calls.map((call) => JSON.parse(call.function.arguments).location), ["Paris", "London"]);
  assert.equal(new Set(calls.map((call) => call.id)).size, 2);
  assert.equal(final.choices[0].finish_reason, "tool_calls");
});

for (const stream of [false, true]) {
  test(`openai: runTools, stream ${stream}`, async () => {
    const seen = [];
    const runner = client.chat.completions.runTools({
      model, stream, messages: user("What is the weather in Paris?"),
      tools: [{ type: "function", function: {
        name: "get_weather", parameters, parse: JSON.parse,
        function: (input) => { seen.push(input); return "sunny"; },
      } }],
    });
    assert.equal(await runner.finalContent(), SUNNY);
    assert.deepEqual(seen, [PARIS]);
  });
}

const weather = tool({
  description: "The weather now.", inputSchema: z.object({ location: z.string() }), execute: async () => "sunny",
});

test("ai: generateText runs the tool and goes on", async () => {
  const result = await generateText({
    model: chatModel, prompt: "What is the weather in Paris?", tools: { get_weather: weather },
    stopWhen: stepCountIs(3), maxRetries: 0,
  });
  assert.equal(result.text, SUNNY);
  assert.deepEqual(result.steps[0].toolCalls[0].input, PARIS);
  assert.equal(result.steps[0].finishReason, "tool-calls");
});

test("ai: streamText runs the tool and goes on", async () => {
  const result = streamText({
    model: chatModel, prompt: "What is the weather in Paris?", tools: { get_weather: weather },
    stopWhen: stepCountIs(3), maxRetries: 0,
  });
  assert.equal(await result.steps.then((steps) => steps.at(-1).text), SUNNY);
});
