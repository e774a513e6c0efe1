// Asks a gateway with the official client, and prints what it has seen as one JSON object.
import OpenAI from "openai";

const { BASE_URL: baseURL, API_KEY: apiKey, MODEL: model } = process.env;
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 30_000 });
const messages = [{ role: "user", content: "hello" }];

async function streamed() {
  const seen = { text: "", usages: [], finish_reasons: [] };
  const stream = await client.chat.completions.create({
    model, messages, max_tokens: 5, stream: true, stream_options: { include_usage: true },
  });
  for await (const chunk of stream) {
    if (chunk.usage) seen.usages.push(chunk.usage.completion_tokens);
    for (const choice of chunk.choices) {
      seen.text += choice.delta.content ?? "";
      if (choice.finish_reason) seen.finish_reasons.push(choice.finish_reason);
    }
  }
  return seen;
}

async function responseEvents() {
  const kinds = [];
  const stream = await client.responses.create({ model, input: "hello", max_output_tokens: 5, stream: true });
  for await (const event of stream) kinds.push(event.type);
  return kinds;
}

async function models() {
  const ids = [];
  for await (const card of client.models.list()) ids.push(card.id);
  return ids;
}

async function refused(ask) {
  try {
    await ask();
    return null;
  } catch (error) {
    const { status, code, param, message, requestID } = error;
    return { kind: error.constructor.name, status, code, param, message, requestID };
  }
}

const stranger = new OpenAI({ baseURL, apiKey: "wrong", maxRetries: 0 });
console.log(JSON.stringify({
  chat: await client.chat.completions.create({ model, messages, max_tokens: 5 }),
  stream: await streamed(),
  response: await client.responses.create({ model, input: "hello", max_output_tokens: 5 }),
  response_events: await responseEvents(),
  completion: await client.completions.create({ model, prompt: ["once", "upon"], max_tokens: 3 }),
  models: await models(),
  errors: {
    bad_request: await refused(() => client.chat.completions.create({ model, messages, temperature: -1 })),
    not_found: await refused(() => client.chat.completions.create({ model: "nope", messages })),
    unauthenticated: await refused(() => stranger.models.list()),
  },
}));
