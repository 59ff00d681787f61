// Two turns with the chat agent over its WebSocket, in the frames that its React hook sends and reads.
const { AGENT_URL } = process.env;
const socket = new WebSocket(`${AGENT_URL.replace("http", "ws")}/agents/chat-agent/room`);
await new Promise((resolve, reject) => {
  socket.addEventListener("open", resolve);
  socket.addEventListener("error", reject);
});

function turn(id, messages) {
  const chunks = [];
  return new Promise((resolve, reject) => {
    const listen = ({ data }) => {
      const frame = JSON.parse(data);
      if (frame.type !== "cf_agent_use_chat_response" || frame.id !== id) return;
      if (frame.error) return reject(new Error(frame.body));
      if (frame.body) chunks.push(JSON.parse(frame.body));
      if (!frame.done) return;
      socket.removeEventListener("message", listen);
      resolve(chunks);
    };
    socket.addEventListener("message", listen);
    const init = { method: "POST", body: JSON.stringify({ messages, trigger: "submit-message" }) };
    socket.send(JSON.stringify({ type: "cf_agent_use_chat_request", id, init }));
  });
}

const textOf = (chunks) => chunks.filter(({ type }) => type === "text-delta").map(({ delta }) => delta).join("");
const message = (id, role, text) => ({ id, role, parts: [{ type: "text", text }] });

const messages = [message("question-1", "user", "Name a city.")];
const first = await turn("turn-1", messages);
const { messageId } = first.find(({ type }) => type === "start");
messages.push(message(messageId, "assistant", textOf(first)), message("question-2", "user", "Another."));
const second = await turn("turn-2", messages);
const kept = await (await fetch(`${AGENT_URL}/agents/chat-agent/room/get-messages`)).json();
const affinity = await (await fetch(`${AGENT_URL}/affinity`)).text();
socket.close();

const told = (chunks) => ({ text: textOf(chunks), types: [...new Set(chunks.map(({ type }) => type))] });
console.log(JSON.stringify({ affinity, turns: [told(first), told(second)], roles: kept.map(({ role }) => role) }));
process.exit(0);
