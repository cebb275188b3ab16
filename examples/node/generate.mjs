// node generate.mjs [PROMPT] [SPEC_JSON]: streams a completion to stdout. For an invalid request, prints its field violations as JSON.
// SPEC_JSON has other fields of sluice.v1.GenerationSpec, such as '{"sampling": {"temperature": 0}}'.
// SLUICE_ADDRESS can name several routers, separated by commas: a broken stream resumes at the next one.
import { existsSync } from 'node:fs';
import process from 'node:process';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';

const addresses = (process.env.SLUICE_ADDRESS ?? '127.0.0.1:50051').split(',');
const protos = process.env.SLUICE_PROTOS ?? fileURLToPath(new URL('protos', import.meta.url));
const [text = 'def fibonacci(n):', more = '{"stopping": {"max_tokens": 64}}'] = process.argv.slice(2);
// Milliseconds between attempts, and for which to try to resume a broken stream.
const PAUSE = 200;
const RESUME_TIMEOUT = 60_000;
// Reasons after which each other router gets only one attempt, because the server has already retried.
const SERVER_GAVE_UP = ['ENGINE_LOST', 'DETOKENIZER_LOST', 'ROWS_LOST'];

if (!existsSync(protos)) {
  console.error(`${protos} is missing: sluice protos export ${protos}`);
  process.exit(1);
}
// An error of stdout that nobody handles would end the process with a stack trace, as when `head` has read enough.
process.stdout.on('error', (error) => process.exit(error.code === 'EPIPE' ? 0 : 1));
const definitions = protoLoader.loadSync(
  ['sluice/v1/generation.proto', 'google/rpc/status.proto', 'google/rpc/error_details.proto'],
  { includeDirs: [protos], keepCase: true, longs: String, enums: String, defaults: true, oneofs: true },
);
const { sluice, google } = grpc.loadPackageDefinition(definitions);
const typeNamed = (name) => (definitions[`sluice.v1.${name}`] ?? definitions[name])?.type;
const routers = addresses.map((address) => new sluice.v1.GenerationService(address, grpc.credentials.createInsecure()));

// The violations of fields that a message has and its type does not. proto-loader drops such fields without an error. Maps
// have types of their own, which are not among the definitions, so their keys are not checked.
function unknownFields(message, type, path) {
  if (Array.isArray(message)) return message.flatMap((each, i) => unknownFields(each, type, `${path}[${i}]`));
  if (!type || message === null || typeof message !== 'object') return [];
  return Object.entries(message).flatMap(([name, value]) => {
    const field = type.field.find((each) => each.name === name);
    if (!field) return [{ field: `${path}.${name}`, description: `is not a field of ${type.name}` }];
    return unknownFields(value, typeNamed(field.typeName), `${path}.${name}`);
  });
}

// The details of a type in the google.rpc.Status of the call's trailer. Each detail is packed in an Any.
function details(error, type) {
  const [packed] = error.metadata?.get('grpc-status-details-bin') ?? [];
  if (!packed) return [];
  return google.rpc.Status.deserialize(packed)
    .details.filter((detail) => detail.type_url.endsWith(`/google.rpc.${type}`))
    .map((detail) => google.rpc[type].deserialize(detail.value));
}

// What remains of a google.protobuf.Duration after `elapsed` milliseconds, at least 1 ms.
function remaining({ seconds = 0, nanos = 0 }, elapsed) {
  const milliseconds = Math.max(Number(seconds) * 1000 + nanos / 1e6 - elapsed, 1);
  return { seconds: Math.floor(milliseconds / 1000), nanos: Math.floor((milliseconds % 1000) * 1e6) };
}

// A line for a token of the prompt: its log-probability, rank and text, and those of the most likely tokens.
function row({ token, logprob, rank, top }) {
  const quoted = (entry) => JSON.stringify(entry.token.toString());
  if (!rank) return `\t\t${quoted({ token })}`;
  const others = top.map((other) => `${quoted(other)} ${other.logprob.toFixed(3)}`);
  return [logprob.toFixed(3), rank, quoted({ token }), ...others].join('\t');
}

// The state that a stream needs to resume: its seed, its id, its model, and the token ids of each output.
class StreamState {
  constructor(spec) {
    this.spec = { ...spec, output: { ...spec.output, token_ids: true } };
    this.outputs = new Map();
    this.rows = new Map(); // number of rows received of each tensor
    this.begun = false;
    this.beganAt = Date.now();
  }

  // The request of the next attempt. Text that belongs to an end that was not received is dropped.
  request() {
    this.events = 0;
    this.admitted = false;
    for (const output of this.outputs.values()) output.tail = '';
    // A beam search starts again. Each output is a single event, so the known ones are merely repeated.
    const usesBeams = this.spec.sampling?.beam_search?.width > 1;
    const outputs = [...this.outputs].filter(([, output]) => output.token_ids.length && !usesBeams);
    const limit = this.spec.time_limit && { time_limit: remaining(this.spec.time_limit, Date.now() - this.beganAt) };
    const resume = outputs.map(([index, { token_ids }]) => {
      return { index, token_ids, tensor_rows: this.rowsOf(index), model_fingerprint: this.model };
    });
    return { spec: { ...this.spec, ...limit, resume, resume_context_rows: this.rowsOf('prompt') } };
  }

