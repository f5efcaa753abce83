// Where the server is, and clients of it without retries.
import OpenAI from "openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";

export const baseURL = process.env.CONFORMANCE_BASE_URL;
export const model = process.env.CONFORMANCE_MODEL;
export const HELLO = "Hello from the mesh \u{1f600}.";
export const COUNT = "1, 2, 3, 4, 5";
export const SUNNY = "It is sunny in Paris, 21 degrees.";

export const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const provider = createOpenAICompatible({ name: "meshnet", baseURL, apiKey: "none", includeUsage: true,
  supportsStructuredOutputs: true });
export const chatModel = provider(model);
export const completionModel = provider.completionModel(model);
export const embeddingModel = provider.textEmbeddingModel(model);

export const user = (content) => [{ role: "user", content }];
export const parameters = {
  type: "object",
  properties: { location: { type: "string" } },
  required: ["location"],
  additionalProperties: false,
};
