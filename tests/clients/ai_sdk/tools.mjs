// A tool loop of the Vercel AI SDK: the SDK runs the tools itself and goes on until the model calls none.
// Read from stdin by node in the folder where the packages are; argv: wire, base URL, the texts as JSON.
// Prints the answer and the calls of each text as JSON; the second text is streamed.

import { createAnthropic } from '@ai-sdk/anthropic';
import { createGoogle } from '@ai-sdk/google';
import { createOpenAI } from '@ai-sdk/openai';
import { generateText, jsonSchema, stepCountIs, streamText, tool } from 'ai';

const [wire, baseURL, texts] = process.argv.slice(2);
const options = { baseURL, apiKey: 'none' };

const models = {
  chat: () => createOpenAI(options).chat('sonnet'),
  responses: () => createOpenAI(options).responses('sonnet'),
  anthropic: () => createAnthropic(options)('sonnet'),
  google: () => createGoogle(options)('sonnet'),
};

const city = jsonSchema({ type: 'object', properties: { city: { type: 'string' } }, required: ['city'] });
const calls = [];
const about = (what) => tool({
  description: `The ${what} of a city`,
  inputSchema: city,
  execute: async ({ city }) => {
    calls.push(`${what} ${city}`);
    return `${what} of ${city}: fine`;
  },
});
const tools = { get_weather: about('weather'), get_time: about('time') };

const messages = [];
const answers = [];
for (const [turn, text] of JSON.parse(texts).entries()) {
  messages.push({ role: 'user', content: text });
  const call = { model: models[wire](), messages, tools, maxRetries: 0, stopWhen: stepCountIs(5) };
  if (turn % 2) {
    const result = streamText({ ...call, onError: ({ error }) => { throw error; } });
    let said = '';
    for await (const piece of result.textStream) said += piece;
    answers.push(said);
    messages.push(...(await result.responseMessages));
  } else {
    const result = await generateText(call);
    answers.push(result.text);
    messages.push(...result.responseMessages);
  }
}
console.log(JSON.stringify([...answers, ...calls.sort()]));
