// Checks custom objects, a JSON list from standard input, with the validators of @kubernetes-models; prints a JSON list
// with a message or null for each. Lies beside node_modules when it runs.

import { readFileSync } from "node:fs";

const PACKAGES = {
  "gateway.networking.k8s.io": "gateway-api",
  "keda.sh": "keda",
  "monitoring.coreos.com": "prometheus-operator",
};

async function problem({ apiVersion, kind, ...rest }) {
  const models = await import(`@kubernetes-models/${PACKAGES[apiVersion.split("/")[0]]}/${apiVersion}/${kind}`);
  try {
    new models[kind](rest).validate();
    return null;
  } catch (error) {
    return `${kind}: ${error.message}`;
  }
}

const objects = JSON.parse(readFileSync(0, "utf8"));
console.log(JSON.stringify(await Promise.all(objects.map(problem))));
