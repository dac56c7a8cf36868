// A conversation with the Vercel AI SDK, whole history and no name: a text a turn, streamed and not by turns.
// Read from stdin by node in the folder where the packages are; argv: wire, base URL, the texts as JSON.
// Prints the answers as JSON.

import { createAnthropic } from '@ai-sdk/anthropic';
import { createGoogle } from '@ai-sdk/google';
import { createOpenAI } from '@ai-sdk/openai';
import { generateText, streamText } from 'ai';

const [wire, baseURL, texts] = process.argv.slice(2);
const options = { baseURL, apiKey: 'none' };

const models = {
  chat: () => createOpenAI(options).chat('sonnet'),
  responses: () => createOpenAI(options).responses('sonnet'),
  anthropic: () => createAnthropic(options)('sonnet'),
  google: () => createGoogle(options)('sonnet'),
};

const messages = [];
const answers = [];
for (const [turn, text] of JSON.parse(texts).entries()) {
  messages.push({ role: 'user', content: text });
  const call = { model: models[wire](), messages, maxRetries: 0 };
  if (turn % 2) {
    const result = streamText({ ...call, onError: ({ error }) => { throw error; } });
    let said = '';
    for await (const piece of result.textStream) said += piece;
    answers.push(said);
    messages.push(...(await result.response).messages);
  } else {
    const result = await generateText(call);
    answers.push(result.text);
    messages.push(...result.response.messages);
  }
}
console.log(JSON.stringify(answers));
