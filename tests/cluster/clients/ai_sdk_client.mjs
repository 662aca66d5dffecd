// Vercel's AI SDK over @ai-sdk/openai-compatible: texts, streams, tools in steps, typed answers.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "conductor",
  baseURL: `${process.env.CONDUCTOR_URL}/v1`,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const ANSWER = "The capital of France is Paris.";
const asked = {
  model: provider("smollm2"),
  prompt: "In one sentence: what is the capital of France?",
  temperature: 0,
  maxOutputTokens: 64,
  maxRetries: 0,
};

const whole = await generateText(asked);
assert.equal(whole.text, ANSWER);
assert.equal(whole.finishReason, "stop");
assert.equal(whole.usage.outputTokens, 8);

const streamed = streamText(asked);
const pieces = [];
for await (const piece of streamed.textStream) pieces.push(piece);
assert.equal(pieces.join(""), ANSWER);
assert.ok(pieces.length > 5);
assert.equal((await streamed.usage).outputTokens, 8);

const schema = z.object({ name: z.enum(["Paris", "London"]), days: z.literal([1, 2]) });
const { object } = await generateObject({ ...asked, schema });
assert.deepEqual(schema.parse(object), object);
const parts = streamObject({ ...asked, schema });
for await (const part of parts.partialObjectStream) assert.ok(part);
assert.deepEqual(await parts.object, object);

const weather = tool({
  description: "Tell the weather of a city.",
  inputSchema: z.object({ city: z.enum(["Paris", "London"]) }),
  execute: async ({ city }) => `rain in ${city}`,
});
const demanded = { ...asked, tools: { weather }, toolChoice: "required", stopWhen: stepCountIs(1) };
const called = await generateText(demanded);
assert.equal(called.toolCalls[0].toolName, "weather");
assert.match(called.toolResults[0].output, /^rain in /);
const inStream = streamText(demanded);
await inStream.consumeStream();
assert.deepEqual((await inStream.toolCalls)[0].input, called.toolCalls[0].input);

const { messages } = called.response;
const question = { role: "user", content: asked.prompt };
const after = await generateText({ ...asked, prompt: undefined, messages: [question, ...messages], tools: { weather }, toolChoice: "none" });
assert.ok(after.text.length > 0);
