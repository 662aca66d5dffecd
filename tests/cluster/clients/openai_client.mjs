// OpenAI's client for Node: chats, streams, tools that must be called, typed answers, Responses.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: `${process.env.CONDUCTOR_URL}/v1`, apiKey: "none", maxRetries: 0 });
const ANSWER = "The capital of France is Paris.";
const messages = [{ role: "user", content: "In one sentence: what is the capital of France?" }];
const asked = { model: "smollm2", messages, temperature: 0, max_tokens: 64 };

const whole = await client.chat.completions.create(asked);
assert.equal(whole.choices[0].message.content, ANSWER);
assert.equal(whole.usage.completion_tokens, 8);

let text = "";
let pieces = 0;
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
  text += chunk.choices[0].delta.content ?? "";
  pieces += 1;
}
assert.equal(text, ANSWER);
assert.ok(pieces > 5);

const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "London"] } },
  required: ["city"],
};
const tools = [{ type: "function", function: { name: "weather", description: "Tells it.", parameters } }];
const called = await client.chat.completions.create({ ...asked, tools, tool_choice: "required" });
const [call] = called.choices[0].message.tool_calls;
assert.equal(called.choices[0].finish_reason, "tool_calls");
assert.equal(call.function.name, "weather");
const streamed = client.chat.completions.stream({ ...asked, tools, tool_choice: "required" });
const [again] = (await streamed.finalChatCompletion()).choices[0].message.tool_calls;
assert.equal(again.function.arguments, call.function.arguments);

const told = [...messages, called.choices[0].message, { role: "tool", tool_call_id: call.id, content: "rain" }];
const after = await client.chat.completions.create({ ...asked, messages: told, tools, tool_choice: "none" });
assert.ok(after.choices[0].message.content);

const City = z.object({ name: z.enum(["Paris", "London"]), days: z.literal([1, 2]) });
const format = zodResponseFormat(City, "city");
const typed = await client.chat.completions.parse({ ...asked, response_format: format });
assert.ok(City.parse(typed.choices[0].message.parsed));

const common = { model: "smollm2", temperature: 0 };
const response = await client.responses.create({ ...common, input: messages[0].content });
assert.equal(response.output_text, ANSWER);
const next = client.responses.stream({ ...common, input: "And of Italy?", previous_response_id: response.id });
assert.ok((await next.finalResponse()).output_text.length > 0);
const runner = client.chat.completions.runTools({
  ...asked,
  tool_choice: "auto",
  tools: [{ ...tools[0], function: { ...tools[0].function, function: () => "rain", parse: JSON.parse } }],
});
assert.ok(await runner.finalContent());