  // Number of rows received of all tensors of an output, or of the prompt.
  rowsOf(place) {
    const { tensors = [], context_logits, generation_logits } = this.spec.output;
    const names = tensors.filter(({ context }) => context || place !== 'prompt').map(({ name }) => name);
    if (place === 'prompt' && context_logits) names.push('context_logits');
    if (place !== 'prompt' && generation_logits) names.push('generation_logits');
    return names.length ? Math.min(...names.map((name) => this.rows.get(`${place} ${name}`) ?? 0)) : 0;
  }

  addRows({ index, name, start, context, shape: [count, ...shape], dtype }) {
    const key = `${context ? 'prompt' : index} ${name}`;
    const known = this.rows.get(key) ?? 0;
    if (start > known) throw new Error('rows were lost');
    if (start + count <= known) return;
    this.rows.set(key, start + count);
    console.error(`${key}: rows ${known} to ${start + count - 1}, each ${dtype} [${shape}]`);
  }

  // Applies an event, and returns its text.
  onEvent(event) {
    if (Number(event.sequence) !== ++this.events) throw new Error('events were lost');
    const { index } = event.delta ?? event.finished ?? {};
    const output = this.outputs.get(index) ?? { token_ids: [], tail: '', echoed: false, ended: false };
    if (event.event === 'started') {
      const { request_id, seed, model_fingerprint, prompt_logprobs } = event.started;
      this.model = model_fingerprint;
      if (!this.begun) {
        this.spec = { ...this.spec, request_id, sampling: { ...this.spec.sampling, seed } };
        for (const entry of prompt_logprobs) console.error(row(entry));
      }
      this.begun = this.admitted = true;
    } else if (event.event === 'delta') {
      this.outputs.set(index, output);
      return this.add(output, event.delta);
    } else if (event.event === 'tensor') {
      this.addRows(event.tensor);
    } else if (event.event === 'finished' && !output.ended) {
      if (event.finished.completion_tokens > output.token_ids.length) throw new Error('tokens were lost');
      this.outputs.set(index, { ...output, ended: true });
      return output.tail;
    }
    return '';
  }

  add(output, delta) {
    const known = output.token_ids.length;
    if (output.ended || delta.token_offset + delta.token_count < known) return '';
    if (delta.token_count === 0 && known > 0) output.tail += delta.text; // held back until the output ends
    if (delta.token_count === 0) return known > 0 || output.echoed ? '' : ((output.echoed = true), delta.text);
    if (delta.token_offset + delta.token_count === known) return '';
    if (delta.token_offset !== known) throw new Error('tokens were lost');
    output.token_ids.push(...delta.token_ids);
    const text = output.tail + delta.text;
    output.tail = '';
    return text;
  }

  // Whether another attempt may succeed.
  isRetryable(error) {
    const { UNAVAILABLE, ALREADY_EXISTS, RESOURCE_EXHAUSTED } = grpc.status;
    if (error.code === UNAVAILABLE) return true;
    if (!this.begun) return false;
    if (error.code === ALREADY_EXISTS || error.code === RESOURCE_EXHAUSTED) return !this.admitted;
    // An error from the server has a reason. Without one, the connection broke.
    return error.code !== grpc.status.DEADLINE_EXCEEDED && !details(error, 'ErrorInfo').length;
  }
}

// Yields text as it arrives, and resumes when a router fails. Until the stream has begun, each router gets one attempt.
async function* generate(spec) {
  const state = new StreamState(spec);
  let brokenAt = null;
  for (let failures = 0; ; ) {
    try {
      for await (const event of routers[0].GenerateStream(state.request())) {
        const text = state.onEvent(event);
        if (event.event === 'done') return;
        if (['delta', 'tensor'].includes(event.event)) [failures, brokenAt] = [0, null];
        if (text) yield text;
      }
      throw new Error('the stream ended before its last event');
    } catch (error) {
      brokenAt ??= Date.now();
      failures += 1;
      const [info] = details(error, 'ErrorInfo');
      const timeout = state.begun && !SERVER_GAVE_UP.includes(info?.reason) ? RESUME_TIMEOUT : 0;
      if (!state.isRetryable(error)) throw error;
      if (failures >= routers.length && Date.now() + PAUSE > brokenAt + timeout) throw error;
      if (error.code === undefined || error.code === grpc.status.UNAVAILABLE) routers.push(routers.shift());
      if (failures >= routers.length) await sleep(PAUSE);
    }
  }
}

try {
  const spec = { text, ...JSON.parse(more) };
  const unknown = unknownFields(spec, typeNamed('GenerationSpec'), 'spec');
  if (unknown.length) throw new Error(JSON.stringify(unknown));
  for await (const part of generate(spec)) process.stdout.write(part);
  process.stdout.write('\n');
} catch (error) {
  const violations = details(error, 'BadRequest').flatMap((detail) => detail.field_violations);
  const printed = violations.map(({ field, description }) => ({ field, description }));
  console.error(printed.length ? JSON.stringify(printed) : error.message);
  process.exitCode = 1;
} finally {
  for (const router of routers) router.close();
}
