// Does with env.AI what the test asks for, and says what came of it.

async function drain(stream) {
  const decoder = new TextDecoder();
  let text = "";
  for await (const chunk of stream) text += decoder.decode(chunk, { stream: true });
  return text;
}

const actions = {
  async run(ai, { model, inputs, options }) {
    return await ai.run(model, inputs, options);
  },
  async stream(ai, { model, inputs, options }) {
    const stream = await ai.run(model, { ...inputs, stream: true }, options);
    return { isStream: stream instanceof ReadableStream, text: await drain(stream) };
  },
  async raw(ai, { model, inputs, options }) {
    const response = await ai.run(model, inputs, { ...options, returnRawResponse: true });
    const headers = Object.fromEntries(response.headers);
    return { status: response.status, headers, body: await response.json() };
  },
  async streamInput(ai, { model, inputs, body }) {
    const stream = new Response(JSON.stringify(body)).body;
    return await ai.run(model, { ...inputs, body: { body: stream, contentType: "application/json" } });
  },
  async abort(ai, { model, inputs, options, how }) {
    const controller = new AbortController();
    const stream = await ai.run(model, { ...inputs, stream: true }, { ...options, signal: controller.signal });
    const reader = stream.getReader();
    const first = await reader.read();
    if (how === "cancel") {
      await reader.cancel();
      return { gotFirst: !first.done };
    }
    controller.abort();
    try {
      while (!(await reader.read()).done);
      return { gotFirst: !first.done, error: null };
    } catch (error) {
      return { gotFirst: !first.done, error: error.name };
    }
  },
  async models(ai, { params }) {
    return await ai.models(params);
  },
  async toMarkdown(ai, { files }) {
    return await ai.toMarkdown(files.map(({ name, type, text }) => ({ name, blob: new Blob([text], { type }) })));
  },
  async supported(ai) {
    return await ai.toMarkdown().supported();
  },
  async gatewayUrl(ai, { provider }) {
    return await ai.gateway("gw1").getUrl(provider);
  },
  async gatewayLog(ai, { id }) {
    return await ai.gateway("gw1").getLog(id);
  },
  async patchLog(ai, { id }) {
    return await ai.gateway("gw1").patchLog(id, { feedback: 1 });
  },
};

export default {
  async fetch(request, env) {
    const order = await request.json();
    const ai = env[order.binding ?? "AI"];
    let answer;
    try {
      answer = { result: await actions[order.action](ai, order) };
    } catch (error) {
      answer = { error: { name: error.name, message: error.message } };
    }
    const { lastRequestId, aiGatewayLogId, lastRequestHttpStatusCode, lastRequestInternalStatusCode } = ai;
    const seen = { lastRequestId, aiGatewayLogId, lastRequestHttpStatusCode, lastRequestInternalStatusCode };
    return Response.json({ ...answer, seen });
  },
};
