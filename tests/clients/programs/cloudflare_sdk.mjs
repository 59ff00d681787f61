// The official TypeScript SDK: run, stream, list, schema, verify, retry.
import Cloudflare from "cloudflare";

const { EMBERGATE_URL, EMBERGATE_ACCOUNT_ID, EMBERGATE_API_TOKEN, MODEL } = process.env;
const client = new Cloudflare({ apiToken: EMBERGATE_API_TOKEN, baseURL: `${EMBERGATE_URL}/client/v4` });
const account_id = EMBERGATE_ACCOUNT_ID;
const messages = [{ role: "user", content: "Name a city." }];

const seen = {};
if (process.env.WHAT === "retry") {
  const started = performance.now();
  seen.answers = [];
  for (let turn = 0; turn < 2; turn++) {
    seen.answers.push(await client.ai.run(MODEL, { account_id, messages, max_tokens: 4 }));
  }
  seen.seconds = (performance.now() - started) / 1000;
  const impatient = new Cloudflare({ apiToken: EMBERGATE_API_TOKEN, baseURL: client.baseURL, maxRetries: 0 });
  try {
    await impatient.ai.run(MODEL, { account_id, messages, max_tokens: 4 });
  } catch (error) {
    seen.refusal = { name: error.constructor.name, status: error.status, errors: error.errors };
  }
} else {
  seen.run = await client.ai.run(MODEL, { account_id, messages, max_tokens: 8 });
  const response = await client.ai
    .run(MODEL, { account_id, messages, max_tokens: 8, stream: true })
    .asResponse();
  seen.contentType = response.headers.get("content-type");
  seen.stream = await response.text();
  seen.models = [];
  for await (const model of client.ai.models.list({ account_id, per_page: 1 })) seen.models.push(model.name);
  seen.schema = await client.ai.models.schema.get({ account_id, model: MODEL });
  seen.tasks = [];
  for await (const task of client.ai.tasks.list({ account_id })) seen.tasks.push(task.name);
  seen.authors = [];
  for await (const author of client.ai.authors.list({ account_id })) seen.authors.push(author.name);
  seen.finetunes = await client.ai.finetunes.list({ account_id });
  seen.token = await client.user.tokens.verify();
  seen.accountToken = await client.accounts.tokens.verify({ account_id });
  seen.accounts = [];
  for await (const account of client.accounts.list()) seen.accounts.push(account.id);
  seen.supported = [];
  for await (const each of client.ai.toMarkdown.supported({ account_id })) seen.supported.push(each.extension);
  const files = [new File(["<h1>Head</h1>"], "a.html", { type: "text/html" }), new File(["?"], "b.bin")];
  seen.markdown = [];
  for await (const each of client.ai.toMarkdown.transform({ account_id, file: { files } })) seen.markdown.push(each);
  try {
    await client.ai.run("@cf/nobody/nothing", { account_id, messages });
  } catch (error) {
    seen.refusal = { name: error.constructor.name, status: error.status, errors: error.errors };
  }
}
console.log(JSON.stringify(seen));
