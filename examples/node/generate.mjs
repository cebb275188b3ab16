// node generate.mjs [PROMPT] [SPEC_JSON]: streams a completion to stdout; a bad request prints its field violations as JSON.
// SPEC_JSON holds further fields of sluice.v1.GenerationSpec, such as '{"sampling": {"temperature": 0}}'.
import process from 'node:process';
import { fileURLToPath } from 'node:url';
import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';

const address = process.env.SLUICE_ADDRESS ?? '127.0.0.1:50051';
const protos = process.env.SLUICE_PROTOS ?? fileURLToPath(new URL('protos', import.meta.url));
const [text = 'def fibonacci(n):', more = '{"stopping": {"max_tokens": 64}}'] = process.argv.slice(2);

const { sluice, google } = grpc.loadPackageDefinition(
  protoLoader.loadSync(
    ['sluice/v1/generation.proto', 'google/rpc/status.proto', 'google/rpc/error_details.proto'],
    { includeDirs: [protos], keepCase: true, longs: String, enums: String, defaults: true, oneofs: true },
  ),
);

// google.rpc.Status travels in a trailer; each of its details is packed in an Any.
function fieldViolations(error) {
  const [packed] = error.metadata?.get('grpc-status-details-bin') ?? [];
  if (!packed) return [];
  return google.rpc.Status.deserialize(packed)
    .details.filter((detail) => detail.type_url.endsWith('/google.rpc.BadRequest'))
    .flatMap((detail) => google.rpc.BadRequest.deserialize(detail.value).field_violations)
    .map(({ field, description }) => ({ field, description }));
}

const client = new sluice.v1.GenerationService(address, grpc.credentials.createInsecure());
try {
  for await (const { event, delta } of client.GenerateStream({ spec: { text, ...JSON.parse(more) } })) {
    if (event === 'delta') process.stdout.write(delta.text);
  }
  process.stdout.write('\n');
} catch (error) {
  const violations = fieldViolations(error);
  console.error(violations.length ? JSON.stringify(violations) : error.message);
  process.exitCode = 1;
} finally {
  client.close();
}
