// OpenAI's TypeScript SDK: run, stream, list, tools, retry.
import OpenAI from "openai";

const { EMBERGATE_URL, EMBERGATE_ACCOUNT_ID, EMBERGATE_API_TOKEN, MODEL, TINY } = process.env;
const options = {
  apiKey: EMBERGATE_API_TOKEN,
  baseURL: `${EMBERGATE_URL}/client/v4/accounts/${EMBERGATE_ACCOUNT_ID}/ai/v1`,
};
const client = new OpenAI(options);
const messages = [{ role: "user", content: "Name a city." }];
const ask = { model: MODEL, messages, max_tokens: 8, temperature: 0 };

const seen = {};
if (process.env.WHAT === "retry") {
  const started = performance.now();
  seen.answers = [];
  for (let turn = 0; turn < 2; turn++) seen.answers.push(await client.chat.completions.create(ask));
  seen.seconds = (performance.now() - started) / 1000;
  try {
    await new OpenAI({ ...options, maxRetries: 0 }).chat.completions.create(ask);
  } catch (error) {
    seen.refusal = { name: error.constructor.name, status: error.status };
  }
} else {
  seen.run = await client.chat.completions.create(ask);
  const stream = await client.chat.completions.create({
    ...ask,
    stream: true,
    stream_options: { include_usage: true },
  });
  seen.chunks = [];
  for await (const chunk of stream) seen.chunks.push(chunk);
  seen.models = [];
  for await (const model of client.models.list()) seen.models.push(model.id);
  const parameters = { type: "object", properties: { city: { enum: ["Rome", "Paris"] } }, required: ["city"], additionalProperties: false };
  const called = await client.chat.completions.create({
    model: TINY,
    messages,
    max_tokens: 64,
    reasoning_effort: "none",
    parallel_tool_calls: false,
    tools: [{ type: "function", function: { name: "weather", parameters } }],
    tool_choice: "required",
  });
  seen.tool = called.choices[0];
  try {
    await client.chat.completions.create({ ...ask, model: "nobody" });
  } catch (error) {
    seen.refusal = { name: error.constructor.name, status: error.status };
  }
}
console.log(JSON.stringify(seen));
