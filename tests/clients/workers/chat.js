// A Worker as people write it: streams a chat from env.AI.
export default {
  async fetch(request, env) {
    const { model, messages, session } = await request.json();
    const stream = await env.AI.run(
      model,
      { messages, stream: true, max_tokens: 8, temperature: 0 },
      { extraHeaders: { "x-session-affinity": session } },
    );
    return new Response(stream, { headers: { "content-type": "text/event-stream" } });
  },
};
