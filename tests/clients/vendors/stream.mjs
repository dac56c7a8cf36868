// A streamed answer with the vendor's own client of each wire that a line of stdin names. Given to node as text, in the
// folder where the packages are; argv: root of the addresses. Prints the pieces of each answer's text as a line of JSON.

import Anthropic from '@anthropic-ai/sdk';
import { GoogleGenAI } from '@google/genai';
import { Ollama } from 'ollama';
import OpenAI from 'openai';
import { createInterface } from 'node:readline';

const root = process.argv.at(-1);
const model = 'sonnet';
const messages = [{ role: 'user', content: 'hello' }];
const openai = () => new OpenAI({ baseURL: `${root}/v1`, apiKey: 'k', maxRetries: 0 });
const anthropic = () => new Anthropic({ baseURL: root, apiKey: 'k', maxRetries: 0 });
const google = () => new GoogleGenAI({ apiKey: 'k', httpOptions: { baseUrl: root } });
const ollama = () => new Ollama({ host: root });
let pieces = [];
const say = (text) => { if (text) pieces.push(text); };

const streams = {
  chat: async () => {
    for await (const chunk of await openai().chat.completions.create({ model, messages, stream: true })) {
      say(chunk.choices[0]?.delta.content);
    }
  },
  responses: async () => {
    for await (const event of await openai().responses.create({ model, input: 'hello', stream: true })) {
      if (event.type === 'response.output_text.delta') say(event.delta);
    }
  },
  messages: async () => {
    for await (const event of anthropic().messages.stream({ model, messages, max_tokens: 99 })) {
      if (event.type === 'content_block_delta') say(event.delta.text);
    }
  },
  generate: async () => {
    const chat = google().chats.create({ model });
    for await (const chunk of await chat.sendMessageStream({ message: 'hello' })) say(chunk.text);
    const told = chat.getHistory(true).slice(1).flatMap((one) => one.parts).map((part) => part.text).join('');
    if (told !== pieces.join('')) throw new Error(`the chat remembers ${told}`);
  },
  interactions: async () => {
    for await (const event of await google().interactions.create({ model, input: 'hello', stream: true })) {
      if (event.event_type === 'step.delta') say(event.delta.text);
    }
  },
  'ollama-chat': async () => {
    for await (const part of await ollama().chat({ model, messages, stream: true })) say(part.message.content);
  },
  'ollama-generate': async () => {
    for await (const part of await ollama().generate({ model, prompt: 'hello', stream: true })) say(part.response);
  },
};

for await (const wire of createInterface({ input: process.stdin })) {
  pieces = [];
  await streams[wire]();
  console.log(JSON.stringify(pieces));
}
