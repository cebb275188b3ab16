// node cache_events.mjs [COUNT]: prints the first COUNT events of the engines' prefix caches as JSON, one per line.
// Requires the setting kv_event_buffer of engines: sluice serve --set engine.kv_event_buffer=10000
import process from 'node:process';
import { fileURLToPath } from 'node:url';
import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';

const address = process.env.SLUICE_ADDRESS ?? '127.0.0.1:50051';
const protos = process.env.SLUICE_PROTOS ?? fileURLToPath(new URL('protos', import.meta.url));
// An error of stdout that nobody handles would end the process with a stack trace, as when `head` has read enough.
process.stdout.on('error', (error) => process.exit(error.code === 'EPIPE' ? 0 : 1));
let left = Number(process.argv[2] ?? 10);

// Block hashes have 64 bits, more than JavaScript's numbers, so they are loaded as strings.
const options = { includeDirs: [protos], keepCase: true, longs: String, enums: String, defaults: true, oneofs: true };
const { sluice } = grpc.loadPackageDefinition(protoLoader.loadSync(['sluice/v1/admin.proto'], options));
const admin = new sluice.v1.AdminService(address, grpc.credentials.createInsecure());

const events = admin.StreamCacheEvents({});
try {
  for await (const { engine_id, events: found } of events) {
    for (const { event_id, data, ...event } of found.slice(0, left)) {
      console.log(JSON.stringify({ engine_id, event_id, [data]: event[data] }));
    }
    left -= found.length;
    if (left <= 0) break;
  }
} catch (error) {
  console.error(error.message);
  process.exitCode = 1;
} finally {
  events.cancel();
  admin.close();
}
