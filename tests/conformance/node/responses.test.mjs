// The Responses API.
import assert from "node:assert/strict";
import { test } from "node:test";
import { zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { client, COUNT, HELLO, model, parameters } from "./server.mjs";

test("openai: create", async () => {
  const response = await client.responses.create({ model, input: "Hi" });
  assert.deepEqual([response.output_text, response.status], [HELLO, "completed"]);
});

test("openai: stream helper", async () => {
  const stream = client.responses.stream({ model, input: "Count from 1 to 5." });
  let deltas = "";
  stream.on("response.output_text.delta", (event) => { deltas += event.delta; });
  assert.equal((await stream.finalResponse()).output_text, COUNT);
  assert.equal(deltas, COUNT);
});

test("openai: parse", async () => {
  const schema = z.object({ name: z.string(), age: z.number() });
  const response = await client.responses.parse({
    model, input: "Describe a person as JSON.", text: { format: zodTextFormat(schema, "person") },
  });
  assert.deepEqual(response.output_parsed, { name: "Ada", age: 36 });
});

test("openai: a function call, streamed", async () => {
  const final = await client.responses.stream({
    model, input: "What is the weather in Paris?",
    tools: [{ type: "function", name: "get_weather", parameters, strict: true }],
  }).finalResponse();
  const call = final.output.find((item) => item.type === "function_call");
  assert.deepEqual(JSON.parse(call.arguments), { location: "Paris \u{1f600}" });
});
