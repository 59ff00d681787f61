// The starter's chat agent, as the Agents SDK's documents have it, with fewer tokens.
import { AIChatAgent } from "@cloudflare/ai-chat";
import { routeAgentRequest } from "agents";
import { convertToModelMessages, streamText } from "ai";
import { createWorkersAI } from "workers-ai-provider";

export class ChatAgent extends AIChatAgent {
  async onChatMessage() {
    const workersai = createWorkersAI({ binding: this.env.AI });
    const result = streamText({
      model: workersai(this.env.MODEL, { sessionAffinity: this.sessionAffinity }),
      system: this.env.SYSTEM,
      messages: await convertToModelMessages(this.messages),
      maxOutputTokens: 8,
      temperature: 0,
    });
    return result.toUIMessageStreamResponse();
  }
}

export default {
  async fetch(request, env) {
    const { pathname } = new URL(request.url);
    if (pathname === "/affinity") return new Response(env.ChatAgent.idFromName("room").toString());
    return (await routeAgentRequest(request, env)) ?? new Response("Not found", { status: 404 });
  },
};
