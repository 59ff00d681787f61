// workers-ai-provider under the AI SDK over REST: text, streams, a round trip of tools, an object, cached tokens.
import { generateText, stepCountIs, streamText, tool, Output } from "ai";
import { createWorkersAI } from "workers-ai-provider";
import { z } from "zod";

const { EMBERGATE_URL, EMBERGATE_ACCOUNT_ID, EMBERGATE_API_TOKEN, MODEL, TINY, SYSTEM } = process.env;
const requests = [];
const workersai = createWorkersAI({
  accountId: EMBERGATE_ACCOUNT_ID,
  apiKey: EMBERGATE_API_TOKEN,
  fetch: (url, init) => {
    const target = String(url).replace("https://api.cloudflare.com", EMBERGATE_URL);
    requests.push({ path: new URL(target).pathname, session: new Headers(init.headers).get("x-session-affinity") });
    return fetch(target, init);
  },
});
const session = { sessionAffinity: "ai-sdk-session" };
const model = workersai(MODEL, session);
const few = { maxOutputTokens: 8, temperature: 0 };

const seen = {};
const first = await generateText({ model, system: SYSTEM, prompt: "Name a city.", ...few });
seen.generate = { text: first.text, finishReason: first.finishReason, usage: first.usage };

const messages = [
  { role: "user", content: "Name a city." },
  { role: "assistant", content: first.text },
  { role: "user", content: "Another." },
];
const stream = streamText({ model, system: SYSTEM, messages, ...few });
const pieces = [];
for await (const piece of stream.textStream) pieces.push(piece);
seen.stream = {
  text: await stream.text,
  pieces,
  finishReason: await stream.finishReason,
  usage: await stream.usage,
};

const inputSchema = z.object({ city: z.enum(["Rome", "Paris"]) });
const weather = tool({
  description: "The weather of a city.",
  inputSchema,
  execute: async ({ city }) => ({ city, celsius: 21 }),
});
const rounds = await generateText({
  model: workersai(TINY, { reasoning_effort: null }),
  prompt: "What is the weather?",
  tools: { weather },
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
  stopWhen: stepCountIs(2),
  maxOutputTokens: 64,
});
seen.tools = rounds.steps.map((step) => ({
  finishReason: step.finishReason,
  calls: step.toolCalls.map((call) => call.input),
  results: step.toolResults.map((result) => result.output),
}));

const object = await generateText({
  model,
  prompt: "Name a city.",
  output: Output.object({ schema: inputSchema }),
  maxOutputTokens: 64,
});
seen.object = object.output;
seen.requests = requests;
console.log(JSON.stringify(seen));
