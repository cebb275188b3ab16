// Vercel's AI SDK through both providers: texts, objects, tools, streams and errors. See checks.py for the output.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateObject, generateText, isStepCount, streamObject, streamText, tool } from "ai";
import assert from "node:assert/strict";
import { z } from "zod";

const [baseURL, MODEL] = process.argv.slice(2);
const QUESTION = "Tell me about whales.";
const LONG = "word ".repeat(9000);

const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({
  name: "sluice",
  baseURL,
  supportsStructuredOutputs: true,
  includeUsage: true,
});
const CHATS = { openai: (name) => openai.chat(name), compatible: (name) => compatible.chatModel(name) };
const COMPLETIONS = { openai: (name) => openai.completion(name), compatible: (name) => compatible.completionModel(name) };

const schema = z.object({ fish: z.boolean(), kind: z.enum(["mammal", "fish"]) });
const weather = tool({
  description: "The weather of a city.",
  inputSchema: z.object({ city: z.enum(["Oslo", "Rome"]) }),
  execute: async ({ city }) => `Rain in ${city}.`,
});
const question = { prompt: QUESTION, maxOutputTokens: 8, temperature: 0, maxRetries: 0 };
const longer = { ...question, maxOutputTokens: 80 };

async function collect(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
}

const chatChecks = {
  async generateText(model) {
    const answer = await generateText({ ...question, model });
    assert(answer.text && answer.finishReason === "length" && answer.usage.outputTokens === 8, answer.text);
  },
  async settings(model) {
    const more = { temperature: 1, topP: 0.9, presencePenalty: 0.1, frequencyPenalty: 0.1, stopSequences: ["zzz"], seed: 3 };
    const [first, second] = await Promise.all([1, 2].map(() => generateText({ ...question, ...more, model })));
    assert.equal(first.text, second.text);
  },
  async streamText(model) {
    const answer = streamText({ ...question, model });
    assert((await collect(answer.textStream)).join(""));
    assert.equal(await answer.finishReason, "length");
    assert.equal((await answer.usage).outputTokens, 8);
  },
  async abort(model) {
    const controller = new AbortController();
    const answer = streamText({ ...longer, maxOutputTokens: 4000, model, abortSignal: controller.signal });
    const kinds = [];
    for await (const part of answer.fullStream) {
      kinds.push(part.type);
      if (part.type === "text-delta") controller.abort();
    }
    assert.equal(kinds.at(-1), "abort");
  },
  async generateObject(model) {
    const { object } = await generateObject({ ...longer, model, schema });
    assert.equal(typeof object.fish, "boolean");
  },
  async outputObject(model) {
    const { output } = await generateText({ ...longer, model, output: Output.object({ schema }) });
    assert.equal(typeof output.fish, "boolean");
  },
  async outputObjectAsAStream(model) {
    const answer = streamText({ ...longer, model, output: Output.object({ schema }) });
    assert((await collect(answer.partialOutputStream)).length > 0);
    assert.equal(typeof (await answer.output).fish, "boolean");
  },
  async outputChoice(model) {
    const { output } = await generateText({ ...longer, model, output: Output.choice({ options: ["yes", "no"] }) });
    assert(["yes", "no"].includes(output), output);
  },
  async streamObject(model) {
    const answer = streamObject({ ...longer, model, schema });
    assert((await collect(answer.partialObjectStream)).length > 0);
    assert.equal(typeof (await answer.object).fish, "boolean");
  },
  async toolsAuto(model) {
    const answer = await generateText({ ...question, model, tools: { weather } });
    assert(answer.text || answer.toolCalls.length, answer.finishReason);
  },
  async toolsRequiredAndSecondTurn(model) {
    const answer = await generateText({
      ...longer,
      model,
      tools: { weather },
      toolChoice: "required",
      stopWhen: isStepCount(2),
      prepareStep: ({ stepNumber }) => (stepNumber === 0 ? {} : { toolChoice: "none" }),
    });
    const [first, second] = answer.steps;
    assert.equal(first.finishReason, "tool-calls");
    assert(first.toolResults[0].output.startsWith("Rain in "), JSON.stringify(first.toolResults));
    assert(second.text);
  },
  async toolNamedAsAStream(model) {
    const answer = streamText({ ...longer, model, tools: { weather }, toolChoice: { type: "tool", toolName: "weather" } });
    const parts = await collect(answer.fullStream);
    const kinds = new Set(parts.map((part) => part.type));
    for (const kind of ["tool-input-start", "tool-input-delta", "tool-call", "tool-result"]) assert(kinds.has(kind), kind);
    assert.equal(await answer.finishReason, "tool-calls");
  },
  async contextLengthExceeded(model) {
    await assert.rejects(generateText({ ...question, model, prompt: LONG }), (error) => {
      assert(APICallError.isInstance(error) && error.statusCode === 400 && !error.isRetryable, error);
      return JSON.parse(error.responseBody).error.code === "context_length_exceeded";
    });
  },
  async contextLengthExceededInAStream(model) {
    const answer = streamText({ ...question, model, prompt: LONG, onError: () => {} });
    const parts = await collect(answer.fullStream);
    const failed = parts.find((part) => part.type === "error");
    assert(failed.error.message.includes("context_length_exceeded"), failed.error.message);
  },
};

const completionChecks = {
  async completion(model) {
    const answer = await generateText({ ...question, model });
    assert(answer.text && answer.usage.outputTokens === 8, answer.text);
  },
  async completionAsAStream(model) {
    const answer = streamText({ ...question, model });
    assert((await collect(answer.textStream)).join(""));
    assert.equal((await answer.usage).outputTokens, 8);
  },
};

async function logprobs() {
  const providerOptions = { openai: { logprobs: 2 } };
  const answer = await generateText({ ...question, model: openai.chat(MODEL), providerOptions });
  assert.equal(answer.finalStep.providerMetadata.openai.logprobs.length, 8);
}

async function unknownModel(model) {
  await assert.rejects(generateText({ ...question, model }), (error) => error.statusCode === 404);
}

async function run(name, check, model) {
  try {
    await check(model);
    console.log(`ok ${name}`);
  } catch (error) {
    console.log(`failed ${name}: ${String(error).replaceAll(/\s+/g, " ").slice(0, 600)}`);
  }
}

for (const provider of Object.keys(CHATS)) {
  for (const [name, check] of Object.entries(chatChecks)) await run(`${provider} ${name}`, check, CHATS[provider](MODEL));
  for (const [name, check] of Object.entries(completionChecks)) {
    await run(`${provider} ${name}`, check, COMPLETIONS[provider](MODEL));
  }
  await run(`${provider} unknownModel`, unknownModel, CHATS[provider]("other"));
}
await run("openai logprobs", logprobs);
